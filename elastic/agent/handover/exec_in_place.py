"""A process becomes another program: what it hands over, and the signals that come meanwhile."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from elastic.agent.handover.request_files import SIGNAL, UpgradeRequest, UpgradeRequestFiles
from elastic.errors import ConfigError
from elastic.process import log, stop_signals
from elastic.records.journal import Journal

OPTION = "--handover"
HELD = (*stop_signals.BLOCKED, signal.SIGUSR1, SIGNAL, *log.SIGNALS)
"""Signals that wait until the new program has handlers; by default they would end it."""


@dataclass(frozen=True, slots=True)
class Handed:
    """What the previous program in this process has handed over. refused: why this is not a new program, or ""."""

    request: UpgradeRequest
    state: dict[str, Any]
    refused: str = ""

    @classmethod
    def read(cls, descriptor: int) -> Handed:
        """Read the descriptor and close it. Raises ConfigError."""
        try:
            with os.fdopen(descriptor, "rb") as file:
                document = json.loads(file.read())
            return cls(UpgradeRequest(**document["request"]), document["state"], document["refused"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{OPTION} {descriptor} cannot be read: {error}") from error


def go(
    request: UpgradeRequest, command: Sequence[str], state: Mapping[str, Any], signals: Sequence[int] = ()
) -> NoReturn:
    """Become the new program, or, if it does not start, this one again, which reports that. command: module and
    arguments. signals: signals that came meanwhile, for the new program. Main thread only, because children die with
    it. Raises OSError if neither program starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        for number in signals:
            signal.pthread_kill(threading.get_ident(), number)
        document = {"request": asdict(request), "state": state, "refused": ""}
        try:
            _become(request.python, request.environment(), command, document)
        except OSError as error:  # between the check and now
            refused = f"the new program does not start any more: {request.python}: {error.strerror}"
            _become(sys.executable, os.environ, command, {**document, "refused": refused})
    finally:
        hear()


def _become(python: str, environment: Mapping[str, str], command: Sequence[str], document: object) -> NoReturn:
    descriptor = os.memfd_create("elastic-handover")
    with os.fdopen(descriptor, "wb") as file:
        file.write(json.dumps(document).encode())
        file.flush()
        file.seek(0)
        os.set_inheritable(descriptor, True)
        os.execve(python, [python, "-P", "-m", *without_option(command), OPTION, str(descriptor)], {**environment})


def begin(place: UpgradeRequestFiles, journal: Journal, handed: Handed | None, jobs: Sequence[str] = ()) -> None:
    """Note that this program has its handlers: let signals in, accept requests, and report a takeover, if there was
    one. A full disk is journalled only. jobs: the jobs of a daemon."""
    hear()
    try:
        place.ready()
        if handed is not None:
            place.say(handed.request, refused=handed.refused, jobs=jobs)
    except OSError as error:
        journal.write("handover_not_answered", because=str(error))


def hear() -> None:
    """Let in the signals that were held until now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


def without_option(command: Sequence[str]) -> list[str]:
    """The command without the handover option, which this program has if it was handed over itself."""
    words = list(command)
    if OPTION in words:
        at = words.index(OPTION)
        del words[at : at + 2]
    return words
