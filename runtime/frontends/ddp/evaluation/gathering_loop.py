"""An evaluation whose loop may gather: batch by batch, each rank's turn first, and then what all ranks have brought.

For each batch number, the script's loop body runs once for each rank of this worker. In these turns a collective gives
nothing: an empty tensor, an empty list, zeros for a sum. What it would send is kept. When all ranks have had their turn
and every worker has what they brought, the body runs once more, with the batch of rank 0 on every worker, and each
collective gives the values of all ranks. So a metric gets all values once, in rank order, on every worker; and the
turns of a lost worker's ranks are run by another one.

A number that the body changes without a collective becomes what it would be on the average of the ranks, as in any
evaluation (see evaluations.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, cast

import torch

from runtime.data.random_state import seed_shard
from runtime.frontends.ddp import mistakes
from runtime.frontends.ddp.evaluation.evaluations import REMEMBERED_MAX
from runtime.frontends.ddp.evaluation.fed_metrics import FedMetrics, packed, unpacked
from runtime.frontends.ddp.evaluation.loop_values import LoopValues
from runtime.frontends.ddp.frames.evaluation_values import HIGHEST, LOWEST, total
from runtime.frontends.ddp.frames.places import ValuePlace
from runtime.frontends.ddp.frames.plain_values import FrameValues, is_number, item, same
from runtime.frontends.ddp.process_group import as_object, as_tensor
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.rank_values import RankValue
from runtime.frontends.ddp.sampler_source import ListedSource
from runtime.loop.training.gathering import from_bytes, gather_in_turns, to_bytes

SUMS = ("dist.all_reduce",)
"""Beginnings of the names of collectives that the loop may call besides gather()."""
PADDED = 1 << 12
"""What a rank has brought fills a multiple of so many bytes: whoever computes it has as many."""
ADDED = "added"
"""What newcomers are told of such a loop has this key; the results of other evaluations have the texts of places."""
GATHER, OBJECTS = "accelerator.gather", "accelerator.gather_object"


class Brought:
    """What a rank has brought in its turn."""

    def __init__(self, content: bytes) -> None:
        """content: of GatheringLoop._rank."""
        found = cast(dict[str, Any], from_bytes(content))
        self.calls: list[tuple[str, torch.Tensor]] = [(name, value) for name, value in found["calls"]]
        self.added: dict[str, float] = found["added"]
        """What the turn has added to values of the script, see EvaluationValues.added."""
        self.was: dict[str, float] = found["was"]
        """The numbers that it has changed, as they were before: workers may begin an evaluation with different ones."""


class BatchValues(LoopValues):
    """The plain values of the script before a batch."""

    extremes: Mapping[str, float] = MappingProxyType({})
    """Texts of the places where a number was infinite when the evaluation began, and that number."""

    def _numbers(self, now: FrameValues, rank: int) -> dict[str, float]:
        """A number that was infinite when the evaluation began is the lowest or the highest of all batches."""
        found = super()._numbers(now, rank)
        for place in self._plain:
            first, here = self.extremes.get(place.text), item(now._at(place))
            if first is not None and is_number(here) and found.pop(place.text, None) is not None:
                found[f"{LOWEST if first > 0 else HIGHEST}{rank} {place.text}"] = float(here)
        return found

    def infinite(self) -> dict[str, float]:
        """`extremes` of the evaluation that begins with these values."""
        plain = self.plain()
        return {text: value for text, value in plain.items() if isinstance(value, float) and math.isinf(value)}

    def before(self, names: Collection[str]) -> dict[str, float]:
        """The numbers at the places with these texts."""
        plain = {name: item(value) for name, value in self.plain().items()}
        return {name: float(plain[name]) for name in names if is_number(plain.get(name))}

    def _entries(self, now: FrameValues, batches: int) -> dict[str, float]:
        """Lists may get what a collective has given, which is empty in the turns of the ranks. batches: 0 for a whole
        evaluation, see `gained`."""
        if batches == 0:
            return {}
        lists, self._lists = self._lists, {}
        for place, listed in lists.items():
            gained = list(listed.values)[listed.length :]
            empty = all(_is_empty(entry) and not _is_zero(entry) for entry in gained)
            if not same(listed.entries, list(listed.values)[: listed.length]) or not empty:
                self._lists[place] = listed
        try:
            return super()._entries(now, batches)
        finally:
            self._lists = lists

    def changed(self) -> dict[str, float]:
        """As `added`, of the whole evaluation, but for lists."""
        return total([self.added(0, 0)])

    def gained(self) -> dict[str, list[Any]]:
        """What lists have got since then, by the text of their place."""
        found = {place.text: list(listed.values)[listed.length :] for place, listed in self._lists.items()}
        return {text: entries for text, entries in found.items() if entries}

    def become_told(self, added: dict[str, float], gained: dict[str, list[Any]]) -> None:
        """What is told of the evaluation comes instead of what has changed since then."""
        self.changed()
        told = self.only([*added, *gained])
        told.put_back(objects=False)
        told.add(added, 1)
        for place, listed in told._lists.items():
            listed.values.extend(gained.get(place.text, ()))

    def accumulated(self, names: Collection[str]) -> list[str]:
        """The spellings of the places of these names, without tensors of several elements: those of a batch, under the
        name that the batch before has had."""
        places = [*self._plain, *(place for place, (tensor, _) in self._tensors.items() if tensor.numel() == 1)]
        return [place.spelling for place in places if any(_belongs(place.text, name) for name in names)]

    def only(self, names: Collection[str]) -> BatchValues:
        """Those of the places to which these names, as of `added`, belong."""
        found = type(self)(self._frames)
        found._grown, found.extremes = self._grown, self.extremes

        def wanted(place: ValuePlace) -> bool:
            return any(_belongs(place.text, name) for name in names)

        found._plain = {place: value for place, value in self._plain.items() if wanted(place)}
        found._lists = {place: value for place, value in self._lists.items() if wanted(place)}
        found._tensors = {place: value for place, value in self._tensors.items() if wanted(place)}
        return found


def _belongs(place: str, name: str) -> bool:
    """Whether a name of `added` is of the place with this text."""
    return f" {place} " in f" {name} "


def _is_empty(entry: object) -> bool:
    if isinstance(entry, torch.Tensor):
        return entry.numel() == 0
    if isinstance(entry, int | float):
        return _is_zero(entry) or math.isnan(entry)
    return hasattr(entry, "__len__") and len(entry) == 0


def _is_zero(entry: object) -> bool:
    return isinstance(entry, int | float) and entry == 0


class GatheringLoop:
    """One evaluation. Used by the script's thread only."""

    def __init__(self, script: RankScript, loader: Any, source: ListedSource) -> None:
        """loader: has what accelerate's DataLoaderShard has."""
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
        self._fed = FedMetrics()
        self._clocks: set[str] = set()
        """Names of values that a clock has given."""
        self._own: str | None = None
        """The class of a metric that has added up values of one rank."""
        self._padding: tuple[int, int, bool] | None = None
        """The arguments of pad_across_processes() that is in progress."""
        self._padded: list[tuple[torch.Tensor, tuple[int, int, bool]]] = []
        """What that has given in this turn, and its arguments."""

    # The loop

    def batches(self, occasion: str | None = None) -> Iterator[Any]:
        """The turns. occasion: of a loop that has begun already. Raises MidShardCollective."""
        script, loader = self._script, self._loader
        evaluations = script.evaluations
        evaluations.check_begins()
        start, occasion = BatchValues.read(script.frames), occasion or script.occasion("an evaluation")
        nobody = evaluations.counts_for_nobody
        if not nobody:
            evaluations.begin()
        loader.begin()
        evaluations.running, evaluations.loop = True, self
        late, extremes = False, start.infinite()
        try:
            for number in range(1 if nobody else len(self._source)):
                loader.end_of_dataloader = number == len(self._source) - 1
                self.place = number
                yield from self._for_nobody() if nobody else self._batch(extremes)
            if not script.silent:
                loader.iteration += 1
            loader.end()
        except GeneratorExit:
            # The script has left its loop. At the top of the body all workers do so; behind it the turns of other ranks
            # are missing, and the next call of all workers raises.
            late = not nobody and self._given is None and (bool(self._calls) or evaluations.forwards > 0)
        finally:
            evaluations.running, evaluations.loop = late, None
        if late:
            return
        if nobody:
            self._become(start, script.training.replies.shared.get(occasion))
            return
        evaluations.collected = not self._gathers
        if script.begun:
            evaluations.end()
            added = start.changed()
            if len(added) <= REMEMBERED_MAX:
                lists = [packed(pair) for pair in start.gained().items()]
                told = {"added": added, "lists": [text for text in lists if text], "fed": self._fed.told()}
                script.training.replies.remember(occasion, cast(Any, told))

    def _become(self, start: BatchValues, told: Any) -> None:
        """The turn has counted for nobody. told: what the evaluation has given those who have gone through it."""
        if told is None:
            return
        known, to_device = cast(dict[str, Any], told), self._source.to_device
        self._fed.replay(known["fed"] or [], to_device)
        # Behind it: what a metric of the script's own class has in its attributes is among these values.
        start.become_told(known[ADDED], dict(to_device(unpacked(text)) for text in known["lists"]))

    def _for_nobody(self) -> Iterator[Any]:
        self._alone = True
        yield from self._turn(0)

    def _batch(self, extremes: Mapping[str, float]) -> Iterator[Any]:
        script = self._script
        start = BatchValues.read(script.frames)
        start.extremes = extremes
        script.evaluations.summed |= start.summed
        done: dict[int, bytes] = {}
        found: list[bytes] = []
        owned = script.training.session.owned(script.ranks) if script.begun else tuple(range(script.ranks))
        for rank in owned or (0,):  # the script may leave its loop here, also in a worker that has no rank
            yield from self._rank(start, rank, done)
        if script.begun:
            op = script.evaluations.op(f", batch {self.place}")
            for rank in gather_in_turns(script.training, op, done, found):
                yield from self._rank(start, rank, done)
        else:
            found = [done[rank] for rank in range(script.ranks)]
        given = [Brought(content) for content in found]
        start.put_back(objects=False)
        self._gathers |= bool(given[0].calls)
        if given[0].calls:
            yield from self._all(start, given)
        else:
            start.add(total([brought.added for brought in given]), script.ranks)

    def _rank(self, start: BatchValues, rank: int, done: dict[int, bytes]) -> Iterator[Any]:
        """The turn of one rank."""
        start.put_back(objects=False)
        buffers = self._script.objects.versions_of_buffers()
        yield from self._turn(rank)
        self._script.evaluations.check_buffers(buffers)
        if self._calls and self._own is not None:
            raise mistakes.metric_of_one_rank(self._own)
        added = start.added(rank, 1)
        calls = [[name, value] for name, value in self._calls]
        whole = {"calls": calls, "added": added, "was": start.before(added)}
        content = to_bytes(whole, f"what rank {rank} gathers in an evaluation")
        done[rank] = content + bytes(-len(content) % PADDED)

    def _all(self, start: BatchValues, given: list[Brought]) -> Iterator[Any]:
        """The turn in which collectives have their values: that of rank 0 on every worker, so that all have the same
        values behind it."""
        self._given = given
        yield from self._turn(0)
        self._given = None
        # What the ranks' turns have changed differently is no result of a collective.
        parts = [total([brought.added]) for brought in given]
        local = {name for part in parts for name in part if _differ([other.get(name, 0.0) for other in parts])}
        # What workers had differently, as the loss of the last training step, is that of rank 0 now.
        local -= {name for name in local if _differ([brought.was[name] for brought in given if name in brought.was])}
        if not local:
            return
        values = start.only(local)
        now = total([values.added(0, 1)])
        mixed = [name for name in local if _differ([now.get(name, 0.0), parts[0].get(name, 0.0)])]
        if not self._clocks.issuperset(mixed):
            yield from self._find_clocks(start, mixed, parts[0])
        local -= self._clocks
        if totals := values.accumulated([name for name in mixed if name not in self._clocks]):
            raise mistakes.mixed_in_evaluation(totals[0])
        values = start.only(local)
        values.put_back(objects=False)
        together = total([brought.added for brought in given])
        values.add({name: value for name, value in together.items() if name in local}, self._script.ranks)

    def _find_clocks(self, start: BatchValues, mixed: Collection[str], found: Mapping[str, float]) -> Iterator[Any]:
        """Those of the mixed values that change otherwise whenever the same batch is evaluated, as one that a clock has
        given: they are no results. The turn of rank 0 comes once more. found: what it has changed before."""
        after = BatchValues.read(self._script.frames)
        start.put_back(objects=False)
        yield from self._turn(0)
        again = total([start.only(mixed).added(0, 1)])
        self._clocks |= {name for name in mixed if _differ([again.get(name, 0.0), found.get(name, 0.0)])}
        after.put_back(objects=False)

    def _turn(self, rank: int) -> Iterator[Any]:
        script = self._script
        self._calls, self._padded, script.evaluations.forwards = [], [], 0
        script.evaluations.batches += 1
        batch = self._source.fetch_now(self.place, rank)
        seed_shard(script.training.seed, script.training.at.step, self.place, rank)
        yield batch

    @property
    def silent(self) -> bool:
        """The turn is that of one rank, of a loop that gathers, or may."""
        return self._given is None and (self._gathers or self.place == 0)

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

    def feed(self, metric: Any, add: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """A metric of a library is to add values up: not in the turn of a rank, where those that were gathered are
        empty, and not in a turn that counts for nobody. add: does it."""
        number = self._fed.number(metric, add)
        if self._alone:
            return
        if self._given is not None:
            self._fed.note(number, args, kwargs)
        else:
            if all(map(_is_empty, (*args, *kwargs.values()))):
                return
            self._own = type(metric).__name__
        add(*args, **kwargs)

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
    first = values[0] if values else 0.0
    return any(value != first and not (math.isnan(value) and math.isnan(first)) for value in values)


def _pad(tensor: torch.Tensor, size: int, dim: int, pad_index: int, pad_first: bool) -> torch.Tensor:
    missing = size - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    filling = tensor.new_full(shape, pad_index)
    return torch.cat([filling, tensor] if pad_first else [tensor, filling], dim=dim)
