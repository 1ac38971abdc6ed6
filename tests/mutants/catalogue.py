"""The mutants: which module gets which defect, which faults bring it out, and which invariant has to find it.

A defect shows only when something fails, as the dangerous ones do. The quiet run is that of the sound product.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from chaos_tests.failpoints.import_patch import Patch


@dataclass(frozen=True, slots=True)
class Mutant:
    """faults: kinds, injected one after the other, gap_s apart. rounds: of a job whose script runs in rounds."""

    module: str
    patch: Patch
    caught_by: str
    faults: tuple[str, ...] = ("kill", "kill-rank-0", "kill")
    gap_s: float = 3.0
    rounds: bool = False


def _first_redone(shared: Any, leaf: Any) -> bool:
    """Whether this is the first shard of a pass that is computed after a loss, in this generation."""
    p = shared.position
    leaf.settle()
    if p.record is None or str(p.record.kind) != "loss" or p.record.plan.op != p.reduced or not leaf.flats:
        return False
    first = getattr(shared, "mutated", 0) != p.record.number
    shared.mutated = p.record.number
    return bool(first)


def dropped_shard(module: Any) -> None:
    """A shard that is computed again after a loss counts for nothing."""
    sound = module.SharedWorkerState.unit_done

    def unit_done(self: Any, leaf: Any) -> None:
        if _first_redone(self, leaf):
            for flat in leaf.flats.values():
                flat.zero_()
            leaf.weight, leaf.scalars = 0.0, {}
        sound(self, leaf)

    module.SharedWorkerState.unit_done = unit_done


def shard_twice(module: Any) -> None:
    """A shard that is computed again after a loss counts twice."""
    sound = module.SharedWorkerState.unit_done

    def unit_done(self: Any, leaf: Any) -> None:
        if _first_redone(self, leaf):
            for flat in leaf.flats.values():
                flat.mul_(2)
            leaf.weight *= 2
            leaf.scalars = {name: (kind, 2 * total, 2 * w) for name, (kind, total, w) in leaf.scalars.items()}
        sound(self, leaf)

    module.SharedWorkerState.unit_done = unit_done


def unordered_sum(module: Any) -> None:
    """Partial sums are added in the order of ranks, and not along the tree."""

    def by_rank(terms: Any, units: int, nodes: Any) -> list[tuple[int, int]]:
        return [(0 if n == 1 else len(terms) + n - 2, n) for n in range(1, len(terms))]

    module.along_tree = by_rank


def rng_per_worker(module: Any) -> None:
    """Random numbers go on from shard to shard in a worker, and are not those of the shard."""
    sound = module.seed_shard

    def seed_shard(*position: int) -> int:
        state = module.torch.get_rng_state()
        derived = int(sound(*position))
        module.torch.set_rng_state(state)
        return derived

    module.seed_shard = seed_shard


def late_copy(module: Any) -> None:
    """The donor's copy for a newcomer is taken after the update that the newcomer will make itself."""

    def serve_state(self: Any, connection: Any, newcomer: str, follow: bool) -> None:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: self._may_copy(newcomer) or not shared.position.donor, 5.0)
            if not self._may_copy(newcomer):
                connection.send({"later": "no window here"})
                return
            number, window, carrier = shared.position.reduced, self.window, self.carrier
            op, about = window.op, self._about()
            shared.post(module.CopyBegun(newcomer))
            shared.post(module.CopyEnded(newcomer, number, True))
            shared.changed.wait_for(lambda: window.op is not op and window.is_open, 10.0)
        header, blobs = carrier.capture()
        connection.send({"op": number, **about, "state": header})
        module.send_parts(connection, module.HostBytes(blobs))

    module.CopyServer._serve_state = serve_state


def no_fencing(module: Any) -> None:
    """A worker that a later generation has left out stays."""
    sound = module.LeaderOrders.leave_if_over

    def leave_if_over(self: Any) -> None:
        if isinstance(self._over, module.messages.Close | module.messages.Release):
            sound(self)

    module.LeaderOrders.leave_if_over = leave_if_over


def stale_generation(module: Any) -> None:
    """A worker goes on in the name of the first generation it was in, and is believed."""
    sound = module.OperationLoop.generation

    def generation(self: Any) -> int:
        self.mutated = getattr(self, "mutated", 0) or int(sound.fget(self))
        return int(self.mutated)

    module.OperationLoop.generation = property(generation)


def double_commit(module: Any) -> None:
    """The step that was applied last is written once more when the ledger is closed."""
    sound = module.Ledger.close

    def close(self: Any) -> None:
        last = self._line_of(self.next_step - 1)
        os.write(self._file, module.json.dumps(last).encode() + b"\n")
        sound(self)

    module.Ledger.close = close


def restart_everybody(module: Any) -> None:
    """After a loss all but the oldest survivor start anew."""
    sound = module.LeaderOrders._published

    def published(self: Any, order: Any, generation: Any, *rest: Any) -> None:
        p = self._shared.position
        if str(generation.kind) == "loss" and p.entered and generation.ids[0] != p.me:
            os._exit(75)
        sound(self, order, generation, *rest)

    module.LeaderOrders._published = published


def torn_checkpoint(module: Any) -> None:
    """A part of a checkpoint is written once more, in place, when its note already says that it is there."""
    sound = module.Saver._write_part

    def write_part(self: Any, task: Any, rank: int) -> int:
        size = int(sound(self, task, rank))
        name = module.part_file(rank, task.place.world)
        path = os.path.join(self._storage.url, module.Series(self._storage, task.series).path(task.name, name))
        if os.path.exists(path):
            with open(path, "r+b") as file:
                content = file.read()
                file.truncate(len(content) // 2)
                time.sleep(0.3 + rank)  # so that some member finds all notes meanwhile
                file.seek(len(content) // 2)
                file.write(content[len(content) // 2 :])
        return size

    module.Saver._write_part = write_part


def no_eviction(module: Any) -> None:
    """Silence is never noticed."""
    module.Detector.judge = lambda self, now_s: {}


def script_stays(module: Any) -> None:
    """The script of the round before is not ended when the next round begins."""

    def end_script(self: Any, *, planned: bool) -> None:
        self._at.script = module.rounds.ScriptState.WAITING

    module.Supervisor._end_script = end_script


def wrong_world(module: Any) -> None:
    """Ranks are given in the order of names, and not in that of the generation."""
    sound = module.places
    module.places = lambda members, ranks: sound(sorted(members), ranks)


def stopped_unseen(module: Any) -> None:
    """Nobody looks whether a script is stopped."""
    module.ScriptWatch.look = lambda self, now_s: False


def orphans_stay(module: Any) -> None:
    """Only the script itself is ended, and not what it has started."""

    def children() -> set[int]:
        return set()

    module._children = children


def wrong_blame(module: Any) -> None:
    """Another worker than the one whose script has failed has to go."""
    sound = module.decide

    def decide(reports: Any, members: Any, *rest: Any, **options: Any) -> Any:
        found = sound(reports, members, *rest, **options)
        if isinstance(found, module.Blame):
            worker = members[(members.index(found.worker) + 1) % len(members)]
            return module.Blame(worker, found.failure)
        return found

    module.decide = decide


MUTANTS = {
    "dropped-shard": Mutant("runtime.worker.state_owner", dropped_shard, "I7"),
    "shard-twice": Mutant("runtime.worker.state_owner", shard_twice, "I7"),
    "unordered-sum": Mutant("runtime.allreduce.reduction.schedule", unordered_sum, "I10"),
    "rng-per-worker": Mutant("runtime.allreduce.reduction.gradient_harvest", rng_per_worker, "I10"),
    "late-copy": Mutant("runtime.worker.donor", late_copy, "I6", ("kill",)),
    "no-fencing": Mutant("runtime.worker.leader_orders", no_fencing, "I4", ("freeze-long",)),
    "stale-generation": Mutant("runtime.worker.operations", stale_generation, "I4", ("kill",)),
    "double-commit": Mutant("elastic.records.ledger", double_commit, "I5", ("kill",)),
    "restart-everybody": Mutant("runtime.worker.leader_orders", restart_everybody, "I13", ("kill",)),
    "torn-checkpoint": Mutant(
        "runtime.recovery.checkpoint.saver", torn_checkpoint, "I14", ("kill", "kill-in-checkpoint")
    ),
    "no-eviction": Mutant("elastic.protocol.failure_detector", no_eviction, "I11", ("freeze-for-good",)),
    "script-stays": Mutant("runtime.frontends.restart.supervisor", script_stays, "I18", ("kill",), rounds=True),
    "wrong-world": Mutant("runtime.frontends.restart.places", wrong_world, "I17", ("kill-rank-0",), rounds=True),
    "stopped-unseen": Mutant(
        "runtime.frontends.restart.script_watch", stopped_unseen, "I11", ("stop-script",), rounds=True
    ),
    "orphans-stay": Mutant("runtime.frontends.restart.script_host", orphans_stay, "I18", ("kill",), rounds=True),
    "wrong-blame": Mutant("runtime.frontends.restart.rounds", wrong_blame, "I13", ("kill-script",), rounds=True),
}
