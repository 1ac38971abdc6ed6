"""What a person sees of a running job: a live table on a terminal, else one plain line now and then.

All of it goes to stderr; stdout belongs to the script.
"""

from __future__ import annotations

import contextlib
import json
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import IO, Any, Protocol, TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic.errors import ElasticError
from elastic.records.job_directory import read_json
from elastic.records.journal import read_all, recoveries
from elastic.records.ledger_tail import StepsTail
from elastic.records.resume import redone
from elastic.rendezvous.operator_client import fetch_status

PLAIN_S = 10.0
TABLE_S = 0.5
ROOM_S = 0.1
"""How often a reader that takes nothing is looked at."""
SCALARS_SHOWN = 4
STATUS_TIMEOUT_S = 2.0
WAITING = "waiting for "
"""What the leader of a new job says begins so: elastic/protocol/membership/formation.py."""


class LiveView:
    """Everything the display shows, gathered by a thread of its own so that a silent leader holds up nothing."""

    def __init__(self, job_dir: Path) -> None:
        self.tail = StepsTail(job_dir / "steps.jsonl")
        self.tail.poll(time.monotonic())
        self.status: dict[str, Any] = {}
        self.recoveries: list[dict[str, Any]] = []
        self._plan: dict[str, Any] = {}
        self._planned_at: tuple[object, ...] = ()
        self._job_dir = job_dir
        self._told_of = 0
        self._redone = redone(job_dir)

    def gather(self) -> None:
        self.tail.poll(time.monotonic())
        if (result := read_json(self._job_dir / "result.json")) is not None:
            ended = {"state": "closed", "because": result["because"], "generation": result["generation"]}
            self.status = {**self.status, **ended}
            if not self._plan:  # a short job may be over before the first look at it
                self._read_plan()
            return
        where = read_json(self._job_dir / "rendezvous.json")
        if where is None:
            return
        try:
            self.status = cast(dict[str, Any], fetch_status(where["address"], STATUS_TIMEOUT_S))
        except ElasticError:
            self.status = {**self.status, "because": "no leader answers at the moment; training goes on"}
            return
        at = (self.status["generation"], self.tail.last.get("epoch"), self.tail.steps > 0)
        if self.status["state"] == "running" and (at != self._planned_at or not self._plan):
            self._planned_at = at
            self._read_plan()
        number = self.status["generation"]
        if number != self._told_of and self.status["state"] == "running":
            self._told_of = number
            self.recoveries = recoveries(read_all(self._job_dir))

    def _read_plan(self) -> None:
        """How far the job goes, which workers say when they come to a loop: each of them, and in each epoch anew."""
        told = read_all(self._job_dir, ("steps_planned",))
        self._plan = told[-1] if told else {}

    def _waits_for(self) -> str:
        """What has to happen before the next step of a job that has not begun to train, or has to begin again; "" where
        the leader's own sentence says more."""
        match self.status.get("state", "starting"):
            case "starting":
                return "etcd and the rendezvous to start"
            case "forming" if self.status["because"].startswith(WAITING):
                return f"{self.status['because'].removeprefix(WAITING)} to get through the script's set-up"
            case "running" if self.tail.last.get("step") is None and not self.status.get("restart"):
                phases = [f"{one['worker_id']} is in {one['phase']}" for one in self.status["members"] if one["phase"]]
                return "; ".join(["the first step", *phases])
        return ""

    def _again(self) -> str:
        """Which steps of the ledger are done again, and which is next; "" where none are. The ledger, from which the
        step and the speed are, has no new line meanwhile."""
        step = self.tail.last.get("step")
        if self._redone is None or step is None or step > self._redone[1]:
            return ""
        first, last = self._redone
        following = max(first, self.status.get("applied", 0))
        return f"steps {first} to {last} are done again, {following} is next"

    def facts(self) -> dict[str, Any]:
        """The display's content: plain values, JSON-able."""
        members = self.status.get("members", [])
        step, total, rate = self.tail.last.get("step"), self._plan.get("total"), self.tail.steps_per_s
        return {
            "state": self.status.get("state", "starting"),
            "because": self.status.get("because", ""),
            "restart": self.status.get("restart", False),
            "generation": self.status.get("generation", 0),
            "members": [member["worker_id"] for member in members],
            "spares": self.status.get("spares", []),
            "stragglers": self.status.get("stragglers", {}),
            "waits_for": self._waits_for(),
            "again": self._again(),
            "step": step,
            "total": total,
            "steps_per_s": round(rate, 3),
            "eta_s": round((total - 1 - step) / rate) if rate and step is not None and total is not None else None,
            "epoch": self.tail.last.get("epoch"),
            "scalars": dict(list(self.tail.last.get("scalars", {}).items())[:SCALARS_SHOWN]),
            "samples_per_s": round(self.tail.samples_per_s, 1) if self.tail.last.get("samples", True) else None,
            "shards_per_s": round(rate * self._plan["shards"], 1) if self._plan else None,
            "recoveries": len(self.recoveries),
            "last_recovery_ms": round(self.recoveries[-1]["recovery_ms"], 1) if self.recoveries else None,
        }


class Display(Protocol):
    """What `elastic run` talks to."""

    def show(self, facts: dict[str, Any]) -> None:
        """Called every `interval_s`."""

    def output(self, data: bytes) -> None:
        """Lines of the leader's stdout."""

    def notice(self, text: str) -> None:
        """A sentence that the person at the terminal should see; a traceback may be below it."""

    def close(self) -> None: ...


@contextlib.contextmanager
def expendable() -> Iterator[None]:
    """For what is only said: a full disk, where our output is a file on it, or a terminal that is gone costs the words
    and not the job. A reader that closes its pipe ends the command all the same."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        return


def has_room(stream: IO[Any], stopping: Callable[[], bool]) -> bool:
    """Wait until PIPE_BUF bytes can be written to stdout or stderr; False if its reader takes nothing, and a signal has
    asked this command to stop: then the words are not worth the wait."""
    try:
        descriptor = stream.fileno()
    except OSError:  # it is no file
        return True
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while not poll.poll(ROOM_S * 1000):
        if stopping():
            return False
    return True


class PlainDisplay:
    """Lines only: for logs, pipes and machines. quiet: no progress. as_json: progress as JSON lines on stdout, and
    the script's output on stderr. stopping: whether a signal has asked this command to stop."""

    def __init__(
        self, *, quiet: bool = False, as_json: bool = False, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self._quiet = quiet
        self._as_json = as_json
        self._stopping = stopping
        self._out = sys.stderr.buffer if as_json else sys.stdout.buffer

    def show(self, facts: dict[str, Any]) -> None:
        if self._as_json:
            self._say(json.dumps({"event": "progress", **facts}), sys.stdout)
        elif not self._quiet:
            self._say(plain_line(facts), sys.stderr)

    def output(self, data: bytes) -> None:
        with expendable():
            for begin in range(0, len(data), select.PIPE_BUF):
                if not has_room(self._out, self._stopping):
                    return
                self._out.write(data[begin : begin + select.PIPE_BUF])
                self._out.flush()

    def notice(self, text: str) -> None:
        self._say(f"elastic: {text}", sys.stderr)

    def _say(self, text: str, to: TextIO) -> None:
        with expendable():
            if has_room(to, self._stopping):
                print(text, file=to, flush=True)

    def close(self) -> None:
        """Nothing is held."""


class TableDisplay:
    """A table that stays at the bottom of the terminal; everything else scrolls above it."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    @expendable()
    def show(self, facts: dict[str, Any]) -> None:
        self._live.update(table(facts), refresh=True)

    @expendable()
    def output(self, data: bytes) -> None:
        if sys.stdout.isatty():
            text = Text.from_ansi(data.decode(errors="replace").removesuffix("\n"))
            self._console.print(text, soft_wrap=True, highlight=False)
        else:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

    @expendable()
    def notice(self, text: str) -> None:
        self._console.print(f"elastic: {text}", style="yellow", markup=False, highlight=False)

    @expendable()
    def close(self) -> None:
        self._live.stop()


def plain_line(facts: dict[str, Any]) -> str:
    parts = [f"elastic: {facts['state']}"]
    if facts["step"] is not None:
        parts.append(f"step {facts['step']}" + (f" of {facts['total']}" if facts["total"] is not None else ""))
        parts += [f"{name} {_number(value)}" for name, value in facts["scalars"].items()]
        if not facts["waits_for"]:
            parts += _speed(facts)
    parts.append(f"{len(facts['members'])} members")
    if count := len(facts["spares"]):
        parts.append(f"{count} spare{'s' * (count > 1)}")
    parts.append(f"{'round' if facts['restart'] else 'generation'} {facts['generation']}")
    if facts["last_recovery_ms"] is not None:
        parts.append(f"last recovery {facts['last_recovery_ms']:.0f} ms")
    if facts["waits_for"]:
        parts.append(f"waits for {facts['waits_for']}")
    elif facts["state"] != "running" and facts["because"]:
        parts.append(f"because {facts['because']}")
    return ", ".join(parts)


def table(facts: dict[str, Any]) -> Table:
    view = Table(show_header=False, box=None, pad_edge=False)
    view.add_column(style="bold")
    view.add_column(overflow="fold")
    if facts["waits_for"]:
        view.add_row("waits for", Text(facts["waits_for"]))
    of = f" of {facts['total']}" if facts["total"] is not None else ""
    if facts["step"] is not None or not facts["restart"]:
        view.add_row("step", "-" if facts["step"] is None else f"{facts['step']}{of} (epoch {facts['epoch']})")
    for name, value in facts["scalars"].items():
        view.add_row(Text(name), _number(value))
    if facts["step"] is not None and not facts["waits_for"]:
        view.add_row("speed", ", ".join(_speed(facts)))
    view.add_row("members", Text(f"{len(facts['members'])}: {' '.join(facts['members'])}"))
    for worker_id, because in facts["stragglers"].items():
        view.add_row("straggler", Text(f"{worker_id}: {because}"))
    if facts["spares"]:
        view.add_row("spares", Text(f"{len(facts['spares'])}: {' '.join(facts['spares'])}"))
    view.add_row("round" if facts["restart"] else "generation", f"{facts['generation']}, {facts['state']}")
    view.add_row("because", Text(facts["because"]))
    if facts["last_recovery_ms"] is not None:
        view.add_row("last recovery", f"{facts['last_recovery_ms']:.0f} ms, {facts['recoveries']} in all")
    return view


def _speed(facts: dict[str, Any]) -> list[str]:
    """steps/s, samples/s or, where the script draws its own samples, shards/s, and the time left."""
    if facts["again"]:
        return [facts["again"]]
    known = facts["samples_per_s"] is not None
    work = f"{facts['samples_per_s']:.0f} samples/s" if known else f"{facts['shards_per_s'] or 0:.0f} shards/s"
    left = [f"{span(facts['eta_s'])} left"] if facts["eta_s"] is not None else []
    return [f"{_three_digits(facts['steps_per_s'])} steps/s", *([] if facts["restart"] else [work]), *left]


def span(seconds: float) -> str:
    """In the two largest units that matter, such as 2 h 5 min."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _three_digits(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class JobWatcher:
    """Gathers a LiveView every interval_s on a thread and calls `ready` with its facts, until `close`."""

    def __init__(self, snapshot: LiveView, interval_s: float, ready: Callable[[dict[str, Any]], None]) -> None:
        self._snapshot = snapshot
        self._interval_s = interval_s
        self._ready = ready
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2 * STATUS_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            with contextlib.suppress(FileNotFoundError):  # the job directory was removed this moment
                self._snapshot.gather()
            self._ready(self._snapshot.facts())


def summary_text(summary: dict[str, Any]) -> str:
    """The last lines of `elastic run`."""
    # Of a script that draws its own samples nobody knows how many there were.
    what = "samples" if summary["samples"] else "steps"
    rate = summary[what] / summary["seconds"] if summary["seconds"] else 0.0
    done = ", ".join(f"{summary[name]} {name}" for name in dict.fromkeys(("steps", what)))
    lines = [
        f"elastic: {summary['job']}: {done} in {summary['seconds']:.1f} s ({_three_digits(rate)} {what}/s), "
        f"generation {summary['generation']}"
    ]
    if summary["restart"]:
        rounds = f"{summary['generation']} round{'s' * (summary['generation'] != 1)}"
        steps = f"{summary['steps']} steps, " if summary["steps"] else ""
        lines = [f"elastic: {summary['job']}: {steps}{rounds} in {summary['seconds']:.1f} s"]
    if times := [told["recovery_ms"] for told in summary["recoveries"]]:
        count = "1 recovery" if len(times) == 1 else f"{len(times)} recoveries"
        lines.append(f"elastic: {count}, median {median(times):.0f} ms, worst {max(times):.0f} ms")
    if summary["digest"]:
        lines.append(f"elastic: digest {summary['digest']}")
    lines.append(f"elastic: exit {summary['exit_code']}; see {summary['job_dir']}")
    return "\n".join(lines)
