"""The job's state machine, told as traces in scenarios/membership/, and what no trace should have to tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.config import JobSpec, Reduction, RingKind, Timing
from elastic.protocol import membership
from elastic.protocol.failures import NODE_FAILURES, FailureKind, WorkerFailure, judge_node
from elastic.protocol.membership import (
    Action,
    AgentDown,
    AgentUp,
    Commit,
    CommitRefused,
    Committed,
    Elected,
    End,
    Event,
    Group,
    GroupTick,
    Note,
    Point,
    PointerAt,
    Resized,
    State,
    Stopped,
    Tell,
)
from elastic.protocol.membership.group import Unreached
from elastic.protocol.membership.hangs import holding_up, standing_still
from elastic.protocol.membership.planned_changes import LEAVING_S
from elastic.protocol.membership.restore import founders
from elastic.protocol.membership.roster import Stage, WorkerView
from elastic.protocol.messages import (
    Announce,
    BuildFailedReport,
    CheckpointComplete,
    Close,
    Corrupted,
    Doing,
    DrainOver,
    DrainWish,
    Failed,
    Fence,
    Finished,
    Generation,
    Home,
    Invite,
    Kill,
    Kind,
    Left,
    Member,
    Plan,
    Progress,
    Publish,
    Quiesce,
    Ready,
    Report,
    RingBrokenReport,
    RingState,
    RingUp,
    SlotGivenUp,
    Unreadable,
    WorkerDead,
    WorkerFrozen,
)
from elastic.protocol.reduction_tree import Node
from tests.membership_step import step
from tests.unit.trace import arguments, check

SCENARIOS = sorted((Path(__file__).parent / "scenarios" / "membership").glob("*.txt"))


SHOWN_OTHERWISE = {"state", "committed", "published", "announced", "quiesce_started", "quiesce_complete"}
"""Notes that say what the lines of a scenario say anyway."""


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, Job(), rewrite=request.config.getoption("--rewrite"))


class Job:
    """`NOW_S event arguments`, with a store that keeps what is committed. Workers a and a.0.1 run on node na."""

    def __init__(self) -> None:
        self.group = membership.Group(JobSpec(name="job", command=("train",), workers=1), seed="seed")
        self.store: list[Generation] = []

    def feed(self, line: str) -> list[str]:
        now_s, name, *words = line.split()
        if name == "job":
            numbers = {key: int(value) for key, value in arguments(words).items()}
            spec = JobSpec(
                name="job",
                command=("train",),
                workers=numbers["workers"],
                min_workers=numbers.get("min", 1),
                max_workers=numbers.get("max"),
                spares=numbers.get("spares", 0),
                replace=bool(numbers.get("replace", 1)),
                restart=bool(numbers.get("rounds", 0)),
                reduction=Reduction.ALLREDUCE if numbers.get("native") else Reduction.EXACT,
                timing=Timing(join_window_s=20.0),
            )
            resumed = f"step-{numbers['resumed']:012d}.0.g1-01234567" if "resumed" in numbers else ""
            self.group = membership.Group(spec, seed="seed", revives=bool(numbers.get("revives")), resumed=resumed)
            return []
        if name == "announce" and node_of(words[0]) not in self.group.slots:
            self.group, _ = step(self.group, AgentUp(node_of(words[0]), 1), float(now_s))
        if name == "elected":
            before = self.group
            self.group = membership.Group(before.spec, seed="seed", revives=before.revives, resumed=before.resumed)
        if name == "committed":
            assert self.group.committing is not None
            self.store = [*(self.store if self.group.committing.kind is Kind.PLANNED else []), self.group.committing]
        self.group, actions = step(self.group, self._event(name, words), float(now_s))
        return [said for action in actions if (said := tell(action))]

    def _event(self, name: str, words: list[str]) -> Event:
        plain = [word for word in words if "=" not in word]
        options = arguments(words)
        worker = plain[0] if plain else ""
        number = int(plain[1]) if len(plain) > 1 and plain[1].isdigit() else 0
        match name:
            case "elected":
                return Elected(int(plain[0]), tuple(self.store))
            case "up":
                return AgentUp(worker, int(options.get("slots", 0)))
            case "down":
                return AgentDown(worker, float(options.get("silent", 0)), ended="ended" in words)
            case "committed":
                assert self.group.committing is not None
                return Committed(self.group.committing.number)
            case "refused":
                assert self.group.committing is not None
                return CommitRefused(self.group.committing.number, "another leader wrote")
            case "tick":
                return GroupTick()
            case "stop":
                return Stopped("stopped: enough", at_once="at_once" in words)
            case "announce":
                ring = RingState(options.get("ring", "none"))
                entered, reduced = int(options.get("entered", 0)), int(options.get("reduced", 0))
                numerics = options.get("numerics", "same")
                return Announce(
                    worker, node_of(worker), 0, 1, "host", 1, numerics, entered, ring, reduced,
                    ready="ready" in plain, invited="invited" in plain, snapshot=options.get("snapshot", ""),
                    home=int(options.get("home", -1)),
                )  # fmt: skip
            case "report":
                return Report(
                    worker,
                    round=self.group.round,
                    promise=int(options["promise"]),
                    entered=int(options.get("entered", 0)),
                    has_state="entered" in options,
                    reduced=int(options.get("reduced", 0)),
                    units=int(options.get("units", 0)),
                    roots=nodes(options.get("roots", "")),
                    running=int(options["running"]) if "running" in options else None,
                    kept=int(options.get("kept", -1)),
                    copied=int(options.get("copied", -1)),
                    copied_step=int(options.get("step", -1)),
                    began=options.get("began", ""),
                    closed=tuple(options["closed"].split(",")) if "closed" in options else (),
                )
            case "ringup":
                return RingUp(worker, number)
            case "broken":
                return RingBrokenReport(worker, number)
            case "unreachable":
                because = options.get("because", "").replace("_", " ")
                return BuildFailedReport(worker, number, tuple(plain[2:]), because)
            case "progress":
                return Progress(
                    worker, number, int(plain[2]), int(options.get("applied", 0)),
                    phase=options.get("phase", "").replace("_", " "),
                    doing=Doing(options.get("doing", "elsewhere")), for_ms=int(options.get("for", 0)) * 1000,
                    usual_ms=int(options.get("usual", 0)) * 1000, computes="idle" not in words,
                    shards=int(options.get("shards", 0)), exchange_us=1_000_000 * int(options.get("exchange", 0)),
                )  # fmt: skip
            case "ready":
                return Ready(worker, number, int(options.get("outdated", 0)), hold=bool(options.get("hold", "")))
            case "drain":
                return DrainWish(worker, "spot notice", int(options.get("left", 120)) * 1000)
            case "undrain":
                return DrainOver(worker)
            case "left":
                return Left(worker, number)
            case "finished":
                return Finished(worker, number, plain[2])
            case "failed":
                exit_code = int(options.get("exit", 1))
                return Failed(
                    worker,
                    0,
                    plain[1].replace("_", " "),
                    "Traceback",
                    exit_code,
                    of_device="device" in plain,
                    newcomer="newcomer" in plain,
                    samples=options.get("samples", "").replace("_", " "),
                )
            case "dead":
                where = options.get("where", "").replace("_", " ")
                return WorkerDead(
                    worker, "signal 9", options.get("snapshot", ""), failure=options.get("as", ""), where=where
                )
            case "unreadable":
                memory, instead = "memory" in plain, options.get("instead", "")
                return Unreadable(worker, plain[1], "a bit flipped", memory, instead)
            case "corrupted":
                return Corrupted(worker, number, plain[2], "the state of model")
            case "frozen":
                return WorkerFrozen(worker, "silent and using no CPU")
            case "pointer":
                return PointerAt(plain[0])
            case "complete":
                return CheckpointComplete(worker, options.get("series", "_periodic"), plain[1])
            case "givenup":
                return SlotGivenUp(f"n{worker}", 0, "too many restarts", int(options.get("exit", 1)))
        raise ValueError(f"unknown event {name}")

    def show(self) -> list[str]:
        group = self.group
        chain = " + ".join(f"{record.number}:{','.join(record.ids)}" for record in group.chain)
        tick_s = membership.deadline_s(group)
        workers = {str(stage): group.workers.at(stage) - group.dead.keys() for stage in Stage}
        workers |= {"dead": set(group.dead), "given up": set(group.given_up)}
        stages = [f"{name} {','.join(sorted(some))}" for name, some in workers.items() if some]
        return [
            f"{group.state} [{chain}] {group.because}".replace("\n", " / "),
            f"  {'; '.join(stages) or 'nobody'}{'' if tick_s == float('inf') else f'; tick at {round(tick_s, 3):g}'}",
        ]


def node_of(worker: str) -> str:
    """na, of a and of a.0.1."""
    return f"n{worker.partition('.')[0]}"


def nodes(text: str) -> tuple[Node, ...]:
    """`0-2,3-4`"""
    spans = [span.split("-") for span in text.split(",") if span]
    return tuple((int(low), int(high)) for low, high in spans)


def tell(action: Action) -> str:
    match action:
        case Note(event, fields):
            return "" if event in SHOWN_OTHERWISE else " ".join(["note", event, *map(str, _of_note(fields))])
        case Point(series, pointer):
            return f"point {series} {pointer.entry} of {pointer.holder}"
        case Commit(record):
            return f"commit {describe(record)}"
        case End(exit_code, because, digest):
            return f"end {exit_code} {digest} {because}".replace("\n", " / ")
        case Tell(to, order):
            match order:
                case Publish(_, record):
                    said = f"publish {record.number}"
                case Quiesce(_, _, up_to):
                    said = f"quiesce up to {up_to}"
                case Home(_, _, home):
                    said = f"home {home}"
                case Close(_, because, exit_code):
                    said = f"close {exit_code}: {because}".split("\n")[0]
                case _:
                    said = type(order).__name__.lower()
            return f"{','.join(to)} <- {said}"


def _of_note(fields: Mapping[str, object]) -> Iterator[object]:
    """What a note is about, and what it says of it; not how long something took, to the tenth of a second."""
    for name, value in fields.items():
        if name in ("worker_id", "slot", "because", "shards"):
            yield value if name != "because" else f"({str(value).replace(chr(10), ' / ')})"


def describe(record: Generation) -> str:
    words = " hold" * record.hold + " early" * record.early + f" from {record.began}" * (record.kind is Kind.FORM)
    words = words.removesuffix(" from ")
    return f"{record.number} {record.kind}{words} {','.join(record.ids)}{plan(record.plan)}"


def plan(plan: Plan) -> str:
    shares = " ".join(
        f"{share.worker_id}:{','.join(f'{low}-{high}' for low, high in share.keep)}+{','.join(map(str, share.units))}"
        for share in plan.shares
    )
    behind = " ".join(f"{lag.worker_id}<-{lag.source or 'alone'}" for lag in plan.laggards)
    redo = f" redo {plan.op}/{plan.units} {shares}" if plan.units else (f" resume {plan.op}" if plan.op else "")
    return redo + (f" behind {behind}" if behind else "") + (f" new {','.join(plan.newcomers)}" * bool(plan.newcomers))


def run(*lines: str) -> tuple[Group, list[str]]:
    job = Job()
    said = [answer for line in lines for answer in job.feed(line)]
    return job.group, said


def test_a_step_leaves_the_group_it_was_given_as_it_was() -> None:
    before, _ = run("0 job workers=2", "0 elected 1", "0 announce a")
    copy_of_workers = dict(before.workers)
    after, _ = step(before, WorkerDead("a", "signal 9"), 1.0)
    assert before.workers == copy_of_workers and "a" not in after.workers


def test_a_closed_group_answers_nothing() -> None:
    group, _ = run("0 job workers=2", "0 elected 1", "600 tick")
    assert group.state is membership.State.CLOSED
    assert step(group, Announce("a", "na", 0, 1, "host", 1, "same"), 601.0)[1] == ()


def test_the_token_of_a_generation_cannot_be_told_from_its_number() -> None:
    first, _ = run("0 job workers=1", "0 elected 1", "0 announce a")
    assert first.committing is not None and "seed" not in first.committing.token
    other, _ = step(membership.Group(first.spec, seed="other"), Elected(1), 0.0)
    other, _ = step(other, Announce("a", "na", 0, 1, "host", 1, "same"), 0.0)
    assert other.committing is not None and other.committing.token != first.committing.token


def test_a_group_without_anything_to_wait_for_wants_no_tick() -> None:
    group, _ = run("0 job workers=1", "0 elected 1", "0 announce a", "0 committed", "0 ringup a 1")
    assert group.state is membership.State.RUNNING and membership.deadline_s(group) == float("inf")


def test_a_job_without_members_has_applied_nothing() -> None:
    group, _ = run("0 job workers=1", "0 elected 1")
    assert (membership.status(group)["applied"], membership.status(group)["members"]) == (0, [])


def test_status_names_the_members_in_rank_order() -> None:
    group, _ = run("0 job workers=2", "0 elected 1", "0 announce b", "0 announce a", "0 committed", "0 announce c")
    status = membership.status(group)
    members = status["members"]
    assert isinstance(members, list)
    assert [(m["worker_id"], m["rank"]) for m in members] == [("a", 0), ("b", 1)]
    assert (status["waiting"], status["spares"]) == ([], ["c"])
    group, _ = step(group, WorkerDead("a", "signal 9"), 1.0)
    status = membership.status(group)
    assert (status["waiting"], status["spares"]) == ([], ["c"]), "a place is given when the ring has settled"


def test_status_names_the_slots_that_were_waited_for_in_vain() -> None:
    group, _ = run("0 job workers=1", "0 elected 1", "0 announce a", "0 committed", "0 ringup a 1")
    assert membership.status(group)["in_vain"] == []
    assert membership.status(replace(group, in_vain={"b", "a"}))["in_vain"] == ["a", "b"]


def test_status_names_the_slots_that_get_no_worker_any_more() -> None:
    lines = ("0 job workers=2 min=1", "0 elected 1", "0 announce a", "0 announce b", "0 committed", "0 ringup a 1")
    group, _ = run(*lines, "1 dead b", "2 givenup b")
    assert membership.status(group)["given_up"] == {"nb.0": "too many restarts"}
    several = replace(group, slots_given_up={"nb.0": "Traceback\n  of many lines"})
    assert membership.status(several)["given_up"] == {"nb.0": "Traceback"}


def test_status_says_what_carries_the_gradients_and_why_not_what_was_asked_for() -> None:
    group, _ = run("0 job workers=2", "0 elected 1", "0 announce b", "0 announce a", "0 committed", "0 ringup a 1")
    group.spec = replace(group.spec, ring=RingKind.MPI)
    assert membership.status(group)["ring"] == {"asked": "mpi", "over": "", "because": ""}
    because = "a started after mpirun, and has no rank"
    group, _ = step(group, Progress("b", 1, 0, over="tcp", over_because=because), 1.0)
    assert membership.status(group)["ring"] == {"asked": "mpi", "over": "tcp", "because": because}
    group, _ = step(group, Progress("b", 1, 0), 2.0)
    assert membership.status(group)["ring"] == {"asked": "mpi", "over": "", "because": ""}, "it is broken"


def test_all_workers_of_a_node_drain_at_once_and_stay_at_once() -> None:
    """Said one by one, the wishes of the only node's workers would make them leave one by one."""
    group = membership.Group(JobSpec(name="job", command=("train",), workers=2), seed="seed")
    events: list[Event] = [Elected(1)]
    events += [Announce(f"n.{slot}.0", "n", slot, 1, "host", 1, "same") for slot in (0, 1)]
    events += [Committed(1), *(RingUp(f"n.{slot}.0", 1) for slot in (0, 1))]
    events += [DrainWish("n.0.0", "spot notice", 120_000), DrainWish("n.1.0", "spot notice", 119_990)]
    events += [DrainOver("n.0.0"), DrainOver("n.1.0")]
    commits = []
    for event in events:
        group, actions = step(group, event, 0.0)
        commits += [action for action in actions if isinstance(action, Commit)]
    assert len(commits) == 1 and group.drains == {}


@pytest.mark.parametrize("another", [False, True])
def test_a_drain_is_not_taken_back_once_a_newcomer_has_the_number(another: bool) -> None:
    """Two scripts with one RANK would go on for good."""
    group = membership.Group(JobSpec(name="job", command=("train",), workers=2), seed="seed")
    events: list[Event] = [Elected(1)]
    events += [Announce(f"{node}.0.0", node, 0, 1, "host", 1, "same") for node in ("a", "b")]
    events += [Committed(1), RingUp("a.0.0", 1), RingUp("b.0.0", 1), DrainWish("a.0.0", "spot notice", 120_000)]
    events += [Announce("c.0.0", "c", 0, 1, "host", 1, "same")] if another else []
    events += [DrainOver("a.0.0")]
    for event in events:
        group, _ = step(group, event, 0.0)
    homes = [seen.member.home for name, seen in group.workers.items() if name not in group.drains]
    assert len(homes) == len(set(homes))
    assert ("a.0.0" in group.drains) == another


def test_a_drain_is_taken_back_whatever_number_one_that_has_left_had() -> None:
    """The process of the worker before may still be there when its successor's drain is taken back."""
    group = membership.Group(JobSpec(name="job", command=("train",), workers=2), seed="seed")
    events: list[Event] = [Elected(1)]
    events += [Announce(f"{node}.0.0", node, 0, 1, "host", 1, "same") for node in ("a", "b")]
    events += [Committed(1), RingUp("a.0.0", 1), RingUp("b.0.0", 1), DrainWish("a.0.0", "spot notice", 120_000)]
    for event in events:
        group, _ = step(group, event, 0.0)
    before = group.workers["b.0.0"]
    group.workers["z.0.0"] = before._replace(member=replace(before.member, worker_id="z.0.0", home=0), stage=Stage.LEFT)
    group, _ = step(group, DrainOver("a.0.0"), 0.0)
    assert group.drains == {}


def test_a_newcomer_whose_number_another_leader_has_given_away_begins_again() -> None:
    """The new leader hears of the one without a number first, and gives it the lowest that it knows to be free."""
    group = membership.Group(JobSpec(name="job", command=("train",), workers=1), seed="seed")
    events: list[Event] = [Elected(1), Announce("a.0.0", "a", 0, 1, "host", 1, "same"), Committed(1)]
    events += [RingUp("a.0.0", 1), Announce("b.0.0", "b", 0, 1, "host", 1, "same")]
    for event in events:
        group, _ = step(group, event, 0.0)
    assert group.workers["b.0.0"].member.home == 1
    late = Announce("c.0.0", "c", 0, 1, "host", 1, "same", home=1)
    for _ in range(2):
        group, actions = step(group, late, 0.0)
        assert Tell(("c.0.0",), Fence(1, "c.0.0", "b.0.0 has got its RANK from another leader")) in actions
    group, actions = step(group, replace(late, worker_id="c.0.1", home=-1), 0.0)
    assert group.workers["c.0.1"].member.home == 2


def test_nobody_is_called_a_last_time_once_the_generation_without_members_is_in_effect() -> None:
    """Also if a later one lists them again, because a newcomer seemed to come: the leader would look at a deadline in
    the past again and again."""
    group = membership.Group(JobSpec(name="job", command=("train",), workers=2), seed="seed")
    events: list[Event] = [Elected(1), *(Announce(f"{node}.0.0", node, 0, 1, "host", 1, "same") for node in "ab")]
    events += [Committed(1), RingUp("a.0.0", 1), RingUp("b.0.0", 1)]
    events += [DrainWish("a.0.0", "spot notice", 20), DrainWish("b.0.0", "spot notice", 20)]
    for event in events:
        group, _ = step(group, event, 0.0)
    group.committing = None
    again, nobody = group.chain[0], replace(group.chain[0], number=7, kind=Kind.PLANNED, members=())
    group.chain = (again, nobody, replace(again, number=8, kind=Kind.PLANNED))
    assert group.last_call_s == 0.01
    group.workers["a.0.0"] = group.workers["a.0.0"]._replace(entered=7)
    assert group.last_call_s == float("inf")


@pytest.mark.parametrize("hung", [False, True])
def test_it_is_told_whether_a_member_that_died_was_ended_because_it_hung(hung: bool) -> None:
    group = membership.Group(JobSpec(name="job", command=("train",), workers=2), seed="seed")
    events: list[Event] = [Elected(1), *(Announce(f"{node}.0.0", node, 0, 1, "host", 1, "same") for node in "ab")]
    events += [Committed(1), RingUp("a.0.0", 1), RingUp("b.0.0", 1)]
    for event in events:
        group, _ = step(group, event, 0.0)
    group.hung = {"b.0.0": "stuck: it hangs"} if hung else {}
    _, actions = step(group, WorkerDead("b.0.0", "killed by SIGKILL"), 0.1)
    (told,) = (action.fields for action in actions if isinstance(action, Note) and action.event == "member_lost")
    because = "stuck: it hangs" if hung else "killed by SIGKILL"
    assert (told["because"], told["hung"], told["rank"]) == (because, hung, 1)


@pytest.mark.parametrize(
    ("members", "dead", "left_s", "usual_s", "call_s"),
    [
        (2, 0, 120, 0.1, 105),
        (2, 0, 120, 2.0, 120 - LEAVING_S - 3 * (2.0 * 4 + 1)),
        (1, 0, 120, 1.0, 120 - LEAVING_S - 3 * (1.0 * 8 + 1)),
        (3, 0, 120, 2.0, 120 - LEAVING_S - 3 * (2.0 * 3 + 1)),
        (3, 1, 120, 2.0, 120 - LEAVING_S - 3 * (2.0 * 4 + 1)),
        (2, 0, 120, 10.0, 60),
        (2, 0, 20, 0.1, 10),
    ],
)
def test_the_last_call_leaves_time_for_long_passes(
    members: int, dead: int, left_s: int, usual_s: float, call_s: float
) -> None:
    """15 s before the end, or three passes and LEAVING_S, but halfway at the earliest. A pass has eight shards, of
    which each takes usual_s, and an exchange of 1 s. The dead compute none of them."""
    group = membership.Group(JobSpec(name="job", command=("train",), workers=members), seed="seed")
    workers = [f"a.{slot}.0" for slot in range(members)]
    events: list[Event] = [
        Elected(1),
        *(Announce(worker, "a", slot, 1, "h", 1, "same") for slot, worker in enumerate(workers)),
    ]
    events += [Committed(1), *(RingUp(worker, 1) for worker in workers)]
    events += [
        Progress(worker, 1, 3, 3, shards=8, usual_ms=round(1000 * usual_s), exchange_us=1_000_000) for worker in workers
    ]
    for event in events:
        group, _ = step(group, event, 0.0)
    group.dead = dict.fromkeys(workers[members - dead :], "killed by SIGKILL")
    group, _ = step(group, DrainWish("a.0.0", "spot notice", 1000 * left_s), 0.0)
    assert group.drains["a.0.0"].last_call_s == pytest.approx(call_s)


def test_a_member_that_is_given_up_keeps_its_number_until_it_is_expelled() -> None:
    group = membership.Group(JobSpec(name="job", command=("train",), workers=2), seed="seed")
    words = [Announce(f"{node}.0.0", node, 0, 1, "host", 1, "same") for node in ("a", "b")]
    events: list[Event] = [Elected(1), *words, Committed(1), RingUp("a.0.0", 1), RingUp("b.0.0", 1)]
    for event in events:
        group, _ = step(group, event, 0.0)
    group.given_up["a.0.0"] = "no answer"
    group, _ = step(group, Announce("c.0.0", "c", 0, 1, "host", 1, "same"), 0.0)
    assert [group.workers[f"{node}.0.0"].member.home for node in "abc"] == [0, 1, 2]


def test_a_leader_that_finds_two_members_with_one_number_lets_the_older_one_leave() -> None:
    """The leader before had demoted it, and did not live to let it go."""
    members = tuple(Member(f"{node}.0.0", node, "host", 1, rank, home) for rank, (node, home) in enumerate(_HOMES))
    record = Generation(4, Kind.PLANNED, 4, members, Plan(0, 0, ()), "c.0.0 joins")
    group = membership.Group(JobSpec(name="job", command=("train",), workers=2), seed="seed")
    group, _ = step(group, Elected(2, (record,)), 0.0)
    assert {name: leaver.demoted for name, leaver in group.drains.items()} == {"b.0.0": True}


_HOMES = [("a", 1), ("b", 0), ("c", 0), ("d", 2)]


def test_a_spare_fills_a_place_and_never_adds_one() -> None:
    """Two workers of a node and its spare, in a world that may grow: it grows by what another node brings."""
    spec = JobSpec(name="job", command=("train",), workers=2, max_workers=4, spares=1)
    group = membership.Group(spec, seed="seed")
    told: list[tuple[str, ...]] = []

    def feed(*events: Event) -> None:
        nonlocal group
        for event in events:
            group, actions = step(group, event, 0.0)
            tells = [action for action in actions if isinstance(action, Tell)]
            told.extend(tell.to for tell in tells if isinstance(tell.order, Invite))

    feed(Elected(1), AgentUp("n", 2), *(Announce(f"n.{slot}.0", "n", slot, 1, "host", 1, "same") for slot in range(3)))
    feed(Committed(1), RingUp("n.0.0", 1), RingUp("n.1.0", 1))
    assert group.running is not None and group.running.ids == ("n.0.0", "n.1.0") and group.spares == {"n.2.0"}
    assert told == []
    feed(AgentUp("m", 1), Announce("m.0.0", "m", 0, 1, "host", 1, "same"))
    assert told == [("n.2.0",)], "whoever has waited longest gets the place, on whichever node"
    feed(Announce("m.1.0", "m", 1, 1, "host", 1, "same"))
    assert group.spares == {"m.0.0", "m.1.0"} and len(told) == 1


def test_a_job_that_is_to_be_smaller_forms_with_as_many_and_leaves_places_empty() -> None:
    """Three nodes with a spare each; before it has begun, and after one of its nodes has gone."""
    group = membership.Group(JobSpec(name="job", command=("train",), workers=3, spares=1), seed="seed")
    events: list[Event] = [Elected(1)]
    for node in "ab":
        events += [AgentUp(node, 1), *(Announce(f"{node}.{s}.0", node, s, 1, "host", 1, "same") for s in (0, 1))]
    for event in events:
        group, _ = step(group, event, 0.0)
    assert group.committing is None, "three are awaited"
    group, actions = step(group, Resized(2), 0.0)
    assert group.committing is not None and group.committing.ids == ("a.0.0", "b.0.0")
    assert group.committing.because == "2 of 2 workers are here"
    for event in (Committed(1), RingUp("a.0.0", 1), RingUp("b.0.0", 1)):
        group, _ = step(group, event, 0.0)
    assert (group.state, group.spares, group.places) == (State.RUNNING, {"a.1.0", "b.1.0"}, 0), "a spare adds no place"
    group, actions = step(group, Resized(3), 0.0)
    invited = [action.to for action in actions if isinstance(action, Tell) and isinstance(action.order, Invite)]
    assert invited == [("a.1.0",)], "now there is one more"


def test_a_founder_that_was_a_newcomer_before_a_loss_keeps_its_home() -> None:
    group = membership.Group(JobSpec(name="job", command=("train",), workers=3), seed="seed")
    for slot, home in enumerate((-1, 0, -1)):
        member = Member(f"n.{slot}.0", "n", "host", 1, slot, home)
        group.workers[member.worker_id] = WorkerView(member, slot=slot, pid=1, numerics="same")
    members = founders(group, group.workers.values())
    assert [member.home for member in members] == [1, 0, 2]
    assert [group.workers[member.worker_id].member for member in members] == list(members)


def test_a_set_up_that_is_only_slow_gets_its_time_from_a_longer_pause_limit() -> None:
    limits_s = ((600.0, 600.0), (600.0, 60.0), (600.0, 3600.0))
    timings = [Timing(orphan_limit_s=orphan_s, pause_limit_s=pause_s) for orphan_s, pause_s in limits_s]
    specs = [JobSpec(name="job", command=("train",), workers=1, timing=timing) for timing in timings]
    assert [membership.Group(spec, seed="seed").set_up_s for spec in specs] == [300.0, 300.0, 1800.0]


def formed(*slots: int, window_over: bool = False) -> tuple[str, ...]:
    """The first generation of two workers and a spare on one node, which come in this order; empty: none yet."""
    group = membership.Group(JobSpec(name="job", command=("train",), workers=2, spares=1), seed="seed")
    events: list[Event] = [Elected(1), AgentUp("n", 2)]
    events += [Announce(f"n.{slot}.0", "n", slot, 1, "host", 1, "same") for slot in slots]
    for event in events:
        group, _ = step(group, event, 0.0)
    if window_over:
        group, _ = step(group, GroupTick(), group.spec.timing.join_window_s)
    return group.committing.ids if group.committing else ()


def test_a_job_begins_with_the_first_slots_of_a_node_because_devices_go_by_them() -> None:
    assert formed(2, 0) == ()
    assert formed(2, 0, 1) == ("n.0.0", "n.1.0")
    assert formed(2, 0, window_over=True) == ("n.0.0", "n.2.0")


def test_a_process_that_is_still_starting_may_be_a_spare() -> None:
    spec = JobSpec(name="job", command=("train",), workers=4, min_workers=3, spares=1)
    group = membership.Group(spec, seed="seed")
    for event in (Elected(1), AgentUp("n", 2), Announce("n.0.0", "n", 0, 1, "host", 1, "same")):
        group, _ = step(group, event, 0.0)
    assert group.starting == {"n": 2}


def test_events_taken_at_once_do_what_they_do_one_by_one() -> None:
    """Three members form, one dies, the others report: the same group and the same actions, however they are read."""
    events: list[Event] = [Elected(1)]
    for worker in "abc":
        events += [AgentUp(f"n{worker}", 1), Announce(worker, f"n{worker}", 0, 1, "host", 1, "same")]
    events += [Committed(1), *(RingUp(worker, 1) for worker in "abc"), WorkerDead("b", "signal 9")]
    reports = [Report(worker, 1, 1, 1, has_state=True, reduced=4, kept=3) for worker in "ac"]
    events += [*reports, Committed(2), RingUp("c", 2), RingUp("a", 2), Progress("a", 2, 5)]
    one_by_one = at_once = membership.Group(JobSpec(name="j", command=("t",), workers=3, min_workers=1), seed="seed")
    before, done = repr(at_once), list[Action]()
    for event in events:
        one_by_one, actions = step(one_by_one, event, 1.0)
        done += actions
    assert repr(at_once) == before, "the old one is as it was"
    actions = membership.advance(at_once, events, 1.0)
    assert (at_once, list(actions)) == (one_by_one, done) and at_once.state is State.RUNNING


def test_a_job_that_went_back_gets_on_again_when_it_is_further_than_before() -> None:
    """Its operations are counted from 0 again, its steps are not: else failures after that, each behind new steps,
    would be taken for failures without progress."""
    group, _ = run("0 job workers=1", "0 elected 1", "0 announce a", "0 committed", "0 ringup a 1")
    done = []
    for reduced, applied in ((9, 4), (1000, 990), (2, 980), (12, 990), (13, 991), (13, 991), (14, 992), (2000, 993)):
        group, _ = step(group, Progress("a", 1, reduced, applied), 1.0)
        done.append(group.failures.furthest)
    assert done == [9, 1000, 1000, 1000, 1001, 1001, 1002, 2000]


@pytest.mark.parametrize("serves", [False, True])
def test_failures_of_a_node_are_in_a_row_if_no_worker_of_it_has_served_between(serves: bool) -> None:
    """Also if it is gone since, as spot machines are."""
    spec = JobSpec(name="j", command=("t",), workers=2, min_workers=1)
    group = membership.Group(spec, seed="seed")
    first = [Announce(f"{node}.0.0", node, 0, 1, "host", 1, "same") for node in "ab"]
    up = [RingUp(one.worker_id, 1) for one in first]
    serving = [Progress("b.0.0", 1, 5), Progress("b.0.0", 1, 6 if serves else 5)]
    membership.advance(group, [Elected(1), *first, Committed(1), *up, Progress("a.0.0", 1, 5)], 1.0)
    group.failures = replace(group.failures, history=tuple(_early_end(number) for number in range(NODE_FAILURES - 1)))
    membership.advance(group, [*serving, Progress("a.0.0", 1, 99)], 2.0)
    ends = [*group.failures.history, replace(_early_end(NODE_FAILURES), done=99)]
    assert (judge_node(ends, others_train=True, one_is_fruitful=False) is None) == serves


def _early_end(number: int) -> WorkerFailure:
    because, kind = "killed by SIGSEGV", FailureKind.CRASHED
    return WorkerFailure(f"b.1.{number}", "b", kind, because, 1, done=number, member=False, fruitful=False)


def test_a_member_that_takes_its_ring_back_holds_up_the_others_again() -> None:
    """Its agent lost the stream while the ring was built, and announces it as it is now."""
    group = membership.Group(JobSpec(name="j", command=("t",), workers=3, min_workers=1), seed="seed")
    announced = [Announce(worker, f"n{worker}", 0, 1, "host", 1, "same") for worker in "abc"]
    building = replace(announced[0], entered=1, ring=RingState.BUILDING)
    membership.advance(group, [Elected(1), *announced, Committed(1), RingUp("a", 1), RingUp("b", 1)], 1.0)
    membership.advance(group, [building, RingUp("c", 1)], 2.0)
    assert group.state is State.REBUILDING
    group, _ = step(group, RingUp("a", 1), 3.0)
    assert group.state is State.RUNNING


def adopted(workers: int) -> Group:
    """By a leader that has read of so many members, each on a node of its own, and heard of none."""
    members = tuple(Member(f"n{rank:05}.0.0", f"n{rank:05}", "host", 1, rank) for rank in range(workers))
    spec = JobSpec(name="job", command=("train",), workers=workers)
    record = Generation(1, Kind.FORM, 1, members, Plan(), "all are here")
    return step(membership.Group(spec, seed="seed"), Elected(1, (record,)), 0.0)[0]


def lost(actions: tuple[Action, ...]) -> list[Action]:
    return [action for action in actions if isinstance(action, Note) and action.event == "member_lost"]


@pytest.mark.parametrize(("workers", "given_up_s"), [(3, 10.0), (1500, 15.0)])
def test_many_agents_are_given_longer_to_find_another_leader(workers: int, given_up_s: float) -> None:
    group = adopted(workers)
    assert membership.deadline_s(group) == given_up_s
    group, actions = step(group, GroupTick(), given_up_s - 0.1)
    assert not lost(actions)
    assert len(lost(step(group, GroupTick(), given_up_s)[1])) == workers


def test_a_member_is_not_stuck_because_thousands_are_heard_before_it() -> None:
    """Its agent is there, and what it says of its workers waits in the leader's mailbox."""
    group, patience_s = adopted(2), Timing().progress_s
    come_s = patience_s + 5.0
    for node in ("n00000", "n00001"):
        group, _ = step(group, AgentUp(node, 1), come_s)
    group, actions = step(group, GroupTick(), come_s + patience_s - 0.1)
    assert not actions
    _, actions = step(group, GroupTick(), come_s + patience_s)
    assert {action.order for action in actions if isinstance(action, Tell)} == {
        Kill(1, worker) for worker in ("n00000.0.0", "n00001.0.0")
    }


def test_while_new_processes_are_awaited_nobody_holds_the_others_up() -> None:
    """The members died before a step was applied. The generation that they were of is still the last one."""
    group = membership.Group(JobSpec(name="j", command=("t",), workers=2, min_workers=1), seed="seed")
    events: list[Event] = [Elected(1)]
    for worker in "ab":
        events += [AgentUp(f"n{worker}", 1), Announce(worker, f"n{worker}", 0, 1, "host", 1, "same")]
    events += [Committed(1), *(RingUp(worker, 1) for worker in "ab"), *(Progress(worker, 1, 0) for worker in "ab")]
    for event in (*events, WorkerDead("a", "signal 9"), WorkerDead("b", "signal 9")):
        group, _ = step(group, event, 1.0)
    assert group.state is State.FORMING and group.running is not None and not group.workers
    assert holding_up(group) == standing_still(group) == {}


def test_an_agent_of_which_no_slots_are_known_has_none() -> None:
    group = membership.Group(JobSpec(name="j", command=("t",), workers=1), seed="seed")
    for event in (Elected(1), AgentUp("n", 0)):
        group, _ = step(group, event, 0.0)
    assert group.slots == {"n": 0}
    for event in (AgentUp("n", 3), AgentUp("n", 0)):
        group, _ = step(group, event, 0.0)
    assert group.slots == {"n": 3}, "it has come back, and says no slots then"


@pytest.mark.parametrize(
    "need",
    [
        ("10 drain a.0.0", "10 committed"),
        (
            *("10 dead b.0.0", "10 report a.0.0 promise=3 entered=3 reduced=5 kept=4", "10 report c.0.0 promise=3"),
            *("10 committed", "10 ringup a.0.0 4", "10 ready c.0.0 4"),
        ),
    ],
    ids=["a member drains", "below quorum"],
)
def test_a_newcomer_that_could_not_be_connected_is_tried_at_once_when_the_job_needs_it(need: tuple[str, ...]) -> None:
    job = Job()
    for line in (
        *("0 job workers=2 min=2 max=3", "0 elected 1", "0 announce a.0.0", "0 announce b.0.0", "0 committed"),
        *("0 ringup a.0.0 1", "0 ringup b.0.0 1", "5 announce c.0.0", "5 ready c.0.0 1", "5 committed"),
        *("6 unreachable a.0.0 2 c.0.0", "6 committed", "6.1 progress a.0.0 3 5"),
    ):
        job.feed(line)
    assert job.group.unreached.keys() == {"c.0"}
    job.group.unreached["c.0"] = Unreached(10, 2, 262.0)
    said = [word for line in need for word in job.feed(line)]
    assert [word for word in said if word.startswith("commit ")][-1].endswith("new c.0.0")
    assert job.group.unreached["c.0"].times == 10, "and the wait after that is no shorter"
