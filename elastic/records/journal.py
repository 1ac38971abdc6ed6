"""The append-only event log of every process, and the account of recoveries made from it.

A line is one JSON object: ``t_mono_ns, t_wall, job, generation, worker_id, node, pid, who, event`` and the event's own
fields. worker_id and pid are those of the writer, or, if given, of the worker that the line is about. Times are
CLOCK_MONOTONIC of the machine, so lines of all processes of one machine can be sorted. Each process appends to
``<job-dir>/journal/<who>.jsonl``; `merge` makes ``<job-dir>/journal.jsonl`` of them.

Lines are written at once and not fsynced: they survive any kill of a process, but not the loss of the machine.

elastic/records/events has the table of all events.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeAlias

from elastic.process import file_modes
from elastic.records.retention import Retention

Line: TypeAlias = dict[str, Any]

_IN_EVERY_LINE = {
    "t_mono_ns": int,
    "t_wall": int | float,
    "generation": int,
    "worker_id": str,
    "who": str,
    "event": str,
}

PHASES = ("detect", "abort", "decide", "build", "sync", "redo")


def journal_path(job_dir: Path, who: str) -> Path:
    return job_dir / "journal" / f"{who}.jsonl"


class Journal:
    """One process's log. Any thread may call `write`, which never raises for a full disk: the loss of lines is printed
    on stderr, once, and noted in the log when it can be written again (`journal_gap`)."""

    def __init__(
        self,
        path: Path,
        job: str,
        who: str,
        node: str,
        worker_id: str = "",
        retention: Retention | None = None,
        logged: int | None = None,
    ) -> None:
        """retention: for a process that runs for ever; None: all lines are kept. logged: the level at which the events
        go to the process's log too; if it is INFO, those that the table of events calls warnings at WARNING. None:
        not at all."""
        self._path = path
        self._retention = retention
        self._file: int | None = None
        self._base: Line = {"job": job, "generation": 0, "worker_id": worker_id, "node": node, "pid": os.getpid()}
        self._who = who
        self._logged = logged
        self._lost = 0
        self._closed = False
        self._lock = threading.Lock()

    def write(self, event: str, generation: int = 0, **fields: object) -> None:
        if self._logged is not None:
            self._log(event, generation, fields)
        if self._lost and self._put(self._line("journal_gap", {"lines": self._lost})):
            self._lost = 0
        if not self._put(self._line(event, {"generation": generation, **fields})):
            self._lost += 1

    def _log(self, event: str, generation: int, fields: Line) -> None:
        """Log an event, as of the module that writes it."""
        level = self._logged or 0
        if level == logging.INFO:
            from elastic.records.events.table import row  # which only daemons need

            level = logging.WARNING if row(event).warns else level
        log = logging.getLogger(sys._getframe(2).f_globals["__name__"])
        if log.isEnabledFor(level):
            about = {"job": self._base["job"], "generation": generation}
            shown = {**{name: value for name, value in about.items() if value}, **fields}
            log.log(level, event, extra={"fields": shown})

    def close(self) -> None:
        """Lines of threads that have not ended yet are dropped from now on: the directory may be gone, or another
        job's."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, event: str, fields: Line) -> bytes:
        line = {
            "t_mono_ns": time.monotonic_ns(),
            "t_wall": time.time(),
            **self._base,
            "who": self._who,
            "event": event,
            **fields,
        }
        return json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n"

    def _put(self, data: bytes) -> bool:
        try:
            with self._lock:
                if self._closed:
                    return False
                if self._file is not None and self._retention is not None and self._retention.is_over(self._file):
                    os.close(self._file)
                    self._file = None
                if self._file is None:
                    self._file = self._open()
                written = os.write(self._file, data)
                if written < len(data):  # a partial line would spoil the next one
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
        except OSError as error:
            if not self._lost:
                self._complain(f"{self._path}: {error.strerror}; journal lines are being lost")
            return False
        return written == len(data)

    def _complain(self, sentence: str) -> None:
        if self._logged is not None:
            logging.getLogger(__name__).error(sentence)
            return
        with contextlib.suppress(OSError):  # stderr may be a file on the same disk
            print(sentence, file=sys.stderr)

    def _open(self) -> int:
        file_modes.make_directory(self._path.parent)
        path = self._path if self._retention is None else self._retention.part(self._path)
        file = file_modes.opener(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")
        if self._retention is not None:
            self._retention.prune(path)
        return file


def read(path: Path, events: Collection[str] = ()) -> list[Line]:
    """The lines of one journal, or only these events. Torn lines, from a kill in the middle of a write, are left
    out."""
    texts = path.read_bytes().splitlines()
    if events:
        texts = list(filter(re.compile(f'"event":"({"|".join(events)})"'.encode()).search, texts))
    return [line for text in texts if (line := parse(text)) is not None]


def parse(text: bytes) -> Line | None:
    """A line of a journal, or None for a torn one."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict):
        return None
    whole = all(isinstance(line.get(name), kind) for name, kind in _IN_EVERY_LINE.items())
    return line if whole else None


def read_all(job_dir: Path, events: Collection[str] = ()) -> list[Line]:
    """The lines of all processes of a job on this machine, by time, or only these events."""
    lines = [line for path in sorted((job_dir / "journal").glob("*.jsonl")) for line in read(path, events)]
    return sorted(lines, key=lambda line: line["t_mono_ns"])


def on_wall_clock(line: Line) -> Line:
    """For lines of several machines, whose monotonic clocks cannot be compared: t_mono_ns is that of t_wall."""
    return {**line, "t_mono_ns": int(line["t_wall"] * 1e9)}


def merge(job_dir: Path) -> Path:
    """Write ``journal.jsonl``, all lines of the job by time, in place of an earlier merge. Returns its path."""
    target = job_dir / "journal.jsonl"
    temporary = target.with_suffix(".jsonl.tmp")
    with open(temporary, "w", encoding="utf-8", opener=file_modes.opener) as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in read_all(job_dir))
    temporary.replace(target)
    return target


@dataclass(slots=True)
class _Episode:
    """The time from the order to leave the ring until the interrupted operation is complete again."""

    because: str
    started_ns: int
    clock_ns: int
    phase: str = "abort"
    lost: list[str] = field(default_factory=list)
    spent_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    generation: int = 0
    members: frozenset[str] = frozenset()
    up: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    redone: bool = False

    def turn(self, phase: str, now_ns: int) -> None:
        """Begin a phase. The time since the last call belongs to the phase that ends."""
        now_ns = max(now_ns, self.clock_ns)  # clocks of several machines differ a little
        self.spent_ns[self.phase] += now_ns - self.clock_ns
        self.phase, self.clock_ns = phase, now_ns

    def see(self, line: Line) -> bool:
        """Take the next line; True when it ends the episode."""
        now_ns, worker = line["t_mono_ns"], line["worker_id"]
        of_loss = line.get("kind") == "loss"
        of_this = line["generation"] == self.generation
        match line["event"], self.phase:
            case "member_lost", _:
                self.lost.append(worker)
            case "quiesce_started", "decide" | "build":
                self.turn("abort", now_ns)
            case "quiesce_complete", "abort":
                self.turn("decide", now_ns)
            case "committed", "decide" if of_loss:
                self.generation, self.members = line["generation"], frozenset(line["members"])
                self.up, self.done, self.redone = set(), set(), False
            case "published", "decide" if of_loss:
                self.turn("build", now_ns)
            case "ring_up", "decide" | "build" if of_this:
                self.up.add(worker)
                if self.up >= self.members:
                    self.turn("sync", now_ns)
            case "result_copied", "sync" if of_this:
                self.turn("sync", now_ns)
            case "redo_started", _ if of_this:
                self.redone = True
            # A planned generation may take effect right after this operation, whose end is then journalled for that
            # generation. Workers outside it have left in order.
            case "entered", _ if self._is_later(line) and not of_loss:
                self.members &= frozenset(line["members"])
                return self._is_done(now_ns)
            case "op_complete", _ if of_this or self._is_later(line):
                self.done.add(worker)
                return self._is_done(now_ns)
        return False

    def _is_later(self, line: Line) -> bool:
        return 0 < self.generation < int(line["generation"])

    def _is_done(self, now_ns: int) -> bool:
        if not self.done or not self.done >= self.members:
            return False
        self.phase = "redo" if self.phase == "sync" else self.phase
        self.turn("done", now_ns)
        return True

    def told(self, faults_ns: dict[str, int], complete: bool) -> Line:
        causes = [faults_ns[worker] for worker in self.lost if faults_ns.get(worker, self.started_ns) < self.started_ns]
        self.spent_ns["detect"] = self.started_ns - min(causes, default=self.started_ns)
        if not self.redone:
            self.spent_ns["redo"] = 0
        split = {f"{phase}_ms": self.spent_ns[phase] / 1e6 for phase in PHASES}
        recovery_ms = sum(split.values()) - split["redo_ms"]
        head = {"generation": self.generation, "lost": self.lost, "because": self.because, "complete": complete}
        head["started_ns"] = self.started_ns
        return {**head, **split, "recovery_ms": recovery_ms}


class Recoveries:
    """`recoveries`, one line after the other. leader_only: the lines are a leader's alone, which does not see the rings
    and the operation: a loss is over when all members have said that their rings are up."""

    def __init__(self, *, leader_only: bool = False) -> None:
        self._leader_only = leader_only
        self._episode: _Episode | None = None
        self._faults_ns: dict[str, int] = {}
        self._passing: dict[int, list[str]] = {}
        self._lost: list[str] = []

    def see(self, line: Line) -> Line | None:
        """Take the next line. Returns the recovery that ends with it, or None."""
        event, now_ns, worker, episode = line["event"], line["t_mono_ns"], line["worker_id"], self._episode
        if event in ("fault_injected", "worker_dying", "worker_exited", "worker_frozen"):
            self._faults_ns.setdefault(worker, now_ns)
        if event == "fault_injected" and line.get("lethal") is False:
            self._passing.setdefault(line.get("number", 0), []).append(worker)
        if event == "fault_ended":
            for thawed in self._passing.pop(line.get("number", 0), ()):
                if episode is None or thawed not in episode.lost:
                    self._faults_ns.pop(thawed, None)  # the worker has survived this fault
        if event == "quiesce_started" and (episode is None or episode.phase == "sync"):
            told = self.end()
            self._episode = _Episode(line.get("because", ""), now_ns, now_ns, lost=self._lost)
            self._lost = []
            return told
        if episode is not None and not (event == "member_lost" and episode.phase == "sync"):
            if self._leader_only and event == "running" and episode.phase == "build":
                episode.turn("done", now_ns)
                return self.end(complete=True)
            return self.end(complete=True) if episode.see(line) else None
        if event == "member_lost":
            # A loss is noted just before it makes the leader quiesce, unless a survivor's broken ring did so first.
            self._lost.append(worker)
        elif event == "committed":
            self._lost = []  # the lost workers were about to join, and are planned out again
        return None

    def end(self, *, complete: bool = False) -> Line | None:
        """The recovery that is going on, which is not followed any more, or None."""
        episode, self._episode = self._episode, None
        return episode.told(self._faults_ns, complete=complete) if episode is not None else None


def recoveries(lines: Iterable[Line]) -> list[Line]:
    """Each loss of a job, in order, with the time of each phase. Lines as `read_all` gives them; those of several
    machines by `on_wall_clock`.

    Keys: generation (the one that goes on), lost (worker ids), because, complete (False: the journal or the job
    ends, or the next loss comes, before the operation was complete again), started_ns (t_mono_ns of
    quiesce_started), and in milliseconds

        detect_ms    fault (or its first sign if no harness wrote it) -> quiesce_started
        abort_ms     -> quiesce_complete: rings aborted, reports in
        decide_ms    -> published: plan made and committed to etcd
        build_ms     -> ring_up of the last member
        sync_ms      -> result_copied of the last laggard; 0 without one
        redo_ms      -> op_complete of the last member; 0 if no operation was interrupted
        recovery_ms  all but redo_ms

    A loss before the ring is up again belongs to the same episode: the phases of both are added up, without gap
    or overlap.
    """
    seen = Recoveries()
    told = [*map(seen.see, lines), seen.end()]
    return [recovery for recovery in told if recovery is not None]
