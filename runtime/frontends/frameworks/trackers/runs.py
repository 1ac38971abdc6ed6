"""Runs of MLflow and of Weights & Biases: the next leader goes on in the run of the one before it.

The first leader lets the framework open a run, and all workers are told its id. The next leader opens the run with this
id, and sends the last rows again, as a leader that dies may have sent all, some or none of them. MLflow says which
points a run has; those are left out. A row of W&B has a number: rows that are sent again have the numbers that they
had.

Names of transformers that are not public, as 5.24 has them: of its callbacks `_initialized`, `_auto_end_run`, `_wandb`
and `_ml_flow`. Of Lightning's loggers, as 2.6 has them: `_id`, `_experiment`, `_wandb_init` and `_run_id`.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

from runtime.frontends.frameworks.trackers.rows import ROWS_KEPT, KeptRows, as_row

WANDB, MLFLOW = "wandb", "mlflow"
CALLBACKS = {"WandbCallback": WANDB, "MLflowCallback": MLFLOW}
"""Callbacks of transformers, and their trackers."""
OF_RUN = frozenset({"_initialized", "_auto_end_run"})
"""Attributes of callbacks of transformers that say whether this process has opened a run."""


def kind_of(thing: object, kinds: Mapping[str, str]) -> str | None:
    """The tracker of a callback or logger. kinds: name of a class -> tracker."""
    return next((kinds[kind.__name__] for kind in type(thing).__mro__ if kind.__name__ in kinds), None)


def send_missing_only(client: Any, run: str) -> None:
    """From now on this process sends to a run of MLflow only what it has not yet: each point that it has is left out as
    often as it has it, as a name may have several points at one step. client: an MlflowClient."""
    names = client.get_run(run).data.metrics
    known = Counter((point.key, point.step) for name in names for point in client.get_metric_history(run, name))

    def is_new(point: Any) -> bool:
        known[point.key, point.step] -= 1
        return known[point.key, point.step] < 0

    kind: Any = type(client)
    own = kind.log_batch

    @functools.wraps(own)
    def log_batch(self: Any, run_id: str, metrics: Any = (), *args: Any, **kwargs: Any) -> Any:
        if run_id == run:
            metrics = list(filter(is_new, metrics))
        return own(self, run_id, metrics, *args, **kwargs)

    kind.log_batch = log_batch


def go_on_numbering(run: Any, first: int, count: int) -> int:
    """The next row that is sent to a run of W&B has the number that the first leader gave it. first, count: the rows
    that could be sent again. Returns how many of them the run has, which W&B's server says."""
    known = max(0, min(count, int(run.step) - first))
    if first + known > run.step:
        run.log({}, step=first + known, commit=False)
    return known


# Trainer


class TrainerRuns:
    """The runs of a trainer's callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.goes_on = False
        """Another leader, or an earlier run of the job, may have sent rows of this train()."""
        self._before = 0
        """Rows before this train()."""
        self._read = 0
        """Rows of the history that are of another job, whose snapshot this train() has read."""

    def state_dict(self) -> dict[str, int]:
        return {"before": self._before, "read": self._read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._before, self._read = state["before"], state["read"]

    def begin(self, agree: Callable[[str, Callable[[], str | None]], Any]) -> None:
        """A train() begins; its trainer has its new state, with the history of a snapshot that it has read. agree(name,
        say): all workers get what say() gives the leader; nothing in a worker that comes to a train() that is over."""
        self.goes_on = False
        self._read = len(self._trainer.state.log_history)
        for callback in self._trainer.callback_handler.callbacks:
            if (kind := kind_of(callback, CALLBACKS)) is None:
                continue
            own = type(callback).setup.__get__(callback)
            callback.setup = functools.partial(self._set_up, callback, kind, own)
            # A run of W&B stays open behind a train(): who leads from the second one on goes on in it.
            callback.elastic_run = getattr(callback, "elastic_run", None) if kind == WANDB else None
            callback.elastic_run = agree(f"Trainer's run of {kind}", functools.partial(self._opened, callback, kind))

    def count(self) -> None:
        """A train() is about to begin: count what the trainer has logged before, also in evaluations."""
        self._before += len(self._trainer.state.log_history) - self._read

    def lead(self) -> None:
        """This worker is the leader from now on: its callbacks have still to open their runs."""
        self.goes_on = True
        for callback in self._trainer.callback_handler.callbacks:
            if hasattr(callback, "_initialized"):
                callback._initialized = False

    def _opened(self, callback: Any, kind: str) -> str | None:
        """The id of the run that this worker has, or opens."""
        trainer = self._trainer
        if not callback._initialized:
            state = copy(trainer.state)
            state.is_world_process_zero = True
            callback.setup(trainer.args, state, trainer.model)
            if callback.elastic_run is not None:
                go_on_numbering(callback._wandb.run, self._before, 0)
        if kind == MLFLOW:
            mlflow = callback._ml_flow
            if mlflow.active_run() is None:  # that of an earlier train() has ended, and a row would begin another one
                mlflow.start_run(run_name=trainer.args.run_name)
            return str(mlflow.active_run().info.run_id)
        return None if callback._wandb.run is None else str(callback._wandb.run.id)

    def _set_up(
        self, callback: Any, kind: str, own: Callable[..., None], args: Any, state: Any, model: Any, **kwargs: Any
    ) -> None:
        """The callback's own setup(), in the run that all workers know."""
        if not state.is_world_process_zero or callback.elastic_run is None:
            own(args, state, model, **kwargs)
            return
        with _opening(callback, kind):
            own(args, state, model, **kwargs)
        if self.goes_on:
            self._send_again(callback, kind)

    def _send_again(self, callback: Any, kind: str) -> None:
        trainer, history = self._trainer, self._trainer.state.log_history[self._read :]
        rows = history[-ROWS_KEPT:]
        if kind == MLFLOW:
            send_missing_only(callback._ml_flow.MlflowClient(), callback.elastic_run)
        else:
            first = self._before + len(history) - len(rows)
            rows = rows[go_on_numbering(callback._wandb.run, first, len(rows)) :]
        state = copy(trainer.state)
        for row in rows:
            state.global_step, values = as_row(row)
            callback.on_log(trainer.args, state, trainer.control, logs=values)


@contextmanager
def _opening(callback: Any, kind: str) -> Iterator[None]:
    """What the callback opens is the run that it is to go on in."""
    run = callback.elastic_run
    if kind == MLFLOW:
        mlflow, before = callback._ml_flow, os.environ.pop("MLFLOW_RUN_ID", None)
        active = mlflow.active_run()
        if active is None or active.info.run_id != run:
            if active is not None:  # the script has begun one in each worker
                mlflow.end_run()
            os.environ["MLFLOW_RUN_ID"] = run  # start_run() takes it out
        try:
            yield
        finally:
            os.environ.pop("MLFLOW_RUN_ID", None)
            if before is not None:
                os.environ["MLFLOW_RUN_ID"] = before
        if active is not None:
            callback._auto_end_run = False  # the script ends it
        return
    wandb = callback._wandb
    own = wandb.init
    wandb.init = functools.partial(own, id=run, resume="allow")
    try:
        yield
    finally:
        wandb.init = own


# accelerate


def asked_for(accelerator: Any) -> bool:
    """Whether an Accelerator is to log to a tracker that has runs."""
    return any(str(tracker) in (WANDB, MLFLOW) for tracker in accelerator.log_with)


def ids_of(accelerator: Any) -> dict[str, str]:
    """Tracker -> the id of the run that it has opened."""
    found = {}
    for tracker in accelerator.trackers:
        if tracker.name == WANDB:
            found[WANDB] = str(tracker.run.id)
        elif tracker.name == MLFLOW:
            found[MLFLOW] = str(tracker.active_run.info.run_id)
    return found


def with_ids(options: Mapping[str, Any] | None, ids: Mapping[str, str]) -> dict[str, Any]:
    """The options of init_trackers(), by which trackers open the runs with these ids."""
    options = dict(options or {})
    for kind, run in ids.items():
        more = {"id": run, "resume": "allow"} if kind == WANDB else {"run_id": run}
        options[kind] = {**options.get(kind, {}), **more}
    return options


def send_again(tracker: Any, kept: KeptRows) -> None:
    """A tracker of accelerate, in a new leader: the last rows once more. W&B takes each step once."""
    if tracker.name == MLFLOW:
        send_missing_only(sys.modules["mlflow"].MlflowClient(), tracker.active_run.info.run_id)
    for step, row in kept.rows:
        tracker.log(row, step=step)


# Lightning


def share_run(logger: Any, told: Callable[[Any], Any]) -> None:
    """All workers know the run of a logger. told: gives all workers what the leader has."""
    kind = kind_of(logger, {"WandbLogger": WANDB, "MLFlowLogger": MLFLOW})
    if kind == WANDB:
        own = logger._id or getattr(logger._experiment, "id", None) or secrets.token_hex(4)
        logger._id = logger._wandb_init["id"] = told(own)
    elif kind == MLFLOW:
        logger._run_id = told(logger.run_id)  # the leader opens it
