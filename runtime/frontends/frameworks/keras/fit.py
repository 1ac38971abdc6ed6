"""What `fit()` does otherwise in a job of logical ranks. Method names of Keras are Keras's own.

Names of Keras that are not public, as 3.15 has them: TorchTrainer and TorchEpochIterator in
keras.src.backend.torch.trainer, of an iterator `_get_iterator`, `data_adapter`, and of an adapter `num_batches`,
`on_epoch_begin`, `on_epoch_end`; of a model `_initial_epoch` and `_flatten_layers`; and global_seed_generator in
keras.src.random.seed_generator.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from elastic.errors import ConfigError
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.seams import Seams, missing
from runtime.frontends.frameworks.keras.batches import (
    Part,
    PlaceIterator,
    WholeBatches,
    check_validation,
    read_in_order,
)
from runtime.frontends.frameworks.keras.callbacks import OwnCallback, callback_list
from runtime.frontends.frameworks.keras.variables import ModelVariables, OptimizerVariables
from runtime.frontends.frameworks.step_loop import PassedBy, StepLoop
from runtime.loop.step import Step

TESTED = ("3.15",)
"""Versions with which the tests ran."""
PRIVATE = {
    "keras.src.backend.torch.trainer": (
        "TorchTrainer.fit",
        "TorchTrainer.train_on_batch",
        "TorchEpochIterator._get_iterator",
    ),
    "keras.src.layers.layer": ("Layer._flatten_layers",),
    "keras.src.random.seed_generator": ("global_seed_generator",),
}
"""Module -> names in it."""
LOGGED = "fit "
"""Prefix of what a train_step() of the script's own returns that is no metric."""


class _Stopped(Exception):
    """The job was told to stop: fit() is left."""


class _Here(threading.local):
    fit: Fit | None = None
    """The fit() of this thread that has still to make its iterator over the training data."""


_here = _Here()


def install(seams: Seams, module: Any) -> None:
    """module: keras.src.backend.torch.trainer. Each fit() from now on trains in place. Raises ConfigError."""
    if names := missing(PRIVATE):
        raise ConfigError(
            f"Keras has no {', '.join(names)}: this version cannot train in place, {', '.join(TESTED)} can; or write "
            "a loop of torch"
        )
    own_iterator = module.TorchEpochIterator

    def iterator(*args: Any, **kwargs: Any) -> Any:
        made, fit = own_iterator(*args, **kwargs), _here.fit
        if fit is None:
            return made
        _here.fit = None  # all others are over the data of an evaluation
        return PlaceIterator(made, fit.begin, fit.places)

    def fit(script: RankScript, original: Any, /, self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(self, *args, **kwargs)
        given.apply_defaults()
        given.arguments.pop("self")
        return Fit(self, script, given.arguments).run(functools.partial(original, self))

    def train_on_batch(script: RankScript, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            "train_on_batch() cannot train in place: no other worker would know of its batch. Use fit(), or write a "
            "loop of torch with DistributedDataParallel(model)"
        )

    seams.replace(module, "TorchEpochIterator", iterator)
    seams.wrap(module.TorchTrainer, "train_on_batch", train_on_batch)
    seams.wrap(module.TorchTrainer, "fit", fit)


class Fit:
    """One call of fit(): from its arguments to what it returns."""

    def __init__(self, model: Any, script: RankScript, arguments: dict[str, Any]) -> None:
        """arguments: of fit(), all by name."""
        self._model = model
        self._script = script
        self._arguments = arguments
        self._loop = StepLoop(script, lambda: self._callbacks.callbacks)
        self._batches: WholeBatches | None = None
        self._variables: ModelVariables | None = None
        self._found: dict[str, Any] | None = None
        """What others, or an earlier run, had kept, until this worker's first step."""
        self._behind = False
        """This worker comes to a step that others, or an earlier run, have begun."""
        self._applied = False
        """The train_step() in progress has called optimizer.apply()."""
        keras = sys.modules["keras"]
        self._tree = keras.tree
        # Under the names of fit(); keras.callbacks.CallbackList takes them as the parameters of callbacks.
        verbose, epochs = arguments["verbose"], arguments["epochs"]
        verbose = 1 if verbose == "auto" else verbose
        self._callbacks = callback_list(
            keras.callbacks.CallbackList,
            arguments["callbacks"],
            add_history=True,
            add_progbar=verbose != 0,
            model=model,
            verbose=verbose,
            epochs=epochs,
            steps=None,
        )
        self._callbacks.wrap(self._own_callback, self._leads, self._passes_by)

    def run(self, own: Callable[..., Any]) -> Any:
        """own: fit() of the model. Raises ConfigError for what cannot be trained in place."""
        model, script = self._model, self._script
        self._check()
        script.job.on_lead(self._callbacks.lead)
        model.make_train_function = self.make_train_function
        _here.fit, first = self, model._initial_epoch
        try:
            own(**{**self._arguments, "callbacks": self._callbacks})
        except _Stopped:
            self._callbacks.on_train_end()
        except PassedBy:
            self._pass_by()
        finally:
            _here.fit, model._initial_epoch = None, first
            script.training.leading.hooks.remove(self._callbacks.lead)
            del model.make_train_function
            model.train_function = None
            if self._batches is not None:
                self._batches.close()
        self._loop.end()
        self._loop.close()
        return model.history

    def _check(self) -> None:
        model = self._model
        if not model.compiled:
            return  # fit() says so
        if model.jit_compile is True:
            self._script.job.print("elastic: jit_compile=True: in place, train_step() runs without torch.compile")
        if model.steps_per_execution > 1:
            raise ConfigError("compile(steps_per_execution=...) cannot train in place: leave it out")
        losses = sys.modules["keras"].tree.flatten(model.loss)
        if any(getattr(loss, "reduction", None) == "sum" for loss in losses):
            raise ConfigError(
                'a loss with reduction="sum" cannot train in place: gradients are the mean over the batch; write '
                'reduction="sum_over_batch_size", and a learning rate that is so many times larger'
            )
        check_validation(self._arguments["validation_data"])

    # Who this worker is

    def _leads(self) -> bool:
        script = self._script
        return not self._behind and script.training.session.world_size > 0 and script.rank_now == 0

    def _own_callback(self, callback: Any) -> OwnCallback:
        return OwnCallback(callback, self._leads, lambda: self._behind)

    def _passes_by(self, method: str) -> bool:
        """A worker that comes in the middle of an epoch: the others have had the events before its first step."""
        if not self._behind:
            return False
        if method == "on_train_batch_begin":
            self._put_back()
        return True

    # What is kept between steps

    def state_dict(self) -> dict[str, Any]:
        assert self._variables is not None
        return {
            "metrics": self._variables.metrics_now(),
            "seeds": self._variables.seeds_now(),
            "callbacks": [callback.state_dict() for callback in self._callbacks.callbacks],
            "stop": bool(getattr(self._model, "stop_training", False)),
            "place": self._batches.place if self._batches is not None else (-1, 0),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._found = state

    def _put_back(self) -> None:
        found, self._found, self._behind = self._found, None, False
        assert found is not None and self._variables is not None
        self._variables.set_metrics(found["metrics"])
        if (seeds := found.get("seeds")) is not None:  # a checkpoint of an older version has none
            self._variables.set_seeds(seeds)
        for callback, kept in zip(self._callbacks.callbacks, found["callbacks"], strict=True):
            callback.load_state_dict(kept)
        self._model.stop_training = found["stop"]
        if self._leads():  # a run that goes on: its leader could not begin before
            self._callbacks.lead()

    def _pass_by(self) -> None:
        """Have what the others had behind this fit()."""
        assert self._found is not None and self._batches is not None
        number, batches = self._found["place"]
        self._put_back()
        self._batches.pass_by(number, batches)

    # The loop

    def begin(self, iterator: Any) -> None:
        """Everything that is trained was made. iterator: Keras's own, over the training data."""
        model, loop, script = self._model, self._loop, self._script
        if not model.trainable_weights:
            raise ConfigError("this model has no trainable weights, so there is nothing to train")
        generator = sys.modules["keras.src.random.seed_generator"].global_seed_generator()
        self._variables = ModelVariables(model, generator.state)
        self._batches = WholeBatches(
            iterator,
            loop.ranks,
            script.training.seed,
            iterator.steps_per_epoch,  # at most keras.config.max_steps_per_epoch()
            self._tree,
            placed=lambda: self._found is not None or not script.training.at.joining,
            first=self._arguments["initial_epoch"],
        )
        if read_in_order(iterator.data_adapter):
            script.job.print(
                "elastic: fit() shuffles, and workers of a PyDataset would give each machine another order: batches "
                "are read without them. fit(shuffle=False) keeps them"
            )
        self._callbacks.set_params({**self._callbacks.params, "steps": iterator.num_batches})
        objects = {"model": self._variables, "optimizer": OptimizerVariables(model.optimizer)}
        rules = {f"model.{name}": rule for name, rule in self._variables.rules.items()}
        if not loop.begin(self._batches, self, objects, rules):
            raise PassedBy
        if loop.entered:
            self._behind = True
            loop.enter(self._rank)
            model._initial_epoch = loop.epoch
        elif self._leads():  # since an earlier fit()
            self._callbacks.lead()

    def places(self) -> Iterator[int]:
        """The steps of the epoch that fit() begins, from the step on at which this worker is."""
        batches, loop, epoch = self._batches, self._loop, self._callbacks.epoch
        assert batches is not None
        if self._behind:
            step = loop.position
        else:
            step = 0
            loop.begin_epoch(epoch)
        while (batches.limit is None or step < batches.limit) and batches.at(epoch, step) is not None:
            yield step
            step += 1
        if step < (batches.limit or 1) and self._leads():
            warnings.warn(f"the training data have ended: epoch {epoch} has {step} steps", stacklevel=2)

    def make_train_function(self, force: bool = False) -> None:
        self._model.train_function = self._train

    def _train(self, place: list[int]) -> dict[str, Any]:
        """Train one step. Returns the metrics of this epoch so far, over all ranks. place: the number of the step in
        its epoch, in the list that PlaceIterator gives."""
        model, loop, variables = self._model, self._loop, self._variables
        assert variables is not None and self._batches is not None
        if not loop.next():
            raise _Stopped
        epoch, index = loop.epoch, self._script.training.at.step
        variables.begin_step()
        said = loop.run(self._rank)
        variables.end_step(self._batches.samples_at(epoch, place[0]), index)
        weights = model.trainable_weights[:]
        with torch.no_grad():
            model.optimizer.apply([weight.value.grad for weight in weights], weights)
        logged = {name.removeprefix(LOGGED): value for name, value in said.items() if name.startswith(LOGGED)}
        return {**model.get_metrics_result(), **logged}

    def _rank(self, part: Part, step: Step) -> None:
        """Compute the gradients of one rank in a step, by the model's own train_step()."""
        model, variables = self._model, self._variables
        assert variables is not None
        if part.samples == 0:
            step.skip()
            return
        step.weigh(part.samples)
        variables.begin_rank(step.shard.generator)
        model.train()
        self._applied = False
        own, model.optimizer.apply = model.optimizer.apply, self._apply
        try:
            logs = model.train_step(part.data)
        finally:
            model.optimizer.apply = own
        if not self._applied:
            raise ConfigError(
                "train_step() has not called optimizer.apply(gradients, variables), so there are no gradients of this "
                "batch; call it once"
            )
        variables.end_rank(part.samples)
        metrics = {*model.get_metrics_result(), *(metric.name for metric in model.metrics)}
        step.log(mean={LOGGED + name: float(value) for name, value in logs.items() if name not in metrics})

    def _apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """In the place of the optimizer's own apply() while a rank is computed: its gradients are those of its
        weights, which the job sums. Raises ConfigError for others."""
        if self._applied:
            raise ConfigError("train_step() calls optimizer.apply() twice: one update a step can train in place")
        weights = self._model.trainable_weights
        given = weights if trainable_variables is None else list(trainable_variables)
        if list(map(id, given)) != list(map(id, weights)) or any(
            gradient is not weight.value.grad for gradient, weight in zip(grads, weights, strict=True)
        ):
            raise ConfigError(
                "train_step() must give optimizer.apply() the gradients that backward() has left, of "
                "model.trainable_weights in their order: what is done to gradients has to be done to their sum. Use "
                "clipnorm=, global_clipnorm= or clipvalue= of the optimizer"
            )
        self._applied = True
