"""transformers.Trainer under --restart --ranks: each step is kept in memory, without a line in the script.

The next round resumes by Trainer's own way of going on from a checkpoint, whose loading methods find what elastic.keep
has kept. Trainer writes nothing for it, and reads nothing but its own TrainerState, from a file in memory.

Names of transformers that are not public, as 5.24 has them: `_init_training_state`, `_prepare_for_training`,
`_run_epoch`, `_maybe_log_save_evaluate`, `_load_from_checkpoint`, `_load_optimizer_and_scheduler`, `_load_scaler`,
`_load_rng_state`, `_tr_loss`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic.errors import ConfigError, NotCarried
from runtime.data.random_state import RandomNumbers
from runtime.frontends.frameworks import trainer_callbacks
from runtime.frontends.frameworks.long_tensors import NOTHING, CallbackTensors, Told, numbered, put_back
from runtime.frontends.frameworks.plain_state import plain_attributes, set_attributes
from runtime.recovery.kept.keep import KeptScript, is_kept, keep, kept_before
from runtime.recovery.kept.place import KeptPlace

TESTED = ("5.24",)
LOADERS = ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler")
REPLACED = (
    *("train", "_init_training_state", "_prepare_for_training", "_run_epoch", "_maybe_log_save_evaluate"),
    "_load_rng_state",
)
"""Methods that are replaced on the instance, so subclasses are called as they were written."""
SKIPPED = ("eval_on_start", "ignore_data_skip")
"""Arguments that are False in a run which goes on: the first evaluation is over, and the epoch goes on where it was."""
APART = frozenset({"train_dataset", "eval_dataset", "_tr_loss"})
"""Attributes of a trainer that may be long lists, or are on its device."""
NAME = "trainer"


def install(trainers: Any) -> None:
    """trainers: the module transformers.trainer. Each Trainer that is made from now on is kept. Raises ConfigError."""
    if missing := [name for name in (*REPLACED, *LOADERS) if not hasattr(trainers.Trainer, name)]:
        raise ConfigError(
            f"transformers.Trainer has no {', '.join(missing)}: the state of this version is not kept in memory, that "
            f"of {', '.join(TESTED)} is; start the script without --ranks"
        )
    original = trainers.Trainer.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        place = KeptPlace.from_environment(os.environ)
        fsdp = getattr(self.accelerator.state, "fsdp_plugin", None)
        # Another engine has a way of its own to load what it shards, and its shards are no DTensors.
        own_engine = self.is_deepspeed_enabled or (fsdp is not None and fsdp.fsdp_version != 2)
        by_itself = is_kept() and KeptTrainer.first is None
        if place is not None and place.own and not own_engine and not by_itself:
            KeptTrainer(self, place)

    trainers.Trainer.__init__ = made


class KeptTrainer:
    """What a trainer does otherwise. Method names are the trainer's own."""

    first: KeptTrainer | None = None
    """Of this process, that which is kept: a later train() could not be told from the first one in the next round."""

    def __init__(self, trainer: Any, place: KeptPlace) -> None:
        self._trainer = trainer
        self._own = {name: getattr(trainer, name) for name in (*REPLACED, *LOADERS)}
        self._arguments = {name: getattr(trainer.args, name) for name in SKIPPED}
        self._memory = Path(place.memory)
        self._kept: KeptScript | None = None
        self._found: dict[str, Any] | None = None
        """What an earlier round has kept, until the loop has begun."""
        self._random: dict[str, object] | None = None
        """The random numbers that were kept, until the loop asks for them."""
        self._epoch = self._in_epoch = self._updates = 0
        """The epoch, the steps of it that are done, and how many it has."""
        self._step = -1
        """The global step behind which Trainer has logged, evaluated and saved."""
        self._over = False
        self._state = _StateJson()
        self._long = CallbackTensors(behind=True)
        """Modules and long tensors of the callbacks, and of the trainer itself."""
        for name in REPLACED:
            setattr(trainer, name, getattr(self, name))

    # ------------------------------------------------------------------------------------------------ what is kept

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        if self._kept is None:
            return {}  # keep() asks before it fills it
        *of_callbacks, own = self._long.note(self._rows(), trainer.model)
        self._long.check_fillable("__init__() or in on_train_begin()")
        callbacks = [
            [type(one).__name__, plain_attributes(one), long]
            for one, long in zip(trainer.callback_handler.callbacks, of_callbacks, strict=True)
        ]
        return {
            "state": self._state.json,
            "at": [self._epoch, self._in_epoch, self._over],
            "loss": trainer._tr_loss.item(),
            "attributes": plain_attributes(trainer, without=APART),
            "long": own,
            "callbacks": callbacks,
            "control": plain_attributes(trainer.control),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._found = state

    # --------------------------------------------------------------------------------------------- the trainer's own

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer's own; an earlier round goes before the files of the script."""
        if (first := KeptTrainer.first) is not None:
            if first._kept is not None:
                first._kept.turn_off("the script calls train() a second time")
            for name, own in self._own.items():
                setattr(self._trainer, name, own)
            for name, value in self._arguments.items():
                setattr(self._trainer.args, name, value)
            return self._own["train"](resume_from_checkpoint, *args, **kwargs)
        KeptTrainer.first = self
        if (before := kept_before(NAME)) is not None:
            directory = self._memory / f"trainer.{os.environ['RANK']}"
            directory.mkdir(exist_ok=True)
            (directory / "trainer_state.json").write_text(before["state"])
            resume_from_checkpoint = str(directory)
            self._epoch, self._in_epoch, self._over = before["at"]
            self._step = json.loads(before["state"])["global_step"]
            for name in SKIPPED:
                setattr(self._trainer.args, name, False)
            for name in LOADERS:
                setattr(self._trainer, name, self._load_nothing)
        return self._own["train"](resume_from_checkpoint, *args, **kwargs)

    def _load_nothing(self, *args: Any, **kwargs: Any) -> None:
        """keep() has filled it."""

    def _init_training_state(self, max_steps: int, updates: int, epochs: int, *rest: Any) -> tuple[int, int]:
        found: tuple[int, int] = self._own["_init_training_state"](max_steps, updates, epochs, *rest)
        if self._step < 0:
            return found
        if self._over:
            return epochs, 0
        return self._epoch, self._in_epoch * self._trainer.args.gradient_accumulation_steps

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        model, loader = self._own["_prepare_for_training"](*args, **kwargs)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        more: dict[str, Any] = {NAME: self, "scaler": getattr(trainer.accelerator, "scaler", None)}
        self._kept = keep(model=model, optimizer=optimizer, scheduler=trainer.lr_scheduler, **more)
        if self._found is not None:
            self._random = RandomNumbers().state_dict()
        begin = trainer.callback_handler.on_train_begin

        def begun(*args: Any, **kwargs: Any) -> Any:
            trainer.callback_handler.on_train_begin = begin
            self._long.begin(self._rows())
            control = begin(*args, **kwargs)
            self._long.begin(self._rows())
            self._restore()
            return control

        trainer.callback_handler.on_train_begin = begun
        return model, loader

    def _restore(self) -> None:
        """What the loop has set at its beginning, and what callbacks have counted."""
        trainer = self._trainer
        if (found := self._found) is None:
            return
        trainer._tr_loss += torch.tensor(found["loss"], dtype=trainer._tr_loss.dtype)
        set_attributes(trainer, found["attributes"])
        own = found.get("long", NOTHING)  # an older version told none
        put_back(trainer, own, type(trainer).__name__, strict=True)
        self._long.loaded([(NAME, own)])
        self._restore_callbacks(found)

    def _restore_callbacks(self, found: dict[str, Any]) -> None:
        """Trainer puts those that it makes anew from a snapshot behind the others, so they are found by their names. An
        older version told no long tensors."""
        here = dict(numbered((type(one).__name__, one) for one in self._trainer.callback_handler.callbacks))
        rows = [(name, (values, *more)) for name, values, *more in found["callbacks"]]
        for key, (values, *more) in numbered(rows):
            if (callback := here.get(key)) is not None:
                set_attributes(callback, values)
                for long in more:
                    put_back(callback, long, f"callback {key[0]}", strict=True)
        self._long.loaded((name, more[1] if len(more) > 1 else NOTHING) for name, more in rows)
        set_attributes(self._trainer.control, found["control"])

    def _rows(self) -> list[tuple[str, Told]]:
        """What callbacks and the trainer keep besides tensors of the model, now."""
        trainer, callbacks = self._trainer, self._trainer.callback_handler.callbacks
        reader = trainer_callbacks.reader(trainer)
        rows = [(type(one).__name__, reader.told(one)) for one in callbacks]
        told = [value for one in callbacks for value in vars(one).values() if isinstance(value, nn.Module)]
        return [*rows, (NAME, trainer_callbacks.reader(trainer, told).told(trainer, without=APART))]

    def _run_epoch(self, **words: Any) -> Any:
        if self._found is not None:
            if self._in_epoch:  # its on_epoch_begin() was called before
                self._restore_callbacks(self._found)
            self._found = None
        self._epoch, self._updates = words["epoch"], words["num_update_steps_per_epoch"]
        return self._own["_run_epoch"](**words)

    def _load_rng_state(self, checkpoint: Any) -> Any:
        if (random := self._random) is None:
            return self._own["_load_rng_state"](checkpoint)
        self._random = None
        return RandomNumbers().load_state_dict(random)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Called behind each step, and at the end of an epoch: of its last step the second call counts."""
        self._own["_maybe_log_save_evaluate"](*args, **kwargs)
        trainer, control = self._trainer, self._trainer.control
        if trainer.state.global_step != self._step:
            self._step, self._in_epoch = trainer.state.global_step, self._in_epoch + 1
            if self._in_epoch == self._updates or control.should_epoch_stop or control.should_training_stop:
                return
        elif self._in_epoch:
            self._epoch, self._in_epoch, self._over = self._epoch + 1, 0, control.should_training_stop
        else:
            return
        assert self._kept is not None, "the loop has begun"
        try:
            self._state.update(trainer.state)
        except TypeError as error:  # the same in all ranks, each of which has the whole log
            self._kept.turn_off(f"what Trainer's state or log has cannot be written as JSON: {error}")
        try:
            self._kept.done()
        except NotCarried as error:
            self._kept.turn_off(str(error))


class _StateJson:
    """The JSON of a TrainerState. Its log only grows, and is not written anew in each step: an entry that has another
    one behind it is not read again."""

    def __init__(self) -> None:
        self.json = ""
        self._seen: list[Any] = []
        """The entries of the log that are written."""
        self._log = ""
        """Each of them, with a comma behind it."""

    def update(self, state: Any) -> None:
        """Raises TypeError for a value that JSON has no word for. Scalars of numpy and torch become plain numbers."""
        settled = state.log_history[:-1]
        if len(settled) < len(self._seen) or not all(map(operator.is_, self._seen, settled)):
            self._seen, self._log = [], ""
        self._log += "".join(f"{json.dumps(entry, default=_plain)}, " for entry in settled[len(self._seen) :])
        self._seen = settled
        newest = "".join(json.dumps(entry, default=_plain) for entry in state.log_history[-1:])
        names = (each.name for each in dataclasses.fields(state) if each.name != "log_history")
        rest = json.dumps({name: getattr(state, name) for name in names}, default=_plain)
        self.json = f'{rest[:-1]}, "log_history": [{self._log}{newest}]}}'


def _plain(value: Any) -> Any:
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r:.80}")
