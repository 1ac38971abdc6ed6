"""A worker's rings on paper: their frames arrive late, and outlive their sender."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from elastic.protocol.messages import Generation
from elastic.protocol.reduction_tree import Node
from elastic.protocol.worker_state import (
    Acknowledged,
    AwaitAcknowledgements,
    HeadersHeld,
    LinksClosed,
    Obtained,
    ReadHeader,
    RingBuilt,
    RingFailed,
    RingLost,
)
from tests.sim.script import Sum

if TYPE_CHECKING:
    from tests.sim.worker import Worker

_ENDS = frozenset({"eof", "leave"})
"""After which nothing more of that ring comes from a member: it has closed the connection, or keeps it for the next."""

_IN_USE = 0.25
"""The part of the connections that carry too much to be kept."""

Header: TypeAlias = tuple[dict[Node, Sum], tuple[int, ...]]


class Mesh:
    def __init__(self, worker: Worker) -> None:
        self.w = worker
        self.awaited: AwaitAcknowledgements | None = None
        self._frames: dict[tuple[int, str], dict[object, object]] = {}
        self._closed: set[int] = set()
        self._rings: dict[int, Generation] = {}
        self._left: Generation | None = None
        self._retired: dict[int, int] = {}
        self._exchange: tuple[int, int] | None = None
        self._summed = False

    def close_all(self) -> None:
        self._close_left()
        for number in list(self._rings):
            self.close(number)

    def abort(self) -> None:
        """The connections of the ring that was in use stay open until the next one is built."""
        entered = self.w.p.entered
        if entered in self._rings:
            self._left = self._rings.pop(entered)
            self._closed.add(entered)
        for number in list(self._rings):
            self.close(number)
        self._exchange = None
        self.awaited = None

    def _close_left(self, keeps: Sequence[str] = ()) -> None:
        """keeps: the members of the ring to be built. A connection to one of them may be kept, and closed as well."""
        left, self._left = self._left, None
        if left is not None:
            self._hang_up(left, keeps)

    def _hang_up(self, ring: Generation, keeps: Sequence[str] = ()) -> None:
        for peer in ring.ids:
            if peer != self.w.me:
                kept = peer in keeps and not self.w.world.clock.chance(_IN_USE)
                self.send(ring.number, peer, "leave" if kept else "eof", True)

    def retire(self, number: int, until: int) -> None:
        self._retired[number] = until

    def close_retired(self, op: int) -> None:
        for number, until in list(self._retired.items()):
            if until <= op:
                del self._retired[number]
                self.close(number)

    def build(self, generation: Generation) -> None:
        number = generation.number
        self._close_left(generation.ids)
        self._rings[number] = generation
        peers = [peer for peer in generation.ids if peer != self.w.me]
        if peers and self.w.agent.uncarried and not self.w.world.healed:
            # What carries the gradients names nobody.
            self.w.after(0.1, 0.9, lambda: self._cannot_carry(number))
            return
        troubled = self.w.world.link_trouble()
        for peer in peers:
            if not troubled:
                self.send(number, peer, "hello", True)
        build_s = self.w.world.spec.timing.build_s
        self.w.after(build_s, build_s, lambda: self._build_is_over(number))
        self.w.after(0, 0.002, lambda: self._check_built(number))

    def _check_built(self, number: int) -> None:
        ring = self._rings.get(number)
        if ring is None or self._is_up(number):
            return
        if all("hello" in self._frames.get((number, peer), {}) for peer in ring.ids if peer != self.w.me):
            self._frames.setdefault((number, self.w.me), {})["up"] = True
            self.w.after(0, 0.001, lambda: self._built(number))

    def _built(self, number: int) -> None:
        """Between the last hello and the lock the control thread may have been told something else."""
        self.w.post(RingBuilt(number))
        self.w.world.hook("ring_built", self.w)

    def _is_up(self, number: int) -> bool:
        return "up" in self._frames.get((number, self.w.me), {})

    def _build_is_over(self, number: int) -> None:
        ring = self._rings.get(number)
        if ring is None or self._is_up(number):
            return
        missing = [
            peer for peer in ring.ids if peer != self.w.me and "hello" not in self._frames.get((number, peer), {})
        ]
        self.w.world.reach("a ring could not be built")
        self.close(number)
        self.w.after(0, 0.005, lambda: self._post(RingFailed(number, tuple(missing))))

    def _cannot_carry(self, number: int) -> None:
        if number in self._rings:
            self.w.world.reach("a ring could not be built")
            self.close(number)
            self._post(RingFailed(number, ()))

    def close(self, number: int) -> None:
        ring = self._rings.pop(number, None)
        self._closed.add(number)
        if ring is not None:
            self._hang_up(ring)

    def closed_by_peers(self, number: int) -> tuple[str, ...]:
        return tuple(sorted(peer for (ring, peer), got in self._frames.items() if ring == number and "eof" in got))

    def send(self, number: int, peer: str, key: object, content: object) -> None:
        self.w.world.frame(self.w, peer, number, key, content)

    def frame(self, number: int, sender: str, key: object, content: object) -> None:
        """The kernel takes it, also while the process is paused."""
        if number in self._closed:
            if key == "hello":
                self.send(number, sender, "eof", True)
            elif key == "eof" and number == self.w.p.entered:
                self._frames.setdefault((number, sender), {})[key] = content
                self.w.after(0, 0.01, lambda: self._post(LinksClosed(number, self.closed_by_peers(number))))
            return
        self._frames.setdefault((number, sender), {})[key] = content
        if key == "hello":
            self.w.after(0, 0, lambda: self._check_built(number))
        elif key in _ENDS or self._is_last(number, key):
            self.w.wake()

    def _is_last(self, number: int, key: object) -> bool:
        """Whether nobody else of the ring is waited for in this round. Of acknowledgements each is looked at."""
        ring = self._rings.get(number)
        if ring is None or (isinstance(key, tuple) and key[0] == "ack"):
            return True
        return all(key in self._frames.get((number, peer), {}) for peer in ring.ids if peer != self.w.me)

    def take_part(self, number: int) -> None:
        """Headers with roots to everybody; the sums of slices to everybody; a peer without a word is a broken ring."""
        op, ring = self.w.p.reduced, self._rings.get(number)
        if ring is None:
            self._lost(number, "closed")
            return
        mine = self._frames.setdefault((number, self.w.me), {})
        if self._exchange != (number, op):
            self._exchange, self._summed = (number, op), False
            if self.w.world.link_is_slow():
                self.w.world.reach("a member gave up a slow link")
                self._lost(number, "a member cannot be reached any more")
                return
            self.w.post(ReadHeader())
            carry = self.w.p.carry
            assert carry is not None
            mine[("header", op)] = ({node: self.w.sums[node] for node in self.w.p.roots}, carry)
            self.w.world.hook("header", self.w)
            self._to_all(ring, ("header", op))
        for phase in ("header", "slice"):
            key = (phase, op)
            missing = [worker for worker in ring.ids if key not in self._frames.get((number, worker), {})]
            if missing:
                if any(self._frames.get((number, worker), {}).keys() & _ENDS for worker in missing):
                    self._lost(number, f"{missing[0]} is gone")
                return
            if phase == "header" and not self._summed:
                self._summed = True
                headers = {worker: cast(Header, self._frames[(number, worker)][key]) for worker in ring.ids}
                self.w.after(0, 0.001, lambda: self._post(HeadersHeld(number, op)))
                mine[("slice", op)] = (
                    self.w.world.judge.total(self.w, op, headers),
                    tuple(headers[w][1] for w in ring.ids),
                )
                self._hook_summed(op, [carried for _, carried in headers.values()])
                self._to_all(ring, ("slice", op))
        result, carried = cast(tuple[Sum, tuple[tuple[int, ...], ...]], mine[("slice", op)])
        self.w.world.judge.agree(self.w, [self._frames[(number, w)][("slice", op)][0] for w in ring.ids])  # type: ignore[index]
        self.w.world.paths.read(self.w, carried)
        self._exchange = None
        for worker in ring.ids:
            for phase in ("header", "slice"):
                self._frames[(number, worker)].pop((phase, op))
        self.w.work(0, 0.002, lambda: self.w.obtained(Obtained(number, carried), result))

    def _hook_summed(self, op: int, carried: list[tuple[int, ...]]) -> None:
        """Named after what follows: the end of the script, or a planned generation that takes effect."""
        self.w.world.hook("summed" if op < self.w.script.last else "last_summed", self.w)
        if set(carried[0]).intersection(*carried):
            self.w.world.hook("effect_summed", self.w)

    def _post(self, event: HeadersHeld | LinksClosed | RingFailed | RingLost) -> None:
        self.w.post(event)

    def _lost(self, number: int, because: str) -> None:
        """The exchange ends here; before that is said somebody else may have ended the ring."""
        self._exchange = None
        self.w.work(0, 0.001, lambda: self._post(RingLost(number, because)))

    def _to_all(self, ring: Generation, key: tuple[str, int]) -> None:
        content = self._frames[(ring.number, self.w.me)][key]
        for peer in ring.ids:
            if peer != self.w.me:
                self.send(ring.number, peer, key, content)

    def check_acknowledgements(self) -> None:
        wanted = self.awaited
        if wanted is None:
            return
        frames = {worker: self._frames.get((wanted.generation, worker), {}) for worker in wanted.of}
        missing = [worker for worker, got in frames.items() if ("ack", wanted.op) not in got]
        if not missing:
            self.awaited = None
            self.w.post(Acknowledged())
        elif any(frames[worker].keys() & _ENDS for worker in missing):
            self.awaited = None
            self.w.post(RingLost(wanted.generation, f"{missing[0]} is gone without its acknowledgement"))
