"""A worker's side of operations and generations: traces in scenarios/worker_state/, and a machine of chance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic.protocol import worker_state
from elastic.protocol.messages import (
    BuildFailedReport,
    Generation,
    Kind,
    Laggard,
    Left,
    Member,
    Order,
    Plan,
    Publish,
    Quiesce,
    Report,
    RingBrokenReport,
    RingState,
    RingUp,
    Share,
    Word,
)
from elastic.protocol.recovery_plan import redo_shares
from elastic.protocol.reduction_tree import Node, leaves
from elastic.protocol.worker_state import (
    AbortRings,
    Acknowledge,
    Acknowledged,
    Action,
    AskOutcome,
    AwaitAcknowledgements,
    Begin,
    BuildRing,
    CloseRetired,
    Compute,
    Copied,
    CopyBegun,
    CopyEnded,
    CopyResult,
    CopyState,
    Done,
    DropRoots,
    Event,
    Exchange,
    Fetched,
    FetchFailed,
    FreeResult,
    GraceOver,
    HeadersHeld,
    Joined,
    Leave,
    Linger,
    LinksClosed,
    Move,
    Obtained,
    Phase,
    ReadHeader,
    RetireRing,
    RingBuilt,
    RingFailed,
    RingLost,
    Say,
    Started,
    Stop,
    Used,
    Wait,
    WorkerState,
)
from tests.trees import fold_nodes
from tests.unit.elastic.protocol.test_membership import nodes
from tests.unit.trace import arguments, check

SCENARIOS = sorted((Path(__file__).parent / "scenarios" / "worker_state").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, Worker(), rewrite=request.config.getoption("--rewrite"))


class Worker:
    """Worker b, from its start. `publish 2 loss a,b redo=7/4 a:0-2+2 b:+3 behind=c:a hold`."""

    def __init__(self) -> None:
        self.p = WorkerState("b", phase=Phase.FRESH)

    def feed(self, line: str) -> list[str]:
        name, *words = line.split()
        self.p, actions = worker_state.step(self.p, self._event(name, words))
        return [tell(action) for action in actions]

    def show(self) -> list[str]:
        return [f"{describe(self.p)} : {will(worker_state.next_move(self.p))}" if self.p.record else describe(self.p)]

    def _event(self, name: str, words: list[str]) -> Event:
        numbers = [int(word) for word in words if word.isdigit()]
        spans = nodes(",".join(word for word in words if word[0].isdigit() and "-" in word))
        match name:
            case "begin":
                return Begin(numbers[0], joinable="joinable" in words, parts="unsaved" not in words)
            case "started":
                return Started(numbers[0])
            case "done":
                return Done(numbers[0], spans[0], spans[1:])
            case "header":
                return ReadHeader()
            case "obtained":
                return Obtained(numbers[0], tuple(map(carried, words[1].split(","))))
            case "fetched":
                return Fetched(numbers[0])
            case "fetch-failed":
                return FetchFailed(numbers[0])
            case "built":
                return RingBuilt(numbers[0])
            case "unreachable":
                because = arguments(words).get("because", "").replace("_", " ")
                return RingFailed(numbers[0], tuple(word for word in words[1:] if "=" not in word), because)
            case "lost":
                return RingLost(numbers[0])
            case "headers":
                return HeadersHeld(numbers[0], numbers[1])
            case "used":
                return Used(numbers[0])
            case "copying":
                return CopyBegun(words[0])
            case "copy-ended":
                return CopyEnded(words[0], int(words[1]), words[2] == "complete")
            case "grace-over":
                return GraceOver()
            case "copied":
                return Copied(int(words[0]))
            case "joined":
                return Joined(numbers[0], numbers[1])
            case "acknowledged":
                return Acknowledged()
            case "closed":
                return LinksClosed(numbers[0], tuple(words[1].split(",")))
            case "quiesce":
                return Quiesce(1, 1, numbers[0])
            case "publish":
                return Publish(1, record(words))
        raise ValueError(f"unknown event {name}")


def carried(header: str) -> tuple[int, ...]:
    return tuple(int(number) for number in header.split("+") if number != "0")


def record(words: list[str]) -> Generation:
    number, kind, ids = int(words[0]), Kind(words[1]), [] if words[2] == "-" else words[2].split(",")
    options = arguments(words)
    op, units = (int(n) for n in options.get("redo", "0/0").split("/"))
    shares = []
    for word in words[3:]:
        if ":" in word and "=" not in word:
            worker, owned = word.split(":")
            keep, compute = owned.split("+")
            shares.append(Share(worker, nodes(keep), tuple(int(unit) for unit in compute.split(",") if unit)))
    behind = tuple(Laggard(*pair.split(":")) for pair in options.get("behind", "").split(",") if pair)
    return Generation(
        number,
        kind,
        base=int(options.get("base", number)),
        members=members(ids),
        plan=Plan(op, units, tuple(shares), behind),
        because="of the test",
        hold="hold" in words,
        early="early" in words,
        began=options.get("began", ""),
    )


def members(ids: list[str]) -> tuple[Member, ...]:
    return tuple(Member(worker, f"n{worker}", "host", 1, rank) for rank, worker in enumerate(ids))


def describe(p: WorkerState) -> str:
    roots = ",".join(f"{low}-{high}" for low, high in p.roots)
    running = f" running={p.running}" if p.running is not None else ""
    pending = f" pending={','.join(str(g.number) for g in p.pending)}" if p.pending else ""
    kept = f" kept={p.kept}" if p.kept >= 0 else ""
    copied = f" copied={p.copied}" if p.copied >= 0 else ""
    return f"{p.phase} reduced={p.reduced} gen={p.entered} ring={p.ring} roots={roots}{running}{pending}{kept}{copied}"


def will(move: Move) -> str:
    match move:
        case Compute(unit):
            return f"compute {unit}"
        case Exchange(generation):
            return f"exchange on {generation}"
        case CopyResult(source, op):
            return f"copy result {op} from {source}"
        case Linger(newcomers):
            return f"linger for {','.join(newcomers)}"
        case Wait(because):
            return f"wait: {because}"
        case Stop(because):
            return f"stop: {because}"
        case _:
            return type(move).__name__.lower()


def tell(action: Action) -> str:
    match action:
        case BuildRing(generation):
            return f"build ring {generation.number}"
        case RetireRing(generation, until):
            return f"retire ring {generation} until {until}"
        case CloseRetired(op):
            return f"close rings retired until {op}"
        case Acknowledge(generation, op, to):
            return f"acknowledge {op} on ring {generation} to {','.join(to)}"
        case AwaitAcknowledgements(generation, op, of):
            return f"await acknowledgements of {op} on ring {generation} of {','.join(of)}"
        case FreeResult(op):
            return f"free result {op}"
        case DropRoots(keep):
            return f"keep roots {','.join(f'{low}-{high}' for low, high in keep)}".rstrip()
        case Leave(because):
            return f"leave: {because}"
        case AbortRings():
            return "abort rings"
        case Say(word):
            return f"say {say(word)}"


def say(word: Word) -> str:
    match word:
        case Report():
            running = f" running={word.running}" if word.running is not None else ""
            roots = ",".join(f"{low}-{high}" for low, high in word.roots)
            copied = f" copied={word.copied}" if word.copied >= 0 else ""
            begun = f" units={word.units} roots={roots}{running}" if word.units else ""
            closed = f" closed={','.join(word.closed)}" if word.closed else ""
            return f"report promise={word.promise} entered={word.entered} reduced={word.reduced}{begun}{copied}{closed}"
        case RingUp() | Left():
            return f"{type(word).__name__} {word.generation}"
        case RingBrokenReport():
            return f"RingBrokenReport {word.generation}"
        case BuildFailedReport():
            return f"BuildFailedReport {word.generation} {','.join(word.unreachable) or word.because}"
        case _:
            return str(word)


def test_an_operation_cannot_begin_inside_another() -> None:
    worker = Worker()
    for line in ("publish 1 form a,b", "begin 4"):
        worker.feed(line)
    with pytest.raises(AssertionError, match="b begins operation 0 while collecting"):
        worker.feed("begin 4")


def test_a_plan_two_operations_away_is_a_bug_not_a_wait() -> None:
    worker = Worker()
    for line in ("publish 1 form a,b", "begin 4", "quiesce 1"):
        worker.feed(line)
    with pytest.raises(AssertionError, match="b is in operation 0, the plan redoes 2"):
        worker.feed("publish 2 loss b redo=2/4 b:+0,1,2,3")


def test_a_header_that_may_not_leave_yet_is_not_read() -> None:
    """A donor lets newcomers copy only before it has read its header; what holds it back may be that one is to copy."""
    worker = Worker()
    for line in ("publish 1 form b hold", "built 1", "begin 1 joinable", "started 0", "done 0 0-1", "header"):
        worker.feed(line)
    assert worker_state.next_move(worker.p) == Wait("below quorum") and worker.p.carry is None
    for line in ("publish 2 planned b,c base=1", "built 2", "copying c", "copy-ended c 0 complete", "header"):
        worker.feed(line)
    assert worker_state.next_move(worker.p) == Exchange(1) and worker.p.carry == (2,)


@pytest.mark.parametrize(("copied", "carried"), [(False, (3,)), (True, (4, 3))])
def test_who_drains_does_not_wait_for_who_joins(copied: bool, carried: tuple[int, ...]) -> None:
    """c leaves in 3 while d still copies; 4, in which it leaves and d joins, is carried once d holds the state."""
    worker = Worker()
    for line in ("publish 1 form b,c", "built 1", "publish 2 planned b,c,d base=1", "built 2"):
        worker.feed(line)
    for line in ("publish 3 planned b base=1 early", "built 3", "publish 4 planned b,d base=1", "built 4"):
        worker.feed(line)
    worker.feed("begin 1 joinable")
    for line in ("copying d", "copy-ended d 0 complete") if copied else ():
        worker.feed(line)
    for line in ("started 0", "done 0 0-1", "header"):
        worker.feed(line)
    assert worker.p.carry == carried


@pytest.mark.parametrize(
    ("others", "entered", "left"), [("4+3", 4, 0), ("3", 3, 1), ("4", 4, 0), ("2", 1, 3), ("0", 1, 3), ("4+2", 4, 0)]
)
def test_the_newest_generation_that_all_headers_carried_takes_effect(others: str, entered: int, left: int) -> None:
    worker = Worker()
    for line in ("publish 1 form b,c", "built 1", "publish 2 planned b,c,d base=1", "publish 3 planned b base=1 early"):
        worker.feed(line)
    for line in ("publish 4 planned b,d base=1", "built 3", "built 4", "begin 1 joinable", f"obtained 1 4+3,{others}"):
        worker.feed(line)
    assert (worker.p.entered, len(worker.p.pending)) == (entered, left)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("publish 2 planned b,c,d base=1", id="a newcomer is in that the leader did not know of"),
        pytest.param("publish 5 planned b,c,e base=1", id="the drain was taken back"),
    ],
)
def test_what_was_planned_for_other_members_is_void(line: str) -> None:
    worker = Worker()
    for said in ("publish 1 form b,c", "built 1", line):
        worker.feed(said)
    if worker.p.pending[0].number == 2:
        for said in ("built 2", "begin 1 joinable", "obtained 1 2,2"):
            worker.feed(said)
    for said in ("publish 3 planned b base=1 early", "built 3"):
        worker.feed(said)
    if worker.p.entered == 2:  # 4 keeps d, which 3 leaves out
        for said in ("publish 4 planned b,d base=1", "built 4"):
            worker.feed(said)
    worker.feed("begin 1 joinable")
    assert 3 not in [generation.number for generation in worker_state.pending.to_carry(worker.p)]


def test_a_generation_without_anybody_is_not_carried_beside_another() -> None:
    """Whether everybody may leave is asked of the newest alone."""
    worker = Worker()
    for line in ("publish 1 form b,c", "built 1", "publish 2 planned - base=1", "publish 3 planned - base=1"):
        worker.feed(line)
    worker.feed("begin 1 joinable unsaved")
    assert worker_state.pending.to_carry(worker.p) == ()
    worker.feed("publish 4 planned d base=1")
    assert worker_state.pending.to_carry(worker.p) == ()


def test_a_newcomer_asks_until_it_knows_what_became_of_its_copy() -> None:
    """Also when it has been planned out again meanwhile: the earlier plan may be the one that took effect."""
    worker = Worker()
    assert worker_state.seek(worker.p) == Wait("not admitted yet")
    worker.feed("publish 3 loss a")
    worker.feed("publish 4 planned a,b base=3")
    assert worker_state.seek(worker.p) == CopyState(("a",))
    worker.feed("copied 7")
    worker.feed("publish 5 planned c base=3")
    assert worker_state.seek(worker.p) == AskOutcome(7, ("c", "a"))
    worker.feed("copied -1")
    assert worker_state.seek(worker.p) == Wait("not admitted yet")


def test_a_quiesced_newcomer_neither_copies_nor_asks() -> None:
    worker = Worker()
    for line in ("publish 3 loss a", "publish 4 planned a,b base=3", "copied 7", "quiesce 4"):
        worker.feed(line)
    assert isinstance(worker_state.seek(worker.p), Wait)


def test_a_member_says_which_generation_took_effect_after_its_operation() -> None:
    worker = Worker()
    for line in ("publish 1 form a,b", "built 1", "publish 2 planned a,b,c base=1", "built 2", "begin 2 joinable"):
        worker.feed(line)
    assert worker_state.outcome(worker.p, 0) is None
    worker.feed("header")
    worker.feed("obtained 1 2,2")
    assert worker_state.outcome(worker.p, 0) == 2
    for line in ("begin 2", "header", "obtained 2 0,0,0"):
        worker.feed(line)
    assert (worker_state.outcome(worker.p, 1), worker_state.outcome(worker.p, 2)) == (0, None)


class Survivor(RuleBasedStateMachine):
    """One worker that computes, loses peers again and again, and gets every plan that fits what it reported.

    The rest of the world is a set of leaves that others say they hold: whatever is drawn, a plan made from the report
    leaves this worker with exactly its part of the tree, and each unit's sum is taken once.
    """

    UNITS = 6

    def __init__(self) -> None:
        super().__init__()
        self.p = WorkerState("b", phase=Phase.FRESH)
        self.computing: tuple[int, tuple[Node, ...]] | None = None
        self.report: Report | None = None
        self.mine: set[int] = set()

    def post(self, event: Event) -> tuple[Action, ...]:
        self.p, actions = worker_state.step(self.p, event)
        for action in actions:
            if isinstance(action, Say) and isinstance(action.word, Report):
                self.report = action.word
        return actions

    def order(self, order: Order) -> None:
        assert isinstance(order, Publish | Quiesce)
        self.post(order)

    @initialize()
    def form(self) -> None:
        ids = ["a", "b", "c"]
        self.order(Publish(1, Generation(1, Kind.FORM, 1, members(ids), Plan(), "start")))
        self.post(RingBuilt(1))

    @precondition(lambda self: self.p.phase is Phase.READY)
    @rule(joinable=st.booleans())
    def begin(self, joinable: bool) -> None:
        self.post(Begin(self.UNITS, joinable))
        self.mine = {*self.p.todo, *leaves(self.p.roots)}

    @precondition(lambda self: self.computing is None and isinstance(worker_state.next_move(self.p), Compute))
    @rule()
    def start(self) -> None:
        move = worker_state.next_move(self.p)
        assert isinstance(move, Compute)
        self.post(Started(move.unit))
        self.computing = (move.unit, self.p.roots)

    @precondition(lambda self: self.computing is not None)
    @rule()
    def finish(self) -> None:
        """The fold used the roots that were held when it began; they may be gone."""
        assert self.computing is not None
        (unit, held), self.computing = self.computing, None
        leaf = (unit, unit + 1)
        folded = set(fold_nodes({*held, leaf}, self.UNITS))
        root = next(node for node in folded if node[0] <= unit < node[1])
        self.post(Done(unit, root, tuple(sorted(set(held) - folded))))

    @rule()
    def quiesce(self) -> None:
        self.report = None
        self.order(Quiesce(1, 1, self.p.entered))
        assert self.report is not None and self.p.promise >= self.p.entered

    @precondition(lambda self: self.p.quiesced and self.report is not None)
    @rule(others=st.lists(st.integers(0, 5), max_size=3, unique=True), begun=st.booleans())
    def lose(self, others: list[int], begun: bool) -> None:
        """The plan is made from the report, which may be older than what the worker has done since."""
        assert self.report is not None
        number = self.p.entered + 1
        ids = ["b", "c"]
        units = self.UNITS if self.report.units or begun else 0
        shares = redo_shares(
            units,
            ids,
            {"b": self.report.roots, "c": fold_nodes([(leaf, leaf + 1) for leaf in others], self.UNITS)},
            {"b": self.report.running},
        )
        plan = Plan(self.report.reduced, units, shares if units else ())
        self.order(Publish(1, Generation(number, Kind.LOSS, number, members(ids), plan, "a loss")))
        self.post(RingBuilt(number))
        share = plan.share_of("b")
        if self.p.phase is Phase.COLLECTING and share is not None:
            self.mine = {*leaves(share.keep), *share.units}
        elif self.p.phase is Phase.COLLECTING:
            self.mine = {*self.p.todo}

    @precondition(lambda self: isinstance(worker_state.next_move(self.p), Exchange) and self.computing is None)
    @rule()
    def exchange(self) -> None:
        before = self.p
        self.post(ReadHeader())
        assert set(leaves(self.p.roots)) == self.mine, "the header covers exactly what the plan gave this worker"
        self.post(HeadersHeld(self.p.entered, self.p.reduced))
        assert self.p.kept == -1, "everybody is in this operation, so nobody needs the last result"
        self.post(Obtained(self.p.entered, ((), ())))
        assert self.p.reduced == before.reduced + 1 and self.p.kept == before.reduced

    @rule()
    def late_result(self) -> None:
        """Of a ring that was left."""
        before = self.p
        self.post(Obtained(self.p.entered - 1, ((), ())))
        assert self.p == before

    @precondition(lambda self: self.p.quiesced)
    @rule()
    def late_result_of_this_ring(self) -> None:
        before = self.p
        self.post(Obtained(self.p.entered, ((), ())))
        assert self.p == before

    @invariant()
    def units_are_held_once(self) -> None:
        p = self.p
        if p.phase is not Phase.COLLECTING:
            return
        running = [p.running] if p.running is not None else []
        held = [*leaves(p.roots), *running, *p.todo]
        assert len(held) == len(set(held)), f"a unit is held or planned twice: {p}"

    @invariant()
    def a_quiesced_worker_starts_nothing(self) -> None:
        if self.p.quiesced:
            assert not isinstance(worker_state.next_move(self.p), Compute | Exchange)

    @invariant()
    def a_quiesced_worker_has_no_ring(self) -> None:
        if self.p.quiesced and self.p.entered:
            assert self.p.ring is RingState.ABORTED


Survivor.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSurvivor = Survivor.TestCase


def test_a_generation_without_anybody_waits_for_a_step_whose_begin_is_saved() -> None:
    worker = Worker()
    unsaved = ("begin 2 joinable unsaved", "publish 2 planned - base=1", "started 1", "done 1 1-2", "header")
    for line in ("publish 1 form a,b", "built 1", *unsaved):
        worker.feed(line)
    assert not worker.p.carry
    for line in ("obtained 1 0,0", "begin 2 joinable", "started 1", "done 1 1-2", "header"):
        worker.feed(line)
    assert worker.p.carry == (2,)


def test_a_result_that_cannot_be_copied_is_computed_but_for_what_is_held_or_just_computed() -> None:
    behind = replace(
        WorkerState("b"), phase=Phase.COLLECTING, entered=1, units=4, roots=((0, 1),), running=2, laggard="a", reduced=5
    )
    assert worker_state.step(behind, FetchFailed(5))[0].todo == (1, 3)
    assert worker_state.step(replace(behind, running=None), FetchFailed(5))[0].todo == (1, 2, 3)
    for late in (replace(behind, laggard=""), replace(behind, quiesced=True), replace(behind, reduced=6)):
        assert worker_state.step(late, FetchFailed(5)) == (late, ())


def test_a_newcomer_reports_that_it_holds_no_state() -> None:
    _, actions = worker_state.step(WorkerState("c"), Quiesce(1, 1, 3))
    (report,) = [action.word for action in actions if isinstance(action, Say)]
    assert isinstance(report, Report) and (report.has_state, report.entered, report.promise) == (False, 0, 3)


def test_a_worker_is_a_newcomer_until_it_has_completed_an_operation_with_the_others() -> None:
    members = tuple(Member(worker, worker, "host", 1, rank) for rank, worker in enumerate("abc"))
    founder, _ = worker_state.step(
        WorkerState("a", phase=Phase.FRESH), Publish(1, Generation(1, Kind.FORM, 1, members[:2], Plan(), ""))
    )
    assert not founder.newcomer
    come = WorkerState("c", phase=Phase.FRESH)
    assert come.newcomer
    for generation in (
        Generation(1, Kind.FORM, 1, members[:2], Plan(), ""),
        Generation(2, Kind.PLANNED, 1, members, Plan(), ""),
    ):
        come, _ = worker_state.step(come, Publish(1, generation))
    come, _ = worker_state.step(come, Joined(2, 6))
    assert (come.phase, come.reduced, come.newcomer) == (Phase.READY, 7, True)
    assert not replace(come, reduced=8).newcomer


def test_a_planned_generation_is_pending_once_and_never_below_what_was_promised() -> None:
    members = tuple(Member(worker, worker, "host", 1, rank) for rank, worker in enumerate("ab"))
    first = Generation(1, Kind.FORM, 1, members, Plan(), "")
    later = Generation(3, Kind.PLANNED, 1, members, Plan(), "")
    p, _ = worker_state.step(WorkerState("a"), Publish(1, first))
    p, actions = worker_state.step(p, Publish(1, later))
    assert p.pending == (later,) and actions == (BuildRing(later),)
    assert worker_state.step(p, Publish(1, later)) == (p, ())
    promised, _ = worker_state.step(p, Quiesce(1, 1, 5))
    after, _ = worker_state.step(promised, Publish(1, replace(later, number=4)))
    assert after.pending == promised.pending
