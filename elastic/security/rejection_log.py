"""The journal of refused callers, with the reason: the first refusal at once, more of the same kind with their number.

gRPC tells of callers whose handshake fails (no certificate, a foreign or an expired one, noise) only on standard error,
and only if its log level asks for it. So file descriptor 2 of this process becomes a pipe: such lines go to the
journal, gRPC's other chatter is dropped, and everything else goes to the log of a daemon, or, of a process without a
log, where it was meant to go.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from elastic.process import log
from elastic.records.journal import Journal
from elastic.security.rate_limit import CallRate

_TALK = re.compile(rb"[IW]\d{4} [0-9:.]+ +\d+ [\w.]+\.cc:\d+\] ")
_HANDSHAKE = re.compile(rb"Handshake failed with error \S+ error:[^:]*:[^:]*:[^:]*:(\w+): ?(.*)")

_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the caller has shown no certificate",
    "CERTIFICATE_VERIFY_FAILED": "the caller's certificate is not believed",
    "WRONG_VERSION_NUMBER": "the caller does not speak TLS",
    "HTTP_REQUEST": "the caller does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "the caller's TLS is too old",
}
_STDERR = 2
_LONGEST_LINE = 1 << 16


def ask_for_talk() -> None:
    """Have gRPC log failed handshakes. Must be called before gRPC is imported for the first time."""
    os.environ.setdefault("GRPC_VERBOSITY", "info")


@contextmanager
def told(refusals: RejectionLog) -> Iterator[None]:
    """While the block lasts, handshakes that fail become lines of the journal."""
    original = os.dup(_STDERR)
    reading, writing = os.pipe()
    os.dup2(writing, _STDERR)
    os.close(writing)
    thread = threading.Thread(target=_sort, args=(reading, original, refusals), name="stderr", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.dup2(original, _STDERR)  # closes the last writing end, so that the thread comes to an end
        thread.join()
        os.close(original)


def _sort(reading: int, original: int, refusals: RejectionLog) -> None:
    rest = b""
    while part := os.read(reading, _LONGEST_LINE):
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            _pass_on(line + b"\n", original, refusals)
    if rest:
        _pass_on(rest, original, refusals)
    os.close(reading)


def _pass_on(line: bytes, original: int, refusals: RejectionLog) -> None:
    if not _TALK.match(line) and log.has_begun():
        log.foreign(line.decode(errors="replace").rstrip("\n"))
    elif not _TALK.match(line):
        with suppress(OSError):  # nobody reads it, or its disk is full: writers must not block
            while line:
                line = line[os.write(original, line) :]
    elif because := reason(line):
        refusals.say(because, at="handshake")


def reason(line: bytes) -> str:
    """Why a handshake failed, or "" if the line is not about a handshake."""
    found = _HANDSHAKE.search(line)
    if found is None:
        return ""
    code, detail = found[1].decode(), found[2].decode(errors="replace").strip()
    because = _REASONS.get(code, f"the handshake failed: {code}")
    return f"{because}: {detail}" if code == "CERTIFICATE_VERIFY_FAILED" and detail else because


AGAIN_S = 10.0
"""Seconds before the same refusal is written again, with how often it happened meanwhile."""

KINDS_KEPT = 256
OTHERS = f"refusals of other kinds: more than {KINDS_KEPT} at a time are not told apart"

LINES_A_SECOND = 10.0
LINES_AT_ONCE = 200.0
"""The limit of all kinds together: a caller with many names, or many reasons, cannot fill the disk."""


@dataclass(slots=True)
class _Kind:
    next_s: float
    unsaid: int = 0


class RejectionLog:
    """Writes refusals to the journal, from any thread. Callers may be refused ten thousand times a second without
    filling the disk."""

    def __init__(self, journal: Journal, clock: Callable[[], float] = time.monotonic) -> None:
        self._journal = journal
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: OrderedDict[tuple[str, str, str, str, str, str], _Kind] = OrderedDict()
        self._others: Counter[str] = Counter()
        """Event -> refusals that were counted and not written, of kinds that had to give way."""
        self._pace = CallRate(LINES_A_SECOND, LINES_AT_ONCE, clock)

    def say(
        self, because: str, *, at: str, caller: str = "", peer: str = "", event: str = "refused", job: str = ""
    ) -> None:
        """Write a line `event`. at: the method that was called. caller: its name by its certificate, or "". peer: its
        address, or "". job: the job that it asked for, or ""."""
        now_s, key = self._clock(), (event, because, at, caller, peer.rpartition(":")[0] or peer, job)
        with self._lock:
            kind = self._kinds.setdefault(key, _Kind(now_s))
            self._kinds.move_to_end(key)
            if len(self._kinds) > KINDS_KEPT:
                (given_up, *_), old = self._kinds.popitem(last=False)
                self._others[given_up] += old.unsaid
            if now_s < kind.next_s or not self._pace.allows():
                kind.unsaid += 1
                return
            times, kind.next_s, kind.unsaid = kind.unsaid + 1, now_s + AGAIN_S, 0
        self._write(event, because, at, caller, peer, job, times)

    def flush(self, *, last: bool = False) -> None:
        """Write what was counted and not written, of kinds that are due. last: of all, as no more will come."""
        now_s = self._clock()
        due: list[Callable[[], None]] = []
        with self._lock:
            for key, kind in self._kinds.items():
                if kind.unsaid and (last or (now_s >= kind.next_s and self._pace.allows())):
                    due.append(partial(self._write, *key, kind.unsaid))
                    kind.next_s, kind.unsaid = now_s + AGAIN_S, 0
            for event, times in (+self._others).items():
                due.append(partial(self._write, event, OTHERS, "", "", "", "", times))
            self._others.clear()
        for tell in due:
            tell()

    async def watch(self) -> None:
        """Flush again and again. Never returns."""
        while True:
            await asyncio.sleep(AGAIN_S)
            self.flush()

    def _write(self, event: str, because: str, at: str, caller: str, peer: str, job: str, times: int) -> None:
        about: dict[str, Any] = {"job": job} if job else {}  # a worker's journal names its own job
        self._journal.write(event, because=because, at=at, caller=caller, peer=peer, times=times, **about)
