"""One program takes another's place in the same process (execve): the process keeps its children and its descriptors.

    <name>.process.json     pid of the process and the version of its program; it takes over when it is sent SIGUSR2
    <name>.upgrade.json     what takes its place: written by whoever asks, before the signal
    <name>.upgraded.json    how it went: written by the old program if it stays, else by the new one

All three lie in one directory and can be read by this user only. What the old program hands to the new one, beside open
descriptors, is in memory that both share, so that no full disk can be in the way. Before anything is given up the new
program is run once beside the old one, and has to read what it would be handed and to check its own options: one that
cannot start costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import elastic
from elastic import process
from elastic.codec import WireError
from elastic.errors import ConfigError, ElasticError
from elastic.files import write_atomically
from elastic.journal import Journal

OPTION = "--handover"
SIGNAL = signal.SIGUSR2
HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, SIGNAL)
"""They wait until the new program can hear them; by default they would end it."""

CHECK_S = 60.0
CALM_S = 15.0
"""How long a moment is waited for in which another program can take over."""

POLL_S = 0.05


class Refused(ElasticError):
    """The program stays as it is, and says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """python: the interpreter of the new program. path: its PYTHONPATH, or "". token: tells answers apart."""

    python: str
    path: str
    token: str


def of_this_program() -> Request:
    """That which asks is the new one."""
    path = process.own_environment().get("PYTHONPATH", "")
    return Request(sys.executable, path, secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class Running:
    """A process that hands over when it is asked."""

    pid: int
    version: str


class Place:
    """The files of one process. name: unique in the directory."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name

    # ---------------------------------------------------------------------------------------- whoever asks

    def running(self) -> Running | None:
        """None: there is no such process, or none that can be asked yet. Raises Refused if it is not ours to know."""
        found = self._read("process")
        if found is None or process.started(int(found["pid"])) != found["started"]:
            return None
        return Running(int(found["pid"]), str(found["version"]))

    def ask(self, running: Running, request: Request) -> None:
        """Raises Refused for a process that is another user's, and could not read what is asked, or has ended."""
        try:
            owner = os.stat(f"/proc/{running.pid}").st_uid
            if owner != os.geteuid():
                raise Refused(f"process {running.pid} is of the user with id {owner}; ask as that user")
            self._write("upgrade", asdict(request))
            os.kill(running.pid, SIGNAL)
        except OSError as error:
            raise Refused(f"process {running.pid} cannot be asked: {error}") from error

    def answer(self, request: Request) -> dict[str, Any] | None:
        """What has come of it, if anything has."""
        found = self._read("upgraded")
        return found if found is not None and found["token"] == request.token else None

    # --------------------------------------------------------------------------------------- whoever is asked

    def ready(self) -> None:
        """This process can be asked from now on."""
        pid = os.getpid()
        self._write("process", {"pid": pid, "started": process.started(pid), "version": elastic.__version__})

    def end(self) -> None:
        """This process ends, and cannot be asked any more."""
        for what in ("process", "upgrade", "upgraded"):
            with contextlib.suppress(OSError):  # whoever finds it can tell that its process has ended
                self._path(what).unlink()

    def request(self) -> Request:
        """Raises Refused if it cannot be read."""
        found = self._read("upgrade")
        try:
            return Request(**(found or {}))
        except TypeError as error:
            raise Refused(f"the request in {self._path('upgrade')} cannot be read: {error}") from error

    def say(self, request: Request, *, refused: str = "", jobs: Sequence[str] = ()) -> None:
        """How it went. jobs: of a daemon that has taken over."""
        told = {"token": request.token, "version": elastic.__version__, "refused": refused, "jobs": list(jobs)}
        self._write("upgraded", told)

    def _path(self, what: str) -> Path:
        return self._directory / f"{self._name}.{what}.json"

    def _write(self, what: str, document: object) -> None:
        mask = os.umask(0o177)
        try:
            write_atomically(self._path(what), json.dumps(document).encode())
        finally:
            os.umask(mask)

    def _read(self, what: str) -> dict[str, Any] | None:
        try:
            document: dict[str, Any] = json.loads(self._path(what).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise Refused(f"{self._path(what)} cannot be read: {error.strerror}") from error
        return document


@dataclass(frozen=True, slots=True)
class Handed:
    """What the program before this one has left. refused: why this is no new program, or nothing."""

    request: Request
    state: dict[str, Any]
    refused: str = ""

    @classmethod
    def read(cls, descriptor: int) -> Handed:
        """Once: it is closed then. Raises ConfigError."""
        try:
            with os.fdopen(descriptor, "rb") as file:
                document = json.loads(file.read())
            return cls(Request(**document["request"]), document["state"], document["refused"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{OPTION} {descriptor} cannot be read: {error}") from error


def go(request: Request, command: Sequence[str], state: Mapping[str, Any], signals: Sequence[int] = ()) -> NoReturn:
    """Become the new program, or, if that does not start after all, this one anew, which says so. command: its module
    and arguments. signals: that came meanwhile, and are its. Main thread only: children die with that. Raises OSError
    if neither starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        for number in signals:
            signal.pthread_kill(threading.get_ident(), number)
        document = {"request": asdict(request), "state": state, "refused": ""}
        try:
            _become(request.python, _environment(request), command, document)
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
        os.execve(python, [python, "-P", "-m", *_without_option(command), OPTION, str(descriptor)], {**environment})


def begin(place: Place, journal: Journal, handed: Handed | None, jobs: Sequence[str] = ()) -> None:
    """This program has its handlers: it hears signals, can be asked, and says how it has taken over, if it has. A full
    disk is no reason to end. jobs: of a daemon."""
    hear()
    try:
        place.ready()
        if handed is not None:
            place.say(handed.request, refused=handed.refused, jobs=jobs)
    except OSError as error:
        journal.write("handover_not_answered", because=str(error))


def hear() -> None:
    """What was held until now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a new program is tried on. function: "module:name", is called with the words and the state, and checks all
    for which the program could end. words: of the command line that it will have."""

    function: str
    words: Sequence[str]


async def check(request: Request, trial: Trial, state: Mapping[str, Any]) -> None:
    """Run the new program beside this one, on the words and the state. Raises Refused."""
    command = [request.python, "-P", "-m", "elastic.handover", trial.function]
    given = {"words": _without_option(trial.words), "state": state}
    try:
        tried = await asyncio.create_subprocess_exec(
            *command, env=_environment(request), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    except OSError as error:
        raise Refused(f"the new program does not start: {request.python}: {error.strerror}") from error
    try:
        async with asyncio.timeout(CHECK_S):
            said, _ = await tried.communicate(json.dumps(given).encode())
    except TimeoutError:
        tried.kill()
        await tried.wait()
        raise Refused(f"the new program has not started within {CHECK_S:g} s: {' '.join(command)}") from None
    if tried.returncode != 0:
        words = said.decode(errors="replace").strip().splitlines() or [f"it ended with {tried.returncode}"]
        raise Refused(f"the new program does not start, or cannot read what it would be handed: {words[-1]}")


async def prepared(
    place: Place,
    journal: Journal,
    trial: Trial,
    state: Callable[[], Mapping[str, Any]],
    in_the_way: Callable[[], str],
    others: Callable[[Request], Awaitable[str]] | None = None,
) -> Request | None:
    """What is asked for, if it can be done now; else that is said, and None.

    trial, state: see `check`. in_the_way: why no other program can take over now, or nothing. others: who has to be
    replaced first; why not, or nothing.
    """
    request: Request | None = None
    try:
        request = place.request()
        await until(lambda: not in_the_way(), CALM_S)
        await check(request, trial, state())
        if because := in_the_way() or (await others(request) if others is not None else ""):
            raise Refused(because)
        await until(lambda: not in_the_way(), CALM_S)
        if because := in_the_way():
            raise Refused(because)
    except (Refused, OSError) as refused:
        journal.write("handover_refused", because=str(refused))
        if request is not None:
            refuse(place, journal, request, str(refused))
        return None
    journal.write("handover", version=elastic.__version__)
    return request


def refuse(place: Place, journal: Journal, request: Request, because: str) -> None:
    """Say so; on a full disk, to the journal alone."""
    try:
        place.say(request, refused=because)
    except OSError as error:
        journal.write("handover_not_answered", because=str(error))


async def until(reached: Callable[[], bool], within_s: float) -> bool:
    """Files of other processes, and moments of calm: there is nothing to wait on."""
    deadline_s = time.monotonic() + within_s
    while not reached():
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(POLL_S)
    return True


def _environment(request: Request) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**environment, "PYTHONPATH": request.path} if request.path else environment


def _without_option(command: Sequence[str]) -> list[str]:
    """This program may have been handed over itself."""
    words = list(command)
    if OPTION in words:
        at = words.index(OPTION)
        del words[at : at + 2]
    return words


def main() -> int:
    """`python -m elastic.handover MODULE:FUNCTION`, the check: the function gets what standard input has."""
    module, _, name = sys.argv[1].partition(":")
    try:
        getattr(importlib.import_module(module), name)(**json.load(sys.stdin))
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, WireError, ConfigError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
