"""The rings of one worker: rings being built, the ring in use, and old rings that are not closed yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from elastic.config import RingKind
from elastic.errors import BuildFailed, ConfigError, DeviceHung, GenerationEnded, RingBroken
from elastic.protocol.messages import Generation
from elastic.protocol.worker_state import Event, LinksClosed, RingBuilt, RingFailed
from runtime.allreduce.ring.abandonable_call import result_of
from runtime.allreduce.ring.frames import PeerLink
from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.ring import Peer, Ring
from runtime.allreduce.ring.ring_builder import RingSpec, build
from runtime.allreduce.ring.transport import Meet, Meeting, Transport
from runtime.script_end import TorchThread

FAILURES_MAX = 3
"""How often in a row the mesh may connect the members while their transports fail."""


class Rings:
    """Called under the lock of SharedWorkerState, except `get` and `check`. Each generation is built in a thread of its
    own. kind: what was asked for. meet: connects transports of that kind; None: the mesh carries everything."""

    def __init__(
        self,
        listener: Listener,
        job: str,
        me: str,
        build_s: float,
        kind: RingKind = RingKind.TCP,
        meet: Meet | None = None,
    ) -> None:
        self._listener = listener
        self._job = job
        self._me = me
        self._build_s = build_s
        self._kind = kind
        self._meet = meet
        self._failures: list[BuildFailed] = []
        """The failures of transports since a transport was last connected."""
        self.on_hung: Callable[[DeviceHung], object] = lambda hung: None
        """Called on the thread that builds, and ends a worker's process: the user's thread may wait for the same
        device, and never come to `check`."""
        self._lock = threading.Lock()
        self._rings: dict[int, Ring] = {}
        self._building: dict[int, threading.Event] = {}
        self._retired: dict[int, int] = {}
        self._left: Ring | None = None
        """The ring of the generation entered, after it was left."""

    def get(self, generation: int) -> Ring | None:
        with self._lock:
            return self._rings.get(generation)

    def check(self) -> None:
        """Raise ConfigError if another try is of no use."""
        with self._lock:
            if len(self._failures) >= FAILURES_MAX:
                last = self._failures[-1]
                raise ConfigError(
                    f"this ring cannot send the gradients: {last}; start the job with --ring tcp"
                ) from last

    def build(self, generation: Generation, post: Callable[[Event], object]) -> None:
        """Start building; posts RingBuilt or RingFailed, or nothing if it was aborted or retired meanwhile."""
        cancelled = threading.Event()
        with self._lock:
            self._building[generation.number] = cancelled
            left, self._left = self._left, None
        name = f"ring-{generation.number}"
        TorchThread(target=self._build, args=(generation, left, cancelled, post), name=name).start()

    def _build(
        self, generation: Generation, left: Ring | None, cancelled: threading.Event, post: Callable[[Event], object]
    ) -> None:
        """left: the ring before, whose connections are kept as far as they can be."""
        kept: dict[str, PeerLink] = {}
        if left is not None:
            kept = left.hand_over(generation.ids)
            _close_all([left])
        try:
            ring = self._connect(generation, kept, cancelled)
        except (BuildFailed, DeviceHung, OSError) as failed:  # an OSError: no descriptor is left, say
            with self._lock:
                self._building.pop(generation.number, None)
            if isinstance(failed, DeviceHung):
                self.on_hung(failed)
            if not cancelled.is_set():
                unreachable = failed.unreachable if isinstance(failed, BuildFailed) else ()
                post(RingFailed(generation.number, unreachable, "" if unreachable else str(failed)))
            return
        except GenerationEnded:
            return
        finally:
            for unused in kept.values():
                unused.close()
        with self._lock:
            self._building.pop(generation.number, None)
            if not cancelled.is_set():
                self._rings[generation.number] = ring
        if cancelled.is_set():
            ring.close()
        else:
            post(RingBuilt(generation.number))

    def _connect(self, generation: Generation, kept: dict[str, PeerLink], cancelled: threading.Event) -> Ring:
        """The mesh, with its transport if there is one. Raises BuildFailed and GenerationEnded."""
        if self._meet is None:
            return self._mesh(generation, kept, cancelled, "")
        with self._meet(generation.number, generation.ids, generation.ids.index(self._me)) as meeting:
            ring = self._mesh(generation, kept, cancelled, meeting.offer)
            try:
                if cancelled.is_set():
                    raise GenerationEnded(f"generation {generation.number} ended while its ring was built")
                self._carry(ring, meeting, cancelled)
            except BaseException as error:
                ring.close()
                if isinstance(error, BuildFailed) and not cancelled.is_set():
                    with self._lock:
                        self._failures.append(error)
                raise
        with self._lock:
            self._failures.clear()
        return ring

    def _carry(self, ring: Ring, meeting: Meeting, cancelled: threading.Event) -> None:
        """Connect the members' transports, in a thread of its own: while it waits for a lost member nothing can
        interrupt it, and the generation may be over. Raises BuildFailed and GenerationEnded."""
        name = f"transport-{ring.generation}"
        ring.transport = result_of(name, lambda: meeting.connect(ring.offer), unwanted=cancelled, late=_close)
        ring.because = meeting.because
        if cancelled.is_set():
            meeting.abort()
            raise GenerationEnded(f"generation {ring.generation} ended while its transports were connected")

    def _mesh(self, generation: Generation, kept: dict[str, PeerLink], cancelled: threading.Event, offer: str) -> Ring:
        peers = [Peer(member.worker_id, member.host, member.port) for member in generation.members]
        spec = RingSpec(
            job=self._job,
            generation=generation.number,
            base=generation.base,
            me=self._me,
            peers=peers,
            plan=generation.digest(),
            token=generation.token,
            offer=offer,
        )
        return build(self._listener, spec, deadline_s=self._build_s, cancelled=cancelled, kept=kept)

    def closed(self, generation: int) -> tuple[str, ...]:
        """See `Ring.closed_by_peers`; () if there is no such ring."""
        ring = self.get(generation)
        return ring.closed_by_peers() if ring is not None else ()

    def abort(self, entered: int, post: Callable[[Event], object]) -> bool:
        """Free threads that are blocked in any ring, at once. Rings are closed in the background, except the ring of
        the generation entered, whose connections stay open until the next one is built: LinksClosed is posted whenever
        another peer has closed its end. So members that leave their ring by order are not taken for gone."""
        with self._lock:
            rings, self._rings, self._retired = self._rings, {}, {}
            for cancelled in self._building.values():
                cancelled.set()
            self._building = {}
            left = rings.get(entered)
            self._left = left or self._left
        for ring in rings.values():
            ring.abort()
        if left is not None:
            threading.Thread(target=_watch, args=(left, post), name="ring-ends", daemon=True).start()
        _close_all([ring for ring in rings.values() if ring is not left])
        return bool(rings)

    def retire(self, generation: int, until: int) -> None:
        with self._lock:
            self._retired[generation] = until

    def close_retired(self, op: int) -> None:
        """Close the rings that had to stay open until the headers of operation ``op`` or an earlier one came. What is
        still being built ends, or is closed by its builder."""
        with self._lock:
            numbers = [number for number, until in self._retired.items() if until <= op]
            rings = [ring for number in numbers if (ring := self._rings.pop(number, None))]
            for number in numbers:
                del self._retired[number]
                if cancelled := self._building.pop(number, None):
                    cancelled.set()
        _close_all(rings)

    def carries(self, generation: int) -> tuple[str, str]:
        """(what carries that ring's gradients, as in --ring; why not what was asked for). ("", ""): no ring."""
        ring = self.get(generation)
        if ring is None:
            return "", ""
        return str(RingKind.TCP if ring.transport is None else self._kind), ring.because

    def acknowledge(self, generation: int, op: int, to: Sequence[str]) -> None:
        """Tell leaving members that this worker holds the result; a member that is gone is no error."""
        if (ring := self.get(generation)) is not None:
            with suppress(RingBroken):
                ring.acknowledge(op, to)


def _close(transport: Transport | None) -> None:
    if transport is not None:
        transport.close()


def _watch(ring: Ring, post: Callable[[Event], object]) -> None:
    for closed in ring.watch_ends():
        post(LinksClosed(ring.generation, closed))


def _close_all(rings: Iterable[Ring]) -> None:
    """Close rings in the background, because a ring may be in use."""
    if closing := list(rings):
        TorchThread(target=_close_each, args=(closing,), name="ring-close").start()


def _close_each(rings: Sequence[Ring]) -> None:
    for ring in rings:
        ring.close()
