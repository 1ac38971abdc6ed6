"""Where this worker stands, shared by its threads: the state machine, one lock, and the effects of its actions.

The user's thread posts what it has computed, the control thread posts orders, builder threads post their rings. Each
`post` steps the machine and performs its actions under the lock, in order: a report follows the abort of every ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from elastic.protocol import worker_state
from elastic.protocol.messages import Kind, Quiesce, Report, RingUp, Word
from elastic.protocol.reduction_tree import Node
from elastic.records.journal import Journal
from runtime.allreduce.reduction.flat_pool import CPU
from runtime.allreduce.reduction.partial_sum import Partial, fold, siblings
from runtime.allreduce.ring.ring_set import Rings
from runtime.recovery.state.host_bytes import DONE, StreamMark

RESULT_POOL_MAX = 2


class SharedWorkerState:
    """All fields are read and written while holding `changed`."""

    def __init__(
        self, me: str, rings: Rings, say: Callable[[Word], None], journal: Journal, sums_on: torch.device = CPU
    ) -> None:
        """sums_on: the device of the tensors of results."""
        self.changed = threading.Condition(threading.RLock())
        self.position = worker_state.WorkerState(me)
        self.result: Partial | None = None
        """The result of operation ``position.kept``."""
        self.mark = DONE
        """Behind what the tensors of that result are complete, on a GPU."""
        self._shared = False
        self.served = 0
        """Number of threads that are sending the result's tensors now: until 0 they are not reused."""
        self.acknowledgements: worker_state.AwaitAcknowledgements | None = None
        self.sums_on = sums_on
        self._rings = rings
        self._say = say
        self._journal = journal
        self._held: dict[Node, Partial] = {}
        self._pool: list[dict[str, torch.Tensor]] = []

    def post(self, event: worker_state.Event) -> worker_state.WorkerState:
        """Step the machine; returns the state after the step. Wakes every waiter."""
        with self.changed:
            # Before the ring is left, so that the first report names the members that are gone already.
            if isinstance(event, Quiesce) and (closed := self._rings.closed(self.position.entered)):
                self.position, _ = worker_state.step(
                    self.position, worker_state.LinksClosed(self.position.entered, closed)
                )
            before = self.position
            self.position, actions = worker_state.step(before, event)
            self._note(before, self.position)
            for action in actions:
                self._perform(action)
            self.changed.notify_all()
            return self.position

    def _perform(self, action: worker_state.Action) -> None:
        match action:
            case worker_state.AbortRings():
                if self._rings.abort(self.position.entered, self.post):
                    self._journal.write("ring_aborted", generation=self.position.entered)
            case worker_state.BuildRing(generation):
                self._rings.build(generation, self.post)
            case worker_state.RetireRing(generation, until):
                self._rings.retire(generation, until)
            case worker_state.CloseRetired(op):
                self._rings.close_retired(op)
            case worker_state.Acknowledge(generation, op, to):
                self._rings.acknowledge(generation, op, to)
            case worker_state.AwaitAcknowledgements():
                self.acknowledgements = action
            case worker_state.FreeResult():
                self._free_result()
            case worker_state.DropRoots(keep):
                self._held = {node: partial for node, partial in self._held.items() if node in keep}
            case worker_state.Say(word):
                if isinstance(word, Report):
                    self._journal.write("reported", generation=word.entered, reduced=word.reduced)
                if isinstance(word, RingUp):
                    over, because = self._rings.carries(word.generation)
                    self._journal.write("ring_up", generation=word.generation, over=over, because=because)
                self._say(word)
            case worker_state.Leave(because):
                self._journal.write("fenced", generation=self.position.entered, because=because)

    def _note(self, before: worker_state.WorkerState, after: worker_state.WorkerState) -> None:
        if after.entered != before.entered and after.record is not None:
            record = after.record
            self._journal.write(
                "entered",
                generation=record.number,
                kind=str(record.kind),
                members=list(record.ids),
                rank=record.ids.index(after.me),
                reduced=after.reduced,
            )
            if record.kind is Kind.LOSS and after.phase is worker_state.Phase.COLLECTING:
                self._journal.write("redo_started", generation=record.number, op=after.reduced)

    # ------------------------------------------------------------------------------------------ partial sums

    def unit_done(self, leaf: Partial) -> None:
        """Fold a leaf with the held siblings. The fold runs outside the lock and never writes into a held root: until
        it is committed the unit counts as running, and a plan may take its siblings away."""
        with self.changed:
            units, held = self.position.units, dict(self._held)
        new, chain = leaf, siblings(leaf.node, held, units).chain
        consumed = [sibling for sibling, _ in chain]
        for sibling, is_left in chain:
            new = fold(sibling, new, into=new) if is_left else fold(new, sibling, into=new)
        with self.changed:
            after = self.post(worker_state.Done(leaf.lo, new.node, tuple(partial.node for partial in consumed)))
            if new.node in after.roots and new.node not in self._held:
                self._held[new.node] = new
                for partial in consumed:
                    del self._held[partial.node]

    def roots(self) -> list[Partial]:
        with self.changed:
            return [self._held[node] for node in self.position.roots]

    # ----------------------------------------------------------------------------------------------- results

    def result_buffer(self, groups: dict[str, int]) -> dict[str, torch.Tensor]:
        """Tensors for the next result; reused, because new memory of this size costs page faults."""
        with self.changed:
            while self._pool:
                flats = self._pool.pop()
                fits = all(flat.device == self.sums_on for flat in flats.values())
                if fits and {name: flat.numel() for name, flat in flats.items()} == groups:
                    return flats
        return {
            name: torch.empty(size, dtype=getattr(torch, name), device=self.sums_on) for name, size in groups.items()
        }

    def keep(self, result: Partial, mark: StreamMark = DONE, *, shared: bool = False) -> None:
        """Keep a result, and drop all partial sums: the operation is complete. mark: behind what it is. shared: another
        object holds its tensors for longer; then they are not reused."""
        with self.changed:
            self._free_result()
            self.result, self.mark, self._shared = result, mark, shared
            self._held.clear()

    def give_back(self, flats: dict[str, torch.Tensor]) -> None:
        """Take back a result buffer that was not filled, because the exchange was broken off."""
        with self.changed:
            if flats and len(self._pool) < RESULT_POOL_MAX:
                self._pool.append(flats)

    def _free_result(self) -> None:
        if self.result is not None and not self.served and not self._shared:
            self.give_back(self.result.flats)
        self.result = None
