"""When a member keeps its state outside its process, and what a revived job's member begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.checkpoints.naming import PERIODIC, TOKEN_DIGITS, EntryName
from elastic.protocol.messages import CheckpointComplete, Pointed
from elastic.protocol.worker_id import node_of
from tests.sim.memory import Kept
from tests.sim.training import Meta

if TYPE_CHECKING:
    from tests.sim.worker import Worker


class Keeping:
    def __init__(self, worker: Worker) -> None:
        self.w = worker
        self._writing = False
        self.begun_from: Kept | None = None
        """What this process of a revived job has begun with."""

    def before_step(self, moment: Meta) -> None:
        """A step is handed out: everybody's state is the same now."""
        w, clock = self.w, self.w.world.clock
        assert w.p.record is not None
        operation = w.script.operations[w.p.reduced]
        name = EntryName(operation.place, 0, w.p.record.number, w.p.record.token[:TOKEN_DIGITS])
        kept = Kept(operation.place, w.state, moment)
        if w.world.scene.rounds is not None:
            w.world.judge.rounds.kept(str(name), w.state)
        every = w.world.scene.snapshot_every
        if every and operation.place % every == 0 and not self._writing:
            here = tuple(worker for worker in w.p.record.ids if node_of(worker) == w.agent.node)
            self._writing = True
            w.after(0.001, 0.1, lambda: self._snapshot(name, here, kept))
        if w.p.donor and clock.chance(w.world.scene.checkpoints):
            w.after(0.01, 3.0, lambda: self._checkpoint(name, kept))

    def _snapshot(self, name: EntryName, here: tuple[str, ...], kept: Kept) -> None:
        self._writing = False
        self.w.agent.memory.write(name, self.w.me, here, kept)

    def _checkpoint(self, name: EntryName, kept: Kept) -> None:
        """Durable now, whoever is a member by now."""
        if self.w.world.clock.chance(0.1):
            self.w.say(CheckpointComplete(self.w.me, PERIODIC, "what is no name"))
            return
        self.w.world.storage.write(name, kept)
        self.w.say(CheckpointComplete(self.w.me, PERIODIC, str(name)))

    def pointed(self, order: Pointed) -> None:
        if order.holds:
            self.w.world.storage.prune(order.entry)

    def find(self, entry: str) -> Kept | None:
        """A snapshot, if it is the newest of this node, or a checkpoint."""
        memory = self.w.agent.memory
        return memory.read(entry) if memory.newest == entry else self.w.world.storage.read(entry)

    def restore(self, entry: str) -> int:
        kept = self.begun_from = self.find(entry)
        assert kept is not None, f"{self.w.me} is to go on from {entry}, which neither its node nor the storage has"
        return kept.state
