"""The script of --host-discovery-script, asked once a second which hosts there are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from elastic.errors import ConfigError, ElasticError
from elastic.platforms.horovod import hosts
from elastic.process import children

EVERY_S = 1.0
TIMEOUT_S = 10.0
"""A script that takes longer has hung: it is killed, and asked again."""

PATIENCE_S = 60.0
"""A script that has given no list for so long in a row ends the job; until then the last list holds."""

TEXT_MAX = 1 << 20


class DiscoveryFailed(ElasticError):
    """Mend the discovery script; the message has what it did."""


def ask(script: str, slots: int | None, timeout_s: float = TIMEOUT_S) -> dict[str, int]:
    """Host -> slots, as the script prints them. Raises ConfigError for what is no list of hosts, DiscoveryFailed for a
    script that cannot be started, fails, or does not end."""
    command = ["/bin/sh", "-c", f"exec {script}"]
    try:
        process = children.start(command, obeys=False, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:  # no memory or no process left, which may pass
        raise DiscoveryFailed(f"{script} cannot be started: {error}") from error
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException as error:
        _kill(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise DiscoveryFailed(
                f"{script} has printed no list of hosts within {timeout_s:g} s, and was killed"
            ) from None
        raise
    if process.returncode:
        said = err.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise DiscoveryFailed(f"{script} ended with {process.returncode}: {said[0][:200]}")
    if len(out) > TEXT_MAX:
        raise ConfigError(f"{script}: it has printed {len(out)} bytes; a list of hosts has a line for each")
    return hosts.of_script(out.decode(errors="replace"), script, slots)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it has started, which would hold its output open."""
    assert process.stdout is not None and process.stderr is not None
    with contextlib.suppress(ProcessLookupError):  # it has ended, and what it has left behind is in another group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()


def check_script(script: str) -> None:
    """Raises ConfigError if there is no such program."""
    first = script.split()[0] if script.split() else ""
    path = Path(first)
    if not first or ("/" in first and not path.is_file()):
        raise ConfigError(f"--host-discovery-script {script!r}: there is no such file")


class HostWatch:
    """The newest list, asked for by a thread of its own, as a script may take its time."""

    def __init__(self, script: str, slots: int | None) -> None:
        """Asks once. Raises ConfigError and DiscoveryFailed."""
        self._script, self._slots = script, slots
        self._lock = threading.Lock()
        self._hosts = ask(script, slots)
        self._failure: tuple[float, ElasticError] | None = None
        """Since when it fails, and how it has failed last."""
        self._said = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def now(self) -> Mapping[str, int]:
        """The newest list. Raises DiscoveryFailed if there was none for PATIENCE_S."""
        with self._lock:
            if self._failure is not None and time.monotonic() > self._failure[0] + PATIENCE_S:
                raise DiscoveryFailed(f"no list of hosts for {PATIENCE_S:g} s: {self._failure[1]}")
            return self._hosts

    def close(self) -> None:
        self._over.set()
        self._thread.join(TIMEOUT_S + EVERY_S)

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            try:
                found = ask(self._script, self._slots)
            except ElasticError as error:
                with self._lock:
                    since = time.monotonic() if self._failure is None else self._failure[0]
                    self._failure = since, error
                if str(error) != self._said:
                    self._said = str(error)
                    print(f"elastic: {error}; the last list of hosts holds", flush=True)
                continue
            with self._lock:
                self._hosts, self._failure, self._said = found, None, ""
