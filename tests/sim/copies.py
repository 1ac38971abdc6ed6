"""What a member gives to others and takes from them: results, and, as the donor, its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from elastic.protocol import worker_state
from elastic.protocol.worker_state import CopyBegun, CopyEnded, Fetched, FetchFailed, Phase
from tests.sim.script import Sum
from tests.sim.training import Copy

if TYPE_CHECKING:
    from tests.sim.worker import Worker


class Copies:
    def __init__(self, worker: Worker) -> None:
        self.w = worker
        self.serving: set[str] = set()
        """Newcomers to which a copy of the state is on its way."""
        self._followers: dict[str, int] = {}
        """Newcomer -> the first operation whose result it needs."""
        self._log: dict[int, Sum] = {}

    def completed(self, op: int, result: Sum) -> None:
        if self._followers:
            self._log[op] = result

    def fetch(self, source: str, op: int) -> None:
        """By who is behind."""
        w, world = self.w, self.w.world
        w.busy = True

        def got(result: object) -> None:
            w.after(0, slow_s, lambda: arrived(result))

        def arrived(result: object) -> None:
            w.busy = False
            if result is None and w.cannot_redo(op):  # once more, or what another generation says
                world.reach("a result of a round could not be copied")
                w.work(0.2, 0.5, lambda: None)
            elif result is None:
                world.reach("a result copy failed")
                w.post(FetchFailed(op))
            else:
                w.complete(Fetched(op), result)  # type: ignore[arg-type]
            w.wake()

        world.hook("fetch", w)
        slow_s = 0.1 if world.clock.chance(0.2) else 0.0
        trouble = world.clock.chance(world.copy_trouble)
        w.ask(source, lambda other, reply: reply(None if trouble else other.results.get(op)), got)

    def serve(self, newcomer: Worker, follow: bool, reply: Callable[[object], None]) -> None:
        """A donor's window is from the beginning of a joinable operation to the end of its collecting phase.

        follow: the newcomer is told the results from there on also where it could count as a holder of the state. So it
        is if early calls in this step may bind it to another one."""
        w, world = self.w, self.w.world
        if not self._may_copy(newcomer.me):
            reply(None)
            return
        assert w.p.record is not None
        op, state, waited_for = w.p.reduced, w.state, w.p.record.hold
        held = not waited_for and (world.scene.short_log or world.clock.chance(0.5))
        operation, meta = w.script.operations[op], w.training.meta
        early = meta.early_in(operation.step) if meta is not None and meta.step == operation.step else {}
        follow = follow or bool(early)
        if held or follow:
            self._followers[newcomer.me] = op
        if not held:  # else the window waits until the copy to be held is made
            w.post(CopyBegun(newcomer.me))
            world.hook("copy_begun", w)

        self.serving.add(newcomer.me)

        def sent() -> None:
            self.serving.discard(newcomer.me)
            in_window = w.p.phase is Phase.COLLECTING and w.p.reduced == op and w.applied == op
            if newcomer.alive and (held or in_window) and not world.clock.chance(world.copy_trouble):
                if follow and not held:
                    w.post(CopyEnded(newcomer.me, op, False))
                reply(Copy(op, state, w.me, held or follow, waited_for, early))
                return
            world.reach("a state copy failed")
            if not held:
                w.post(CopyEnded(newcomer.me, op, False))
            reply(None)

        w.after(0.005, 0.15 if not held else 0.6, sent)

    def _may_copy(self, newcomer: str) -> bool:
        p = self.w.p
        wanted = p.newest_pending is not None and p.newest_pending.member(newcomer) is not None
        collecting = p.joinable and p.phase is Phase.COLLECTING and p.carry is None
        return p.donor and wanted and collecting and not p.quiesced

    def next_result(self, newcomer: str, op: int, join: bool, base: int) -> tuple[str, Sum | None]:
        """As {"want": "next"} of runtime/worker/donor.py."""
        p = self.w.p
        if join and self._may_hold(newcomer, op, base):
            self._followers[newcomer] = op
            self.w.post(CopyBegun(newcomer))
            self.w.post(CopyEnded(newcomer, op, True))
            return "now", None
        waits = p.joinable and p.phase is Phase.COLLECTING and p.record is not None and p.record.hold
        if not join and op == p.reduced and waits:
            self.w.world.reach("a step began to wait for a newcomer that went through it")
            return "refused", None
        if not p.donor or op >= p.reduced:
            if p.donor and not join:
                self._followers.setdefault(newcomer, op)
            return "later", None
        if self.w.world.scene.short_log:
            self._followers.pop(newcomer, None)
        if newcomer in self._followers and op in self._log:
            return "result", self._log[op]
        if op == p.kept and op in self.w.results:
            self.w.world.reach("a newcomer took over a result that was kept for nobody")
            self._followers[newcomer] = p.reduced
            return "result", self.w.results[op]
        return "refused", None

    def verified(self, newcomer: str, op: int, base: int) -> None:
        self.w.post(CopyEnded(newcomer, op, self._knows(base)))

    def _may_hold(self, newcomer: str, op: int, base: int) -> bool:
        return op == self.w.p.reduced and self._may_copy(newcomer) and self._knows(base)

    def _knows(self, base: int) -> bool:
        return self.w.p.record is not None and self.w.p.record.base == base

    def outcome(self, newcomer: str, op: int, base: int) -> object:
        """What became of operation op: None if not known, else the generation that took effect, and the result. If it
        is in progress, the newcomer counts as a holder of its state: as {"want": "outcome"} of runtime/worker/donor.py.
        """
        if newcomer not in self.w.p.holders and self._may_hold(newcomer, op, base):
            self.w.world.reach("a newcomer whose word was lost counts as a holder when it asks again")
            self.w.post(CopyBegun(newcomer))
            self.w.post(CopyEnded(newcomer, op, True))
        number = worker_state.outcome(self.w.p, op)
        return None if number is None else (number, self.w.results.get(op))
