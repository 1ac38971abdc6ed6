"""job.evaluate: the mean of scores over a dataset, whose parts are spread over the workers.

The dataset is cut into batches and the batches into parts, independent of the world; a part is a leaf of the canonical
tree, so the numbers have the same bits in every world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import default_collate

from elastic.errors import ConfigError, UsageError
from runtime.allreduce.reduction.partial_sum import Json, Partial, Scalars
from runtime.data.loader import check_count, check_map_style, seed_fetch, to_device, unpack
from runtime.data.random_state import randomness_kept
from runtime.loop.control_scalars import RESERVED
from runtime.loop.training import Training
from runtime.recovery.state.small_values import Number, as_number, same_nan
from runtime.session import OpKind

PARTS_MAX = 64
"""More parts would spread the work more evenly, but make the header of the exchange longer."""

Score = Callable[..., Mapping[str, Number]]


def evaluate(
    training: Training, fn: Score, dataset: Any, *, batch_size: int, models: nn.Module | Sequence[nn.Module] | None
) -> dict[str, float]:
    """See Job.evaluate."""
    check_map_style(dataset, "job.evaluate()")
    batches = -(-len(dataset) // check_count("batch_size", batch_size))
    if batches == 0:
        raise ConfigError("job.evaluate(): the dataset is empty")
    parts = min(batches, PARTS_MAX)
    name = getattr(fn, "__name__", type(fn).__name__)
    training.calls.check_outside_pass("evaluate()")

    def compute(part: int) -> Partial:
        seed_fetch(training.seed, training.at.epoch, training.at.step, part)
        scalars: Scalars = {}
        samples = 0
        for batch in range(part * batches // parts, (part + 1) * batches // parts):
            indices = range(batch * batch_size, min((batch + 1) * batch_size, len(dataset)))
            inputs = to_device(default_collate([dataset[index] for index in indices]), training.registered.device)
            for key, value in _scores(fn(*unpack(inputs)), name).items():
                _, total, weight = scalars.get(key, ("mean", 0.0, 0.0))
                scalars[key] = ("mean", total + value * len(indices), weight + len(indices))
            samples += len(indices)
        return Partial(part, part + 1, weight=float(samples), scalars=scalars)

    def reply(result: Partial) -> Json:
        return {
            key: same_nan(total / weight)
            for key, (_, total, weight) in result.scalars.items()
            if not key.startswith(RESERVED)
        }

    chosen = (
        training.carrier.modules().values() if models is None else [models] if isinstance(models, nn.Module) else models
    )
    with evaluating(chosen), randomness_kept(), torch.no_grad():
        label = f"evaluate({name}) of {len(dataset)} samples"
        return cast(dict[str, float], training.calls.collective(OpKind.EVALUATE, label, parts, compute, reply))


def _scores(scores: object, name: str) -> dict[str, float]:
    if not isinstance(scores, Mapping):
        raise UsageError(
            f"job.evaluate: {name} returned a {type(scores).__name__}; return a dict name -> mean of the batch"
        )
    if reserved := [key for key in scores if not isinstance(key, str) or key.startswith(RESERVED)]:
        raise UsageError(
            f"job.evaluate: {name} returned the name {reserved[0]!r}; names are strings without {RESERVED!r}"
        )
    return {key: as_number(value, f"job.evaluate: {name}'s {key}") for key, value in scores.items()}


@contextmanager
def evaluating(models: Sequence[nn.Module] | Any) -> Iterator[None]:
    """Evaluation mode for these modules and all their parts; each gets its own mode back afterwards."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode
