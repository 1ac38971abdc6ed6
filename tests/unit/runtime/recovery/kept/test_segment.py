"""A segment in a file: whole or not there, and never other bits than were written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.errors import CheckpointCorrupt
from runtime.recovery.kept import segment
from runtime.recovery.kept.choice import HeldSegment, RoundNumber
from runtime.recovery.kept.segment import HEADER_BYTES, Header, Segment, SegmentWriter, read_header, segments_in

ROUND = RoundNumber(2, 7)


def held(step: int) -> HeldSegment:
    return HeldSegment(step, ROUND, 0, 3, 4, 2)


def content(step: int, size: int = 20_000) -> bytes:
    return bytes((step * 31 + i * 7) % 251 for i in range(size))


def write(writer: SegmentWriter, step: int, size: int = 20_000, table: bytes = b'{"a": 1}') -> None:
    buffer = writer.oldest()
    body = buffer.begin(size)
    body[:] = content(step, size)
    buffer.finish(held(step), body, table)


def steps(directory: Path) -> dict[int, Path]:
    """Step -> file, of all segments that are there and right."""
    found = {}
    for path in segments_in(directory):
        if (header := read_header(path)) is not None:
            read = Segment(path, header)
            read.check()
            assert bytes(read.body) == content(header.step, header.body)
            assert header.held == held(header.step) and header.held.copies == 2
            found[header.step] = path
    return found


def test_the_last_three_steps_are_there(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, 0, 3)
    for step in range(1, 6):
        write(writer, step)
        assert sorted(steps(tmp_path)) == list(range(max(1, step - 2), step + 1))
    writer.close()
    assert len(list(segments_in(tmp_path))) == 3


def test_a_state_may_grow_and_shrink(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, 0, 3)
    for step, size in enumerate((100, 50_000, 10, 200_000, 0, 7, 300_000), 1):
        write(writer, step, size, table=b"[" + b" " * (step * 1000) + b"]")
        assert step in steps(tmp_path)
        path = steps(tmp_path)[step]
        assert Segment(path, _header(path)).table() == []
    writer.close()


def _header(path: Path) -> Header:
    found = read_header(path)
    assert found is not None
    return found


@pytest.mark.parametrize("at", ["begin", "body", "checksum", "header"])
def test_a_process_that_is_killed_leaves_no_half_of_a_segment(tmp_path: Path, at: str) -> None:
    if (pid := os.fork()) == 0:
        try:
            writer = SegmentWriter(tmp_path, 0, 3)
            for step in (1, 2, 3, 4):
                write(writer, step)
            _die_at(writer, at)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert sorted(steps(tmp_path)) == [3, 4], "step 2 made way for step 5, which is not there"


def _die_at(writer: SegmentWriter, at: str) -> None:
    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    buffer = writer.oldest()
    body = buffer.begin(20_000)
    if at == "begin":
        die()
    body[:10_000] = content(5)[:10_000]
    if at == "body":
        die()
    body[:] = content(5)
    if at == "checksum":
        vars(segment)["checksum"] = die  # of a process that ends there
    if at == "header":
        setattr(Header, "pack", die)  # noqa: B010  # mypy knows that it is another function
    buffer.finish(held(5), body, b"[]")


def _flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("at", [HEADER_BYTES, HEADER_BYTES + 11_111, HEADER_BYTES + 19_999, HEADER_BYTES + 20_003])
def test_a_flipped_bit_is_found(tmp_path: Path, at: int) -> None:
    writer = SegmentWriter(tmp_path, 0, 3)
    write(writer, 1)
    (path,) = (path for path in segments_in(tmp_path) if read_header(path) is not None)
    _flip(path, at)
    with pytest.raises(CheckpointCorrupt, match=r"the checksum of its 20008 bytes is .*, and was"):
        Segment(path, _header(path)).check()
    _flip(path, at)
    Segment(path, _header(path)).check()


@pytest.mark.parametrize("at", range(88))
def test_a_flipped_bit_of_the_header_is_found(tmp_path: Path, at: int) -> None:
    (tmp_path / "0.0.0").write_bytes(Header(5, 1, 2, 0, 3, 4, 1, 100, 10, 77).pack())
    _flip(tmp_path / "0.0.0", at)
    with pytest.raises(CheckpointCorrupt, match="its header"):
        read_header(tmp_path / "0.0.0")


def test_what_is_no_segment_is_none(tmp_path: Path) -> None:
    (tmp_path / "0.0.0").write_bytes(b"")
    (tmp_path / "0.0.1").write_bytes(bytes(HEADER_BYTES))
    assert [read_header(tmp_path / name) for name in ("0.0.0", "0.0.1", "0.0.2")] == [None] * 3
    assert list(segments_in(tmp_path / "gone")) == []


def test_without_memory_there_is_an_error_and_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    writer = SegmentWriter(tmp_path, 0, 3)
    write(writer, 1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    refused: Callable[[], None] = lambda: write(writer, 2)  # noqa: E731
    with pytest.raises(OSError, match="No space left"):
        refused()
    assert sorted(steps(tmp_path)) == [1]


def test_the_thread_of_a_writer_makes_one_call_behind_the_other_and_ends_with_it(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path, 0, 3)
    seen: list[tuple[int, threading.Thread]] = []
    told, thread = threading.Event(), writer.thread

    def call(number: int) -> None:
        seen.append((number, threading.current_thread()))
        if number == 2:
            told.set()

    for number in range(3):
        thread.call(lambda number=number: call(number))  # type: ignore[misc]
    assert told.wait(100)
    (own,) = {each for _, each in seen}
    assert [number for number, _ in seen] == [0, 1, 2] and own is not threading.current_thread()
    assert own.is_alive()
    del writer, thread
    own.join(100)
    assert not own.is_alive()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_a_thread_of_its_own(tmp_path: Path) -> None:
    thread, told = SegmentWriter(tmp_path, 0, 3).thread, threading.Event()
    thread.call(told.set)
    assert told.wait(100)
    child = os.fork()
    if child == 0:
        status, again = 1, threading.Event()
        try:
            thread.call(again.set)
            status = 0 if again.wait(100) else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
