"""What the next leader sends to a run of MLflow or of W&B that has some of the last rows; the packages themselves are
tried in tests/frameworks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from runtime.frontends.frameworks.lightning.state import rows_of
from runtime.frontends.frameworks.trackers.runs import TrainerRuns, go_on_numbering, send_missing_only, with_ids


class Point(NamedTuple):
    key: str
    step: int


class Client:
    """As an MlflowClient."""

    def __init__(self) -> None:
        self.points: list[tuple[str, Point]] = []

    def get_run(self, run: str) -> Any:
        names = {point.key for own, point in self.points if own == run}
        return SimpleNamespace(data=SimpleNamespace(metrics=dict.fromkeys(names, 0.0)))

    def get_metric_history(self, run: str, name: str) -> list[Point]:
        return [point for own, point in self.points if own == run and point.key == name]

    def log_batch(self, run_id: str, metrics: Sequence[Point] = (), params: Sequence[Any] = ()) -> None:
        self.points += [(run_id, point) for point in metrics]


@pytest.mark.parametrize("written", range(9))
@pytest.mark.parametrize("kept", [2, 5, 8])
def test_a_run_of_mlflow_gets_what_it_lacks_however_much_was_sent(written: int, kept: int) -> None:
    """A name may come twice at each step, as a learning rate that is logged with each of two batches. The rows that are
    kept begin with a step."""
    rows = [Point(name, step) for step in range(1, 4) for name in ("lr", "loss", "lr")]
    rows, last = rows[:8], rows[8]
    written = max(written, len(rows) - kept)  # what is not kept was written long ago
    kind = type("OwnClient", (Client,), {})
    client, other = kind(), Client()
    client.log_batch("run", rows[:written])
    send_missing_only(client, "run")
    for point in (*rows[len(rows) - kept :], last):
        client.log_batch(run_id="run", metrics=[point], params=[])
        client.log_batch("another", [point])
    assert sorted(point for run, point in client.points if run == "run") == sorted([*rows, last])
    assert len([run for run, _ in client.points if run == "another"]) == kept + 1
    assert other.points == []


class Run:
    """As a run of wandb."""

    def __init__(self, step: int) -> None:
        self.step, self.id = step, ""

    def log(self, row: dict[str, Any], step: int | None = None, commit: bool = True) -> None:
        assert not row and not commit and step is not None
        self.step = step


@pytest.mark.parametrize(
    ("there", "first", "known", "number"),
    [(0, 20, 0, 20), (0, 0, 0, 0), (22, 20, 2, 22), (25, 20, 5, 25), (30, 20, 5, 30), (10, 20, 0, 20)],
)
def test_rows_of_wandb_keep_their_numbers(there: int, first: int, known: int, number: int) -> None:
    """Five rows could be sent again. A file of its own has none; a server says how many it has."""
    run = Run(there)
    assert go_on_numbering(run, first, 5) == known
    assert run.step == number


def test_options_of_the_script_stay() -> None:
    given = {"wandb": {"tags": ["a"]}, "tensorboard": {"flush_secs": 1}}
    wanted = {
        "wandb": {"tags": ["a"], "id": "w", "resume": "allow"}, "mlflow": {"run_id": "m"},
        "tensorboard": {"flush_secs": 1},
    }  # fmt: skip
    assert with_ids(given, {"wandb": "w", "mlflow": "m"}) == wanted
    assert given == {"wandb": {"tags": ["a"]}, "tensorboard": {"flush_secs": 1}}
    assert with_ids(None, {}) == {}


class WandbLogger:
    """As Lightning's: what the leader alone logs comes to log_metrics(), too."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.sent.append(metrics)

    def log_image(self, image: object) -> None:
        self.log_metrics({"pictures": [image]}, 1)


def test_pictures_of_the_leader_are_sent_and_not_kept() -> None:
    logger, picture, vector = WandbLogger(), object(), torch.zeros(2)
    rows = rows_of(logger, lambda: True)
    assert rows is not None
    logger.log_metrics({"loss": torch.tensor(1.5)}, 0)
    logger.log_image(picture)
    logger.log_metrics({"loss": 0.5, "picture": picture, "vector": vector}, 2)
    assert logger.sent[1] == {"pictures": [picture]} and logger.sent[2]["picture"] is picture
    assert rows.kept.count == 2
    assert rows.kept.rows == [(0, {"loss": 1.5}), (2, {"loss": 0.5, "vector": vector})]


class Mlflow:
    """As the package, in one process. runs: of the server: id -> the steps of its points."""

    def __init__(self, runs: dict[str, list[int]]) -> None:
        self.runs, self.active = runs, ""
        self.MlflowClient = type("OwnClient", (Client,), {})

    def active_run(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=self.active)) if self.active else None

    def start_run(self, run_name: str | None = None) -> None:
        assert not self.active, f"Run with UUID {self.active} is already active"
        self.active = os.environ.pop("MLFLOW_RUN_ID", f"run {len(self.runs)}")
        self.runs.setdefault(self.active, [])

    def end_run(self) -> None:
        self.active = ""


class MLflowCallback:
    """As that of transformers."""

    def __init__(self, mlflow: Mlflow) -> None:
        self._ml_flow, self._initialized, self._auto_end_run = mlflow, False, False
        self.elastic_run: str | None = None

    def setup(self, args: Any, state: Any, model: Any) -> None:
        if state.is_world_process_zero and (self._ml_flow.active_run() is None or "MLFLOW_RUN_ID" in os.environ):
            self._ml_flow.start_run()
            self._auto_end_run = True
        self._initialized = True

    def on_train_begin(self, args: Any, state: Any) -> None:
        if not self._initialized:
            self.setup(args, state, None)

    def on_train_end(self, args: Any, state: Any) -> None:
        if state.is_world_process_zero and self._auto_end_run:
            self._ml_flow.end_run()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any]) -> None:
        if state.is_world_process_zero:
            self._ml_flow.runs[self._ml_flow.active].append(state.global_step)


class WandbCallback(MLflowCallback):
    """As that of transformers; the package is made for the worker."""

    def __init__(self) -> None:
        super().__init__(Mlflow({}))
        self._wandb = SimpleNamespace(run=None, init=self._init)

    def _init(self, id: str = "run 0", resume: str = "never") -> None:
        self._wandb.run = Run(0)
        self._wandb.run.id = id

    def setup(self, args: Any, state: Any, model: Any) -> None:
        if state.is_world_process_zero and self._wandb.run is None:
            self._wandb.init()
        self._initialized = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any]) -> None:
        self.on_train_begin(args, state)
        if state.is_world_process_zero:
            self._wandb.run.step += 1


class Trainer:
    """A worker's trainer."""

    def __init__(self, callback: Any, leads: bool) -> None:
        self.callback, self.callback_handler = callback, SimpleNamespace(callbacks=[callback])
        self.args, self.control, self.model = SimpleNamespace(run_name=None), None, None
        self.state: Any = None
        self.snapshot: list[dict[str, Any]] = []
        self.new_state(leads)
        self.runs = TrainerRuns(self)

    def new_state(self, leads: bool, history: Sequence[dict[str, Any]] = ()) -> None:
        self.state = SimpleNamespace(is_world_process_zero=leads, log_history=list(history), global_step=0)

    def begin(self, agree: Callable[[str, Callable[[], str | None]], Any]) -> None:
        self.runs.count()
        self.new_state(self.state.is_world_process_zero, self.snapshot)
        self.runs.begin(agree)
        self.callback.on_train_begin(self.args, self.state)

    def log(self, step: int) -> None:
        self.state.global_step = step
        self.state.log_history.append({"loss": 1.0, "step": step})
        self.callback.on_log(self.args, self.state, self.control, {"loss": 1.0})

    def lead(self) -> None:
        self.state.is_world_process_zero = True
        self.runs.lead()
        self.callback.on_train_begin(self.args, self.state)


def first(name: str, say: Callable[[], str | None]) -> str | None:
    """What the first leader is told: what it says."""
    return say()


@pytest.mark.parametrize("own", ["", "of this worker", "run 0"])
@pytest.mark.parametrize("variable", [None, "of the script"])
def test_a_run_that_the_script_has_begun_is_left(
    own: str, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """own: the run that is active in the worker that is the next leader."""
    server: dict[str, list[int]] = {}
    leader = Trainer(MLflowCallback(Mlflow(server)), True)
    if own:
        leader.callback._ml_flow.start_run()
    leader.begin(first)
    mlflow = Mlflow(server)
    other = Trainer(MLflowCallback(mlflow), False)
    mlflow.active = own
    other.begin(lambda name, say: leader.callback.elastic_run)
    if variable is not None:
        monkeypatch.setenv("MLFLOW_RUN_ID", variable)
    other.lead()
    assert mlflow.active == leader.callback.elastic_run == "run 0"
    assert os.environ.get("MLFLOW_RUN_ID") == variable
    assert other.callback._auto_end_run is leader.callback._auto_end_run is (not own)


def test_a_second_train_has_a_run_that_all_know() -> None:
    server: dict[str, list[int]] = {}
    leader, other = Trainer(MLflowCallback(Mlflow(server)), True), Trainer(MLflowCallback(Mlflow(server)), False)
    for number in range(2):
        leader.begin(first)
        other.begin(lambda name, say: leader.callback.elastic_run)
        assert leader.callback.elastic_run == f"run {number}"
        leader.log(1)
        other.log(1)
        if number == 0:
            leader.callback.on_train_end(leader.args, leader.state)
    other.lead()
    other.log(2)
    assert set(server) == {"run 0", "run 1"}
    assert server["run 1"][0] == 1 and server["run 1"][-1] == 2


@pytest.mark.parametrize("reads", [True, False])
def test_rows_of_a_snapshot_are_not_sent(reads: bool) -> None:
    """reads: the next leader has read the snapshot; a newcomer has it from the others."""
    server: dict[str, list[int]] = {}
    leader, other = Trainer(MLflowCallback(Mlflow(server)), True), Trainer(MLflowCallback(Mlflow(server)), False)
    snapshot = [{"loss": 9.0, "step": step} for step in range(1, 6)]
    leader.snapshot = snapshot
    other.snapshot = snapshot if reads else []
    leader.begin(first)
    other.begin(lambda name, say: leader.callback.elastic_run)
    leader.log(6)
    other.runs.load_state_dict(leader.runs.state_dict())
    other.new_state(False, leader.state.log_history)
    other.lead()
    assert set(server["run 0"]) == {6}


@pytest.mark.parametrize("passes", [True, False])
def test_rows_of_a_second_train_and_of_evaluations_keep_their_numbers(passes: bool) -> None:
    """passes: the next leader is a newcomer in the second train(), who has the state that the first one has left."""
    leader, other = Trainer(WandbCallback(), True), Trainer(WandbCallback(), False)
    leader.log(0)  # evaluate()
    leader.begin(first)
    if passes:
        other.begin(lambda name, say: None)
    else:
        other.log(0)
        other.begin(lambda name, say: leader.callback.elastic_run)
    for step in range(1, 11):
        leader.log(step)
        if not passes:
            other.log(step)
    if passes:
        other.new_state(False, leader.state.log_history)
        other.runs.load_state_dict(leader.runs.state_dict())
    leader.log(10)  # evaluate()
    if not passes:
        other.log(10)
    leader.begin(first)
    other.begin(lambda name, say: leader.callback.elastic_run)
    if passes:
        other.runs.load_state_dict(leader.runs.state_dict())
    for step in range(1, 4):
        leader.log(step)
        other.log(step)
    other.lead()
    assert other.callback._wandb.run.id == leader.callback._wandb.run.id == "run 0"
    assert other.callback._wandb.run.step == leader.callback._wandb.run.step == 1 + 10 + 1 + 3


def test_a_leader_lost_between_two_train_is_followed_in_its_run_of_wandb() -> None:
    leader, other = Trainer(WandbCallback(), True), Trainer(WandbCallback(), False)
    leader.callback._wandb.init = functools.partial(leader.callback._wandb.init, "of the first")
    leader.begin(first)
    other.begin(lambda name, say: leader.callback.elastic_run)
    for step in range(5):
        leader.log(step)
        other.log(step)
    other.runs.lead()
    other.state.is_world_process_zero = True
    other.begin(first)
    other.log(1)
    assert other.callback.elastic_run == other.callback._wandb.run.id == "of the first"
    assert other.callback._wandb.run.step == 5 + 1
