"""What an operator should hear of although the job goes on: sentences made from the journals of all processes, and
about a disk that takes no journals."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from elastic.records.events.problems import Problems
from elastic.records.events.table import row
from elastic.records.job_directory import is_removed, removal
from elastic.records.job_follower import Growing
from elastic.records.journal import Line, Recoveries, parse

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


def notice(line: Line) -> str | None:
    """A sentence about this line of a journal, or None if the operator need not hear of it."""
    said = row(line["event"]).console
    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, IndexError):  # the line lacks a field
        return (said.format_map(line) if isinstance(said, str) else said(line)) or None
    return None
