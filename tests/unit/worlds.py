"""Several workers of one job in one process: threads that take turns, with a session which can lose and admit members.

One lock is held by whoever runs and given up only while waiting inside the session. So the global RNGs, which all
threads share, are never read by two at a time, and a run is as deterministic as one of processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch

from elastic.agent.worker.node_notice import NodeNotice
from elastic.checkpoints.naming import EntryName
from elastic.config import Compression, OuterOption, Reduction
from elastic.errors import JoinMissed, UsageError
from elastic.protocol.loop_state import Admitted, CopiedAnew, ResultTaken, Standing, WentAstray
from elastic.protocol.outer_round import Quorum
from elastic.protocol.reduction_tree import next_fold
from runtime.allreduce.reduction.partial_sum import Json, Partial, fold
from runtime.allreduce.reduction.schedule import Cut
from runtime.guards import checks
from runtime.recovery.state.training_state import Carrier, Values
from runtime.recovery.state.verification import Verification
from runtime.session import Copy, HomeRank, JoinMeta, LoopPlace, Op, OpKind, ScriptLoop, StepRecord

WAIT_S = 100.0
"""For what takes seconds on a quiet machine, and on a loaded one while a model is compiled."""


class Killed(BaseException):
    """This worker is gone; not an Exception, so that no script can catch it."""


@dataclass
class Contribution:
    op: Op
    fingerprint: dict[str, str]
    own: Json
    todo: list[int]
    held: dict[tuple[int, int], Partial] = field(default_factory=dict)
    waiting: bool = False


class World:
    """A fake of everything below Session. kills: worker -> (operation number, units computed before it dies)."""

    def __init__(
        self,
        workers: int,
        kills: Mapping[str, tuple[int, int]] | None = None,
        reduction: str = "exact",
        compression: str = "none",
        outer: str = "",
    ) -> None:
        self.reduction, self.compression = Reduction(reduction), Compression(compression)
        self.outer = OuterOption.parse(outer)
        self.lock = threading.Condition()
        self.members = [f"w{i}" for i in range(workers)]
        self.kills = dict(kills or {})
        self.sessions: dict[str, FakeMember] = {}
        self.open: dict[str, Contribution] = {}
        self.results: dict[int, Partial] = {}
        self.ops: dict[int, Op] = {}
        self.fingerprints: dict[int, dict[str, str]] = {}
        self.number = 0
        self.newcomers: list[str] = []
        self.asked_at = 0
        self.asked: JoinMeta | None = None
        self.errors: dict[str, BaseException] = {}
        self.digests: dict[str, str] = {}
        self.joined_at: dict[str, int] = {}
        self.late: set[tuple[str, int]] = set()
        """Worker and operation, a round with a quorum, that is over while the worker still computes."""
        self.dies_amid = False
        """Whether a worker dies only when all members have begun the operation: what it owned is then known to all."""
        self.failure: UsageError | None = None
        """What all members raise: they disagree."""

    def run(
        self,
        script: Callable[[FakeMember], str],
        newcomers: int | Sequence[tuple[int, int]] = 0,
        asked_at: int = 0,
        admit_at: int = 0,
        copy_at: int | None = None,
    ) -> None:
        """Run the script in every worker. Newcomers learn of step asked_at, and enter in step admit_at; they copy the
        state of that step, or of an earlier one, copy_at, and take over results from there on. newcomers: their number,
        or (copy_at, admit_at) of each."""
        self.asked_at = asked_at
        if isinstance(newcomers, int):
            newcomers = [(admit_at if copy_at is None else copy_at, admit_at)] * newcomers
        names = self.members + [f"n{i}" for i in range(len(newcomers))]
        self.newcomers = names[len(self.members) :]
        threads = []
        for name in names:
            self.sessions[name] = session = FakeMember(self, name, joining=name in self.newcomers)
            if session.worker_id in self.newcomers:
                session.copy_at, session.admit_at = newcomers[self.newcomers.index(name)]
            threads.append(threading.Thread(target=self._run_one, args=(script, name), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), f"{thread.name} hangs"

    def _run_one(self, script: Callable[[FakeMember], str], name: str) -> None:
        with self.lock:
            try:
                self.digests[name] = script(self.sessions[name])
            except BaseException as error:
                self.errors[name] = error
            self.remove(name)

    def remove(self, name: str) -> None:
        if name in self.members:
            self.members.remove(name)
            self.open.pop(name, None)
            self.hand_out_orphans()
        if name in self.newcomers:
            self.newcomers.remove(name)
        self.lock.notify_all()

    def hand_out_orphans(self) -> None:
        """Units that a dead worker took along go to the survivors that wait for it."""
        if not self.open or set(self.open) != set(self.members):
            return
        ops = {part.op for part in self.open.values()}
        if len(ops) > 1:
            return
        units = ops.pop().units
        present = {unit for part in self.open.values() for lo, hi in part.held for unit in range(lo, hi)}
        present |= {unit for part in self.open.values() for unit in part.todo}
        for i, unit in enumerate(sorted(set(range(units)) - present)):
            part = self.open[self.members[i % len(self.members)]]
            part.todo.append(unit)
        self.lock.notify_all()  # some of them wait already

    def complete(self) -> bool:
        """All members have delivered everything: make the result. Raises what a real session would."""
        if set(self.open) != set(self.members) or any(part.todo or not part.waiting for part in self.open.values()):
            return False
        ops = {name: part.op for name, part in self.open.items()}
        if len(set(ops.values())) > 1:
            self.fail(checks.disagreement(ops, self.members[0]))
        op = ops[self.members[0]]
        fingerprints = {name: part.fingerprint for name, part in self.open.items()}
        if len({tuple(sorted(values.items())) for values in fingerprints.values()}) > 1:
            self.fail(checks.disagree(fingerprints, op))
        newcomers = [self.sessions[name] for name in self.newcomers] if op.joinable else []
        if any(op.step in (newcomer.copy_at, newcomer.admit_at) and not newcomer.ready for newcomer in newcomers):
            return False
        for member in self.members:
            self.sessions[member].state_given &= not op.joinable
        held = {node: copied(partial) for part in self.open.values() for node, partial in part.held.items()}
        while (pair := next_fold(held, op.units)) is not None:
            left, right, above = pair
            held[above] = fold(held.pop(left), held.pop(right))
        self.results[self.number] = result = held.pop((0, op.units))
        self.ops[self.number], self.fingerprints[self.number] = op, fingerprints[self.members[0]]
        if op.kind is OpKind.ALLREDUCE:
            result.note = {name: part.own for name, part in self.open.items()}
        assert not held, "a unit was computed twice"
        for newcomer in newcomers:
            if op.step == newcomer.copy_at:
                self.send_state(op, newcomer)
            if op.step == newcomer.admit_at:
                self.admit(op, newcomer)
        self.number += 1
        self.open.clear()
        self.lock.notify_all()
        return True

    def fail(self, error: UsageError) -> NoReturn:
        self.failure = error
        self.lock.notify_all()
        raise error

    def send_state(self, op: Op, newcomer: FakeMember) -> None:
        donor = self.sessions[self.members[0]]
        donor.state_given = True
        header, blobs = donor.carrier.capture()
        early = donor.published.early_in(op.step)
        told = donor.published
        newcomer.copy = Copy(op, header, [blob.clone() for blob in blobs], told.state, early, told.stop)
        newcomer.script.stop = told.stop
        newcomer.copied, newcomer.number = op, self.number
        if newcomer.bound_to in (None, op.step) or not (newcomer.script.at.bound or early):
            newcomer.carrier.load(header, newcomer.copy.blobs)
        else:
            newcomer.bound_to = None
            newcomer.script.post(WentAstray())
            newcomer.copy_at, newcomer.admit_at = op.step + 1, op.step + 2

    def admit(self, op: Op, newcomer: FakeMember) -> None:
        donor = self.sessions[self.members[0]].carrier
        assert newcomer.number == self.number
        assert newcomer.carrier.digest() == donor.digest()
        newcomer.script.post(Admitted())
        self.newcomers.remove(newcomer.worker_id)
        self.members.append(newcomer.worker_id)
        self.joined_at[newcomer.worker_id] = op.step


class FakeMember:
    """Session of one thread."""

    alone = False
    local_rank = 0
    restarted = False
    sums_on = torch.device("cpu")
    verification = Verification()

    def __init__(self, world: World, name: str, joining: bool) -> None:
        self.world = world
        self.reduction, self.compression, self.outer = world.reduction, world.compression, world.outer
        self.worker_id = name
        self.script = ScriptLoop(newcomer=joining)
        self.waiting = False
        self.copied: Op | None = None
        self.copy: Copy | None = None
        self.copy_at = self.admit_at = 0
        """Steps, as in World.run; later ones once it had been bound to another step."""
        self.bound_to: int | None = None
        self.published: JoinMeta
        self.number = 0
        self.begun: tuple[Op, dict[str, str]] | None = None
        self.carrier: Carrier
        self.state_given = self.asked_to_hold = False
        self.records: list[StepRecord] = []
        self.notes: list[tuple[str, dict[str, object]]] = []
        self.failures: list[tuple[BaseException, int, int | None]] = []
        self.computed = 0

    @property
    def ready(self) -> bool:
        """It waits in `join`, at the state of the operation in progress or with none."""
        return self.waiting and (self.copied is None or self.number == self.world.number)

    @property
    def rank(self) -> int:
        return self.world.members.index(self.worker_id) if self.worker_id in self.world.members else 99

    @property
    def home(self) -> HomeRank:
        return HomeRank(int(self.worker_id[1:]), 0, 1)

    @property
    def world_size(self) -> int:
        return len(self.world.members)

    @property
    def generation(self) -> int:
        return 1

    def owned(self, units: int) -> tuple[int, ...] | None:
        if self.worker_id not in self.world.members:
            return None
        if units < self.world_size:
            return (self.rank,) if self.rank < units else ()
        return tuple(unit for unit in range(units) if unit * self.world_size // units == self.rank)

    because = ""
    began = ""
    pauses = False
    parting = False
    due = False
    may_part = True
    going: NodeNotice | None = None

    def leave_if_over(self) -> None:
        """Nobody is expelled here."""

    def before_leaving(self, call: Callable[[], None]) -> None:
        """Nobody is drained here."""

    def place(self) -> LoopPlace:
        return LoopPlace(1, self.rank, tuple(self.world.members), "0" * 32)

    def note(self, event: str, **fields: object) -> None:
        self.notes.append((event, fields))

    def point(self, series: str, name: EntryName, answer: Callable[[bool], None]) -> None:
        answer(True)

    def unreadable(self, entry: EntryName, because: str, *, memory: bool, instead: EntryName | None) -> None:
        """Nobody takes its place."""

    def attach(self, carrier: Carrier) -> None:
        self.carrier = carrier

    def publish(self, meta: JoinMeta | None) -> None:
        if meta is None:
            return
        self.published = meta
        if meta.step == self.world.asked_at and not self.script.at.joining:  # nobody asks a newcomer
            self.world.asked = meta
        self.world.lock.notify_all()

    def await_invitation(self) -> None:
        """There is a place for every newcomer."""

    def meta(self, until: Callable[[JoinMeta], bool] = bool) -> JoinMeta:
        world = self.world
        assert world.lock.wait_for(lambda: world.asked is not None and until(world.asked), WAIT_S)
        assert world.asked is not None
        return world.asked

    def registered_by_members(self, name: str) -> tuple[dict[str, Json], Sequence[torch.Tensor]]:
        world = self.world

        def registered() -> Mapping[str, object]:
            return world.sessions[world.members[0]].carrier.objects

        assert world.lock.wait_for(lambda: name in registered(), WAIT_S)
        alone = Carrier(Values())
        alone.register(None, **{name: registered()[name]})
        header, blobs = alone.capture()
        return header, [blob.clone() for blob in blobs]

    def join(self, here: Op, fingerprint: dict[str, str]) -> tuple[Op, Partial]:
        if self.script.at.behind:
            self.copied = here
        else:
            self.bound_to = here.step
        self.waiting = True
        self.world.lock.notify_all()
        result = self._take_over((here, fingerprint) if self.script.at.behind else None)
        assert self.copied is not None
        return self.copied, result

    def hold_to_join(self) -> None:
        """The members do not wait here: that is the harder case, and a real wait may end without a copy."""
        self.asked_to_hold = True

    def copy_anew(self) -> Copy:
        self.copied, self.copy, self.waiting = None, None, True
        self.world.lock.notify_all()
        assert self.world.lock.wait_for(lambda: self.copy is not None or not self.world.members, WAIT_S)
        if self.copy is None:
            raise JoinMissed("the job is over")
        self.waiting = False
        self.script.post(CopiedAnew(self.copy.op.step))
        return self.copy

    def _has_next(self) -> bool:
        return self.copied is not None and self.number in self.world.results

    def _take_over(self, here: tuple[Op, dict[str, str]] | None) -> Partial:
        """The result of the operation that this newcomer is at; here: what it would tell in `begin`, if it knows."""
        world = self.world
        assert world.lock.wait_for(lambda: self._has_next() or not world.members, WAIT_S)
        if not self._has_next():
            raise JoinMissed("the job is over")
        astray = self.script.at.standing is Standing.ASTRAY
        assert astray or here in (None, (world.ops[self.number], world.fingerprints[self.number]))
        self.waiting = False
        if self.worker_id not in world.members:
            self.script.post(ResultTaken())
        return self._take()

    def begin(
        self,
        op: Op,
        fingerprint: dict[str, str],
        groups: dict[str, int] | None = None,
        own: Json = None,
        cuts: Sequence[Cut] = (),
    ) -> None:
        self.begun = (op, fingerprint)
        if self.script.at.behind:
            return
        world = self.world
        todo = list(self.owned(op.units) or ())
        # Others may have begun when there were more members, and own by that count what would be ours now.
        taken = {unit for part in world.open.values() for unit in part.todo}
        taken |= {unit for part in world.open.values() for lo, hi in part.held for unit in range(lo, hi)}
        todo = [unit for unit in todo if unit not in taken]
        world.open[self.worker_id] = Contribution(op, dict(fingerprint), own, todo)
        self.computed = 0
        world.lock.notify_all()

    def send_early(self) -> None:
        """Nobody takes anything early here."""

    def next_unit(self) -> int | None:
        if self.script.at.behind:
            return None
        world, part = self.world, self.world.open[self.worker_id]
        if world.kills.get(self.worker_id) == (self.number, self.computed):
            if world.dies_amid:
                assert world.lock.wait_for(lambda: set(world.open) == set(world.members), WAIT_S)
            raise Killed(self.worker_id)
        part.waiting = False
        return part.todo[0] if part.todo else None

    @property
    def units_left(self) -> int:
        return len(self.world.open[self.worker_id].todo) - 1

    def advanced(self) -> None:
        """Nobody judges how long it takes."""

    def seek(self, quorum: Quorum) -> None:
        """The world says who is late."""

    def replica_done(self) -> None:
        """The world says who is late."""

    @property
    def round_over(self) -> bool:
        return (self.worker_id, self.number) in self.world.late

    def unit_done(self, leaf: Partial) -> None:
        part = self.world.open[self.worker_id]
        part.todo.remove(leaf.lo)
        part.held[leaf.node] = leaf
        while (pair := next_fold(part.held, part.op.units)) is not None:
            left, right, above = pair
            part.held[above] = fold(part.held.pop(left), part.held.pop(right))
        self.computed += 1

    def waits(self, what: str) -> None:
        """Nobody judges how long it takes."""

    def takes_time(self, what: str) -> None: ...

    def loop_over(self) -> None:
        """Nobody judges how long it takes."""

    def used(self) -> None:
        """The world keeps copies of its own."""

    def finish(self) -> Partial | None:
        if self.script.at.behind:
            return self._take_over(self.begun)
        world = self.world
        if self.number in world.results:
            return self._take()
        part = world.open[self.worker_id]
        part.waiting = True
        world.hand_out_orphans()
        if part.todo:
            return None
        if not world.complete():
            assert world.lock.wait_for(lambda: self._awake(part) or world.complete(), WAIT_S)
        if world.failure is not None:
            raise world.failure
        return self._take() if self.number in world.results else None

    def _awake(self, part: Contribution) -> bool:
        return self.number in self.world.results or bool(part.todo) or self.world.failure is not None

    def _take(self) -> Partial:
        result = self.world.results[self.number]
        self.number += 1
        return result

    def applied(self, record: StepRecord) -> None:
        if not self.script.at.behind:
            self.records.append(record)

    def history(self, first: int, end: int) -> list[StepRecord]:
        """What the oldest member has applied stands for the ledger."""
        records = next(iter(self.world.sessions.values())).records
        return [record for record in records if first <= record.step < end]

    def vouch(self, shard: int, digest: str) -> None:
        """Do nothing: these threads have one memory."""

    def draws(self, shard: int, samples: Callable[[], str]) -> None:
        """Do nothing: nobody is told of samples here."""

    def failed(self, error: BaseException, step: int, shard: int | None) -> None:
        self.failures.append((error, step, shard))

    def close(self, digest: str) -> None:
        self.world.remove(self.worker_id)


def copied(partial: Partial) -> Partial:
    partial.settle()
    flats: dict[str, torch.Tensor] = {name: flat.clone() for name, flat in partial.flats.items()}
    return replace(partial, flats=flats, scalars=dict(partial.scalars))
