"""What an operator should hear of although the job goes on: sentences made from the journals of all processes, and
about a disk that takes no journals."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from elastic.records.job_directory import is_removed, removal
from elastic.records.job_follower import Growing
from elastic.records.journal import Line, Recoveries, parse
from elastic.records.problems import Problems

ROOM_BYTES = 4096
"""A disk with fewer free bytes does not take a file of one line."""


class Alerts:
    """Follows the journals of one job directory. members: also which members are lost and join."""

    def __init__(self, job_dir: Path, *, members: bool = False) -> None:
        self._journals = job_dir / "journal"
        self._tails: dict[Path, Growing] = {}
        self._troubles = Problems()
        self._recoveries = Recoveries() if members else None
        self._words: set[str] = set()
        """Last words of scripts that were shown, such as tracebacks."""
        self._full = False
        self._removed = False

    def poll(self) -> list[str]:
        """The notices of all lines written since the last call, by time. A disk that has become full, or a job
        directory that was removed, comes first."""
        job_dir = self._journals.parent
        if is_removed(job_dir):
            before, self._removed = self._removed, True
            return [] if before else [f"{removal(job_dir)}: training goes on, and nobody can go on with it later"]
        try:
            before, self._full = self._full, shutil.disk_usage(job_dir).free < ROOM_BYTES
            full = [f"no room in {self._journals.parent}: training goes on, and what it writes waits for room"]
            return [*(full if self._full and not before else ()), *self._told()]
        except FileNotFoundError:  # the directory was removed just now, which the next call says
            return []

    def _told(self) -> list[str]:
        lines = [line for path in sorted(self._journals.glob("*.jsonl")) for line in self._new_lines(path)]
        lines.sort(key=lambda line: int(line["t_mono_ns"]))
        said = (
            text
            for line in lines
            for text in (self._with_words(notice(line), line) or self._troubles.see(line), self._of_members(line))
        )
        return [str(text) for text in said if text is not None]

    def _of_members(self, line: Line) -> str | None:
        if self._recoveries is None:
            return None
        if (told := self._recoveries.see(line)) is not None and told["complete"]:
            return f"{told['because']}; the others go on after {told['recovery_ms']:.0f} ms"
        match line:
            case {"event": "joined", "worker_id": str(worker)}:
                return f"{worker} has joined"
        return None

    def has_told(self, words: str) -> bool:
        return words.strip() in self._words

    def _with_words(self, sentence: str | None, line: Line) -> str | None:
        """The sentence with the script's last words. The same traceback is shown once, however many workers it ends."""
        match line:
            case {"event": "worker_failed", "words": str(words)}:
                pass
            case {"event": "slot_given_up", "because": str(because)}:
                words = because.partition("\n")[2]
            case _:
                return sentence
        words = words.strip()
        if sentence is None or not words or words in self._words:
            return sentence
        self._words.add(words)
        return f"{sentence}\n{words}"

    def _new_lines(self, path: Path) -> list[Line]:
        tail = self._tails.setdefault(path, Growing(path, from_end=False))
        return list(filter(None, map(parse, tail.all_lines())))


_SENTENCES: Mapping[str, str] = {
    "refused": "{worker_id} is refused: {because}",
    "stuck": "{worker_id} lives and gets nowhere, and is ended: {because}. See where it hangs in its log in logs/",
    "script_stopped": "the script of {worker_id} is {because}; it is ended, and the worker is replaced",
    "newcomer_hung": "the replacement {worker_id} is ended, and its slot gets another process: {because}. See where it "
    "hangs in its log in logs/; a set-up that is only slow may take half of --pause-limit: make that longer",
    "newcomer_awaited": "training waits until {worker_id} has copied the state: {outdated} copies in a row were out of "
    "date before it was through with them",
    "ledger_late": "steps.jsonl could not be written for {seconds:.1f} s ({because}); no line of it is missing",
    "slots_not_written": "node {node} cannot write down which workers it has started, and training goes on: {because}. "
    "Mend the job directory before the agent is started again",
    "node_leaves": "node {node} has to go within {seconds_left:.0f} s: {because}",
    "node_late": "node {node} has not left yet; if others go on, its workers are ended now",
    "node_stays": "node {node} stays: {because}",
    "advised": "node {node} is told, and stays: {because}",
    "notices_unreadable": "node {node} cannot read the notices of {source}, and goes on asking: {because}",
    "checkpoint_failed": "{who} could not make the checkpoint {entry}; training goes on: {because}",
    "snapshot_set_aside": "{who} cannot go on from the snapshot {entry}, which is removed: {because}",
    "checkpoint_set_aside": "{who} cannot go on from the checkpoint {entry}: {because}",
    "straggler": "{worker_id} is a straggler: {because}",
    "demoted": "{worker_id} gives its place to a spare, because it is too slow",
    "mpirun_ended": "mpirun {because}, and every worker that had a rank of it ends with it",
    "ring_without_mpi": "generation {generation} sends its gradients over TCP: {because}",
    "initial_state_copied": "the initial parameters of {worker_id} differed from rank 0's and were copied from "
    "{source}; build the model after elastic.join(), which seeds all workers alike, to spare the copy",
}


def notice(line: Line) -> str | None:
    """A sentence about this line of a journal, or None if the operator need not hear of it."""
    match line:
        case {"event": "worker_failed", "worker_id": str(worker), "because": str(because)}:
            then = " after the job was complete" if line.get("replaced") is False else ", and is replaced"
            return f"{worker} {because}{then}; its log is in logs/"
        case {"event": "slot_given_up", "slot": str(slot), "because": str(because)}:
            return f"slot {slot} gets no worker any more: {because.splitlines()[0]}; see its log in logs/"
        case {"event": "fork_server_unusable", "from_outside": False, "because": str(because)}:
            return f"workers cannot be forked and start with an interpreter of their own: {because}"
        case {"event": "mpi_not_started", "because": str(because), "ended": list(ended)}:
            return (
                f"MPI cannot start: {because}. {', '.join(map(str, ended))} cannot be freed from MPI_Init; they are "
                "replaced, and gradients go over TCP. To try MPI again, stop the job and start it anew"
            )
        case {"event": str(event)} if event in _SENTENCES:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # the line has not what the sentence is about
                return _SENTENCES[event].format_map(line)
    return None
