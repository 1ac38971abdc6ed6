"""The callbacks of transformers.Trainer, as newcomers and checkpoints have their state: each by the name of its class
and by how many callbacks of that name are before it. Their order differs between processes, as Trainer puts those
behind the others that it makes anew from a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from elastic.errors import ConfigError
from runtime.frontends.frameworks import long_tensors
from runtime.frontends.frameworks.long_tensors import NOTHING, CallbackReader, Told, has_any, numbered
from runtime.frontends.frameworks.plain_state import plain_attributes, set_attributes
from runtime.frontends.frameworks.trackers.runs import OF_RUN

DATASETS = ("train_dataset", "eval_dataset")
"""Attributes of a trainer that each process has by itself."""


def reader(trainer: Any, apart: Iterable[object] = ()) -> CallbackReader:
    """Tells what the callbacks of this trainer keep. apart: more objects that are told otherwise."""
    datasets = (getattr(trainer, name, None) for name in DATASETS)
    return CallbackReader(trainer.model, [trainer, getattr(trainer, "model_wrapped", None), *datasets, *apart])


def kept(callbacks: Iterable[Any], reader: CallbackReader) -> list[Any]:
    """[name of the class, its plain attributes, its long tensors] of each callback, in their order."""
    rows = []
    for each in callbacks:
        long = reader.told(each) if _decides(name := _name(each)) else NOTHING
        rows.append([name, plain_attributes(each, without=OF_RUN), long])
    return rows


def long_of(state: list[Any]) -> Iterator[tuple[str, Told]]:
    """(name of the class, its long tensors) of each callback of a state; an older version told none."""
    for row in state:
        if not isinstance(row, dict):
            yield row[0], row[2] if len(row) > 2 else NOTHING


def put_back(callbacks: list[Any], state: list[Any], reader: CallbackReader, *, strict: bool = True) -> None:
    """Give callbacks what `kept` has told of others. strict: their on_train_begin() was called. Raises ConfigError if
    one that has a state is in one process only."""
    if state and all(
        isinstance(each, dict) for each in state
    ):  # an older version told no names, and the order was the same
        if len(state) != len(callbacks):
            raise ConfigError(
                f"the checkpoint has the state of {len(state)} callbacks and names none, and this Trainer has "
                f"{len(callbacks)}: give it the callbacks of the run that wrote the checkpoint"
            )
        state = [[_name(callback), values] for callback, values in zip(callbacks, state, strict=True)]
    here = dict(numbered((_name(each), each) for each in callbacks))
    there = dict(numbered((name, (row[1], long)) for row, (name, long) in zip(state, long_of(state), strict=True)))
    for key, (values, long) in there.items():
        if (callback := here.get(key)) is not None:
            set_attributes(callback, values)
            long_tensors.put_back(callback, long, f"callback {key[0]}", strict=strict)
        elif (values or has_any(long)) and _decides(key[0]):
            raise _refusal(key[0], "has a state in the other workers, or in the checkpoint, and is not in this one")
    for key, callback in here.items():
        if key in there or not _decides(key[0]):
            continue
        if plain_attributes(callback, without=OF_RUN) or has_any(reader.told(callback)):
            raise _refusal(key[0], "has a state in this worker, and is not in the others, or in the checkpoint")


def _name(callback: Any) -> str:
    return f"{type(callback).__module__}.{type(callback).__qualname__}"


def _decides(name: str) -> bool:
    """Whether what a callback keeps may decide something. Those of transformers that have bars and files may differ:
    some scripts show no bar but on one rank."""
    return not name.startswith("transformers.") or name.endswith(".EarlyStoppingCallback")


def _refusal(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"callback {name} {why}. Any worker may become the leader: give Trainer its callbacks in all workers, not "
        "only if trainer.is_world_process_zero() or RANK is 0, and ask state.is_world_process_zero in their methods"
    )
