"""transformers.Trainer in place: its own loop, callbacks and loggers, with the gradients of all ranks in each step.

Trainer asks for the micro-batches of a step, and gets handles. At the last handle this worker's ranks are computed, one
after the other, by the trainer's own training_step(); behind it Trainer clips, steps, logs, evaluates and saves as it
always does. The trainer is adapted when it is made: some methods are replaced on the instance, so subclasses are called
as they were written.

Names of transformers that are not public, as 5.24 has them: `_run_epoch`, `_init_training_state`,
`_prepare_for_training`, `_finalize_training`, `_save_checkpoint`, `_save_rng_state`, `_load_rng_state`,
`_load_best_model`, `_track_num_input_tokens`, `_get_num_items_in_batch`.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from copy import copy
from typing import Any

import torch

from elastic.errors import ConfigError, LeftPass
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.seams import Seams
from runtime.frontends.frameworks import trainer_callbacks
from runtime.frontends.frameworks.accelerate import Accelerated
from runtime.frontends.frameworks.hugging_face_evaluation import Evaluation, alone
from runtime.frontends.frameworks.long_tensors import CallbackTensors
from runtime.frontends.frameworks.plain_state import plain_attributes, set_attributes
from runtime.frontends.frameworks.rank_batches import RankBatches
from runtime.frontends.frameworks.step_loop import PassedBy, StepLoop
from runtime.frontends.frameworks.trackers.event_files import TrainerEventFiles
from runtime.frontends.frameworks.trackers.runs import TrainerRuns
from runtime.frontends.frameworks.trainer_attributes import have_told, recorded
from runtime.frontends.frameworks.trainer_notes import Noted, note
from runtime.loop.control_scalars import UNRECORDED
from runtime.loop.step import Step

TESTED = ("5.24",)
"""Versions with which the tests ran."""

PRIVATE = (
    *("_run_epoch", "_init_training_state", "_prepare_for_training", "_finalize_training", "_save_checkpoint"),
    *("_save_rng_state", "_load_rng_state", "_load_best_model", "_track_num_input_tokens", "_get_num_items_in_batch"),
)
REPLACED = (
    *PRIVATE[:9],
    *("training_step", "get_batch_samples", "floating_point_ops", "store_flos", "evaluation_loop", "prediction_step"),
    *("save_model", "train", "log"),
)
"""Methods of a trainer that are replaced on the instance by those of TrainerLoop and Evaluation."""
OF_PROCESS = frozenset({"is_local_process_zero", "is_world_process_zero"})
"""Attributes of TrainerState that are true of one process."""
DATA = frozenset({"train_dataset", "eval_dataset"})
"""Attributes of a trainer that may be long lists, which each process has by itself."""
FLOS, TOKENS, NOTED_TOTAL = (UNRECORDED + name for name in ("flos", "tokens", "total noted"))
LEAVING = UNRECORDED + "leaving"
"""How many ranks were computed on nodes that have to go."""
NOTED = UNRECORDED + "noted "
"""In front of the names of what trainers note."""


class Handle:
    """The place of one micro-batch of a step; it holds no data."""

    def __init__(self, last: bool) -> None:
        self.last = last
        """Whether it is the last one of its step."""
        self.flos = 0.0
        self.tokens = 0


def install(seams: Seams, trainers: Any) -> None:
    """trainers: the module transformers.trainer. Every Trainer that is made from now on is adapted. Raises
    ConfigError."""
    if missing := [name for name in PRIVATE if not hasattr(trainers.Trainer, name)]:
        raise ConfigError(
            f"transformers.Trainer has no {', '.join(missing)}: this version cannot train in place, "
            f"{', '.join(TESTED)} can; or start the script with --restart"
        )
    original = trainers.Trainer.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        original(self, *args, **kwargs)
        if (script := RankScript.current()) is not None:
            if saves_on_notice(self):
                _leave_signals_alone(self, handler)
            TrainerLoop(self, script)

    samples = trainers.Trainer.get_batch_samples

    @functools.wraps(samples)
    def handles(self: Any, epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any) -> Any:
        loop = getattr(vars(self).get("get_batch_samples"), "__self__", None)
        found = loop.handles(num_batches) if isinstance(loop, TrainerLoop) else None
        return samples(self, epoch_iterator, num_batches, *args, **kwargs) if found is None else found

    seams.replace(trainers.Trainer, "__init__", made)
    seams.replace(trainers.Trainer, "get_batch_samples", handles)


def saves_on_notice(trainer: Any) -> bool:
    """Whether Trainer is to take a snapshot when its machine is about to go; versions before 5 do not know that."""
    return bool(getattr(trainer.args, "enable_jit_checkpoint", False))


def _leave_signals_alone(trainer: Any, handler: Any) -> None:
    """Trainer's own way is a handler of SIGTERM, by which one worker would save and stop without the others. handler:
    the one before."""
    signal.signal(signal.SIGTERM, handler)
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "jit_manager"):
            callback.jit_manager = None


class TrainerLoop:
    """What a trainer does otherwise. Method names are the trainer's own."""

    def __init__(self, trainer: Any, script: RankScript) -> None:
        self._trainer = trainer
        self._own = {name: getattr(trainer, name) for name in REPLACED}
        """The trainer's methods, as its class has them."""
        self._script = script
        self._loop = StepLoop(script, lambda: trainer.callback_handler.callbacks)
        self._source: RankBatches | None = None
        self._found: dict[str, Any] | None = None
        """What others, or an earlier run, had kept, until the trainer's own loop has set what it sets at its start."""
        self._prepared: Any = None
        self._rows: list[dict[str, Any]] = []
        """The history of the trainer's state, of plain numbers."""
        self._output: list[Any] | None = None
        """What train() returns."""
        self._leaving = False
        """Whether a node had to go when the last step was computed."""
        self._in_epoch = False
        """Whether the trainer's own loop asks for batches, and gets handles."""
        self._long = CallbackTensors()
        """What callbacks keep beside it."""
        self._handed_out: list[Handle] | None = None
        """The handles of the step in progress."""
        self._event_files = TrainerEventFiles(trainer)
        self._runs = TrainerRuns(trainer)
        evaluation = Evaluation(trainer, self._own, self._loop, script.training)
        for name in REPLACED:
            setattr(trainer, name, getattr(evaluation if hasattr(evaluation, name) else self, name))
        script.job.on_lead(self._lead)
        if (accelerated := Accelerated.of(script)) is not None:
            accelerated.remove(trainer.accelerator)

    # The state that is kept between steps

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        # Trainer writes its state as JSON, so all of it is plain but numbers of numpy in what a script logs. To the
        # history is only appended: a copy of each row in each step would take longer than the step at last.
        state = {name: copy(value) for name, value in vars(trainer.state).items() if name not in OF_PROCESS}
        for row in trainer.state.log_history[len(self._rows) :]:
            self._rows.append({name: value.item() if hasattr(value, "item") else value for name, value in row.items()})
        state["log_history"] = list(self._rows)
        callbacks = trainer_callbacks.kept(trainer.callback_handler.callbacks, trainer_callbacks.reader(trainer))
        for row, long in zip(
            callbacks, self._long.note(trainer_callbacks.long_of(callbacks), trainer.model), strict=True
        ):
            row[2] = long
        return {
            "state": state,
            "control": plain_attributes(trainer.control),
            "callbacks": callbacks,
            "trainer": plain_attributes(trainer, without=DATA),
            "runs": self._runs.state_dict(),
            "leaving": self._leaving,
            "output": self._output,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._found = state
        self._put_back(strict=False)

    def _put_back(self, *, strict: bool) -> None:
        """strict: on_train_begin() of the callbacks was called."""
        trainer, found = self._trainer, self._found
        if found is None:
            return
        set_attributes(trainer.state, found["state"])
        self._rows = list(trainer.state.log_history)
        set_attributes(trainer.control, found["control"])
        reader, callbacks = trainer_callbacks.reader(trainer), found["callbacks"]
        trainer_callbacks.put_back(trainer.callback_handler.callbacks, callbacks, reader, strict=strict)
        self._long.loaded(trainer_callbacks.long_of(callbacks))
        set_attributes(trainer, found["trainer"])
        if "runs" in found:  # an older version did not count
            self._runs.load_state_dict(found["runs"])
        self._leaving = found.get("leaving", False)

    def _lead(self) -> None:
        """This worker is the leader from now on, which logs and saves."""
        trainer = self._trainer
        state, handler = trainer.state, trainer.callback_handler
        if state.is_world_process_zero:
            return
        state.is_world_process_zero = self._event_files.goes_on = True
        self._runs.lead()
        if not trainer.is_in_train:
            return
        for callback in handler.callbacks:
            if type(callback).__module__.startswith("transformers."):  # they open their bars and files there
                callback.on_train_begin(
                    trainer.args,
                    state,
                    trainer.control,
                    model=handler.model,
                    processing_class=handler.processing_class,
                    optimizer=handler.optimizer,
                    lr_scheduler=handler.lr_scheduler,
                    train_dataloader=handler.train_dataloader,
                    eval_dataloader=handler.eval_dataloader,
                )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """A leader that has died since the step began may have written this row, or not. What a worker logs before it
        is where the others are is the evaluation of `eval_on_start`, which they have logged."""
        if self._loop.entered:
            return
        if self._loop.begun and not self._loop.passing and self._script.rank_now == 0:
            self._lead()
        self._own["log"](logs, *args, **kwargs)

    # The loop

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """A worker that gets the state from others, or from a checkpoint of this job, reads no snapshot of Trainer's:
        it is older, and may be deleted or half written."""
        if self._loop.next_goes_on:
            resume_from_checkpoint = None
        try:
            output = self._own["train"](resume_from_checkpoint, *args, **kwargs)
        except PassedBy:
            output = self._passed_by()
        self._loop.close()
        return output

    def _passed_by(self) -> Any:
        """What the others' train() has returned; the trainer has what they had behind it."""
        trainer, found = self._trainer, self._found
        assert found is not None and self._source is not None
        self._found = None
        self._source.close()
        if (noise := vars(trainer).get("neftune_hook_handle")) is not None:
            noise.remove()
        return sys.modules["transformers.trainer_utils"].TrainOutput(*found["output"])

    def _init_training_state(self, max_steps: int, per_epoch: int, epochs: int, resume: Any, trial: Any) -> Any:
        """Everything that is trained is made here, so that it is known in which epoch the others are."""
        trainer = self._trainer
        self._runs.count()
        self._event_files.begin(functools.partial(self._said_by_one, "Trainer's directory of TensorBoard"))
        found = self._own["_init_training_state"](max_steps, per_epoch, epochs, resume, trial)
        self._runs.begin(self._said_by_one)
        self._rows, self._output = [], None
        self._check(trial)
        loader = trainer.get_train_dataloader()
        self._source = RankBatches(
            loader,
            self._loop.ranks,
            trainer.args.gradient_accumulation_steps,
            trainer.args.data_seed or trainer.args.seed,
        )
        self._prepared = self._own["_prepare_for_training"](max_steps, loader, resume)
        objects = {"model": trainer.model, "optimizer": trainer.optimizer.optimizer, "scheduler": trainer.lr_scheduler}
        if callable(getattr(objects["optimizer"], "eval", None)):
            raise ConfigError(
                f"{type(objects['optimizer']).__name__} has other weights in evaluations (its eval() and train()), "
                "which a worker that joins could not have; use another optim, or start the script with --restart"
            )
        if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
            objects["scaler"] = scaler
        if not self._loop.begin(self._source, self, objects):
            raise PassedBy
        self._event_files.goes_on = self._runs.goes_on = self._loop.entered
        if not self._loop.entered:
            return found
        return self._loop.epoch, self._loop.position * trainer.args.gradient_accumulation_steps

    def _said_by_one(self, name: str, say: Callable[[], str | None]) -> str | None:
        """What one worker says; None in a worker that comes to a train() that is over: the state that it gets has
        it."""
        if not self._loop.begun:
            return self._script.job.shared(name, say)
        return None if self._loop.passing else self._script.job.once(say)

    def _check(self, trial: Any) -> None:
        """Raise ConfigError for what cannot be trained in place."""
        args = self._trainer.args
        refused = {
            "hyperparameter_search()": trial is not None,
            "auto_find_batch_size": args.auto_find_batch_size,
            "deepspeed": bool(args.deepspeed),
            "fsdp": bool(args.fsdp),
            "train_sampling_strategy='batch_rebalance'": args.train_sampling_strategy == "batch_rebalance",
        }
        if names := [name for name, used in refused.items() if used]:
            raise ConfigError(f"Trainer with {names[0]} cannot train in place; start the script with --restart")

    def _prepare_for_training(self, max_steps: int, loader: Any, resume: Any) -> Any:
        return self._prepared

    def _run_epoch(self, *, epoch: int, **about: Any) -> Any:
        """The trainer's own, from the step on at which this worker is."""
        trainer, loop = self._trainer, self._loop
        if loop.entered:
            loop.enter(functools.partial(self._shard, about["model"]))
            self._put_back(strict=True)
            if loop.epoch > epoch:  # the job's epoch has ended meanwhile
                if trainer.control.should_training_stop:  # no epoch follows, and this worker is where the others are
                    loop.entered, self._found = False, None
                return None
            loop.entered, self._found = False, None
            about["epochs_trained"], about["resume_from_checkpoint"] = epoch, "elastic"
            about["steps_trained_in_current_epoch"] = loop.position * trainer.args.gradient_accumulation_steps
            return self._own_epoch(epoch, about, goes_on=True)
        else:
            begun = about["epochs_trained"] == epoch and about["resume_from_checkpoint"] is not None
            accumulated = trainer.args.gradient_accumulation_steps
            loop.begin_epoch(epoch, about["steps_trained_in_current_epoch"] // accumulated if begun else 0)
        return self._own_epoch(epoch, about)

    def _own_epoch(self, epoch: int, about: dict[str, Any], *, goes_on: bool = False) -> Any:
        """goes_on: behind the steps that the job has done. `ignore_data_skip` is about snapshots: the batches of these
        steps are fetched nowhere, and Trainer has to count the steps."""
        args = self._trainer.args
        ignored, args.ignore_data_skip = args.ignore_data_skip, args.ignore_data_skip and not goes_on
        self._in_epoch = True
        try:
            return self._own["_run_epoch"](epoch=epoch, **about)
        finally:
            self._in_epoch = False
            args.ignore_data_skip = ignored

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Call the method of the trainer's class, which gets handles from Trainer's. Raises ConfigError if it returns
        anything else than these."""
        self._handed_out = None
        found = self._own["get_batch_samples"](epoch_iterator, num_batches, device)
        if self._in_epoch and (self._handed_out is None or list(found[0]) != self._handed_out or found[1] is not None):
            raise ConfigError(
                f"the get_batch_samples() of {type(self._trainer).__name__} gives other batches than Trainer's: in "
                "place there is no batch before training_step(). Change a batch in the data_collator or in "
                "compute_loss(), or start the script with --restart"
            )
        return found

    def handles(self, num_batches: int) -> tuple[list[Handle], None] | None:
        """What Trainer.get_batch_samples() returns in place: the handles of the next step instead of its batches, and
        None, as a rank counts its own items. Outside of the trainer's loop: None, so batches are taken as usual."""
        if not self._in_epoch:
            return None
        self._handed_out = []
        if self._loop.next():
            self._handed_out = [Handle(last=num_batches == place) for place in range(1, num_batches + 1)]
        else:
            self._trainer.control.should_training_stop = True
        return list(self._handed_out), None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """At the last micro-batch: the mean loss of all ranks, whose gradients are in place. Of a batch that a script
        has by itself: what the trainer's own gives."""
        device, handle = self._trainer.args.device, inputs
        if not isinstance(handle, Handle):
            loss: torch.Tensor = self._own["training_step"](model, inputs, num_items_in_batch)
            return loss
        if not handle.last:
            return torch.zeros((), device=device)
        said = self._loop.run(functools.partial(self._shard, model))
        model.train()  # as training_step() leaves it, also in a worker without a rank
        # A step has no metrics if none of its ranks has a token to learn from.
        handle.flos, handle.tokens = said.get(FLOS, 0.0), int(said.get(TOKENS, 0))
        means = {name.removeprefix(NOTED): value for name, value in said.items() if name.startswith(NOTED)}
        have_told(self._trainer, said)
        note(self._trainer, "train", means, said.get(NOTED_TOTAL, 0))
        before, self._leaving = self._leaving, LEAVING in said
        if self._leaving and not before:  # all workers know it in the same step, and the leader writes
            self._trainer.control.should_save = True
        return torch.tensor(said.get("loss", 0.0), device=device)

    def _shard(self, model: Any, batches: list[Any], step: Step) -> None:
        """Compute the gradients of one rank in a step. batches: its micro-batches. Raises LeftPass if it has none."""
        trainer = self._trainer
        if not batches and not self._loop.rehearsing:
            raise LeftPass(
                f"Trainer asks for step {self._loop.position + 1} of an epoch, which has no batch: its _run_epoch() "
                "has not begun where the job is; leave it as transformers has it"
            )
        if not self._loop.entered:
            self._long.look()
        own = trainer.args.average_tokens_across_devices
        trainer.current_gradient_accumulation_steps = len(batches)
        with alone(trainer):
            items = trainer._get_num_items_in_batch(batches, trainer.args.device)
        if items is not None and own:
            if float(items) == 0:
                step.skip()
            else:
                # The gradients are weighted by this rank's number. Trainer multiplies its loss by the number of ranks,
                # as it takes `items` for the number of all ranks.
                step.weigh(items)
            items = items * self._loop.ranks
        total, flos, tokens = 0.0, 0.0, 0
        with recorded(trainer, step), Noted(trainer, "train") as noted:
            for number, batch in enumerate(batches, 1):
                # Trainer asks for all handles before a rank is computed, so it has said this of the last one.
                trainer.accelerator.gradient_state._set_sync_gradients(number == len(batches))
                flos += float(self._own["floating_point_ops"](batch))
                tokens += self._tokens(batch)
                with alone(trainer):
                    loss = self._own["training_step"](model, batch, items)
                total += float(loss)
            means, grown = noted.taken()
        means = {NOTED + name: value for name, value in means.items()}
        leaving = int(saves_on_notice(trainer) and self._script.job.notice is not None)
        sums = {name: value for name, value in ((TOKENS, tokens), (NOTED_TOTAL, grown), (LEAVING, leaving)) if value}
        step.log(mean={"loss": total, **means}, sum={FLOS: flos, **sums})

    def floating_point_ops(self, inputs: Any) -> float:
        return inputs.flos if isinstance(inputs, Handle) else self._own["floating_point_ops"](inputs)

    def store_flos(self) -> None:
        """What was counted is that of all ranks."""
        self._trainer.state.total_flos += self._trainer.current_flos
        self._trainer.current_flos = 0

    def _tokens(self, inputs: Any) -> int:
        """How many tokens Trainer would count in this batch."""
        trainer = self._trainer
        before = trainer.state.num_input_tokens_seen
        with alone(trainer):
            self._own["_track_num_input_tokens"](inputs)
        found, trainer.state.num_input_tokens_seen = trainer.state.num_input_tokens_seen - before, before
        return int(found)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        if isinstance(inputs, Handle):
            self._trainer.state.num_input_tokens_seen += inputs.tokens
        else:
            self._own["_track_num_input_tokens"](inputs)

    def _finalize_training(self, *args: Any) -> Any:
        self._loop.end()
        assert self._source is not None
        self._source.close()
        output = self._own["_finalize_training"](*args)
        self._output = list(output)
        return output

    # Checkpoints of the trainer's own

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Written by the leader; by the next one if it dies meanwhile."""
        self._by_leader("_save_checkpoint", model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if _internal_call or not self._loop.begun:
            self._own["save_model"](output_dir, _internal_call)
        elif not self._loop.passing:  # else the others have saved it
            self._by_leader("save_model", output_dir)

    def _by_leader(self, method: str, *args: Any) -> None:
        trainer = self._trainer

        def write() -> list[Any]:
            if self._script.training.examiner is None:
                self._own[method](*args)
            names = ("best_model_checkpoint", "stateful_callbacks", "total_flos")
            return [{name: getattr(trainer.state, name) for name in names}, trainer.current_flos]

        write.__name__ = method
        state, trainer.current_flos = self._script.job.once(write)
        set_attributes(trainer.state, state)

    def _save_rng_state(self, output_dir: str) -> None:
        """Random numbers depend on the step and the rank."""

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Random numbers depend on the step and the rank."""

    def _load_best_model(self) -> None:
        best = self._trainer.state.best_model_checkpoint
        if not os.path.isdir(best):
            raise ConfigError(
                f"load_best_model_at_end: {best} is not on this machine. All workers load it, so output_dir must be on "
                "a file system that all machines share"
            )
        self._own["_load_best_model"]()
