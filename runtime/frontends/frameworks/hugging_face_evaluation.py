"""Evaluations of transformers.Trainer: spread over the workers, and gone through by each one as if it had all ranks.

The trainer's own evaluation_loop() prepares the model and asks for its batches. Then the workers compute what the
trainer's own prediction_step() gives for each batch. The loop goes through all batches and gets these answers: what it
collects, counts and tells its callbacks is that of a run of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import IterableDataset

from elastic.errors import ConfigError
from runtime.data.random_state import randomness_kept, seed_all
from runtime.frontends.ddp.sampler_source import WorkerInit
from runtime.frontends.frameworks import own_generators
from runtime.frontends.frameworks.rank_batches import collated, whole
from runtime.frontends.frameworks.step_loop import StepLoop
from runtime.frontends.frameworks.trainer_attributes import ToldSums, have_told, recorded
from runtime.frontends.frameworks.trainer_notes import Noted, note
from runtime.loop.training import Training
from runtime.loop.training.gathering import gather


@contextmanager
def alone(trainer: Any, gathered: Callable[[Any], Any] | None = None) -> Iterator[None]:
    """What the trainer collects is what it has: one rank is computed, or the values of all are there already. gathered:
    what an evaluation's loop has of what it gathers."""
    accelerator = trainer.accelerator

    def same(thing: Any, *args: Any, **kwargs: Any) -> Any:
        return thing

    names = ("gather", "gather_for_metrics", "pad_across_processes", "reduce")
    before = {name: vars(accelerator).get(name) for name in names}
    gathering, trainer.gather_function = trainer.gather_function, gathered or same
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
        self._batches: _Batches | None = None
        """Those of the evaluation in progress."""
        self._shown: Callable[[Any, Any], Any] | None = None
        """The trainer's preprocess_logits_for_metrics in this evaluation."""
        self._mean_loss = False
        """Whether Trainer gathers the loss of a batch next."""

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """The batches are spread over the workers. Raises ConfigError for a dataset without random access."""
        trainer = self._trainer
        if isinstance(dataloader.dataset, IterableDataset) or whole(dataloader) is None:
            raise ConfigError(
                f"{description} of {type(dataloader.dataset).__name__}, which has no random access: use a dataset with "
                "__len__ and __getitem__"
            )
        loss_only = trainer.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        batches = _Batches(dataloader, [list(batch) for batch in whole(dataloader)], trainer.accelerator.gradient_state)
        batches.inputs = functools.partial(self._answered, batches, description, loss_only, ignore_keys)
        shown, trainer.preprocess_logits_for_metrics = trainer.preprocess_logits_for_metrics, None
        self._shown, self._batches = shown, batches
        try:
            with alone(trainer, self._repeated):
                return self._own["evaluation_loop"](
                    batches, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        finally:
            trainer.preprocess_logits_for_metrics, self._answers, self._batches = shown, iter(()), None
            batches.close()

    def _answered(
        self, batches: _Batches, description: str, loss_only: bool, ignore_keys: list[str] | None
    ) -> list[dict[str, Any]]:
        """What the trainer's own loop is given as batches, when all are computed. It asks when it has prepared the
        model, whose weights it may have cast."""
        trainer, ranks, every = self._trainer, self._loop.ranks, batches.indices
        together = [every[first : first + ranks] for first in range(0, len(every), ranks)]
        with randomness_kept():
            WorkerInit(batches.loader, self._training.seed).begin()
        generators = own_generators.owned_by(batches.loader.collate_fn, batches.dataset)

        def rows_of(part: int) -> list[Any]:
            # Not by the job's step: a worker that passes an earlier train() by comes here in a later one.
            place = (self._training.loops.number, trainer.state.global_step, description, part)
            own_generators.seed(generators, seed_all(self._training.seed, *place))
            return self._rows(batches.loader, together[part], loss_only, ignore_keys)

        if self._loop.entered or not self._loop.begun or self._loop.passing:  # nobody else is here
            with randomness_kept():
                parts = [rows_of(part) for part in range(len(together))]
        elif together:
            parts = gather(self._training, f"{description} of {len(every)} batches", len(together), rows_of)
        else:
            parts = []
        rows = [row for part in parts for row in part]
        self._answers = iter(rows)
        return [row[0] if isinstance(row[0], dict) else {self._main_input: row[0]} for row in rows]

    def _repeated(self, thing: Any) -> Any:
        """What Trainer gathers. The first thing of each batch is its mean loss, as often as a whole batch has samples;
        the last batch may have fewer."""
        if not self._mean_loss or thing.dim() != 1:
            return thing
        assert self._batches is not None
        self._mean_loss = False
        return thing[:1].repeat(self._batches.samples)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        answer = next(self._answers, None)
        if answer is None:
            return self._own["prediction_step"](model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        _, noted, *answered = answer
        if noted is not None:
            means, done = noted
            have_told(self._trainer, done)
            note(self._trainer, "eval", means, 0)
        loss, logits, labels = (_on(self._trainer.args.device, value) for value in answered)
        self._mean_loss = loss is not None and loss.numel() == 1
        return loss, logits, labels

    @property
    def _main_input(self) -> str:
        """Name of what a model is given first."""
        return str(getattr(self._trainer.model, "main_input_name", "input_ids"))

    def _rows(
        self, loader: Any, together: list[list[int]], loss_only: bool, ignore_keys: list[str] | None
    ) -> list[list[Any]]:
        """[inputs, noted, loss, logits, labels] of each batch. together: what all ranks would have at the same time;
        Trainer takes the mean loss over it."""
        trainer, rows = self._trainer, []
        model = trainer.accelerator.unwrap_model(trainer.model)
        batches = [collated(loader, indices) for indices in together]
        means: dict[str, float] = {}
        done = ToldSums()
        with alone(trainer):
            own = [trainer._get_num_items_in_batch([batch], trainer.args.device) for batch in batches]
            shares = self._shares(batches, [len(indices) for indices in together], own)
            try:
                for indices, inputs, part, items in zip(together, batches, own, shares, strict=True):
                    trainer._get_num_items_in_batch = lambda *args, items=items: items
                    with recorded(trainer, done), Noted(trainer, "eval") as noted:
                        loss, logits, labels = self._own["prediction_step"](
                            model, inputs, loss_only, ignore_keys=ignore_keys
                        )
                        said = noted.taken()[0]
                    if logits is not None and self._shown is not None:
                        logits = self._shown(logits, labels)
                    weight = 1 / len(batches) if part is None else float(part / sum(own))
                    for name, value in said.items():
                        means[name] = means.get(name, 0.0) + weight * value
                    rows.append([self._kept(inputs, len(indices)), None, loss, logits, labels])
            finally:
                vars(trainer).pop("_get_num_items_in_batch", None)
        rows[-1][1] = [means, dict(done)]  # noted once for the batches of all ranks
        return rows

    def _shares(self, batches: list[Any], sizes: list[int], own: list[Any]) -> list[Any]:
        """The number by which each batch divides the sum of its losses. sizes: how many samples each batch has, by
        which its loss is weighted. own: how many items each has."""
        trainer = self._trainer
        items = trainer._get_num_items_in_batch(batches, trainer.args.device)
        if items is None or not trainer.args.average_tokens_across_devices:
            return own
        # Of all these batches, as in a run of all ranks; compute_loss() multiplies by the number of ranks.
        return [items * self._loop.ranks * (size / sum(sizes)) for size in sizes]

    def _kept(self, inputs: Any, samples: int) -> Any:
        """What Trainer needs of a batch that is computed: how many samples it has, and what metrics are given of it."""
        args = self._trainer.args
        if "inputs" not in args.include_for_metrics:
            return torch.empty(samples, 0)
        return dict(inputs) if args.batch_eval_metrics else inputs[self._main_input]


class _Batches:
    """The batches of an evaluation, for the trainer's own loop, which asks accelerate whether one is the last."""

    def __init__(self, loader: Any, indices: list[list[int]], state: Any) -> None:
        """state: accelerate's, of the loader in progress."""
        self.dataset = loader.dataset
        self.loader = loader
        self.indices = indices
        self.inputs: Callable[[], list[Any]] = list
        """Computes what the loop is given."""
        self.samples = 0
        """How many samples the batch in progress has."""
        self.end_of_dataloader = False
        self.remainder = 0
        """Samples of the last batch that are there twice: none."""
        self._state = state

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        inputs = self.inputs()
        self._state._add_dataloader(self)
        for number, (indices, given) in enumerate(zip(self.indices, inputs, strict=True), 1):
            self.samples, self.end_of_dataloader = len(indices), number == len(self.indices)
            yield given
        self.close()

    def close(self) -> None:
        """The loop is over, also by an error."""
        self._state._remove_dataloader(self)


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _on(device, item) for key, item in value.items()}
    return type(value)(_on(device, item) for item in value) if isinstance(value, list | tuple) else value
