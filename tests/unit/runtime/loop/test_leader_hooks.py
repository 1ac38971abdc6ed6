"""job.log_to and job.on_lead: what only the leader does, whoever that is."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
import torch

import elastic
from elastic.errors import ConfigError, LeaderOnly
from runtime.loop.hooks import leader_hooks
from runtime.loop.hooks.leader_hooks import RECORDS_KEPT, JobView, LeaderHooks
from runtime.loop.sinks import JsonLines, TensorBoard
from runtime.session import Session, StepRecord
from tests.unit.jobs import Recorded, make_job, set_up, train
from tests.unit.worlds import Killed, World


class Remembering:
    """A sink that outlives its writers, as a file does."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.events: list[str] = []

    def open(self, job: JobView) -> int:
        self.events.append(f"open {job.worker_id}")
        return len(self.records)

    def write(self, record: StepRecord) -> None:
        torch.rand(1)  # a sink that disturbs the random numbers must disturb nobody
        self.records.append(record)

    def close(self) -> None:
        self.events.append("close")


def steps_of(sink: Remembering) -> list[int]:
    return [record.step for record in sink.records]


def in_world(sink: Remembering, kills: dict[str, tuple[int, int]], newcomers: int = 0, admit_at: int = 0) -> World:
    def script(session: Session) -> str:
        setup = set_up(make_job(session))
        setup.job.log_to(sink)
        setup.job.on_lead(lambda: sink.events.append(f"lead {session.worker_id}"))
        return train(setup, epochs=3)

    world = World(2, kills=kills)
    world.run(script, newcomers=newcomers, admit_at=admit_at)
    return world


def test_every_applied_step_is_written_once_by_the_leader() -> None:
    sink = Remembering()
    world = in_world(sink, {})
    assert world.errors == {}
    assert steps_of(sink) == list(range(9))
    assert sink.records == [replace(record, samples=[]) for record in world.sessions["w1"].records]
    assert sink.events == ["lead w0", "open w0", "close"]


@pytest.mark.parametrize("op", [1, 4, 11])
def test_the_next_leader_goes_on_where_the_sink_ended(op: int) -> None:
    """Operation 11 is the pass of the last step."""
    sink = Remembering()
    world = in_world(sink, {"w0": (op, 0)})
    assert {type(error) for error in world.errors.values()} == {Killed}
    assert steps_of(sink) == list(range(9))
    assert sink.events == ["lead w0", "open w0", "lead w1", "open w1", "close"]


def test_a_leader_that_dies_in_the_end_leaves_no_step_out() -> None:
    """It applied the last step and dies while all leave."""
    sink = Remembering()
    in_world(sink, {"w0": (12, 0)})
    assert steps_of(sink) == list(range(9))
    assert sink.events[-1] == "close"


@pytest.mark.parametrize("at_a_time", [1, 2, leader_hooks.REFILL_MAX])
def test_a_newcomer_that_leads_takes_the_steps_before_it_from_the_ledger(
    at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_hooks, "REFILL_MAX", at_a_time)

    class Lost(Remembering):
        """What the first leader wrote is gone, as with a disk of its own."""

        def open(self, job: JobView) -> int:
            if job.worker_id == "n0":
                self.records.clear()
            return super().open(job)

    sink = Lost()
    world = in_world(sink, {"w0": (6, 0), "w1": (7, 0)}, newcomers=1, admit_at=2)
    assert set(world.digests) == {"n0"}
    assert steps_of(sink) == list(range(9))


def test_logging_and_leading_change_no_bit() -> None:
    quiet = train(set_up(make_job()), epochs=3)
    assert set(in_world(Remembering(), {}).digests.values()) == {quiet}


def test_a_collective_call_of_a_hook_is_leader_only() -> None:
    setup = set_up(make_job())

    def hook() -> None:
        setup.job.agree(1)

    setup.job.on_lead(hook)
    with pytest.raises(LeaderOnly, match=r"called inside job\.on_lead\(\) or a sink.*before or after"):
        train(setup)


# What the ledger has, and when


def record(step: int) -> StepRecord:
    return StepRecord(step, 0, 1, 1, (0.1,), {"loss": 0.5}, [])


class WithLedger(Recorded):
    on_file = 0
    asked = 0

    def history(self, first: int, end: int) -> list[StepRecord]:
        self.asked += 1
        return [record(step) for step in range(first, min(end, self.on_file))]


def leader_from(step: int, session: Session) -> tuple[LeaderHooks, Remembering]:
    leading, sink = LeaderHooks(session), Remembering()
    leading.add(sink, make_job())
    leading.begin(step)
    return leading, sink


def test_a_ledger_that_lags_is_waited_for_and_asked_ever_less_often() -> None:
    session = WithLedger()
    leading, sink = leader_from(10, session)
    for step in range(10, 100):
        leading.applied(record(step))
        leading.check()
        if step == 20:
            session.on_file = 10
    assert steps_of(sink) == list(range(100))
    assert session.asked == 5  # with 1, 2, 4, 8 and 16 steps waiting


@pytest.mark.parametrize("steps", [5, RECORDS_KEPT + 5])
def test_steps_that_nobody_has_are_named_and_the_others_written(steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    """At the end, or when more wait than are kept."""
    session = WithLedger()
    session.on_file = 7
    leading, sink = leader_from(10, session)
    for step in range(10, 10 + steps):
        leading.applied(record(step))
        leading.check()
    leading.close()
    assert steps_of(sink) == [*range(7), *range(10, 10 + steps)]
    assert "steps 7 to 9 are not in the ledger" in capsys.readouterr().err


def test_the_steps_of_another_run_are_not_continued() -> None:
    sink = Remembering()
    sink.records = [record(step) for step in range(3)]
    setup = set_up(make_job())
    setup.job.log_to(sink)
    with pytest.raises(ConfigError, match="3 steps of another run"):
        train(setup)


def test_a_job_that_starts_again_from_its_first_step_leaves_out_what_the_sink_has() -> None:
    """It was interrupted before it had a checkpoint; the steps are those of the run before, and come out alike."""
    session, sink = Recorded(), Remembering()
    session.restarted = True
    sink.records = [record(step) for step in range(3)]
    setup = set_up(make_job(session))
    setup.job.log_to(sink)
    train(setup)
    assert steps_of(sink) == [line.step for line in session.records]


def test_a_resumed_run_leaves_out_what_the_sink_has() -> None:
    leading, sink = leader_from(5, Recorded())
    sink.records = [record(step) for step in range(8)]
    for step in range(5, 10):
        leading.applied(record(step))
        leading.check()
    assert steps_of(sink) == list(range(10))


# JsonLines


def test_json_lines_hold_each_step_with_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "metrics.jsonl"
    session = Recorded()
    setup = set_up(make_job(session))
    setup.job.log_to(elastic.JsonLines(path))
    train(setup)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(6))
    assert [line["scalars"] for line in lines] == [record.scalars for record in session.records]
    assert set(lines[0]) == {"step", "epoch", "world_size", "lr", "scalars"}


def test_json_lines_go_on_behind_the_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path)
    assert sink.open(make_job()) == 0
    sink.write(StepRecord(0, 0, 1, 1, (), {"loss": float("nan")}, []))
    sink.close()
    with path.open("ab") as file:
        file.write(b'{"step": 1, "epo')
    again = JsonLines(path)
    assert again.open(make_job()) == 1
    again.write(record(1))
    again.close()
    first, second = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(first)["scalars"] == {"loss": "nan"}
    assert json.loads(second)["step"] == 1


@pytest.fixture
def to_metrics(tmp_path: Path) -> Iterator[Callable[[], JsonLines]]:
    """Sinks of one file, each as in a process of its own."""
    made: list[JsonLines] = []

    def make() -> JsonLines:
        made.append(JsonLines(tmp_path / "metrics.jsonl"))
        return made[-1]

    yield make
    for sink in made:
        sink.close()


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_leader_that_was_frozen_writes_nothing_that_its_successor_has_written(
    tmp_path: Path, to_metrics: Callable[[], JsonLines]
) -> None:
    """It wakes in its own step, and does not know yet that the job has gone on without it."""
    frozen, successor = to_metrics(), to_metrics()
    assert frozen.open(make_job()) == successor.open(make_job()) == 0
    for step in range(3):
        successor.write(record(step))
    frozen.write(record(0))
    frozen.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1, 2]
    successor.write(record(3))
    successor.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1, 2, 3]


def test_a_leader_that_was_frozen_while_it_opened_cuts_nothing_off(
    tmp_path: Path, to_metrics: Callable[[], JsonLines], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "epoch": 0}\n{"step": 1, "ep')
    frozen, successor = to_metrics(), to_metrics()
    read = JsonLines._read

    def read_and_freeze(self: JsonLines, file: IO[bytes]) -> Any:
        found = read(self, file)
        if self is frozen and steps_in_whole(path) == [0]:
            assert successor.open(make_job()) == 1
            successor.write(record(1))
            successor.write(record(2))
        return found

    def steps_in_whole(path: Path) -> list[int]:
        return [json.loads(line)["step"] for line in path.read_bytes().splitlines() if line.endswith(b"}")]

    monkeypatch.setattr(JsonLines, "_read", read_and_freeze)
    assert frozen.open(make_job()) == 3
    assert steps_in(path) == [0, 1, 2]


def test_a_file_that_was_moved_aside_is_written_to_its_end(tmp_path: Path, to_metrics: Callable[[], JsonLines]) -> None:
    """By its leader and by one that was frozen; what is at its path now is neither's."""
    path, sink, frozen = tmp_path / "metrics.jsonl", to_metrics(), to_metrics()
    for one in (sink, frozen):
        one.open(make_job())
    path.rename(tmp_path / "aside.jsonl")
    path.write_text("of somebody else\n")
    sink.write(record(0))
    frozen.write(record(0))
    sink.write(record(1))
    assert steps_in(tmp_path / "aside.jsonl") == [0, 1] and path.read_text() == "of somebody else\n"


@pytest.mark.parametrize("then", ["write", "close", "open"])
def test_a_line_that_came_too_late_is_taken_out_again(
    tmp_path: Path, to_metrics: Callable[[], JsonLines], then: str
) -> None:
    """Frozen between its last look at the file and its write."""
    path, sink = tmp_path / "metrics.jsonl", to_metrics()
    sink.open(make_job())
    for step in range(3):
        sink.write(record(step))
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines(keepends=True)[0])
    assert steps_in(path) == [0, 1, 2, 0]
    match then:
        case "write":
            sink.write(record(3))
            assert steps_in(path) == [0, 1, 2, 3]
        case "close":
            sink.close()
            assert steps_in(path) == [0, 1, 2]
        case _:
            assert to_metrics().open(make_job()) == 3
            assert steps_in(path) == [0, 1, 2]


@pytest.mark.parametrize("text", ["hello\n", "hello", "[1]\n", '{"epoch": 1}\n{"st', 'hello\n{"step": 0, "a": 1}\n'])
def test_a_file_of_something_else_is_not_written_to(tmp_path: Path, text: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"give job\.log_to another file"):
        JsonLines(path).open(make_job())
    assert path.read_text(encoding="utf-8") == text


# TensorBoard


class FakeWriter:
    """SummaryWriter as far as it is used; what is flushed survives."""

    files: list[Any]

    def __init__(self, directory: str, purge_step: int, flush_secs: int) -> None:
        self.purge_step, self.waiting = purge_step, list[tuple[str, float, int]]()
        self.flushed: list[tuple[str, float, int]] = []
        FakeWriter.files.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.waiting.append((name, value, step))

    def flush(self) -> None:
        self.flushed += self.waiting
        self.waiting = []

    def close(self) -> None:
        self.flush()


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    FakeWriter.files = []
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr("runtime.loop.sinks.tensorboard.importlib.util.find_spec", lambda name: object())
    return FakeWriter.files


def test_without_tensorboard_the_package_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.loop.sinks.tensorboard.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoard("logs")


def test_tensorboard_gets_scalars_and_rates_of_every_step(writers: list[Any], tmp_path: Path) -> None:
    setup = set_up(make_job())
    setup.job.log_to(elastic.TensorBoard(tmp_path))
    train(setup)
    (file,) = writers
    assert [step for name, _, step in file.flushed if name == "loss"] == list(range(6))
    assert {name for name, _, _ in file.flushed} == {
        *("loss", "samples", "lr/0"),
        *("elastic/members", "elastic/generation"),
    }
    assert (tmp_path / "next-step").read_text(encoding="ascii") == "6"


def test_what_a_dead_leader_had_not_flushed_is_written_again(
    writers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("runtime.loop.sinks.tensorboard.time.monotonic", lambda: now_s)
    dead = TensorBoard(tmp_path)
    assert dead.open(make_job()) == 0
    for step in range(5):
        now_s += 4.0
        dead.write(record(step))
    successor = TensorBoard(tmp_path)
    assert successor.open(make_job()) == 3
    assert [file.purge_step for file in writers] == [0, 3]
    assert {step for _, _, step in writers[0].flushed} == {0, 1, 2}


def test_a_directory_of_something_else_is_refused(writers: list[Any], tmp_path: Path) -> None:
    (tmp_path / "next-step").write_text("soon", encoding="ascii")
    with pytest.raises(ConfigError, match="'soon', no step"):
        TensorBoard(tmp_path).open(make_job())
