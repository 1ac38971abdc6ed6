"""Where one process asks another to hand over, and is answered: three files, and a signal."""

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
from elastic.records.files import write_atomically
from elastic.security.job_user import JobUser, acting
from elastic.version import __version__

SIGNAL = signal.SIGUSR2


class UpgradeRefused(ElasticError):
    """The program stays as it is, and says why."""


@dataclass(frozen=True, slots=True)
class UpgradeRequest:
    """python: the interpreter of the new program. path: its PYTHONPATH, or "". token: tells answers apart."""

    python: str
    path: str
    token: str

    def environment(self) -> dict[str, str]:
        """The environment of the new program."""
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return {**own, "PYTHONPATH": self.path} if self.path else own


def of_this_program() -> UpgradeRequest:
    """That which asks is the new one."""
    path = worker_process.own_environment().get("PYTHONPATH", "")
    return UpgradeRequest(sys.executable, path, secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class RunningProgram:
    """A process that hands over when it is asked."""

    pid: int
    version: str


class UpgradeRequestFiles:
    """The files of one process. name: unique in the directory. user: whose process it is, where not that of the one who
    asks."""

    def __init__(self, directory: Path, name: str, user: JobUser | None = None) -> None:
        self._directory = directory
        self._name = name
        self._user = user

    # ---------------------------------------------------------------------------------------- whoever asks

    def running(self) -> RunningProgram | None:
        """None: there is no such process, or none that can be asked yet. Raises UpgradeRefused if it is not ours."""
        found = self._read("process")
        if found is None or worker_process.started(int(found["pid"])) != found["started"]:
            return None
        return RunningProgram(int(found["pid"]), str(found["version"]))

    def ask(self, running: RunningProgram, request: UpgradeRequest) -> None:
        """Raises UpgradeRefused for a process that is another user's, and could not read the request, or has ended."""
        try:
            owner = os.stat(f"/proc/{running.pid}").st_uid
            if owner != (self._user.uid if self._user is not None else os.geteuid()):
                raise UpgradeRefused(f"process {running.pid} is of the user with id {owner}; ask as that user")
            self._write("upgrade", asdict(request))
            os.kill(running.pid, SIGNAL)
        except OSError as error:
            raise UpgradeRefused(f"process {running.pid} cannot be asked: {error}") from error

    def answer(self, request: UpgradeRequest) -> dict[str, Any] | None:
        """What has come of it, if anything has."""
        found = self._read("upgraded")
        return found if found is not None and found["token"] == request.token else None

    # --------------------------------------------------------------------------------------- whoever is asked

    def ready(self) -> None:
        """This process can be asked from now on."""
        pid = os.getpid()
        self._write("process", {"pid": pid, "started": worker_process.started(pid), "version": __version__})

    def end(self) -> None:
        """This process ends, and cannot be asked any more."""
        for what in ("process", "upgrade", "upgraded"):
            with contextlib.suppress(OSError):  # whoever finds it can tell that its process has ended
                self._path(what).unlink()

    def request(self) -> UpgradeRequest:
        """Raises UpgradeRefused if it cannot be read."""
        found = self._read("upgrade")
        try:
            return UpgradeRequest(**(found or {}))
        except TypeError as error:
            raise UpgradeRefused(f"the request in {self._path('upgrade')} cannot be read: {error}") from error

    def say(self, request: UpgradeRequest, *, refused: str = "", jobs: Sequence[str] = ()) -> None:
        """How it went. jobs: of a daemon that has taken over."""
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
                document: dict[str, Any] = json.loads(self._path(what).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise UpgradeRefused(f"{self._path(what)} cannot be read: {error.strerror}") from error
        return document
