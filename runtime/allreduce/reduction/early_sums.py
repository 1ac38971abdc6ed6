"""The sum of one operation, part by part, while the last shard of this worker is still computed.

Gradients are cut into parts, in the order in which backward completes them. When a part of the last shard is there, it
is added to what this worker has of the other shards, and is sent, on a thread. What was sent early is a guess: the
gradient may change later, by a second backward, by a weight, because the shard is skipped. When the shard is over, the
worker compares what it has sent with what it really has, and the members tell each other in the headers of the
operation. If all have guessed right, the sum is the result. Else it is thrown away, and the tensors are sent again. So
the bits of a result never depend on a guess.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from elastic.errors import DeviceHung, RingBroken
from elastic.protocol.reduction_tree import Node
from runtime.allreduce.reduction.flat_pool import CPU
from runtime.allreduce.reduction.partial_sum import Partial, add_into, siblings
from runtime.allreduce.reduction.schedule import Cut
from runtime.script_end import TorchThread

SumUp: TypeAlias = Callable[["EarlySums"], None]
"""Puts the sum over all members of the terms of such sums into their out, part by part: the n-th one as soon as `ready`
is more than n, for which `wait_for` waits. Raises RingBroken."""
Wait: TypeAlias = Callable[[], None]
"""Makes the current stream of the calling thread wait for what another stream had to do when this was made."""


@dataclass(frozen=True, slots=True)
class LastShard:
    """The shard that a member computes last, and what it has of the others.

    unit: None: it computes none, and sends nothing early. units: of the operation. held: this member's roots, which
    must not change any more. merged: a member brings the sum of its roots, as in over_mesh.ReductionRequest.
    """

    unit: int | None
    units: int
    held: Sequence[Partial]
    merged: bool


class EarlySums:
    """One member's side of one operation. `offer` and `flush` are for one thread, sum_up runs on another one."""

    def __init__(
        self,
        cuts: Sequence[Cut],
        last: LastShard,
        out: dict[str, Tensor],
        room: dict[str, Tensor],
        sum_up: SumUp,
        wake: Callable[[], None],
    ) -> None:
        """cuts: the parts, the same on all members, without a gap. out: gets the sums. room: memory for what is sent,
        as large as out. wake: called when a part was added, for whoever looks at `ready`.
        """
        self.cuts, self.out, self.merged = tuple(cuts), out, last.merged
        self._room, self._wake = room, wake
        self._device = next((flat.device for flat in room.values()), CPU)
        roots = {root.node: root for root in last.held}
        self.nodes: list[Node] = sorted(roots)
        """This member's roots when the shard is over."""
        self._chain: tuple[tuple[Partial, bool], ...] = ()
        if last.unit is not None:
            path = siblings((last.unit, last.unit + 1), roots, last.units)
            self._chain = path.chain
            consumed = {sibling.node for sibling, _ in path.chain}
            self.nodes = sorted([path.node, *(node for node in roots if node not in consumed)])
        self._held = roots
        self.terms = [room]
        """The tensors of the roots, or their one sum."""
        if not last.merged or not self.nodes:
            self.terms = [roots[node].flats if node in roots else room for node in self.nodes]
        self._early = 0
        self._ready = 0
        self._waits = [recorded(self._device)]
        """For the roots that this worker has held since before, then for each part that is ready."""
        self._ended = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._sum_up = sum_up
        self._thread = TorchThread(target=self._run, name="early sums")
        self._thread.start()

    @property
    def offered(self) -> int:
        """How many parts were offered; the next one has this number."""
        return self._early

    def ready(self) -> int:
        """How many parts of the terms are there. Any thread."""
        return self._ready

    def wait_for(self, number: int) -> None:
        """Wait until a part of the terms is there; on a GPU the thread's current stream does so. Raises RingBroken if
        the operation was left."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready > number or self._ended)
            if self._ended:
                raise RingBroken("the operation was left")
            self._waits[0]()
            self._waits[number + 1]()

    def offer(self, values: Mapping[str, Tensor]) -> None:
        """The shard's values of the next part: group -> a tensor as long as the part. They may change afterwards."""
        for group, lo, hi in self.cuts[self._early]:
            self._add(group, lo, hi, values[group], self._room[group][lo:hi])
        self._early += 1
        self._grow(self._early)

    def _add(self, group: str, lo: int, hi: int, values: Tensor, into: Tensor) -> None:
        """Add to the shard's values what they are added to when it is over; along the tree in the same order."""
        into.copy_(values)
        if self.merged:
            for root in self._held.values():
                add_into(into, root.flats[group][lo:hi], into)
            return
        for sibling, is_left in self._chain:
            other = sibling.flats[group][lo:hi]
            left, right = (other, into) if is_left else (into, other)
            add_into(left, right, into)

    def flush(self, terms: Sequence[dict[str, Tensor]]) -> bool:
        """The shard is over. terms: the flats of this worker's roots, in the order of their nodes, or, if merged, their
        sum. Send the parts that were not sent early, and wait until all are summed. Returns whether what was sent early
        was right.

        Raises RingBroken, and whatever else has happened on the thread.
        """
        self._waits[-1]()
        guesses = [(said, real) for said, real in zip(self.terms, terms, strict=True) if said is self._room]
        for said, real in guesses:
            for cut in self.cuts[self._early :]:
                for group, lo, hi in cut:
                    said[group][lo:hi].copy_(real[group][lo:hi])
        self._grow(len(self.cuts))
        right = all(_same(said, real, self.cuts[: self._early]) for said, real in guesses)
        self._thread.join()  # after the comparison, which is done while the last parts are on their way
        if self._error is not None:
            raise self._error
        return right

    def discard(self) -> None:
        """Leave the sums alone. The ring must be aborted, if this member has one. Raises what has happened on the
        thread if another attempt would not help: a GPU that hangs, or is out of memory."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join()
        if isinstance(self._error, RuntimeError | DeviceHung):
            raise self._error

    def _grow(self, ready: int) -> None:
        wait = recorded(self._device)
        with self._changed:
            self._waits += [wait] * (ready - self._ready)
            self._ready = ready
            self._changed.notify_all()
        self._wake()

    def _run(self) -> None:
        try:
            self._sum_up(self)
        except BaseException as error:
            self._error = error


def cuts_of(sizes: Sequence[int], align: int) -> list[tuple[int, int]]:
    """Cut a flat tensor that parameters of these sizes begin, for `EarlySums`, at multiples of align: backward comes to
    the last parameter first. Returns (first element, the one behind the last) of each part."""
    end = sum(sizes)
    most = min(max(end // PARTS, PART_ELEMENTS_MIN), PART_ELEMENTS_MAX)
    found = []
    while end > 0:
        begin = max(0, end - most)
        begin -= begin % align
        found.append((begin, end))
        end = begin
    return found


PARTS = 32
"""So many parts leave the last of them little to do after backward."""
PART_ELEMENTS_MIN = 1 << 16
PART_ELEMENTS_MAX = 4 << 20
ALIGN = 64
"""Parts of floats begin where vectors do."""


def recorded(device: torch.device) -> Wait:
    """Note what the calling thread's current stream has to do by now."""
    if device.type == "cpu":
        return _done
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return lambda: event.wait(torch.cuda.current_stream(device))


def _done() -> None:
    """A CPU has done what was said."""


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], cuts: Sequence[Cut]) -> bool:
    """Whether the bits of these parts are the same, also of NaN and of zeros with signs."""
    places = [place for cut in cuts for place in cut]
    pairs = [[flats[group][lo:hi].view(torch.uint8) for flats in (one, other)] for group, lo, hi in places]
    if not pairs or pairs[0][0].device.type == "cpu":
        return all(torch.equal(said, real) for said, real in pairs)
    differ = torch.stack([(said != real).any() for said, real in pairs])
    return not differ.any().item()  # the host waits for a GPU once, and not for each part
