"""Evaluations of transformers.Trainer: spread over the workers, and gone through by each one as if it had all ranks.

First the workers compute what the trainer's own prediction_step() gives for each batch. Then the trainer's own
evaluation_loop() goes through all batches, and gets these answers: what it collects, counts and tells its callbacks is
that of a run of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from elastic.errors import ConfigError
from runtime.data.random_state import randomness_kept, seed_all
from runtime.frontends.frameworks.rank_batches import collated, whole
from runtime.frontends.frameworks.step_loop import StepLoop
from runtime.frontends.frameworks.trl_metrics import Noted, note
from runtime.loop.training import Training
from runtime.loop.training.gathering import gather


@contextmanager
def alone(trainer: Any) -> Iterator[None]:
    """What the trainer collects is what it has: one rank is computed, or the values of all are there already."""
    accelerator = trainer.accelerator

    def same(thing: Any, *args: Any, **kwargs: Any) -> Any:
        return thing

    names = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")
    before = {name: vars(accelerator).get(name) for name in names}
    gathering, trainer.gather_function = trainer.gather_function, same
    for name in names:
        setattr(accelerator, name, same)
    try:
        yield
    finally:
        trainer.gather_function = gathering
        for name, value in before.items():
            if value is None:
                delattr(accelerator, name)
            else:
                setattr(accelerator, name, value)


class Evaluation:
    """What a trainer does otherwise when it evaluates. Method names are the trainer's own.

    own: the trainer's methods, as its class has them.
    """

    def __init__(self, trainer: Any, own: Mapping[str, Callable[..., Any]], loop: StepLoop, training: Training) -> None:
        self._trainer = trainer
        self._own = own
        self._loop = loop
        self._training = training
        self._answers: Iterator[Any] = iter(())
        """What prediction_step() gives while the trainer goes through an evaluation that is computed already."""

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """The batches are spread over the workers. Raises ConfigError for a dataset without random access."""
        trainer, ranks = self._trainer, self._loop.ranks
        if whole(dataloader) is None:
            raise ConfigError(
                f"{description} of {type(dataloader.dataset).__name__}, which has no random access: use a dataset with "
                "__len__ and __getitem__"
            )
        rest = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        batches = [list(batch) for batch in whole(dataloader)]
        if self._loop.entered or not self._loop.begun or not batches:  # nobody else is here
            with alone(trainer):
                return self._own["evaluation_loop"](_Batches(dataloader, batches), *rest)
        loss_only = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        together = [batches[first : first + ranks] for first in range(0, len(batches), ranks)]
        trainer.accelerator.unwrap_model(trainer.model).eval()
        shown, trainer.preprocess_logits_for_metrics = trainer.preprocess_logits_for_metrics, None

        def rows_of(part: int) -> list[Any]:
            # Not by the job's step: a worker that passes an earlier train() by comes here in a later one.
            seed_all(self._training.seed, self._training.loops.number, trainer.state.global_step, description, part)
            return self._rows(dataloader, together[part], loss_only, ignore_keys, shown)

        label = f"{description} of {len(batches)} batches"
        try:
            if self._loop.passing:
                with randomness_kept():
                    parts = [rows_of(part) for part in range(len(together))]
            else:
                parts = gather(self._training, label, len(together), rows_of)
            rows = [row for part in parts for row in part]
            self._answers = iter(rows)
            inputs = [{self._main_input: row[0]} for row in rows]
            with alone(trainer):
                return self._own["evaluation_loop"](_Batches(dataloader, batches, inputs), *rest)
        finally:
            trainer.preprocess_logits_for_metrics, self._answers = shown, iter(())

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        answer = next(self._answers, None)
        if answer is None:
            return self._own["prediction_step"](model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        _, noted, *answered = answer
        if noted is not None:
            note(self._trainer, "eval", noted, 0)
        return tuple(_on(self._trainer.args.device, value) for value in answered)

    @property
    def _main_input(self) -> str:
        """Name of what a model is given first."""
        return str(getattr(self._trainer.model, "main_input_name", "input_ids"))

    def _rows(
        self,
        loader: Any,
        together: list[list[int]],
        loss_only: bool,
        ignore_keys: list[str] | None,
        shown: Callable[[Any, Any], Any] | None,
    ) -> list[list[Any]]:
        """[inputs, noted, loss, logits, labels] of each batch. together: what all ranks would have at the same time;
        Trainer takes the mean loss over it. shown: the trainer's preprocess_logits_for_metrics."""
        trainer, rows = self._trainer, []
        keeps_inputs = "inputs" in trainer.args.include_for_metrics
        model = trainer.accelerator.unwrap_model(trainer.model)
        batches = [collated(loader, indices) for indices in together]
        means: dict[str, float] = {}
        with alone(trainer):
            own = [trainer._get_num_items_in_batch([batch], trainer.args.device) for batch in batches]
            items = trainer._get_num_items_in_batch(batches, trainer.args.device)
            if items is not None:  # compute_loss() multiplies by the number of ranks
                items = items * self._loop.ranks / len(together)
            trainer._get_num_items_in_batch = lambda *args: items  # of all these batches, as in a run of all ranks
            try:
                for indices, inputs, part in zip(together, batches, own, strict=True):
                    noted = Noted(trainer, "eval")
                    loss, logits, labels = self._own["prediction_step"](
                        model, inputs, loss_only, ignore_keys=ignore_keys
                    )
                    if logits is not None and shown is not None:
                        logits = shown(logits, labels)
                    weight = 1 / len(batches) if part is None else float(part / sum(own))
                    for name, value in noted.taken()[0].items():
                        means[name] = means.get(name, 0.0) + weight * value
                    kept = inputs[self._main_input] if keeps_inputs else torch.empty(len(indices), 0)
                    rows.append([kept, None, loss, logits, labels])
            finally:
                del trainer._get_num_items_in_batch
        rows[-1][1] = means  # noted once for the batches of all ranks
        return rows


class _Batches:
    """The batches of an evaluation, for the trainer's own loop."""

    def __init__(self, loader: Any, indices: list[list[int]], inputs: list[Any] | None = None) -> None:
        self.dataset = loader.dataset
        self._loader = loader
        self._indices = indices
        self._inputs = inputs

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        if self._inputs is not None:
            return iter(self._inputs)
        return (collated(self._loader, batch) for batch in self._indices)


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on(device, item) for key, item in value.items()}
    return type(value)(_on(device, item) for item in value) if isinstance(value, list | tuple) else value
