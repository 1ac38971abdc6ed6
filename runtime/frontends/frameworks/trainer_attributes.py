"""What compute_loss() and training_step() of a user's own Trainer do to its attributes: numbers that they add to or
set, and numbers that they append to lists.

Trainer calls them for the rank of its process. Here a worker calls them for each of its ranks. So what a rank does is
recorded and taken back, and behind the step all workers have the mean of what the ranks have done: a counter grows by
one for each batch of a rank, and a list by one number. Ranks find what the step before has left.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch

from elastic.errors import ConfigError
from runtime.frontends.frameworks.lightning.attributes import NUMBERS
from runtime.frontends.frameworks.lightning.parts import ADDED_MAX, Record, attributes, have, tell, told
from runtime.frontends.frameworks.trainer_averages import Averages
from runtime.loop.control_scalars import UNRECORDED
from runtime.loop.step import Step

COUNTED = UNRECORDED + "ranks that count"
TENSORS = UNRECORDED + "tensors appended to "
"""In front of the names of lists to which tensors are appended."""
_TOLD = re.compile(re.escape(UNRECORDED) + r'.* \["(add|set)",\d.*\]', re.DOTALL)
"""Names of scalars by `tell`."""


class ToldSums(Counter[str]):
    """In the place of a step: the sums of what several parts tell."""

    def log(self, *, sum: Mapping[str, float]) -> None:
        for name, value in sum.items():
            self[name] += value  # type: ignore[assignment]  # a Counter adds up floats, too


@contextmanager
def recorded(trainer: Any, step: Step | ToldSums) -> Iterator[None]:
    """Tell the step what the body does to the trainer's attributes, and take it back. Raises ConfigError for what a
    step does not carry."""
    lists = {name: list(value) for name, value in vars(trainer).items() if type(value) is list}
    names = frozenset(vars(trainer))
    left: dict[str, Any] = {}
    averages = Averages(trainer)
    with attributes(trainer) as record:
        yield
        averages.check()
        left.update(_set_anew(trainer, lists))
    vars(trainer).update(left)
    for name in left:
        record.changes.pop(name, None)
    for name in [name for name, value in vars(trainer).items() if name not in names and _is_short(value)]:
        record.changes[name] = vars(trainer).pop(name)
    _tell(trainer, step, record)


def _set_anew(trainer: Any, lists: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Lists to which the body has not appended: they are others now, as the last rank of this worker has made them."""
    found = {}
    for name, old in lists.items():
        new = vars(trainer).get(name)
        kept = type(new) is list and len(new) >= len(old) and all(a is b for a, b in zip(new, old, strict=False))
        if not kept:
            found[name] = new
    return found


def _is_short(value: Any) -> bool:
    return type(value) is list and 0 < len(value) <= ADDED_MAX and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    return type(value) in NUMBERS or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _tell(trainer: Any, step: Step | ToldSums, record: Record) -> None:
    tensors = {}
    for name, change in record.changes.items():
        if isinstance(change, list):
            if len(change) > ADDED_MAX or not all(map(_is_number, change)):
                raise ConfigError(
                    f"compute_loss() or training_step() of {type(trainer).__name__} appends to self.{name} what a step "
                    f"does not carry: append numbers, {ADDED_MAX} at most, or note it in a callback or in log(), or "
                    "start the script with --restart"
                )
            if any(isinstance(item, torch.Tensor) for item in change):
                tensors[TENSORS + name] = 1.0
        elif isinstance(change, torch.Tensor) and change.numel() > ADDED_MAX:
            raise ConfigError(
                f"compute_loss() or training_step() of {type(trainer).__name__} changes {change.numel()} numbers of "
                f"self.{name}, and a step carries {ADDED_MAX}: keep it in a buffer of the model, or change it in a "
                "callback, or start the script with --restart"
            )
    tell(cast(Step, step), trainer, 0, record)
    step.log(sum={COUNTED: 1.0, **tensors})


def have_told(trainer: Any, said: Mapping[str, float]) -> None:
    """Have what all ranks have done. said: what they have told, added up."""
    own = {name: value for name, value in said.items() if _TOLD.fullmatch(name)}
    if not own:
        return
    for name in own:
        attribute, _, about = name.removeprefix(UNRECORDED).rpartition(" [")
        if about.startswith('"add"') and not hasattr(trainer, attribute):  # a list that a rank has made
            setattr(trainer, attribute, [])
    device = trainer.args.device
    for record in told(trainer, own, round(said[COUNTED]), device):
        for name, change in record.changes.items():
            if TENSORS + name in said and isinstance(change, list):
                record.changes[name] = [torch.tensor(value, device=device) for value in change]
        have(trainer, record)
