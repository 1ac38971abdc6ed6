"""What must hold after every event, and what is rare enough to be counted.

An invariant about a position can only break where a position changes, so it is checked there, for all that it is about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from elastic.checkpoints.naming import EntryName
from elastic.errors import ExitCode
from elastic.protocol.loop_state import Standing
from elastic.protocol.membership import End, Group, deadline_s
from elastic.protocol.messages import ANEW, Generation, Kind, RingState
from elastic.protocol.reduction_tree import Node, leaves
from elastic.protocol.worker_state import WorkerState
from tests.sim.replicas import RoundsJudge
from tests.sim.script import Operation, Sum
from tests.sim.worker import Worker

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.world import World


class Violation(AssertionError):
    """Something that must never happen did."""


class Judge:
    def __init__(self, world: World) -> None:
        self.world = world
        self.rounds = RoundsJudge(world)
        self._effect_after: dict[int, int] = {}
        self._promised: dict[str, int] = {}
        self._first_applied_s: dict[str, float] = {}
        """Run of the job, as Generation.began -> when a member first applied an operation."""
        self._last_died_s: dict[str, float] = {}
        """And when a member died last."""
        self._positions: dict[int, dict[str, int]] = {}
        """Generation -> its living members -> operations that they have completed."""

    # -------------------------------------------------------------------------------------------- records

    def committed(self, record: Generation) -> None:
        world, spec = self.world, self.world.spec
        require(len(set(record.ids)) == len(record.ids), f"{record} lists one member twice")
        require(bool(record.ids) or record.kind is Kind.PLANNED, f"{record} lists nobody")
        wanted = min(spec.workers_limit, max(world.most, sum(agent.slots for agent in world.agents)))
        # Those who may leave stay as long as others are needed.
        drained = world.was_struck("drain", "stop_in_order", "resize")
        require(drained or len(record.ids) <= wanted, f"{record} is larger than the world of {wanted} wanted")
        order = [(member.seniority, member.worker_id) for member in record.members]
        require(order == sorted(order), f"ranks of {record} do not follow seniority")
        if world.scene.rounds is not None and record.number > 1 and record.kind is not Kind.FORM:
            self.rounds.committed(record)
        if record.kind is Kind.LOSS:
            require(world.disturbed or world.scene.poison >= 0, f"a loss generation without a fault: {record.because}")
        if record.kind is Kind.FORM and record.number > 1:
            self._went_on(record)

    def _went_on(self, record: Generation) -> None:
        """Nobody is left in a ring since the last loss; the first members all have what the job goes on from; it gets
        further each time, and from nothing older than what a process that the leader knows has."""
        world, step = self.world, step_of(record.began)
        before = world.records.all[record.number - 1]
        again = record.began.startswith(ANEW)
        if again:
            self._begins_again(record, before)
        else:
            require(step > step_of(before.began), f"the job goes on from {record.began}, as before: {before.began}")
        for worker in world.workers.values():
            steps = worker.alive and worker.p.entered >= before.base and worker.p.ring is not RingState.ABORTED
            require(not steps or world.waited_out, f"{worker.me} is in a ring while {record} is written")
        for founder in record.ids if not again else ():
            kept = world.workers[founder].keeping.find(record.began)
            require(kept is not None, f"{founder} is to go on from {record.began}, and does not have it")
        if world.leader is None or not world.leader.leads:
            return
        group = world.leader.group
        for name in group.newcomers - group.dead.keys() - group.given_up.keys():
            seen = group.workers[name]
            require(step_of(seen.snapshot) <= step, f"{seen} has kept what is newer than {record.began}")

    def _begins_again(self, record: Generation, before: Generation) -> None:
        """Within max_restarts, from where the first members began; and if one of them has applied anything, its leader
        cannot know that yet."""
        world, timing = self.world, self.world.spec.timing
        runs = {past.began for past in world.records.all.values()}
        require(len(runs) <= 1 + world.spec.max_restarts, f"the job begins again and again: {sorted(runs)}")
        require(step_of(before.began) == 0, f"{record.began} comes after {before.began}")
        died_s = self._last_died_s.get(before.began, 0.0)  # before it had entered anything, it applied nothing
        applied_s = died_s - self._first_applied_s.get(before.began, died_s)
        require(applied_s < timing.evict_s + timing.suspect_s, f"{applied_s:.2f} s of training are gone in silence")

    def applied(self, worker: Worker) -> None:
        if worker.p.entered and worker.p.record is not None:
            self._first_applied_s.setdefault(worker.p.record.began, self.world.clock.now_s)

    # -------------------------------------------------------------------------------------------- scripts

    def begins(self, worker: Worker, operation: Operation) -> None:
        """A member's script: in the operation in which the others are, with their state."""
        at, number = worker.training.at, worker.p.reduced
        require(at.standing is Standing.MEMBER, f"{worker.me} is {at.standing}, and begins {operation}")
        due = worker.script.operations[number]
        require(due is operation, f"{worker.me} begins {operation}, where the others are in {due}")
        expelled = self.world.scene.rounds is not None and not self.rounds.is_current(worker)
        right = expelled or worker.state == worker.script.state(number)
        require(right, f"{worker.me} begins {operation} with another state than the others")

    def told(self, worker: Worker, operation: Operation, reply: Sum) -> None:
        """What others have had from this call."""
        if self.world.scene.rounds is not None:
            self.rounds.told(operation, reply)
            return
        wanted = self.world.script.result(operation.place)
        require(reply == wanted, f"{worker.me} is told {reply} of {operation}, not {wanted}")

    def grouped(self, group: Group) -> None:
        """Whoever is in a record is known, or known dead; only of who is known there is any silence; and no two members
        that stay have the same home."""
        known, dead = group.workers, group.dead
        if any(worker not in known and worker not in dead for record in group.chain for worker in record.ids):
            raise Violation(f"a leader has forgotten members of {group.chain}")
        if group.given_up and not group.given_up.keys() <= known.keys():
            raise Violation(f"a leader has given up strangers: {group.given_up}")
        gone = {*dead, *group.given_up, *group.drains}
        homes = [known[one].member.home for one in (group.aim.ids if group.aim else ()) if one not in gone]
        homes = [home for home in homes if home >= 0]
        require(len(homes) == len(set(homes)), f"members of {group.aim} share a home: {homes}")

    def ticked(self, group: Group, now_s: float) -> None:
        """A deadline that stays in the past after its tick would make the leader spin."""
        if (due_s := deadline_s(group)) <= now_s:
            raise Violation(f"{group.state} wants a tick at {due_s}, and it is {now_s}")

    # ------------------------------------------------------------------------------------------ positions

    def saw(self, worker: Worker, before: WorkerState) -> None:
        after = worker.p
        if not worker.alive:
            return
        if after.entered != before.entered:
            self._entered(worker)
        if (after.entered, after.reduced) != (before.entered, before.reduced):
            self._moved(worker, before)
        report = worker.last_report
        if report is None:
            return
        self._promised[worker.me] = max(self._promised.get(worker.me, 0), report.promise)
        if report.entered and after.quiesced:
            held = set(leaves(after.roots)) | ({after.running} if after.running is not None else set())
            stale = report.reduced != after.reduced or (report.units and not set(leaves(report.roots)) <= held)
            if stale:
                raise Violation(f"{worker.me} reported {report} and stands at {after}")
            require(after.ring is RingState.ABORTED, f"{worker.me} reported with a live ring")

    def _entered(self, worker: Worker) -> None:
        after = worker.p
        record = self.world.records.all.get(after.entered)
        assert record is not None and after.record is not None, f"{worker.me} entered what was not committed"
        same = _told(record, worker) == _told(after.record, worker)
        require(same, f"{worker.me} entered what was not committed")
        require(record.member(worker.me) is not None, f"{worker.me} entered without being a member")
        promised = self._promised.get(worker.me, 0)
        require(after.entered > promised, f"{worker.me} promised {promised} and enters {after.entered}")
        if record.kind is Kind.PLANNED:
            first = self._effect_after.setdefault(record.number, after.reduced)
            require(first == after.reduced, f"{record.number} starts with {first} and with {after.reduced}")

    def _moved(self, worker: Worker, before: WorkerState) -> None:
        if before.entered and before.entered != worker.p.entered:
            self._positions[before.entered].pop(worker.me, None)
        if not worker.p.entered:
            return
        here = self._positions.setdefault(worker.p.entered, {})
        here[worker.me] = worker.p.reduced
        least, most = min(here.values()), max(here.values())
        if most - least > 1:
            raise Violation(f"members of {worker.p.entered} stand at {here}")

    def died(self, worker: Worker) -> None:
        if worker.p.entered:
            self._positions[worker.p.entered].pop(worker.me, None)
            assert worker.p.record is not None
            self._last_died_s[worker.p.record.began] = self.world.clock.now_s

    # --------------------------------------------------------------------------------------------- results

    def total(self, worker: Worker, op: int, headers: Mapping[str, tuple[dict[Node, Sum], tuple[int, ...]]]) -> Sum:
        """The sum of all roots, taken only if they cover every unit exactly once."""
        units = worker.script.operations[op].units
        nodes = [node for roots, _ in headers.values() for node in roots]
        if leaves(nodes) != tuple(range(units)):
            raise Violation(f"{worker.me} sums {nodes} of {units} in {op}")
        held = {node: total for roots, _ in headers.values() for node, total in roots.items()}
        return tuple(value for node in sorted(nodes) for value in held[node])

    def agree(self, worker: Worker, slices: Sequence[Sum]) -> None:
        require(all(other == slices[0] for other in slices), f"{worker.me} gets slices of different sums")

    def parked(self, agent: Agent) -> None:
        """A leader elsewhere may take their rings for gone from now on."""
        for worker in agent.workers.values() if agent.stream is None else ():
            stands = not (worker.alive and worker.p.entered) or worker.paused or worker.p.ring is RingState.ABORTED
            require(stands, f"{worker.me} was parked, and its ring is {worker.p.ring}")

    def obtained(self, worker: Worker, op: int, result: Sum, before: WorkerState) -> None:
        world = self.world
        if world.scene.rounds is not None:
            self.rounds.obtained(worker, op, result)
        elif result != worker.script.result(op):
            raise Violation(f"{worker.me} has {result}, not {worker.script.result(op)}")
        require(worker.applied == op, f"{worker.me} has applied {worker.applied} and obtains {op}")
        base = world.records.base
        superseded = bool(before.entered) and base is not None and base.number > before.entered
        # Who was expelled while it was frozen may complete what the others had completed: it has had all of it.
        require(
            superseded or not world.closed_at(4), f"{worker.me} completes {op} after everything was given up for lost"
        )
        if superseded:
            late = op > self._last_of(before.entered)
            require(not late, f"{worker.me} completes {op} in {before.entered}, which was superseded")

    def _last_of(self, number: int) -> float:
        """The operation which the first loss generation after this one redoes; none, after every copy was lost."""
        later = [r for n, r in sorted(self.world.records.all.items()) if n > number and r.kind is not Kind.PLANNED]
        return -1 if any(r.kind is Kind.FORM for r in later) else later[0].plan.op

    def listed(self, worker: Worker, record: Generation) -> None:
        """Scripts have read their home when they began, so it is the same in every list."""
        if (member := record.member(worker.me)) is not None:
            require(worker.home in (-1, member.home), f"{worker.me} had the home {worker.home}, and now {member.home}")
            worker.home = member.home

    def told_to_close(self, worker: Worker) -> bool:
        """Whether a member that is told that the job is complete may believe it: it waits in the very last operation.
        Whoever was cut off or expelled stands elsewhere, and only ends."""
        base, last = self.world.records.base, worker.script.last
        current = base is not None and worker.p.entered >= base.number and not worker.fenced
        require(not current or worker.p.reduced >= last, f"{worker.me} is closed in operation {worker.p.reduced}")
        return worker.p.reduced >= last

    # ----------------------------------------------------------------------------------------------- ends

    def ended(self, ended: End) -> None:
        """The end says why; what happened must be a reason for it."""
        world, scene = self.world, self.world.scene
        base = world.records.base
        struck = world.was_struck
        match ended.exit_code:
            case 0:
                run = world.run_from(base.entry) if world.scene.rounds and base else world.script
                wanted = str(run.state(run.last))
                right = ended.digest == wanted or struck("drift")
                require(right, f"the job ends with {ended.digest}, not {wanted}")
            case 1:
                raised = struck("raise", "raise_there", "stall") or max(scene.poison, scene.never_joins) >= 0
                require(raised, f"nobody has raised or got stuck: {ended}")
            case 2:
                odd = max(scene.strange, scene.cannot_start, scene.never_joins) >= 0
                require(odd, f"all could start: {ended}")
            case 3:
                alone = scene.min_workers > 1 or not base or not scene.replace
                gone = struck("crash_node", "stop_node", "drain", "raise", "raise_there") or scene.poison >= 0
                require(alone or gone, f"below quorum: {ended}")
                require(scene.name != "stuck" or not scene.replace, f"every slot is filled again, and yet {ended}")
            case 4:
                alive = [worker for worker in world.workers.values() if worker.alive]
                # A copy of the state before an operation that those who went on had completed is of no use to anybody.
                oldest = max(0, base.plan.op) if base else 0
                living = [w for w in alive if base and (w.p.entered >= base.number or w.p.copied >= oldest)]
                steps = [w.me for w in living if w.p.ring is not RingState.ABORTED or not world.waited_out]
                require(not steps, f"{ended} while {steps} live")
                self._nothing_newer(ended)
            case 5:
                require(struck("guard", "drift"), f"nobody has said anything wrong: {ended}")
            case 6:
                require(struck("drain", "stop_in_order", "resize"), f"nobody has to go: {ended}")
                ended_in = max(worker.p.leaving for worker in world.workers.values())
                reduced = {worker.p.reduced for worker in world.workers.values() if worker.p.leaving == ended_in}
                require(len(reduced) <= 1, f"the last to leave stand at {reduced}")
            case code:
                require(code == ExitCode.TERMINATED and struck("stop_job"), f"nobody asked for {ended}")

    def _nothing_newer(self, ended: End) -> None:
        """A job is lost only if neither a node that attends nor the storage has more than where it began."""
        world, scene = self.world, self.world.scene
        asked = (
            world.was_struck("raise", "raise_there", "guard", "stop_job", "stop_in_order", "stall") or scene.poison >= 0
        )
        if not (scene.revives and scene.replace) or asked or world.leader is None:
            return
        base, pointer = world.records.base, world.records.pointer
        began = step_of(base.began) if base else 0
        new = [w for w in world.workers.values() if w.alive and not (w.paused or w.p.entered) and w.agent.stream]
        kept = [step_of(worker.agent.memory.newest) for worker in new]
        kept += [step_of(pointer.entry)] if new and pointer else []
        require(max(kept, default=0) <= began, f"{ended}, and {max(kept, default=0)} is kept; it began at {began}")


def step_of(entry: str) -> int:
    name = EntryName.parse(entry)
    return name.step if name else 0


def _told(record: Generation, worker: Worker) -> tuple[object, ...]:
    """What a worker knows of a record: the tasks of others by their digest only."""
    return record.digest(), record.plan.share_of(worker.me), record.plan.source_of(worker.me)


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)
