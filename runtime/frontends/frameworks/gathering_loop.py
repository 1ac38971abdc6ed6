"""An evaluation whose loop may gather: batch by batch, each rank's turn first, and then what all ranks have brought.

For each batch number, the script's loop body runs once for each rank of this worker. In these turns a collective gives
nothing: an empty tensor, an empty list, zeros for a sum. What it would send is kept. When all ranks have had their turn
and every worker has what they brought, the body runs once more, with the batch of one of these ranks, and each
collective gives the values of all ranks. So a metric gets all values once, in rank order, on every worker; and the
turns of a lost worker's ranks are run by another one.

A number that the body changes without a collective becomes what it would be on the average of the ranks, as in any
evaluation (see ddp/evaluation.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from elastic.errors import ConfigError
from runtime.data.random_state import seed_shard
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.frames.evaluation_values import EvaluationValues, total
from runtime.frontends.ddp.frames.plain_values import FrameValues, same
from runtime.frontends.ddp.process_group import as_object, as_tensor
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.rank_values import RankValue
from runtime.frontends.ddp.seams import Seams
from runtime.frontends.frameworks.accelerate_batches import PreparedBatches
from runtime.loop.training.gathering import from_bytes, gather_in_turns, to_bytes

SUMS = ("dist.all_reduce",)
"""Beginnings of the names of collectives that the loop may call besides gather()."""
GATHER, OBJECTS = "accelerator.gather", "accelerator.gather_object"


class Brought:
    """What a rank has brought in its turn."""

    def __init__(self, content: bytes) -> None:
        found = cast(dict[str, Any], from_bytes(content))
        self.calls: list[tuple[str, torch.Tensor]] = [(name, value) for name, value in found["calls"]]
        self.added: dict[str, float] = found["added"]
        """What the turn has added to values of the script, see EvaluationValues.added."""


class BatchValues(EvaluationValues):
    """The plain values of the script before a batch."""

    def _entries(self, now: FrameValues, batches: int) -> dict[str, float]:
        """Lists may get what a collective has given, which is empty in the turns of the ranks."""
        lists, self._lists = self._lists, {}
        for place, listed in lists.items():
            gained = list(listed.values)[listed.length :]
            if not same(listed.entries, list(listed.values)[: listed.length]) or not all(map(_is_empty, gained)):
                self._lists[place] = listed
        try:
            return super()._entries(now, batches)
        finally:
            self._lists = lists

    def accumulated(self, names: Collection[str]) -> list[str]:
        """The spellings of the places of these names, without tensors of several elements: those of a batch, under the
        name that the batch before has had."""
        places = [*self._plain, *(place for place, (tensor, _) in self._tensors.items() if tensor.numel() == 1)]
        return [place.spelling for place in places if any(_belongs(place.text, name) for name in names)]

    def only(self, names: Collection[str]) -> BatchValues:
        """Those of the places to which these names, as of `added`, belong."""
        found = type(self)(self._frames)
        found._grown = self._grown
        for mine, kept in ((self._plain, found._plain), (self._lists, found._lists), (self._tensors, found._tensors)):
            places = cast(dict[Any, Any], mine)
            cast(dict[Any, Any], kept).update(
                (place, value) for place, value in places.items() if any(_belongs(place.text, name) for name in names)
            )
        return found


def _belongs(place: str, name: str) -> bool:
    """Whether a name of `added` is of the place with this text."""
    return f" {place} " in f" {name} "


def _is_empty(entry: object) -> bool:
    if isinstance(entry, torch.Tensor):
        return entry.numel() == 0
    if isinstance(entry, float):
        return math.isnan(entry)
    return hasattr(entry, "__len__") and len(entry) == 0


class GatheringLoop:
    """One evaluation. Used by the script's thread only."""

    def __init__(self, script: RankScript, loader: Any, source: PreparedBatches) -> None:
        self._script = script
        self._loader = loader
        self._source = source
        self.place = 0
        self._calls: list[tuple[str, torch.Tensor]] = []
        """Of the turn in progress."""
        self._given: list[Brought] | None = None
        """What all ranks have brought for the batch; None in the turn of one rank."""
        self._gathers = False
        """The loop has called a collective: what it collects is what that has given, on every worker."""
        self._alone = False
        """The turn counts for nobody: each rank has brought what this one brings."""
        self._padding: tuple[int, int, bool] | None = None
        """The arguments of pad_across_processes() that is in progress."""
        self._padded: list[tuple[torch.Tensor, tuple[int, int, bool]]] = []
        """What that has given in this turn, and its arguments."""

    # The loop

    def batches(self) -> Iterator[Any]:
        """The turns. Raises MidShardCollective."""
        evaluations, loader = self._script.evaluations, self._loader
        evaluations.check_begins()
        nobody = evaluations.counts_for_nobody
        if not nobody:
            evaluations.begin()
        loader.begin()
        evaluations.running, evaluations.loop = True, self
        try:
            for number in range(1 if nobody else len(self._source)):
                loader.end_of_dataloader = number == len(self._source) - 1
                self.place = number
                yield from self._for_nobody() if nobody else self._batch()
            loader.iteration += 1
            loader.end()
        finally:
            evaluations.running, evaluations.loop = False, None
            if not nobody and self._script.begun:
                evaluations.end()
                evaluations.collected = not self._gathers

    def _for_nobody(self) -> Iterator[Any]:
        self._alone = True
        yield from self._turn(0)

    def _batch(self) -> Iterator[Any]:
        script = self._script
        start = BatchValues.read(script.frames)
        script.evaluations.summed |= start.summed
        done: dict[int, bytes] = {}
        found: list[bytes] = []
        last = 0
        owned = script.training.session.owned(script.ranks) if script.begun else tuple(range(script.ranks))
        for rank in owned or ():
            yield from self._rank(start, rank, done)
            last = rank
        if script.begun:
            op = script.evaluations.op(f", batch {self.place}")
            for rank in gather_in_turns(script.training, op, done, found):
                yield from self._rank(start, rank, done)
                last = rank
        else:
            found = [done[rank] for rank in range(script.ranks)]
        given = [Brought(content) for content in found]
        start.put_back(objects=False)
        self._gathers |= bool(given[0].calls)
        if given[0].calls:
            yield from self._all(start, given, last, own=last in done)
        else:
            start.add(total([brought.added for brought in given]), script.ranks)

    def _rank(self, start: BatchValues, rank: int, done: dict[int, bytes]) -> Iterator[Any]:
        """The turn of one rank."""
        start.put_back(objects=False)
        buffers = self._script.objects.versions_of_buffers()
        yield from self._turn(rank)
        self._script.evaluations.check_buffers(buffers)
        added = start.added(rank, 1)
        calls = [[name, value] for name, value in self._calls]
        done[rank] = to_bytes({"calls": calls, "added": added}, f"what rank {rank} gathers in an evaluation")

    def _all(self, start: BatchValues, given: list[Brought], rank: int, *, own: bool) -> Iterator[Any]:
        """The turn in which collectives have their values. own: this worker has had the turn of that rank."""
        self._given = given
        yield from self._turn(rank)
        self._given = None
        # What the ranks' turns have changed differently is no result of a collective.
        parts = [total([brought.added]) for brought in given]
        local = {name for part in parts for name in part if _differ([other.get(name, 0.0) for other in parts])}
        if not local:
            return
        values = start.only(local)
        now = total([values.added(rank, 1)])
        if own:
            mixed = [name for name in local if _differ([now.get(name, 0.0), parts[rank].get(name, 0.0)])]
            if totals := values.accumulated(mixed):
                raise mistakes.mixed_in_evaluation(totals[0])
        values.put_back(objects=False)
        together = total([brought.added for brought in given])
        values.add({name: value for name, value in together.items() if name in local}, self._script.ranks)

    def _turn(self, rank: int) -> Iterator[Any]:
        script = self._script
        self._calls, self._padded = [], []
        script.evaluations.batches += 1
        batch = self._source.fetch_now(self.place, rank)
        seed_shard(script.training.seed, script.training.at.step, self.place, rank)
        yield batch

    # Collectives in the loop

    def exchange(self, call: str, value: torch.Tensor) -> list[RankValue]:
        """In the turn of a rank: zeros, for all ranks. Raises MidShardCollective for a collective that has no place
        here, NotInPlace if the loop calls others than in the ranks' turns."""
        if call == "dist.barrier":
            return [RankValue(tuple(range(self._script.ranks)), value)]
        if not call.startswith((*SUMS, GATHER, OBJECTS)):
            raise mistakes.in_evaluation(call)
        ranks = range(self._script.ranks)
        number = len(self._calls)
        self._calls.append((call, value.detach().to("cpu", copy=True)))
        if self._alone:
            return [RankValue(tuple(ranks), value.detach().clone())]
        if self._given is None:
            return [RankValue(tuple(ranks), torch.zeros_like(value))]
        found = [
            brought.calls[number] if number < len(brought.calls) else ("nothing", value) for brought in self._given
        ]
        if others := {name for name, _ in found} - {call}:
            raise mistakes.other_calls_in_evaluation(call, sorted(others)[0])
        return [RankValue((rank,), found[rank][1].to(value.device)) for rank in ranks]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, one behind the other."""
        if tensor.dim() == 0:
            tensor = tensor.clone()[None]
        values = self.exchange(GATHER, tensor)
        if self._given is None and not self._alone:
            return tensor if self._padding is not None else tensor[:0]
        found = [entry.value for entry in values for _ in entry.ranks]
        arguments = next((arguments for padded, arguments in self._padded if padded is tensor), None)
        if arguments is not None:
            longest = max(value.shape[arguments[0]] for value in found)
            found = [_pad(value, longest, *arguments) for value in found]
        if len({value.shape[1:] for value in found}) > 1:
            raise mistakes.unequal_in_evaluation([tuple(value.shape) for value in found])
        return torch.cat(found)

    def gather_object(self, thing: Any) -> list[Any]:
        """The entries of all ranks' objects."""
        values = self.exchange(OBJECTS, as_tensor(thing))
        if self._given is None and not self._alone:
            return []
        return [entry for value in values for _ in value.ranks for entry in as_object(value.value)]

    def adds_up(self, metric: str, arguments: Iterable[Any]) -> bool:
        """Whether a metric of a library adds these values up now: not in the turn of a rank, where they are empty.
        Raises NotInPlace for values that were not gathered."""
        if self._given is not None or self._alone:
            return True
        tensors = [value for value in arguments if isinstance(value, torch.Tensor | list | tuple)]
        if self._calls and not all(map(_is_empty, tensors)):
            raise mistakes.metric_of_one_rank(metric)
        return not self._calls

    @contextmanager
    def padding(self, dim: int, pad_index: int, pad_first: bool) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """accelerate asks for the sizes of all ranks and pads. In the turn of a rank nothing is padded; gather() pads
        what was given to the function that comes from here."""
        arguments = (dim, pad_index, pad_first)

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            self._padded.append((tensor, arguments))
            return tensor

        self._padding = arguments
        try:
            yield padded
        finally:
            self._padding = None


def _differ(values: list[float]) -> bool:
    first = values[0]
    return any(value != first and not (math.isnan(value) and math.isnan(first)) for value in values)


def _pad(tensor: torch.Tensor, size: int, dim: int, pad_index: int, pad_first: bool) -> torch.Tensor:
    missing = size - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    filling = tensor.new_full(shape, pad_index)
    return torch.cat([filling, tensor] if pad_first else [tensor, filling], dim=dim)


def guard(seams: Seams, module: Any) -> None:
    """module: torchmetrics or evaluate. In the turn of a rank their metrics get nothing. Raises ConfigError."""
    if module.__name__ == "evaluate":
        for name in ("add", "add_batch"):
            seams.wrap(module.EvaluationModule, name, _added)
    elif hasattr(module.Metric, "_wrap_update"):
        seams.wrap(module.Metric, "_wrap_update", _wrapped_update)
    else:
        raise ConfigError(f"torchmetrics {module.__version__} has no Metric._wrap_update, which evaluations need")


def _added(script: RankScript, original: Any, self: Any, /, *args: Any, **kwargs: Any) -> None:
    loop = script.evaluations.loop
    if not isinstance(loop, GatheringLoop) or loop.adds_up(type(self).__name__, (*args, *kwargs.values())):
        original(self, *args, **kwargs)


def _wrapped_update(script: RankScript, original: Any, self: Any, update: Any) -> Any:
    """Each metric wraps its update() when it is made, and again when it is copied."""
    wrapped = original(self, update)

    @functools.wraps(wrapped)
    def guarded(*args: Any, **kwargs: Any) -> None:
        loop = script.evaluations.loop
        if not isinstance(loop, GatheringLoop) or loop.adds_up(type(self).__name__, (*args, *kwargs.values())):
            wrapped(*args, **kwargs)

    return guarded
