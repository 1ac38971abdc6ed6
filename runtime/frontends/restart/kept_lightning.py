"""Lightning's Trainer under --restart --ranks: each step is kept in memory, without a line in the script.

A step is kept behind all that Lightning does with it: validation, checkpoints, schedulers. The next round makes the
same Trainer, and before its first epoch Lightning's loops, callbacks and loggers get what they had. In the middle of an
epoch the loader begins with the random numbers that it began with, and the batches that are done are taken from it once
more.

Names of Lightning that are not public, as 2.6 has them: those of PRIVATE, and what frameworks/lightning/state.py names.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from typing import Any

from elastic.errors import ConfigError, NotCarried
from runtime.data.random_state import RandomNumbers
from runtime.frontends.ddp.seams import missing
from runtime.frontends.frameworks.lightning import parts
from runtime.frontends.frameworks.lightning.state import CsvRows, LightningState, nothing_deleted
from runtime.recovery.kept.keep import KeptScript, is_kept, keep, kept_before
from runtime.recovery.kept.place import KeptPlace

TESTED = ("2.6",)
PRIVATE = {
    "trainer.connectors.checkpoint_connector": ("_CheckpointConnector.restore_training_state",),
    "trainer.connectors.signal_connector": ("_SignalConnector.register_signal_handlers",),
    "loops.fit_loop": (
        *("_FitLoop.setup_data", "_FitLoop.on_advance_start", "_FitLoop.on_advance_end", "_FitLoop._can_stop_early"),
        *("_FitLoop.restarted_mid_epoch", "RestartStage.RESTARTED_MID_EPOCH"),
    ),
    "loops.training_epoch_loop": (
        *("_TrainingEpochLoop.reset", "_TrainingEpochLoop.on_run_start", "_TrainingEpochLoop.on_advance_end"),
        *("_TrainingEpochLoop._is_training_done", "_TrainingEpochLoop._should_accumulate"),
    ),
}
"""Module -> names in it."""
NAME = "lightning"


def install(module: Any) -> None:
    """module: lightning.pytorch or pytorch_lightning. The first fit() of a Trainer with DDP is kept. Raises
    ConfigError."""
    package = module.__name__
    if names := missing(PRIVATE, package):
        raise ConfigError(
            f"Lightning has no {', '.join(names)}: the state of this version is not kept in memory, that of "
            f"{', '.join(TESTED)} is; start the script without --ranks"
        )
    ddp = sys.modules[f"{package}.strategies"].DDPStrategy
    checkpoints = sys.modules[f"{package}.callbacks"].ModelCheckpoint
    original, there = module.Trainer.fit, checkpoints.file_exists

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = KeptPlace.from_environment(os.environ)
        if place is None or not place.own or type(self.strategy) is not ddp:
            return original(self, *args, **kwargs)
        if (first := KeptLightning.first) is not None:
            first.stop("the script calls fit() a second time")
            return original(self, *args, **kwargs)
        if is_kept():
            return original(self, *args, **kwargs)
        given = inspect.signature(original).bind(self, *args, **kwargs)
        KeptLightning.first = kept = KeptLightning(self)
        if kept.goes_on:  # what is in memory is newer than a file
            given.arguments.pop("ckpt_path", None)
        return original(*given.args, **given.kwargs)

    @functools.wraps(there)
    def file_exists(self: Any, filepath: Any, trainer: Any) -> Any:
        kept = KeptLightning.first
        known = None if kept is None or kept.trainer is not trainer else kept.knows(str(filepath))
        return there(self, filepath, trainer) if known is None else known

    module.Trainer.fit, checkpoints.file_exists = fit, file_exists


class KeptLightning:
    """What a trainer does otherwise in its first fit(). Method names are those of Lightning's loops."""

    first: KeptLightning | None = None
    """Of this process: a later fit() could not be told from the first one in the next round."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._fit, self._epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._own: dict[str, Any] = {}
        self._kept: KeptScript | None = None
        self._state: LightningState | None = None
        self._found: dict[str, Any] | None = None
        """What an earlier round has kept, until the loop has begun."""
        self._random: dict[str, Any] | None = None
        """The random numbers behind the step that was kept, until the loop goes on."""
        self._loader_random: dict[str, Any] | None = None
        """Those with which the loader of this epoch has begun."""
        self._mid_epoch = self._begun = False
        self._before: list[str] = []
        """Checkpoints that were there when the job began."""
        before = kept_before(NAME)
        self.goes_on = bool(before)
        self._put_loggers(json.loads(before["versions"]) if before else None)
        if before:
            trainer.num_sanity_val_steps = 0
        trainer._signal_connector.register_signal_handlers = lambda: None  # a round ends by the worker's word
        self._replace(trainer._checkpoint_connector, "restore_training_state", self._restore_training_state)
        self._replace(trainer.strategy, "save_checkpoint", self._save_checkpoint)
        self._replace(trainer.strategy, "remove_checkpoint", self._remove_checkpoint)
        self._replace(self._fit, "setup_data", self._setup_data)
        self._replace(self._fit, "on_advance_start", self._on_epoch_start)
        self._replace(self._fit, "on_advance_end", self._on_epoch_end)
        self._replace(self._epoch, "reset", self._reset_epoch)
        self._replace(self._epoch, "on_run_start", self._on_batches_start)
        self._replace(self._epoch, "on_advance_end", self._on_batch_end)

    def _replace(self, owner: Any, name: str, method: Any) -> None:
        self._own[method.__name__] = getattr(owner, name)
        setattr(owner, name, method)

    def stop(self, because: str) -> None:
        """Keep nothing any more."""
        if self._kept is not None:
            self._kept.turn_off(because)
            self._kept = None

    def knows(self, path: str) -> bool | None:
        """Whether a checkpoint is there, as the round knows it; what was written in a step that was lost does not
        count. None: it has not begun."""
        return None if self._state is None else path in self._before or path in self._state.written

    # ------------------------------------------------------------------------------------------------ what is kept

    def state_dict(self) -> dict[str, Any]:
        if self._kept is None or self._state is None:
            return {}  # keep() asks before it fills it
        loops = self._state.state_dict()
        self._state.long.check_fillable("__init__(), setup() or on_train_start()")
        return {
            "versions": json.dumps([vars(logger).get("_version") for logger in self.trainer.loggers]),
            "mid_epoch": self._mid_epoch,
            "before": self._before,
            "loader_random": self._loader_random,
            "loops": loops,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self._state is not None, "keep() is called when it is there"
        self._found, self._before = state, state["before"]
        self._state.found = state["loops"]

    def _put_loggers(self, versions: list[Any] | None) -> None:
        """A logger goes on in the directory of its first round."""
        for number, logger in enumerate(self.trainer.loggers):
            if versions is not None:
                logger._version = versions[number]
                if _is_csv(logger):
                    with nothing_deleted(logger):
                        _ = logger.experiment
        leads = self.trainer.strategy.global_rank == 0
        self._csv = [CsvRows(logger, lambda: leads) for logger in self.trainer.loggers if _is_csv(logger)]

    # --------------------------------------------------------------------------------------------- Lightning's loops

    def _restore_training_state(self) -> None:
        """Model, optimizers and schedulers are there, and as at the beginning. Lightning calls it for test(), too."""
        self._own["_restore_training_state"]()
        trainer = self.trainer
        if self._state is not None or trainer.state.fn != "fit":
            return
        self._before = parts.checkpoints_in(trainer.callbacks)
        objects = parts.objects_of(trainer.strategy, trainer)
        metrics = functools.partial(parts.metrics_of, trainer.lightning_module)
        self._state = LightningState(trainer, self._csv, metrics, list(objects.values()))
        self._state.begin()
        self._kept = keep(**{**objects, NAME: self})
        self._random = RandomNumbers().state_dict() if self._found is not None else None

    def _setup_data(self) -> None:
        """The loader of the first epoch begins here."""
        if self._loader_random is None:
            self._loader_random = RandomNumbers().state_dict()
        self._own["_setup_data"]()

    def _on_epoch_start(self) -> None:
        if self._state is not None and not self._begun:  # what callbacks do from now on is told
            self._begun = True
            self._state.begin()
        if (found := self._found) is not None and self._state is not None:
            self._state.put_back()
            self._state.found = None
            for file in self._csv:
                if self.trainer.is_global_zero:
                    file.lead()
            if found["mid_epoch"]:
                stages = vars(sys.modules[type(self._fit).__module__])["RestartStage"]
                self._fit._restart_stage = stages.RESTARTED_MID_EPOCH  # its hooks have been called
            else:
                self._go_on()
        self._own["_on_epoch_start"]()

    def _reset_epoch(self) -> None:
        if self._found is None:
            self._own["_reset_epoch"]()

    def _on_batches_start(self, fetcher: Any) -> None:
        if (found := self._found) is None:
            if self.trainer.current_epoch > 0:
                self._loader_random = RandomNumbers().state_dict()
            self._own["_on_batches_start"](fetcher)
            return
        self._loader_random = found["loader_random"]
        RandomNumbers().load_state_dict(found["loader_random"])
        iter(fetcher)
        for _ in range(self._epoch.batch_progress.current.ready):
            next(fetcher)
        self._go_on()

    def _go_on(self) -> None:
        assert self._random is not None, "it was kept with all else"
        RandomNumbers().load_state_dict(self._random)
        self._found = self._random = None

    def _on_batch_end(self, fetcher: Any) -> None:
        self._own["_on_batch_end"](fetcher)
        if not self._epoch._should_accumulate() and not self._epoch._is_training_done and not self._stops:
            self._keep(mid_epoch=True)

    def _on_epoch_end(self) -> None:
        """Behind the last step of an epoch, and all that follows from its end. The last step of all is not kept: the
        next round would find nothing to do, and leave out what comes at the end."""
        self._own["_on_epoch_end"]()
        fit = self._fit
        epochs_over = 0 <= fit.max_epochs <= fit.epoch_progress.current.processed
        steps_over = 0 <= fit.max_steps <= self._epoch.global_step
        if not (epochs_over or steps_over or self._stops):
            self._keep(mid_epoch=False)

    @property
    def _stops(self) -> bool:
        return bool(self.trainer.should_stop and self._fit._can_stop_early)

    def _keep(self, *, mid_epoch: bool) -> None:
        self._mid_epoch = mid_epoch
        if self._kept is not None:
            try:
                self._kept.done()
            except NotCarried as error:
                self.stop(str(error))

    def _save_checkpoint(self, checkpoint: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        self._own["_save_checkpoint"](checkpoint, filepath, *args, **kwargs)
        if self._state is not None and str(filepath) not in self._state.written:
            self._state.written.append(str(filepath))

    def _remove_checkpoint(self, filepath: Any) -> None:
        self._own["_remove_checkpoint"](filepath)
        if self._state is not None and str(filepath) in self._state.written:
            self._state.written.remove(str(filepath))


def _is_csv(logger: Any) -> bool:
    return any(kind.__name__ == "CSVLogger" for kind in type(logger).__mro__)
