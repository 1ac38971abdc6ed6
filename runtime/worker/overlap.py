"""The overlap of a reduction with backward, or with inner steps: tensors that leave early, and whether they were right.

Where it applies, an operation is several ones of the ring: the tensors (early_sums.py), then the headers, and, if a
member has sent early what its gradient is not, all tensors again.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from elastic.config import Overlap, Reduction
from elastic.records.journal import Journal
from runtime.allreduce.reduction.early_sums import EarlySums, LastShard
from runtime.allreduce.reduction.headers import Headers
from runtime.allreduce.reduction.over_mesh import ReductionRequest, Sums, exchange
from runtime.allreduce.reduction.over_transport import exchange_over
from runtime.allreduce.reduction.partial_sum import Partial
from runtime.allreduce.reduction.schedule import Cut
from runtime.allreduce.ring.ring import PARTS, Ring


class BackwardOverlap:
    """One member's early sums. sums_on: the device of the tensors of results."""

    def __init__(self, sums_on: torch.device, journal: Journal, reduction: Reduction, overlap: Overlap) -> None:
        self._sums_on, self._journal, self._reduction, self._overlap = sums_on, journal, reduction, overlap
        self._early: EarlySums | None = None
        self._early_of: tuple[int, int] | None = None
        """The generation and the number of the operation whose early sums there are."""
        self._wrong_in = -1
        """The last generation in which a member has sent early what its gradient was not: its script will do so again.
        The others know it too, so nobody sends anything early until the next generation."""
        self._room: dict[str, Tensor] = {}

    def applies(self, ring: Ring, cuts: tuple[Cut, ...], again: bool) -> bool:
        """Whether an operation with these cuts is summed part by part; all members find the same. AUTO leaves it out on
        GPUs, where nobody has measured it. again: some members may have begun it before."""
        gains = len(set(ring.hosts)) > 1 and self._sums_on.type == "cpu"
        wanted = self._overlap is Overlap.ON or (self._overlap is Overlap.AUTO and gains)
        fits = self._reduction.stable and not again and ring.generation != self._wrong_in
        return wanted and fits and bool(cuts) and ring.world_size > 1

    def begin(
        self, ring: Ring, number: int, cuts: tuple[Cut, ...], last: LastShard, out: dict[str, Tensor]
    ) -> EarlySums:
        """Early sums of the operation with this number; out gets them."""
        groups = {group: flat.numel() for group, flat in out.items()}

        def sum_up(sums: EarlySums) -> None:
            flats = [{} for _ in sums.nodes] if sums.merged else sums.terms
            request = ReductionRequest(
                op=PARTS * number,
                units=last.units,
                groups=groups,
                roots=[Partial(*node, flat) for node, flat in zip(sums.nodes, flats, strict=True)],
                merged=sums.terms if sums.merged else None,
                cuts=sums.cuts,
            )
            if ring.transport is None:
                exchange(ring, request, sums=Sums(sums.out), ready=sums.ready)
            else:
                exchange_over(ring, request, transport=ring.transport, out=sums.out, wait_for=sums.wait_for)

        if {group: flat.numel() for group, flat in self._room.items()} != groups:
            self._room = {group: torch.empty_like(flat) for group, flat in out.items()}
        self._early_of = (ring.generation, number)
        self._early = EarlySums(cuts, last, out, self._room, sum_up, ring.wake)
        return self._early

    def finish(
        self, ring: Ring, request: ReductionRequest, cuts: tuple[Cut, ...], out: dict[str, Tensor]
    ) -> tuple[Headers, Partial] | None:
        """The headers and the result of the operation that the request is for; None if a member has sent early what its
        gradient is not: then all tensors must be sent again, without the words of the headers."""
        number, early = request.op // PARTS, self._early
        if early is None:
            last = LastShard(None, request.units, request.roots, request.merged is not None)
            early = self.begin(ring, number, cuts, last, out)
        right: bool | None = early.flush(request.flats)
        self._early = None
        if not right and any(root.nonfinite for root in request.roots):
            right = None  # zeros are in the place of what was sent early, and the next gradients will be finite
        words = replace(
            request,
            op=PARTS * number + 1,
            groups={},
            roots=[replace(root, flats={}) for root in request.roots],
            merged=None,
            header={**request.header, "early": right},
        )
        headers, result = exchange(ring, words)
        if all(other["early"] is True for other in headers.values()):
            return headers, replace(result, flats=early.out)
        if wrong := sorted(worker for worker, other in headers.items() if other["early"] is False):
            self._wrong_in = ring.generation
            self._journal.write("overlap_given_up", generation=ring.generation, op=number, because=", ".join(wrong))
        return None

    def leave_others(self, generation: int, number: int) -> None:
        """End early sums of another operation or generation, whose ring has been aborted."""
        if self._early is not None and self._early_of != (generation, number):
            self._early.discard()
            self._early = None
