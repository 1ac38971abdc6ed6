"""`python -m elastic.platforms.horovod.host_task`: one host of a job. Reads its ticket, JSON, from its input.

The input stays open as long as the launcher lives: when it is closed, also because a connection of ssh is gone, the
workers of this host leave between two steps, and the program ends.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
from dataclasses import asdict
from typing import Any

from elastic.errors import ElasticError, ExitCode
from elastic.platforms.common.node_task import TaskOutcome, Ticket, serve
from elastic.preemption.notice import Notice, NoticeKind

LEAVE_S = 20.0
"""How long the workers have to leave a host that is no longer listed."""


def to_line(ticket: Ticket) -> bytes:
    """The ticket, for the input of this program, whose other end is the launcher, or the ssh that it has started."""
    certificates = {name: base64.b64encode(content).decode() for name, content in ticket.certificates.items()}
    function = None if ticket.function is None else base64.b64encode(ticket.function).decode()
    fields = {**asdict(ticket), "certificates": certificates, "function": function}
    return json.dumps(fields).encode() + b"\n"


def of_line(line: bytes) -> Ticket:
    """The ticket of `to_line`. Raises ValueError, TypeError or KeyError for anything else."""
    fields: dict[str, Any] = json.loads(line)
    certificates = {str(name): base64.b64decode(content) for name, content in fields.pop("certificates").items()}
    function = fields.pop("function")
    return Ticket(
        **fields, certificates=certificates, function=None if function is None else base64.b64decode(function)
    )


def outcome_of(line: bytes) -> TaskOutcome:
    """What this program has printed last. Raises ValueError, TypeError or KeyError for anything else."""
    fields = json.loads(line)
    values = {int(rank): base64.b64decode(content) for rank, content in fields["values"].items()}
    return TaskOutcome(bool(fields["over"]), values, dict(fields["last"]))


def main() -> int:
    # Its own output is the outcome alone; what workers print goes to the other stream.
    outcome, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    try:
        ticket = of_line(sys.stdin.buffer.readline())
    except (ValueError, TypeError, KeyError) as error:
        print(f"elastic: no ticket on the input: {error!r}", file=sys.stderr, flush=True)
        return ExitCode.BAD_INPUT
    closed = threading.Event()
    threading.Thread(target=_await_end_of_input, args=(closed,), daemon=True).start()

    def gone() -> Notice | None:
        because = "the launcher no longer lists this host"
        return Notice(NoticeKind.RECLAIM, LEAVE_S, because, "horovodrun") if closed.is_set() else None

    try:
        found = serve(ticket, gone)
    except ElasticError as error:
        print(f"elastic: {error}", file=sys.stderr, flush=True)
        return ExitCode.BELOW_QUORUM
    values = {rank: base64.b64encode(content).decode() for rank, content in found.values.items()}
    outcome.write(json.dumps({"over": found.over, "values": values, "last": dict(found.last)}).encode() + b"\n")
    outcome.flush()
    return ExitCode.DONE


def _await_end_of_input(closed: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    closed.set()


if __name__ == "__main__":
    sys.exit(main())
