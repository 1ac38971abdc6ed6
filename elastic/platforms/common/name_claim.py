"""The claim of one call to the name of a job: of two calls at the same time, one trains.

A file beside the job's checkpoints, which every machine that can go on with the job sees. The call that has the name
counts up in it every BEAT_S, until it ends. A call that finds the file looks whether its content changes: if it does,
another call lives; if it does not for SILENCE_S, that call was killed, and its claim is taken over. Times of two
machines are never compared.

Of calls that write at the same moment, and of a call that was frozen and continues, the one that wrote last has the
name: the others read its claim before they would write theirs again, and give up.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any, Self

from elastic.checkpoints.storage import LocalStorage, put, storage_at
from elastic.errors import ConfigError, NameInUse

FILE = "call.json"
BEAT_S = 2.0
SILENCE_S = 20.0
LOOKS = 4
"""In a beat, while another call's claim is watched."""


class NameClaim:
    """A context manager. job: its name, for people. url: the directory of its checkpoints.

    Raises NameInUse if another call has the name, which is known within a beat. After a call that was killed this takes
    silence_s. Raises ConfigError if the directory cannot be used.
    """

    def __init__(self, job: str, url: str, *, beat_s: float = BEAT_S, silence_s: float = SILENCE_S) -> None:
        self._job, self._url, self._beat_s, self._silence_s = job, url, beat_s, silence_s
        self._storage = storage_at(url)
        self._own = {"call": secrets.token_hex(8), "host": socket.gethostname(), "pid": os.getpid()}
        self._beats = 0
        self._taken: NameInUse | None = None
        self._over = threading.Event()
        try:
            self._await_silence()
            self._write()
            self._look()
        except OSError as error:
            because = error.strerror or error
            raise ConfigError(
                f"the checkpoint directory {url} cannot be used from here: {because}; a job with a name keeps there "
                "which call trains it: give another checkpoint_dir"
            ) from error
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Raises NameInUse if another call has taken the name over, because this one was silent for too long."""
        if self._taken is not None:
            raise self._taken

    def close(self) -> None:
        """Give the name back. Any number of times."""
        self._over.set()
        self._thread.join(self._silence_s)
        with contextlib.suppress(OSError, NameInUse):  # it is another call's, or silent from now on
            self._look()
            self._storage.remove(FILE)
            if isinstance(self._storage, LocalStorage):
                os.rmdir(self._storage.url)  # nothing else is there if the job was refused

    def _await_silence(self) -> None:
        """Return when nobody has the name. Raises NameInUse, OSError."""
        first = self._read()
        if first:
            print(
                f"elastic: {self._job} has the claim of another call, {_caller(first)}; if that has not shown within "
                f"{self._silence_s:g} s that it lives, this call goes on",
                file=sys.stderr,
                flush=True,
            )
        deadline_s = time.monotonic() + self._silence_s
        while first and time.monotonic() < deadline_s:
            time.sleep(self._beat_s / LOOKS)  # a file of another machine: there is nothing to wait on
            found = self._read()
            if not found:
                return
            if found != first:
                raise self._in_use(found)

    def _keep(self) -> None:
        while not self._over.wait(self._beat_s):
            try:
                self._look()
                self._write()
            except NameInUse as error:
                self._taken = error
                return
            except OSError:  # until the storage is back nobody knows more; the job's checkpoints say that it is away
                continue

    def _look(self) -> None:
        """Raises NameInUse if the claim is another call's, OSError."""
        found = self._read()
        if found and _parsed(found).get("call") != self._own["call"]:
            raise self._in_use(found)

    def _write(self) -> None:
        self._beats += 1
        put(self._storage, FILE, json.dumps({**self._own, "beats": self._beats}).encode())

    def _read(self) -> bytes:
        """The claim that is there; b"": there is none."""
        try:
            return self._storage.read(FILE)
        except FileNotFoundError:
            return b""

    def _in_use(self, claim: bytes) -> NameInUse:
        return NameInUse(
            f"another call trains job {self._job} now, {_caller(claim)} (checkpoints in {self._url}); wait until it "
            "has ended, or give this one another name"
        )


def _caller(claim: bytes) -> str:
    its = _parsed(claim)
    return f"process {its.get('pid')} on {its.get('host')}"


def _parsed(claim: bytes) -> dict[str, Any]:
    try:
        found = json.loads(claim)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
