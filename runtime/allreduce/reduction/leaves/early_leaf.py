"""Parts of a shard's gradients, given to EarlySums as soon as backward, or a replica, has completed them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime.allreduce.reduction.early_sums import ALIGN, EarlySums, cuts_of
from runtime.allreduce.reduction.flat_pool import Flats
from runtime.allreduce.reduction.leaves.layout import FlatGroup
from runtime.allreduce.reduction.leaves.leaf_format import LeafFormat
from runtime.allreduce.reduction.schedule import DTYPES, Cut


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements lo..hi-1 of a parameter, which lie from `at` on in the group's flat tensor."""

    parameter: nn.Parameter
    lo: int
    hi: int
    at: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Elements lo..hi-1 of a group's flat tensor, all of gradients."""

    group: str
    lo: int
    hi: int
    pieces: tuple[_Piece, ...]


class EarlyLeaf:
    """cuts: for EarlySums; those of the buckets come first, then what a LeafFormat says of all gradients of a group,
    and what only the end of the shard gives comes last."""

    def __init__(
        self,
        groups: Mapping[str, FlatGroup],
        sizes: Mapping[str, int],
        flats: Mapping[str, Flats],
        converts: LeafFormat | None,
        device: torch.device,
    ) -> None:
        """groups, sizes, flats, converts, device: those of a Harvest. sizes: of the tensors that are summed."""
        self._flats, self._converts, self._device = flats, converts, device
        align = ALIGN if converts is None else converts.align
        self._buckets = [bucket for name in reversed(list(groups)) for bucket in _buckets(name, groups[name], align)]
        self._of: dict[nn.Parameter, list[int]] = {}
        for number, bucket in enumerate(self._buckets):
            for piece in bucket.pieces:
                self._of.setdefault(piece.parameter, []).append(number)
        self._places = [self._places_of(bucket.group, bucket.lo, bucket.hi) for bucket in self._buckets]
        whole = [self._places_of(name, 0, group.gradients) for name, group in groups.items() if group.gradients]
        self._said = [places[1:] for places in whole if places[1:]]
        own = [*(places[:1] for places in self._places), *self._said]
        self.cuts: tuple[Cut, ...] = (*own, *_rest(sizes, own))
        names = {name for said in self._said for name, _, _ in said}
        self._say = {name: torch.empty(sizes[name], dtype=DTYPES[name], device=device) for name in names}
        """What is said of the gradients, as far as they have come."""
        self._sums: EarlySums | None = None
        self._weight: Callable[[], float] = float
        self._missing: list[int] = []
        self._values: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def _places_of(self, group: str, lo: int, hi: int) -> Cut:
        return ((group, lo, hi),) if self._converts is None else self._converts.places_of(group, lo, hi)

    def expect(self, sums: EarlySums, weight: Callable[[], float]) -> None:
        """A shard begins, whose gradients go to these sums. weight: returns what they will be multiplied by, as far as
        is known."""
        if not self._hooks:
            self._hooks = [parameter.register_post_accumulate_grad_hook(self._came) for parameter in self._of]
        self._begin(sums, weight, [len(bucket.pieces) for bucket in self._buckets])

    def give(self, sums: EarlySums, weight: float) -> None:
        """Give all gradients that the parameters have now to these sums; backward has not made them. weight: what they
        will be multiplied by."""
        self._begin(sums, lambda: weight, [0] * len(self._buckets))
        self._offer()
        self.forget()

    def _begin(self, sums: EarlySums, weight: Callable[[], float], missing: list[int]) -> None:
        """missing: of each bucket, how many pieces have still to come."""
        self._sums, self._weight, self._missing = sums, weight, missing
        self._values = {name: pool.take() for name, pool in self._flats.items()}
        self._stream = _stream(self._device)

    def forget(self) -> None:
        """The shard is over."""
        self._sums, self._values = None, {}

    def close(self) -> None:
        """Take the hooks away from the parameters."""
        self.forget()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _came(self, parameter: Tensor) -> None:
        """A gradient is complete, unless there is another backward pass."""
        if self._sums is None:
            return
        if _stream(self._device) != self._stream:
            self.forget()  # a part would have to wait for the streams of all its gradients
            return
        assert isinstance(parameter, nn.Parameter)
        for number in self._of[parameter]:
            self._missing[number] -= 1
        self._offer()

    def _offer(self) -> None:
        """Offer the parts that are complete, in their order."""
        assert self._sums is not None
        while (number := self._sums.offered) < len(self._buckets) and self._missing[number] <= 0:
            values = self._of_bucket(self._buckets[number])
            if values is None:
                self.forget()
                return
            for name, lo, hi in self._places[number][1:]:
                self._say[name][lo:hi] = values[name]
            self._sums.offer(values)
        if self._sums.offered == len(self._buckets):
            for said in self._said:
                self._sums.offer({name: self._say[name][lo:hi] for name, lo, hi in said})

    @torch.no_grad()
    def _of_bucket(self, bucket: _Bucket) -> dict[str, Tensor] | None:
        """The values of the leaf; None where a gradient is not there, or of a kind that takes longer."""
        flat = self._values[bucket.group]
        sources = []
        for piece in bucket.pieces:
            gradient = piece.parameter.grad
            if gradient is None or gradient.layout is not torch.strided or gradient.device != flat.device:
                return None
            sources.append(gradient.reshape(-1)[piece.lo : piece.hi])
        torch._foreach_copy_([flat[piece.at : piece.at + piece.hi - piece.lo] for piece in bucket.pieces], sources)
        values, weight = flat[bucket.lo : bucket.hi], self._weight()
        if weight != 1:
            values.mul_(weight)
        if self._converts is None:
            return {bucket.group: values}
        return self._converts.encode_part(bucket.group, bucket.lo, values)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which the calling thread's work is queued; None on a CPU, and while a graph is captured."""
    if device.type == "cpu" or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device)


def _buckets(name: str, group: FlatGroup, align: int) -> Iterable[_Bucket]:
    sizes = [parameter.numel() for parameter in group.parameters]
    for lo, hi in cuts_of(sizes, align):
        pieces, begin = [], 0
        for parameter, size in zip(group.parameters, sizes, strict=True):
            first, end = max(lo, begin), min(hi, begin + size)
            if first < end:
                pieces.append(_Piece(parameter, first - begin, end - begin, first))
            begin += size
        yield _Bucket(name, lo, hi, tuple(pieces))


def _rest(sizes: Mapping[str, int], cuts: Iterable[Cut]) -> Iterable[Cut]:
    """What the cuts leave of tensors of these sizes: the n-th gap of each tensor, for each n."""
    gaps: dict[str, list[tuple[int, int]]] = {}
    for group, size in sizes.items():
        end, taken = 0, sorted((lo, hi) for cut in cuts for name, lo, hi in cut if name == group)
        for lo, hi in (*taken, (size, size)):
            if end < lo:
                gaps.setdefault(group, []).append((end, lo))
            end = hi
    for number in range(max(map(len, gaps.values()), default=0)):
        yield tuple((group, *found[number]) for group, found in sorted(gaps.items()) if number < len(found))
