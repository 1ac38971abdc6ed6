"""What a worker did last is kept when it is killed, in a file that does not grow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elastic.records import flight_recorder
from elastic.records.flight_recorder import RECORDS, FlightEvent, FlightRecorder, read, read_all

ROOT = Path(__file__).resolve().parents[4]


def recorder(home: Path, worker: str = "a.0.0") -> FlightRecorder:
    return FlightRecorder(home, worker, lambda: (3, 17))


def test_notes_are_read_as_they_were_made(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.note(FlightEvent.BEGUN, "pass 0 of step 4")
    made.note(FlightEvent.COMPUTES, "é" * 40, 5)
    made.note(FlightEvent.COMPUTED)
    (flight,) = read_all(tmp_path)
    assert (flight.worker_id, flight.pid) == ("a.0.0", os.getpid())
    assert [(note.event, note.text, note.unit) for note in flight.notes] == [
        (FlightEvent.BEGUN, "pass 0 of step 4", -1),
        (FlightEvent.COMPUTES, "é" * 31 + "\N{REPLACEMENT CHARACTER}", 5),
        (FlightEvent.COMPUTED, "", -1),
    ]
    assert {(note.generation, note.operation) for note in flight.notes} == {(3, 17)}
    assert [note.number for note in flight.notes] == [1, 2, 3]
    assert flight.notes[0].t_ns <= flight.notes[1].t_ns


def test_the_newest_notes_take_the_places_of_the_oldest(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    size = (tmp_path / "flight" / "a.0.0.ring").stat().st_size
    for number in range(RECORDS + 10):
        made.note(FlightEvent.DONE, str(number))
    (flight,) = read_all(tmp_path)
    assert [note.text for note in flight.notes] == [str(number) for number in range(10, RECORDS + 10)]
    assert (tmp_path / "flight" / "a.0.0.ring").stat().st_size == size


def test_a_killed_worker_leaves_all_its_notes(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, pathlib\n"
        "from elastic.records.flight_recorder import *\n"
        "made = FlightRecorder(pathlib.Path(sys.argv[1]), 'b.1.2', lambda: (1, 9))\n"
        "for number in range(100): made.note(FlightEvent.COMPUTES, f'shard {number}', number)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    (flight,) = read_all(tmp_path)
    assert [note.unit for note in flight.notes] == list(range(100))


def test_a_note_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    made = recorder(tmp_path)
    made.note(FlightEvent.BEGUN, "one")
    made.note(FlightEvent.DONE, "two")
    path = tmp_path / "flight" / "a.0.0.ring"
    data = bytearray(path.read_bytes())
    second = flight_recorder._HEADER.size + flight_recorder._PLACE
    data[second + flight_recorder._NOTE.size :][:8] = bytes(8)
    for torn in (data[:second] + bytes(96) + data[second + 96 :], data[: second + 40]):
        path.write_bytes(torn)
        flight = read(path)
        assert flight is not None
        assert [note.text for note in flight.notes] == ["one"]


@pytest.mark.parametrize("content", [b"", b"elastic flight 1", b"x" * 500])
def test_what_is_no_flight_is_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "a.0.0.ring").write_bytes(content)
    assert read_all(tmp_path) == []


def test_threads_do_not_tear_each_others_notes(tmp_path: Path) -> None:
    made = recorder(tmp_path)

    def many(word: str) -> None:
        for _ in range(500):
            made.note(FlightEvent.DONE, word * 30)

    threads = [threading.Thread(target=many, args=(word,)) for word in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (flight,) = read_all(tmp_path)
    assert len(flight.notes) == 2000
    assert all(len(set(note.text)) == 1 for note in flight.notes)


def test_files_of_a_slots_earlier_workers_go(tmp_path: Path) -> None:
    for number in range(12):
        recorder(tmp_path, f"a.0.{number}")
    recorder(tmp_path, "a.01.3")
    recorder(tmp_path, "a.0.0.4")  # of a node named a.0
    names = sorted(path.stem for path in (tmp_path / "flight").iterdir())
    assert names == ["a.0.0.4", "a.0.10", "a.0.11", "a.0.9", "a.01.3"]


def test_a_full_disk_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a signal, later, when a page is first written."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        recorder(tmp_path)
