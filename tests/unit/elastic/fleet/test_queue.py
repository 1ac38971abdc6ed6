"""Whose turn it is: priorities, quotas, preemption and backfill, as tables, and over days of a simulated fleet."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import JobSpec
from elastic.fleet.documents import FleetJob, NodeShare, Placement, Submission, Wish
from elastic.fleet.queue.order import ordered, within_quota
from elastic.fleet.queue.scheduler import OfferedNode, Schedule, schedule
from elastic.fleet.queue.victims import PreemptibleJob, PreemptionChoice, choose
from elastic.security.roles import Caller

Shares = dict[str, int]


def job(name: str, least: int = 1, workers: int = 0, has: Shares | None = None, **fields: Any) -> FleetJob:
    """name: "<owner><number>"; the number is the age."""
    of_spec = {key: fields.pop(key) for key in ("priority", "labels") if key in fields}
    spec = JobSpec(
        name=name,
        command=("t",),
        min_workers=least,
        workers=workers or least,
        owner=name.rstrip("0123456789"),
        **of_spec,
    )
    number, placement = int(name.lstrip("abcdefghijklmnopqrstuvwxyz")), None if has is None else placed(has)
    return FleetJob(Submission(spec, number, name, "id"), placement, **fields)


def placed(slots: Shares) -> Placement:
    return Placement(shares(slots))


def shares(slots: Shares) -> tuple[NodeShare, ...]:
    return tuple(NodeShare(node, count) for node, count in slots.items())


LEAVES = Wish("preempted for b9", preempts=True)

TABLE: dict[str, tuple[list[FleetJob], Shares, dict[str, int], dict[str, Shares], dict[str, str]]] = {
    "a job of higher priority takes what one of a lower one has beyond its minimum, and preempts nobody": (
        [job("a1", 1, 4, {"x": 2, "y": 2}), job("b2", 2, priority=1)],
        {"x": 2, "y": 2},
        {},
        {"a1": {"x": 2}, "b2": {"y": 2}},
        {},
    ),
    "one that cannot be made smaller is preempted": (
        [job("a1", 1, 4, {"x": 4}), job("b2", 2, priority=1)],
        {"x": 4},
        {},
        {"a1": {"x": 4}},
        {"a1": "b2"},
    ),
    "as few as possible are preempted, and those that come last": (
        [job("a1", 2, has={"x": 2}), job("a2", 2, has={"y": 2}), job("a3", 1, has={"z": 1}), job("b4", 2, priority=1)],
        {"x": 2, "y": 2, "z": 1},
        {},
        {"a1": {"x": 2}, "a2": {"y": 2}, "a3": {"z": 1}},
        {"a2": "b4"},
    ),
    "nobody is preempted for a job that would not fit even then": (
        [job("a1", 2, has={"x": 2}, priority=2), job("a2", 1, has={"y": 1}), job("b3", 3, priority=1)],
        {"x": 2, "y": 2},
        {},
        {"a1": {"x": 2}, "a2": {"y": 1}},
        {},
    ),
    "nor for one of the same priority that came later": (
        [job("a1", 2, has={"x": 2}), job("b2", 1)],
        {"x": 2},
        {},
        {"a1": {"x": 2}},
        {},
    ),
    "while one leaves nobody else has to, and what it leaves is kept": (
        [job("a1", 1, has={"x": 1}, stop=LEAVES), job("a2", 1, has={"y": 1}), job("b3", 1, priority=1), job("a4", 1)],
        {"x": 1, "y": 1},
        {},
        {"a1": {"x": 1}, "a2": {"y": 1}},
        {},
    ),
    "what is free is kept too, where those behind would need it": (
        [job("a1", 1, has={"x": 1}, stop=LEAVES), job("b3", 2, priority=1), job("a4", 1)],
        {"x": 1, "y": 1},
        {},
        {"a1": {"x": 1}},
        {},
    ),
    "an owner within its quota comes before priority, and takes back what others hold beyond theirs": (
        [job("a1", 2, has={"x": 2}, priority=9), job("a2", 2, has={"y": 2}, priority=9), job("b3", 2)],
        {"x": 2, "y": 2},
        {"a": 2, "b": 2},
        {"a1": {"x": 2}, "a2": {"y": 2}},
        {"a2": "b3"},
    ),
    "that a job has more workers than its owner's quota is no right to them": (
        [job("a1", 1, 4, {"x": 2, "y": 2}), job("b2", 2)],
        {"x": 2, "y": 2},
        {"a": 2, "b": 2},
        {"a1": {"x": 2}, "b2": {"y": 2}},
        {},
    ),
    "on its only node it is preempted for that, and begins again with less": (
        [job("a1", 1, 4, {"x": 4}), job("b2", 2)],
        {"x": 4},
        {"a": 2, "b": 2},
        {"a1": {"x": 4}},
        {"a1": "b2"},
    ),
    "of a job within its quota only what its owner has beyond it is taken, so nobody leaves in vain": (
        [job("a1", 4, 5, {"x": 3, "y": 2}), job("b2", 3)],
        {"x": 3, "y": 2},
        {"a": 4, "b": 3},
        {"a1": {"x": 3, "y": 2}},
        {},
    ),
    "beyond their quotas owners are alike": (
        [job("a1", 2, has={"x": 2}), job("a2", 2, has={"y": 2}), job("b3", 2)],
        {"x": 2, "y": 2},
        {"a": 2, "b": 1},
        {"a1": {"x": 2}, "a2": {"y": 2}},
        {},
    ),
    "who has no quota where others have one runs on what is left": (
        [job("c1", 2, has={"x": 2}, priority=9), job("a2", 1)],
        {"x": 2},
        {"a": 1},
        {"c1": {"x": 2}},
        {"c1": "a2"},
    ),
    "a job that has lost a node, and has less than its minimum, gets slots of those behind it": (
        [job("a1", 2, 4, {"x": 1}, priority=1), job("b2", 1, 3, {"x": 1, "y": 2})],
        {"x": 2, "y": 2},
        {},
        {"a1": {"x": 1, "y": 1}, "b2": {"x": 1, "y": 1}},
        {},
    ),
    "and preempts them, if they cannot do with less": (
        [job("a1", 3, has={"x": 1}, priority=1), job("b2", 2, has={"y": 2}), job("b3", 1, has={"x": 1})],
        {"x": 2, "y": 2},
        {},
        {"a1": {"x": 1}, "b2": {"y": 2}, "b3": {"x": 1}},
        {"b2": "a1"},
    ),
    "but takes nothing from those before it, or that would not be enough, or on nodes where it cannot grow": (
        [job("a1", 2, has={"x": 1}), job("b2", 2, has={"y": 2}, priority=1), job("b3", 1, has={"x": 1})],
        {"x": 2, "y": 2},
        {},
        {"a1": {"x": 1}, "b2": {"y": 2}, "b3": {"x": 1}},
        {},
    ),
    "what leaves for it is kept for it": (
        [job("a1", 2, has={"x": 1}, priority=1), job("b2", 1, has={"y": 1}, stop=LEAVES), job("b3", 1)],
        {"x": 1, "y": 1},
        {},
        {"a1": {"x": 1}, "b2": {"y": 1}},
        {},
    ),
    "labels: slots that would not help are left alone": (
        [job("a1", 1, has={"x": 1}), job("b2", 1, priority=1, labels=("gpu=1",))],
        {"x": 1},
        {},
        {"a1": {"x": 1}},
        {},
    ),
    "what is left goes to those that lack workers when all have their minimum": (
        [job("a1", 1, 4), job("a2", 1, 4)],
        {"x": 2, "y": 2},
        {},
        {"a1": {"x": 2, "y": 1}, "a2": {"y": 1}},
        {},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_scenarios(name: str) -> None:
    jobs, nodes, quotas, places, preempted = TABLE[name]
    plan = schedule(jobs, [OfferedNode(node, slots) for node, slots in nodes.items()], set(), quotas)
    assert {name: placement.slots for name, placement in plan.placements.items()} == places
    assert plan.preempted == preempted


def test_a_job_below_its_minimum_whose_nodes_are_all_gone_gets_all_that_it_needs_elsewhere() -> None:
    jobs, nodes = [job("a1", 2, has={"gone": 1}), job("b2", 2)], [OfferedNode("x", 3)]
    for _ in range(2):
        found = schedule(jobs, nodes, gone={"gone"})
        assert {name: placement.slots for name, placement in found.placements.items()} == {"a1": {"x": 2}}
        jobs = [replace(one, placement=found.placements.get(one.name)) for one in jobs]
    alone = schedule([job("a1", 2, has={"gone": 1})], [OfferedNode("y", 2, leaves=True)], gone={"gone"})
    assert alone.placements["a1"] == placed({"gone": 1}), "it has nothing else"


def test_what_a_preempted_job_leaves_on_a_node_that_goes_is_kept_for_nobody() -> None:
    """Or the job behind would begin on slots that the first one needs, and leave again at once."""
    jobs = [job("a1", 3, has={"x": 2, "y": 1}), job("b2", 4, priority=1), job("c3", 2)]
    for x in (OfferedNode("x", 2, goes=True), OfferedNode("x", 2, away=True)):
        nodes = [x, OfferedNode("y", 4)]
        found = schedule(jobs, nodes, gone=())
        assert (dict(found.preempted), {*found.placements}) == ({"a1": "b2"}, {"a1"})
        left = [replace(one, stop=LEAVES) if one.name in found.preempted else one for one in jobs]
        assert not schedule(left, nodes, gone=()).preempted


def test_the_order_is_quota_then_priority_then_age_and_a_preempted_job_keeps_its_age() -> None:
    again = job("a9")
    again = replace(again, submission=replace(again.submission, since=1))
    jobs = [job("a2"), job("b3", priority=1), job("c4"), again]
    assert [one.name for one in ordered(jobs, {})] == ["b3", "a9", "a2", "c4"]
    assert [one.name for one in ordered(jobs, {"a": 1})] == ["a9", "b3", "a2", "c4"]
    large = [job("a1", 3), job("a2", 1), job("a3", 1, stop=Wish("enough")), job("a4", 1)]
    assert within_quota(large, {"a": 2}) == {"a2", "a4"}, "what does not fit leaves the quota to others"


def test_the_owner_is_who_the_certificate_names_else_who_the_file_names() -> None:
    assert job("ann1").account == "ann"
    assert job("ann1", owner=Caller("bob", "operator", "10.0.0.1")).account == "bob"
    assert job("ann1", owner=Caller("", "", "10.0.0.1")).account == "ann"


def test_who_was_not_needed_after_all_is_spared() -> None:
    small, large = (
        PreemptibleJob("small", shares({"x": 1}), shares({"x": 1})),
        PreemptibleJob("large", shares({"y": 3}), shares({"y": 3})),
    )
    assert choose(3, {"x": 0, "y": 0}, [large, small]) == PreemptionChoice({}, ("large",))
    assert choose(4, {"x": 0, "y": 0}, [large, small]) == PreemptionChoice({}, ("large", "small"))
    assert choose(5, {"x": 0, "y": 0}, [large, small]) is None
    assert choose(1, {"x": 0, "y": -3}, [large, small]) == PreemptionChoice({}, ("small",)), (
        "a node that offers less than it has"
    )
    shrinks = replace(large, smaller=shares({"y": 1}))
    assert choose(1, {"x": 0, "y": 0}, [small, shrinks]) == PreemptionChoice({"large": shares({"y": 1})}, ())
    fixed = replace(large, whole=False)
    assert choose(3, {"x": 0, "y": 0}, [fixed, small]) is None


# ------------------------------------------------------------------------------------------------------- whole days

LEAVE_S = 3
"""Most seconds in which a preempted job has left."""

NEW_LEADER_S = 4
"""Seconds for which a new leader preempts nobody."""


@dataclass
class Days:
    """A fleet under virtual time. Its state is the documents: a leader that is replaced loses nothing else."""

    nodes: list[OfferedNode]
    quotas: dict[str, int]
    jobs: dict[str, FleetJob] = field(default_factory=dict)
    left_s: dict[str, int] = field(default_factory=dict)
    leaving_s: dict[str, int] = field(default_factory=dict)
    preempted: dict[int, int] = field(default_factory=dict)
    due_s: dict[tuple[str, str], int] = field(default_factory=dict)
    number: int = 0
    awaited_s: int = 0
    away: str = ""
    """A node that has fallen silent, and comes back."""

    @property
    def total(self) -> int:
        return sum(node.slots for node in self.nodes)

    def submit(self, owner: str, priority: int, least: int, workers: int, works_s: int, since: int = 0) -> None:
        self.number += 1
        one = job(f"{owner}{self.number}", least, workers, priority=priority)
        self.jobs[one.name] = replace(one, submission=replace(one.submission, since=since))
        self.left_s[one.name] = works_s

    def second(self, leaves_s: int) -> None:
        """leaves_s: how long jobs take that are preempted now."""
        self.awaited_s = max(0, self.awaited_s - 1)
        for name in [name for name, one in self.jobs.items() if one.runs]:
            if name in self.leaving_s:
                self.leaving_s[name] -= 1
                if self.leaving_s[name] <= 0:
                    self._leave(name)
            else:
                self.left_s[name] -= 1
                if self.left_s[name] <= 0:
                    del self.jobs[name]
        plan = self._plan()
        for _ in range(10):  # until nothing changes, as the leader does
            for name, placement in plan.placements.items():
                self.jobs[name] = replace(self.jobs[name], placement=placement)
            for name in plan.preempted:
                self.jobs[name] = replace(self.jobs[name], stop=Wish("preempted", preempts=True))
                self.leaving_s[name] = leaves_s
                since = self.jobs[name].since
                self.preempted[since] = self.preempted.get(since, 0) + 1
            again = self._plan()
            if (again.placements, again.preempted) == (plan.placements, {}):
                break
            plan = again
        else:
            raise AssertionError("the queue never settles")
        self._judge(again)

    def _plan(self) -> Schedule:
        nodes = [replace(node, away=node.name == self.away) for node in self.nodes]
        return schedule(list(self.jobs.values()), nodes, set(), self.quotas, awaited=self.awaited_s > 0)

    def _leave(self, name: str) -> None:
        gone, left_s = self.jobs.pop(name), self.left_s.pop(name)
        del self.leaving_s[name]
        spec = gone.spec
        self.submit(spec.owner, spec.priority, spec.min_workers, spec.workers, left_s, gone.since)

    def _judge(self, plan: Schedule) -> None:
        taken: dict[str, int] = {}
        for one in self.jobs.values():
            for share in one.shares:
                taken[share.node] = taken.get(share.node, 0) + share.slots
        assert all(taken.get(node.name, 0) <= node.slots for node in self.nodes), "a slot is given twice"
        idle = self.total - sum(taken.values())
        order = ordered(self.jobs.values(), self.quotas)
        due: set[tuple[str, str]] = set()
        for place, one in enumerate(order):
            if not one.waits or self.awaited_s or self.away:
                continue
            least = one.spec.min_workers
            kept = any(";" in plan.waiting.get(other.name, "") for other in order[: place + 1])
            assert kept or idle < least, "a job waits, and slots that it may use are idle"
            before = [other for other in order[:place] if other.stop is None]
            needed = sum(held(other) or other.spec.min_workers for other in before)
            if self.total - needed >= least:
                due.add((one.name, "those before it leave it enough"))
            own = [other for other in order if other.account == one.account and other.stop is None]
            ahead = sum(held(other) for other in own) + sum(o.spec.min_workers for o in before if o.waits and o in own)
            if sum(self.quotas.values()) <= self.total and ahead + least <= self.quotas.get(one.account, 0):
                due.add((one.name, "its owner holds less than its quota"))
        self.due_s = {what: self.due_s.get(what, 0) + 1 for what in due}
        late = [what for what, seconds in self.due_s.items() if seconds > 2 * LEAVE_S]
        assert not late, late


def held(one: FleetJob) -> int:
    return sum(share.slots for share in one.shares)


def test_days_reach_what_there_is_to_reach() -> None:
    """Otherwise the bounds would hold because nothing happens."""
    reached: dict[str, int] = dict.fromkeys(("preempted", "twice", "smaller", "overtaken", "reclaimed"), 0)
    for seed in range(20):
        random = Random(seed)
        days = Days([OfferedNode("n0", 2), OfferedNode("n1", 3)], {"a": 2, "b": 2} if seed % 2 else {})
        for _ in range(40):
            if random.random() < 0.3:
                least = random.randint(1, 4)
                days.submit(random.choice("abc"), random.choice([0, 0, 2]), least, least + random.randint(0, 3), 6)
            before = {name: held(one) for name, one in days.jobs.items() if one.runs and one.stop is None}
            days.second(random.randint(1, LEAVE_S))
            order = ordered(days.jobs.values(), days.quotas)
            waits = [one.waits for one in order]
            reached["smaller"] += any(name in days.jobs and held(days.jobs[name]) < had for name, had in before.items())
            reached["overtaken"] += any(not one and any(waits[:place]) for place, one in enumerate(waits))
            left = [one for one in days.jobs.values() if one.stop is not None]
            reached["preempted"] += len(left)
            reached["reclaimed"] += any(days.quotas and one.spec.priority == 2 for one in left)
        reached["twice"] += any(times > 1 for times in days.preempted.values())
    assert all(reached.values()), reached


JOBS = st.lists(
    st.tuples(
        st.integers(0, 12),  # when
        st.sampled_from("abc"),
        st.sampled_from([0, 0, 0, 1, 2]),
        st.integers(1, 4),
        st.integers(0, 3),
        st.integers(1, 12),
    ),
    min_size=2,
    max_size=14,
)


@given(
    JOBS,
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.dictionaries(st.sampled_from("ab"), st.integers(1, 6)),
    st.lists(st.integers(1, 40), max_size=2),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_over_days_nobody_starves_and_every_owner_has_its_quota_in_time(
    arrivals: list[tuple[int, str, int, int, int, int]],
    slots: list[int],
    quotas: dict[str, int],
    elections: list[int],
    silence: int,
    random: Any,
) -> None:
    total = sum(slots)
    days = Days([OfferedNode(f"n{number}", count) for number, count in enumerate(slots)], quotas)
    works_s = sum(arrival[-1] for arrival in arrivals)
    horizon_s = 20 + works_s + len(arrivals) ** 2 * (LEAVE_S + 1) + len(elections) * (NEW_LEADER_S + 1)
    for now_s in range(horizon_s):
        for when, owner, priority, least, more, works in arrivals:
            if when == now_s:
                days.submit(owner, priority, min(least, total), min(least, total) + more, works)
        days.away = "n0" if silence <= now_s < silence + 5 else ""
        if now_s in elections:
            days.awaited_s = NEW_LEADER_S
        days.second(random.randint(1, LEAVE_S))
        if now_s > 12 and not days.jobs:
            break
    assert not days.jobs, "all have ended"
    if not quotas:
        assert all(times <= len(arrivals) - 1 for times in days.preempted.values()), "once for each job before it"
