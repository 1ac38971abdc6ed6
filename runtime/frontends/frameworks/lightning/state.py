"""What Lightning keeps between steps, for newcomers and for runs that go on: the progress of its loops, what was logged
in this epoch, and the plain attributes of callbacks, of the LightningModule and of the data module.

The files of CSVLogger and TensorBoardLogger, and the runs of MLFlowLogger and WandbLogger, are a part of it: the next
leader goes on with the rows that were logged so far, no more and no less.
Names of Lightning that are not public, as 2.6 has them: `_results`, `_batches_that_stepped`, `_has_run`,
`_seen_batches_per_dataloader`, `_logger_connector` and its `_progress_bar_metrics`, `_logged_metrics`,
`_callback_metrics`, `_current_fx`, `_first_loop_iter`; of a result `_update_count`, `_computed`, `_forward_cache`; of
CSVLogger `_experiment`, `_prefix`, `_check_log_dir_exists`; of TensorBoardLogger `_experiment`, `_kwargs`.
"""

from __future__ import annotations

import csv
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from runtime.frontends.frameworks.long_tensors import NOTHING, CallbackReader, CallbackTensors, Told, put_back
from runtime.frontends.frameworks.plain_state import is_plain, plain_attributes, plain_row, set_attributes
from runtime.frontends.frameworks.trackers.rows import KeptRows
from runtime.frontends.frameworks.trackers.runs import go_on_numbering, send_missing_only

CONNECTOR = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_current_fx", "_first_loop_iter")
OF_RESULT = ("value", "cumulated_batch_size", "has_reset", "_update_count", "_computed", "_forward_cache")
OF_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx"),
    "metric_attribute",
)
OF_METRIC = ("_update_count", "_computed")


class LightningState:
    """What is kept of a trainer."""

    def __init__(
        self,
        trainer: Any,
        files: Sequence[LoggerRows],
        metrics: Callable[[], Iterator[tuple[str, Any]]],
        apart: Collection[object] = (),
        *,
        in_place: bool = False,
    ) -> None:
        """files: of its loggers. metrics: (path, metric) of each metric of torchmetrics in the LightningModule.
        apart: modules of callbacks that are carried as such. in_place: steps are handed out; else the state is asked
        for behind a step, and copied by the caller."""
        self._trainer = trainer
        self._files = files
        self._metrics = metrics
        self._apart = apart
        self._bare = frozenset(vars(_bare_module(trainer)))
        self.before: list[str] = []
        """Checkpoints of Lightning's own that were there when this fit() began to train."""
        self.written: list[str] = []
        """Checkpoints of Lightning's own that this job has written and not removed."""
        self.found: dict[str, Any] | None = None
        """What others, or an earlier run, had kept, until Lightning has set what it sets when it begins."""
        self.long = CallbackTensors(copies=trainer.accumulate_grad_batches > 1, behind=not in_place)
        """Tensors that callbacks keep."""

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        loop = trainer.fit_loop.epoch_loop
        told = self.long.note(self._long_tensors(), trainer.lightning_module)
        callbacks = [[*_of_callback(callback), long] for callback, long in zip(trainer.callbacks, told, strict=True)]
        return {
            "loops": trainer.fit_loop.state_dict(),
            "should_stop": trainer.should_stop,
            "validation": [loop.val_loop._has_run, dict(loop.val_loop._seen_batches_per_dataloader)],
            "results": [_of_result(key, result) for key, result in loop._results.items()],
            "connector": {name: dict_or_value(getattr(trainer._logger_connector, name)) for name in CONNECTOR},
            "metrics": {
                path: {name: deepcopy(getattr(metric, name)) for name in (*metric._defaults, *OF_METRIC)}
                for path, metric in self._metrics()
            },
            "callbacks": callbacks,
            "module": plain_attributes(trainer.lightning_module, without=self._bare),
            "data": {} if trainer.datamodule is None else plain_attributes(trainer.datamodule),
            "loggers": [plain_attributes(logger) for logger in trainer.loggers],
            "files": [file.state_dict() for file in self._files],
            "before": list(self.before),
            "written": list(self.written),
        }

    def begin(self) -> None:
        """See CallbackTensors."""
        self.long.begin(self._long_tensors())

    def _long_tensors(self) -> Iterator[tuple[str, Told]]:
        """(name, tensors) of each callback."""
        reader = CallbackReader(self._trainer.lightning_module, [*self._apart, self._trainer, self._trainer.datamodule])
        for callback in self._trainer.callbacks:
            of_process = ".callbacks.progress" in type(callback).__module__
            yield type(callback).__qualname__, NOTHING if of_process else reader.told(callback)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state
        self.put_back(strict=False)

    def put_back(self, *, strict: bool = True) -> None:
        """Give Lightning's objects what was found. strict: on_train_start() of the callbacks was called."""
        trainer, found = self._trainer, self.found
        if found is None:
            return
        fit = trainer.fit_loop
        epoch = fit.epoch_loop
        fit.load_state_dict(found["loops"])
        for loop in (fit, epoch, epoch.val_loop, epoch.automatic_optimization, epoch.manual_optimization):
            loop.on_iteration_done()  # all are in the middle of their loops: none of them begins anew
        trainer.should_stop = found["should_stop"]
        epoch.val_loop._has_run = found["validation"][0]
        epoch.val_loop._seen_batches_per_dataloader.update(found["validation"][1])
        set_attributes(trainer._logger_connector, found["connector"])
        self._put_results(epoch, found["results"])
        metrics = dict(self._metrics())
        for path, values in found["metrics"].items():
            set_attributes(metrics[path], values)
        for callback, (attributes, state, *long) in zip(trainer.callbacks, found["callbacks"], strict=True):
            if state:
                callback.load_state_dict(state)
            set_attributes(callback, attributes)
            for told in long:  # an older version told none
                put_back(callback, told, f"callback {type(callback).__qualname__}", strict=strict)
        names = (type(callback).__qualname__ for callback in trainer.callbacks)
        rows = zip(names, found["callbacks"], strict=True)
        self.long.loaded((name, row[2] if len(row) > 2 else NOTHING) for name, row in rows)
        set_attributes(trainer.lightning_module, found["module"])
        if trainer.datamodule is not None:
            set_attributes(trainer.datamodule, found["data"])
        for logger, attributes in zip(trainer.loggers, found["loggers"], strict=True):
            set_attributes(logger, attributes)
        for file, rows in zip(self._files, found.get("files", found.get("csv", ())), strict=False):  # of older versions
            file.load_state_dict(rows)
        self.before, self.written = list(found.get("before", [])), list(found["written"])

    def _put_results(self, loop: Any, rows: list[dict[str, Any]]) -> None:
        results = loop._results
        results.clear()
        module, strategy = self._trainer.lightning_module, self._trainer.strategy
        for row in rows:
            path = row["meta"]["metric_attribute"]
            value = torch.zeros((), device=strategy.root_device) if path is None else module.get_submodule(path)
            # Lightning makes the entry; then the value that is logged for this is replaced.
            results.log(value=value, batch_size=1, sync_dist_fn=strategy.reduce, **row["meta"])
            vars(results[row["key"]]).update(row["values"])


def _bare_module(trainer: Any) -> Any:
    """A LightningModule without anything of a user's: its attributes are Lightning's own."""
    base = next(kind for kind in type(trainer.lightning_module).__mro__ if kind.__name__ == "LightningModule")
    return base()


def dict_or_value(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def _of_callback(callback: Any) -> list[Any]:
    """Its plain attributes, and its own state if that is plain; Lightning's callbacks have theirs in attributes. What a
    progress bar has is of its process."""
    if ".callbacks.progress" in type(callback).__module__:
        return [{}, {}]
    own = {} if ".callbacks." in type(callback).__module__ else callback.state_dict()
    return [plain_attributes(callback), own if is_plain(own) else {}]


def _of_result(key: str, result: Any) -> dict[str, Any]:
    meta, values = result.meta, {name: vars(result).get(name) for name in OF_RESULT}
    if not result.is_tensor:
        del values["value"]
    return {
        "key": key,
        "meta": {
            **{name: getattr(meta, name) for name in OF_META},
            "reduce_fx": meta.reduce_fx.__name__,
            "sync_dist": meta.sync.should,
            "rank_zero_only": meta.sync.rank_zero_only,
        },
        "values": values,
    }


class LoggerRows(ABC):
    """The rows of a logger that writes files: counted by every worker, written by the leader."""

    def __init__(self, logger: Any, leads: Callable[[], bool]) -> None:
        """leads: whether this worker writes; it calls `lead`."""
        self.logger = logger
        self.kept = KeptRows()
        self.leads = leads
        self.own = logger.log_metrics
        self.led = False
        logger.log_metrics = self.log_metrics

    def state_dict(self) -> dict[str, Any]:
        return self.kept.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept.load_state_dict(state)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """As the logger's own, which does nothing but in the leader. A row without a plain value is not kept, and not
        counted: WandbLogger's log_image(), log_table() and the like come here in the leader alone."""
        self.led = self.leads()
        values = plain_row(metrics)
        if values or not metrics:
            self.kept.add(self.kept.count if step is None else step, values)
        self.own(metrics, step)

    @abstractmethod
    def lead(self) -> None:
        """Go on with the files of another leader, or of an earlier run."""


class CsvRows(LoggerRows):
    """The file of a CSVLogger."""

    def lead(self) -> None:
        kept = self.kept
        if self.led or kept.count == 0:
            return
        self.led = True
        with nothing_deleted(self.logger):
            experiment = self.logger.experiment
        file = Path(experiment.metrics_file_path)
        rows: list[dict[str, Any]] = []
        if file.is_file():
            with file.open(newline="") as there:
                rows = [{name: value for name, value in row.items() if value != ""} for row in csv.DictReader(there)]
        prefix = f"{self.logger._prefix}{self.logger.LOGGER_JOIN_CHAR}" if self.logger._prefix else ""
        recent = [{**{prefix + name: value for name, value in row.items()}, "step": step} for step, row in kept.rows]
        rows = rows[: kept.count - len(recent)] + recent
        keys = sorted({name for row in rows for name in row})
        beside = file.with_suffix(".csv.tmp")
        with beside.open("w", newline="") as out:
            writer = csv.DictWriter(out, fieldnames=keys)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(beside, file)
        experiment.metrics, experiment.metrics_keys = [], keys


class EventRows(LoggerRows):
    """The files of a TensorBoardLogger."""

    def __init__(self, logger: Any, leads: Callable[[], bool]) -> None:
        super().__init__(logger, leads)
        self._begins = leads()
        """The first leader, which hides nothing that is there."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if step is None:  # what a logger writes at its beginning, as its hyperparameters
            self.own(metrics, step)
            return
        super().log_metrics(metrics, step)
        if self.led:
            self.logger.experiment.flush()

    def lead(self) -> None:
        if self.led or self._begins:
            return
        self.led = True
        again = self.kept.rewrite()
        self.logger._experiment, self.logger._kwargs["purge_step"] = None, again.purge_step
        experiment = self.logger.experiment
        del self.logger._kwargs["purge_step"]
        for step, row in again.rows:
            self.own(row, step)
        experiment.flush()


class RunRows(LoggerRows):
    """The run of a WandbLogger or of an MLFlowLogger."""

    def __init__(self, logger: Any, leads: Callable[[], bool]) -> None:
        super().__init__(logger, leads)
        self._begins = leads()
        """The first leader, whose run has no rows."""

    def lead(self) -> None:
        if self.led or self._begins:
            return
        self.led = True
        kept, experiment = self.kept, self.logger.experiment
        rows = kept.rows
        if hasattr(self.logger, "_wandb_init"):
            rows = rows[go_on_numbering(experiment, kept.count - len(rows), len(rows)) :]
        else:
            send_missing_only(experiment, self.logger.run_id)
        for step, row in rows:
            self.own(row, step)


ROWS_OF: dict[str, Callable[[Any, Callable[[], bool]], LoggerRows]] = {
    "CSVLogger": CsvRows,
    "TensorBoardLogger": EventRows,
    "WandbLogger": RunRows,
    "MLFlowLogger": RunRows,
}


def rows_of(logger: Any, leads: Callable[[], bool]) -> LoggerRows | None:
    """What is kept of a logger; None: nothing. leads: see LoggerRows. A logger that another Trainer of this process has
    had goes on with its rows: they are in one file."""
    earlier = getattr(logger.log_metrics, "__self__", None)
    if isinstance(earlier, LoggerRows):
        earlier.leads = leads
        return earlier
    found = next((ROWS_OF[kind.__name__] for kind in type(logger).__mro__ if kind.__name__ in ROWS_OF), None)
    return None if found is None else found(logger, leads)


@contextmanager
def nothing_deleted(logger: Any) -> Iterator[None]:
    """CSVLogger deletes the file of an earlier run when it begins."""
    logger._experiment = None
    base = next(kind for kind in type(logger).__mro__ if kind.__name__ == "CSVLogger")
    writer = vars(sys.modules[base.__module__])["ExperimentWriter"]
    kind = next(kind for kind in writer.__mro__ if "_check_log_dir_exists" in vars(kind))
    own, kind._check_log_dir_exists = kind._check_log_dir_exists, lambda self: None
    try:
        yield
    finally:
        kind._check_log_dir_exists = own
