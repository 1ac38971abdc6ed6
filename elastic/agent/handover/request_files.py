"""How one process asks another to hand over, and gets the answer: three files, and a signal."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastic import file_modes
from elastic.agent.process import worker_process
from elastic.errors import ElasticError
from elastic.process import children
from elastic.records.files import read_regular, write_atomically
from elastic.security.job_user import JobUser, acting
from elastic.version import __version__

SIGNAL = signal.SIGUSR2


class UpgradeRefused(ElasticError):
    """The program does not hand over; the message says why."""


@dataclass(frozen=True, slots=True)
class UpgradeRequest:
    """A request to hand over. python: the new program's interpreter. path: its PYTHONPATH, or "". token: names the
    answer."""

    python: str
    path: str
    token: str

    def environment(self) -> dict[str, str]:
        """The environment of the new program."""
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return {**own, "PYTHONPATH": self.path} if self.path else own


def of_this_program() -> UpgradeRequest:
    """A request in which the asking program is the new one."""
    path = children.own_environment().get("PYTHONPATH", "")
    return UpgradeRequest(sys.executable, path, secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A process that hands over when asked."""

    pid: int
    version: str


class UpgradeRequestFiles:
    """The files of one process. name: unique in the directory. user: owner of the process, if not this one's."""

    def __init__(self, directory: Path, name: str, user: JobUser | None = None) -> None:
        self._directory = directory
        self._name = name
        self._user = user

    # ---------------------------------------------------------------------------------- the asking process

    def running(self) -> RunningProgram | None:
        """The process; None: there is none that can be asked. Raises UpgradeRefused if the file cannot be read."""
        found = self._read("process")
        if found is None or worker_process.started(int(found["pid"])) != found["started"]:
            return None
        return RunningProgram(int(found["pid"]), str(found["version"]))

    def ask(self, running: RunningProgram, request: UpgradeRequest) -> None:
        """Write the request and send the signal. Raises UpgradeRefused for a process that has ended, or belongs to
        another user and could not read the request."""
        try:
            owner = os.stat(f"/proc/{running.pid}").st_uid
            if owner != (self._user.uid if self._user is not None else os.geteuid()):
                raise UpgradeRefused(f"process {running.pid} is of the user with id {owner}; ask as that user")
            self._write("upgrade", asdict(request))
            os.kill(running.pid, SIGNAL)
        except OSError as error:
            raise UpgradeRefused(f"process {running.pid} cannot be asked: {error}") from error

    def answer(self, request: UpgradeRequest) -> dict[str, Any] | None:
        """The answer to the request, or None before there is one."""
        found = self._read("upgraded")
        return found if found is not None and found["token"] == request.token else None

    # ---------------------------------------------------------------------------------- the asked process

    def ready(self) -> None:
        """Note that this process can be asked from now on."""
        pid = os.getpid()
        self._write("process", {"pid": pid, "started": worker_process.started(pid), "version": __version__})

    def end(self) -> None:
        """Remove the files: this process ends and cannot be asked any more."""
        for what in ("process", "upgrade", "upgraded"):
            with contextlib.suppress(OSError):  # a reader can tell that the process has ended
                self._path(what).unlink()

    def request(self) -> UpgradeRequest:
        """The request to this process. Raises UpgradeRefused if it cannot be read."""
        found = self._read("upgrade")
        try:
            return UpgradeRequest(**(found or {}))
        except TypeError as error:
            raise UpgradeRefused(f"the request in {self._path('upgrade')} cannot be read: {error}") from error

    def say(self, request: UpgradeRequest, *, refused: str = "", jobs: Sequence[str] = ()) -> None:
        """Write the answer to a request. jobs: the jobs of a daemon that has taken over."""
        told = {"token": request.token, "version": __version__, "refused": refused, "jobs": list(jobs)}
        self._write("upgraded", told)

    def _path(self, what: str) -> Path:
        return self._directory / f"{self._name}.{what}.json"

    def _write(self, what: str, document: object) -> None:
        with acting(self._user):
            write_atomically(self._path(what), json.dumps(document).encode(), file_modes.SETTINGS)

    def _read(self, what: str) -> dict[str, Any] | None:
        try:
            with acting(self._user):
                document: dict[str, Any] = json.loads(read_regular(self._path(what)))
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise UpgradeRefused(f"{self._path(what)} cannot be read: {error.strerror}") from error
        return document
