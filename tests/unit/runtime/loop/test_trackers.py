"""Sinks for experiment trackers, with their real process and a stand-in for MLflow."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic.errors import ConfigError
from runtime.loop.hooks import leader_hooks
from runtime.loop.sinks import MLflow, trackers
from runtime.session import Session, StepRecord
from tests.unit.elastic.observability.trackers import LIBRARIES
from tests.unit.jobs import make_job, set_up, train
from tests.unit.worlds import Killed, World

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(LIBRARIES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([LIBRARIES, os.environ.get("PYTHONPATH", "")]))
    yield
    for sink in SINKS:  # those of dead leaders
        sink.close()
    SINKS.clear()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store.json"


SINKS: list[MLflow] = []


def mlflow(store: Path) -> MLflow:
    SINKS.append(elastic.MLflow("experiment", "bert-1", uri=f"file:{store}"))
    return SINKS[-1]


class Follower:
    """The job of a worker that does not lead."""

    worker_id, rank, world_size, device = "n.0.1", 1, 2, torch.device("cpu")


def record(step: int, **scalars: float) -> StepRecord:
    return StepRecord(step, 0, 1, 2, (0.1,), {"loss": 1.0 / (step + 1), **scalars}, [])


def steps_of(store: Path, metric: str = "loss") -> list[int]:
    return [step for name, _, _, step in json.loads(store.read_text())["metrics"] if name == metric]


def opened(sink: MLflow) -> int:
    end_s = time.monotonic() + WAIT_S
    while (found := sink.open(make_job())) is None:
        assert time.monotonic() < end_s
        time.sleep(0.01)
    return found


def write_all(sink: MLflow, first: int, end: int) -> int:
    """As the leader's hooks do it. Returns how often the sink has not taken a step."""
    refused, step = 0, first
    while step < end:
        if sink.write(record(step)):
            step += 1
        else:
            refused, step = refused + 1, opened(sink)
    return refused


def test_a_run_has_each_step_once_through_the_death_of_the_leader(store: Path) -> None:
    def script(session: Session) -> str:
        setup, sink = set_up(make_job(session)), mlflow(store)
        setup.job.log_to(sink)
        try:
            return train(setup, epochs=3)
        except Killed:
            process, sink._process = sink._process, None
            if process is not None:
                with process:  # as the kernel does with a process, its pipes are closed
                    pass
            raise

    quiet = train(set_up(make_job()), epochs=3)
    world = World(2, kills={"w0": (4, 0)})
    world.run(script)
    assert set(world.digests.values()) == {quiet}
    state = json.loads(store.read_text())
    assert state["status"] == "FINISHED" and state["experiments"] == ["experiment"]
    for metric in ("loss", "lr/0", "elastic/members", "elastic/generation", "elastic/step"):
        assert steps_of(store, metric) == list(range(9)), metric


def test_a_resumed_run_goes_on_where_it_ended(store: Path) -> None:
    first = mlflow(store)
    assert opened(first) == 0
    write_all(first, 0, 5)
    first.close()
    second = mlflow(store)
    assert opened(second) == 5
    write_all(second, 5, 7)
    second.close()
    assert steps_of(store) == list(range(7))


def test_training_goes_on_while_nobody_answers(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_hooks, "CLOSE_S", 0.5)
    (tmp_path / "down").touch()
    setup = set_up(make_job())
    setup.job.log_to(mlflow(store))
    train(setup)
    (tmp_path / "down").unlink()
    assert not store.exists()
    assert "steps up to 5 could not be written, so run bert-1 of MLflow is without them" in capfd.readouterr().err


def test_what_came_while_nobody_answered_is_sent_later(
    store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "down").touch()
    sink = mlflow(store)
    end_s = time.monotonic() + WAIT_S
    while "ConnectionError: nobody answers; it is tried again" not in capfd.readouterr().err:
        assert sink.open(make_job()) is None and time.monotonic() < end_s
        time.sleep(0.01)
    (tmp_path / "down").unlink()
    assert opened(sink) == 0
    write_all(sink, 0, 3)
    sink.close()
    assert steps_of(store) == [0, 1, 2]


@pytest.mark.long
def test_a_pipe_that_is_full_delays_and_loses_nothing(store: Path) -> None:
    sink = mlflow(store)
    assert opened(sink) == 0
    assert sink._process is not None
    os.kill(sink._process.pid, signal.SIGSTOP)
    step = 0
    while sink.write(record(step)):
        step += 1
    assert sink.open(make_job()) is None
    assert len(sink._unwritten) < trackers.UNWRITTEN_MAX + 1000
    os.kill(sink._process.pid, signal.SIGCONT)
    assert opened(sink) == step
    write_all(sink, step, step + 10)
    sink.close()
    assert steps_of(store) == list(range(step + 10))


def test_a_process_that_has_died_is_started_again(
    store: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trackers, "RESTART_S", 0.0)
    sink = mlflow(store)
    assert opened(sink) == 0
    assert sink._process is not None
    sink.write(record(0))
    os.kill(sink._process.pid, signal.SIGKILL)
    sink._process.wait()
    assert write_all(sink, 1, 4) == 1
    sink.close()
    assert steps_of(store) == [0, 1, 2, 3]
    assert "the process that sends the steps has ended (-9); a new one starts" in capfd.readouterr().err


def test_a_leader_that_was_frozen_sends_nothing_more(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "RESTART_S", 0.0)
    frozen, successor = mlflow(store), mlflow(store)
    assert opened(frozen) == 0
    frozen.write(record(0))
    assert opened(successor) == 0
    write_all(successor, 0, 3)
    successor.close()
    frozen.close()
    assert steps_of(store) == [0, 1, 2]
    late = mlflow(store)
    assert opened(late) == 3
    last = mlflow(store)
    assert opened(last) == 3
    late.write(record(3))
    assert late._process is not None and late._process.wait(WAIT_S) == trackers.SUPERSEDED
    assert late.write(record(4)) is False
    for _ in range(2):
        assert late.open(Follower()) is None and late._process is None, "it does not come back"
    last.close()
    assert steps_of(store) == [0, 1, 2]
    assert opened(late) == 3, "unless it leads again"
    write_all(late, 3, 5)
    late.close()
    assert steps_of(store) == [0, 1, 2, 3, 4]


def test_a_package_that_is_missing_is_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("runtime.loop.sinks.trackers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"log_to\(MLflow\(...\)\) needs the package mlflow: pip install mlflow"):
        elastic.MLflow("experiment", "run")
    with pytest.raises(ConfigError, match="pip install wandb"):
        elastic.WandB("project", "run", directory=tmp_path)


def test_names_that_a_tracker_would_refuse_are_refused_at_once(tmp_path: Path) -> None:
    for names in (("a'b", "run"), ("a", "`run`"), ("", "run")):
        with pytest.raises(ConfigError, match="use letters, digits"):
            elastic.MLflow(*names)
    kinds: list[Any] = ["a/b", "", "x" * 65]
    for run in kinds:
        with pytest.raises(ConfigError, match="up to 64 letters"):
            elastic.WandB("project", run, directory=tmp_path)
