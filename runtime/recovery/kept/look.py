"""What a worker sees of the segments on its machine: it checks them before a round, and removes those of old rounds."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from elastic.errors import CheckpointCorrupt
from runtime.recovery.kept.choice import NO_ROUND, HeldSegment, KeptStep, KnownStep, RoundNumber
from runtime.recovery.kept.place import KNOWN, OFF, PART, THIN, KeptPlace, directory_of, rounds_in
from runtime.recovery.kept.segment import Header, Segment, read_header, segments_in
from runtime.session import Reports


class KeptHere:
    """Used by the worker's main thread. memory: the job's directory in memory; "": there is none, and so no segment."""

    def __init__(self, memory: str, session: Reports) -> None:
        self._memory = memory
        self._session = session
        self._settled: RoundNumber | None = None
        self._thin: RoundNumber | None = None
        """The round for which it is noted that the script of this worker cannot mirror what it keeps."""
        self._written: KnownStep | None = None
        """What `remember` has written."""

    def check(self, share: int, shares: int) -> tuple[HeldSegment, ...]:
        """The segments that are as they were written, of this worker's share: the workers of a machine divide the work.
        No script of theirs runs now. A damaged segment is journalled, and removed."""
        return tuple(self._checked(share, shares))

    def is_off(self, number: RoundNumber) -> bool:
        """Whether a script of this machine keeps nothing any more in that round."""
        return bool(self._memory) and _off(directory_of(self._memory, number)) is not None

    def void(self) -> RoundNumber:
        """Remove what is not newer than a round in which a script of this machine has kept nothing any more: the script
        has gone on since, and its own files are newer. Returns the newest such round; NO_ROUND: there is none. The word
        of it stays until a later round has settled: other workers of the machine look for it, too, also after a death
        of this one."""
        rounds = rounds_in(self._memory) if self._memory else []
        newest = max((number for number in rounds if self.is_off(number)), default=NO_ROUND)
        for number in rounds:
            if number < newest:
                shutil.rmtree(directory_of(self._memory, number), ignore_errors=True)
        if newest > NO_ROUND:
            with suppress(FileNotFoundError):  # another worker of the machine removes the same
                for path in directory_of(self._memory, newest).iterdir():
                    if path.name != OFF:
                        path.unlink(missing_ok=True)
        return newest

    def follow(self, number: RoundNumber, rank: int, node: int) -> tuple[int, str]:
        """The newest step that the script of a rank has kept in the round in progress, and the same for people; -1 and
        "": none yet, or it does not ask for it. node: the number of the machine."""
        if not self._memory:
            return -1, ""
        directory = directory_of(self._memory, number)
        if (because := _off(directory)) is not None:
            return -1, f"not kept: {because}"
        part = _part_of(directory, rank)
        found = _headers(directory, (f"0.{part}.", f"{node}.0."))
        newest = max((held.step for held in found if held.parts == 1 or held.part == part), default=-1)
        if newest < 0:
            return -1, ""
        if not (directory / f"{THIN}{rank}").exists():
            return newest, f"step {newest} kept"
        if self._thin != number:
            self._thin = number
            self._session.note("kept_thin", step=newest, parts=1)
        return newest, f"step {newest} kept, on this machine alone"

    def last(self, number: RoundNumber, step: int, rank: int, node: int) -> Iterator[HeldSegment]:
        """What the script of a rank, or another one of the machine that has the same, has kept of a step of that round.
        node: the number of the machine."""
        directory = directory_of(self._memory, number)
        for held in _headers(directory, (f"0.{_part_of(directory, rank)}.", f"{node}.0.")):
            if held.step == step:
                yield held

    def settle(self, number: RoundNumber) -> None:
        """Remove what rounds before this one have kept: it has kept a whole step itself, or what they have is void."""
        if self._memory and self._settled != number:
            self._settled = number
            for old in rounds_in(self._memory):
                if old < number:
                    shutil.rmtree(directory_of(self._memory, old), ignore_errors=True)

    def remember(self, known: KnownStep | None) -> None:
        """Write what this worker knows beside what its round keeps, if something was kept on this machine."""
        if known is None or known == self._written or not self._memory or not rounds_in(self._memory):
            return
        with suppress(OSError):  # the memory is full, or gone
            path = KeptPlace(self._memory, known.round).directory() / KNOWN
            new = Path(f"{path}.{os.getpid()}")
            new.write_text(json.dumps(replace(known, nodes=()).to_json()))
            os.replace(new, path)
            self._written = known

    def remembered(self) -> KnownStep | None:
        """What the workers of this machine have known in the newest round that it remembers, but for the nodes, of
        which some may have been given up since; None: nothing."""
        for number in reversed(rounds_in(self._memory) if self._memory else []):
            with suppress(OSError, ValueError):
                return KnownStep.from_json(json.loads((directory_of(self._memory, number) / KNOWN).read_text()))
        return None

    def _checked(self, share: int, shares: int) -> Iterator[HeldSegment]:
        for number in rounds_in(self._memory):
            for path in segments_in(directory_of(self._memory, number)):
                if int(path.name.split(".")[1]) % shares == share and (header := self._sound(path)) is not None:
                    yield header.held

    def _sound(self, path: Path) -> Header | None:
        """The header of a segment that is as it was written."""
        header: Header | None = None
        try:
            if (header := read_header(path)) is None:
                return None
            Segment(path, header).check()
        except CheckpointCorrupt as error:
            if header is not None and _changed(path, header):
                return None
            self._session.note("kept_damaged", segment=f"{path.parent.name}/{path.name}", because=str(error))
            path.unlink(missing_ok=True)
            return None
        except (OSError, ValueError):  # it was removed just now
            return None
        return header


def _changed(path: Path, header: Header) -> bool:
    """Whether a script that is about to be killed, as its worker was, has begun to write the segment anew."""
    try:
        return read_header(path) != header
    except CheckpointCorrupt:
        return False


def _headers(directory: Path, names: tuple[str, ...]) -> Iterator[HeldSegment]:
    """Of the files whose names begin in one of these ways."""
    for path in (path for path in segments_in(directory) if path.name.startswith(names)):
        try:
            header = read_header(path)
        except CheckpointCorrupt:
            continue
        if header is not None:
            yield header.held


def _off(directory: Path) -> str | None:
    try:
        return (directory / OFF).read_text()
    except OSError:
        return None


def _part_of(directory: Path, rank: int) -> int:
    try:
        return int((directory / f"{PART}{rank}").read_text() or rank)
    except OSError:
        return rank


def segments_of(memory: str, source: KeptStep, elsewhere: Collection[int] = ()) -> list[Segment]:
    """All parts of a step, but for those on other machines. Raises CheckpointCorrupt if one is not there any more."""
    found: dict[int, Segment] = {}
    parts = 0
    for path in segments_in(directory_of(memory, source.round)):
        header = read_header(path)
        if header is not None and (header.step, header.group) == (source.step, source.group):
            found[header.part], parts = Segment(path, header), header.parts
    if len(found.keys() | set(elsewhere)) < parts or not (found or elsewhere):
        said = f"of step {source.step}, kept in round {source.round}"
        raise CheckpointCorrupt(f"{said}, {len(found)} of {parts} parts are here")
    return [found[part] for part in sorted(found) if part not in elsewhere]
