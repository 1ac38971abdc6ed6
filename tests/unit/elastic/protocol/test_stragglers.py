"""Members of different speed: when shards follow it, who is named, and who gives its place to a spare."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import JobSpec, Reduction, Stragglers
from elastic.errors import ConfigError
from elastic.protocol import membership
from elastic.protocol.membership import Action, AgentUp, Commit, Committed, Elected, Event, Note, Resized, State, Tell
from elastic.protocol.membership.stragglers import median_without
from elastic.protocol.messages import (
    Announce,
    Generation,
    Invite,
    Kind,
    Left,
    Progress,
    Quiesce,
    Ready,
    Release,
    Report,
    RingState,
    RingUp,
    WorkerDead,
)
from elastic.protocol.recovery_plan import default_sizes

STEADY_S = 30.0
SHARDS = 8


class Job:
    """A leader, and workers that do what they are told at once: commits get through, rings are built and take effect.

    Workers are `n.0.0`, `n.1.0`, ... on one node; the last `spares` of them are spares.
    """

    def __init__(self, workers: int = 3, spares: int = 0, **spec: Any) -> None:
        self.spec = JobSpec(name="job", command=("train",), workers=workers, spares=spares, **spec)
        self.group = membership.Group(self.spec, seed="seed")
        self.now_s = 0.0
        self.done: list[Action] = []
        self.committed: list[Generation] = []
        self.paces_ms: dict[str, float] = {}
        self.exchange_ms = 0.0
        self.op = 0
        self.feed(Elected(1), AgentUp("n", workers))
        for slot in range(workers + spares):
            self.announce(slot)
        for worker in self.members:
            self.feed(RingUp(worker, 1))
        assert self.group.state is State.RUNNING

    @property
    def members(self) -> tuple[str, ...]:
        assert self.group.running is not None
        return self.group.running.ids

    @property
    def shares(self) -> tuple[int, ...]:
        assert self.group.running is not None
        return default_sizes(self.group.running, SHARDS)

    def announce(self, slot: int, incarnation: int = 0, **standing: Any) -> None:
        self.feed(Announce(f"n.{slot}.{incarnation}", "n", slot, 1, "host", 1, "same", **standing))

    def feed(self, *events: Event) -> None:
        for event in events:
            actions = membership.advance(self.group, (event,), self.now_s)
            self.done += actions
            for action in actions:
                if isinstance(action, Commit):
                    self.committed.append(action.generation)
                    self.feed(Committed(action.generation.number))

    def train(self, seconds: float, **paces_ms: float) -> None:
        """Beats of all members; a planned generation takes effect with the next one. Names as in n0=12.5."""
        self.paces_ms |= {f"n.{name[1:].replace('_', '.')}": ms for name, ms in paces_ms.items()}
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.5
            self.op += 1
            top = self.group.top
            assert top is not None
            for worker in top.ids:
                ms = self.paces_ms.get(worker, 0.0)
                speed = (SHARDS, round(1000 * ms), round(1000 * self.exchange_ms))
                self.feed(Progress(worker, top.number, self.op, self.op, "step", *speed))

    def notes(self, name: str) -> list[dict[str, object]]:
        return [action.fields for action in self.done if isinstance(action, Note) and action.event == name]

    def told(self, kind: type) -> list[str]:
        return [action.to[0] for action in self.done if isinstance(action, Tell) and isinstance(action.order, kind)]


EVEN = {"n0_0": 100.0, "n1_0": 100.0, "n2_0": 100.0}


def test_members_of_one_speed_are_left_alone() -> None:
    job = Job()
    job.train(200, **EVEN)
    job.train(200, n1_0=109.0)
    assert len(job.committed) == 1 and job.shares == (3, 3, 2) and not job.notes("straggler")


def test_shards_follow_speed_once_the_difference_has_lasted() -> None:
    job = Job()
    job.train(10, **EVEN)
    job.train(STEADY_S - 1, n0_0=50.0)
    assert len(job.committed) == 1
    job.train(2)
    record = job.committed[-1]
    assert (record.kind, record.ids, record.plan.paces) == (Kind.PLANNED, job.members, (50_000, 100_000, 100_000))
    assert job.shares == (4, 2, 2)
    assert record.because == "shards follow speed: a pass takes about 200.0 ms, it was 300.0 ms"
    shards = {"n.0.0": 4, "n.1.0": 2, "n.2.0": 2}
    assert job.notes("balanced") == [{"shards": shards, "because": record.because}]
    assert not [action for action in job.done if isinstance(action, Tell) and isinstance(action.order, Quiesce)]


def test_a_job_on_one_node_that_is_made_smaller_trains_with_as_many_and_the_others_become_spares() -> None:
    """And take their places again. The fleet has time to take whole nodes before."""
    job = Job(workers=4)
    job.train(10)
    job.feed(Resized(2))
    job.train(STEADY_S - 1)
    assert len(job.committed) == 1
    job.train(2)
    assert job.members == ("n.0.0", "n.1.0") and [note["worker_id"] for note in job.notes("surplus")] == [
        "n.2.0",
        "n.3.0",
    ]
    assert not job.told(Quiesce), "nothing is interrupted"
    for worker in ("n.2.0", "n.3.0"):
        job.feed(Left(worker, 2), WorkerDead(worker, "exited with 0"))
    assert sorted(job.told(Release)) == ["n.2.0", "n.3.0"]
    for slot in (2, 3):
        job.announce(slot, incarnation=1)
    job.train(3 * STEADY_S)
    assert len(job.committed) == 2 and job.group.spares == {"n.2.1", "n.3.1"} and not job.told(Invite)
    job.feed(Resized(3))
    assert job.told(Invite) == ["n.2.1"]


def test_what_the_fleet_takes_back_itself_makes_no_spares() -> None:
    job = Job(workers=2)
    job.feed(AgentUp("m", 1), Announce("m.0.0", "m", 0, 1, "host", 1, "same"))
    job.feed(Resized(2))
    job.train(3 * STEADY_S)
    assert job.members == ("n.0.0", "n.1.0") and not job.notes("surplus") and not job.told(Invite)


@pytest.mark.parametrize(
    ("reduction", "exchange_ms", "moved"), [("exact", 20, True), ("exact", 30, False), ("allreduce", 30, True)]
)
def test_shards_stay_where_more_partial_sums_cost_what_is_won(reduction: str, exchange_ms: float, moved: bool) -> None:
    """5 and 3 of 8 shards are computed in 350 ms instead of 400 ms, and are two partial sums each instead of one."""
    job = Job(workers=2, reduction=Reduction(reduction))
    job.exchange_ms = exchange_ms
    job.train(40, n0_0=70.0, n1_0=100.0)
    assert (job.shares == (5, 3)) == moved


def test_what_passes_by_in_time_changes_nothing() -> None:
    job = Job()
    for _ in range(20):
        job.train(STEADY_S - 1, **EVEN | {"n0_0": 40.0, "n1_0": 400.0})
        job.train(1, **EVEN)
    assert len(job.committed) == 1 and not job.notes("straggler")


def test_shards_go_back_when_the_difference_is_over() -> None:
    job = Job()
    job.train(40, **EVEN | {"n0_0": 50.0})
    job.train(29, **EVEN)
    assert job.shares == (4, 2, 2)
    job.train(40)
    assert sorted(job.shares) == [2, 3, 3]
    job.train(300)
    assert len(job.committed) == 3, "and that was all"


def test_ownership_changes_at_most_once_in_a_while_however_speeds_jump() -> None:
    job = Job()
    for round_ in range(20):
        fast = f"n{round_ % 3}_0"
        job.train(STEADY_S + 1, **EVEN | {fast: 40.0})
    assert 1 < len(job.committed) <= 21


def test_a_member_whose_speed_is_not_known_yet_is_waited_for() -> None:
    job = Job()
    job.train(100, n0_0=10.0, n1_0=100.0)
    assert len(job.committed) == 1
    job.train(40, n2_0=100.0)
    assert len(job.committed) == 2


def test_nothing_is_moved_where_there_are_too_few_shards() -> None:
    job = Job(workers=9)
    job.train(100, **{f"n{slot}_0": 10.0 if slot else 100.0 for slot in range(9)})
    assert len(job.committed) == 1


def test_survivors_and_newcomers_go_on_with_what_was_known() -> None:
    job = Job()
    job.train(40, **EVEN | {"n0_0": 25.0})
    assert job.shares == (6, 1, 1)
    before = job.group.running
    assert before is not None
    job.feed(WorkerDead("n.2.0", "killed"))
    reports = (Report(w, 1, before.number, before.number, True, job.op, kept=job.op - 1) for w in ("n.0.0", "n.1.0"))
    job.feed(*reports)
    record = job.committed[-1]
    assert (record.kind, record.ids, record.plan.paces) == (Kind.LOSS, ("n.0.0", "n.1.0"), (25_000, 100_000))
    job.feed(*(RingUp(worker, record.number) for worker in record.ids))
    job.announce(2, 1)
    job.feed(Ready("n.2.1", record.number))
    record = job.committed[-1]
    assert (record.ids, record.plan.paces) == (("n.0.0", "n.1.0", "n.2.1"), (25_000, 100_000, 0))


def test_a_straggler_is_named_with_its_reason_until_it_is_as_fast_as_the_others() -> None:
    job = Job()
    job.train(STEADY_S - 1, **EVEN | {"n1_0": 250.0})
    assert not job.notes("straggler")
    job.train(3)
    because = "a shard takes it 250.0 ms, 2.5 times as long as the others"
    assert job.notes("straggler") == [{"worker_id": "n.1.0", "because": because}]
    status = membership.status(job.group)
    assert status["stragglers"] == {"n.1.0": because}
    members = status["members"]
    assert isinstance(members, list) and [(m["shards"], m["shard_ms"]) for m in members] == [
        (3, 100.0), (1, 250.0), (4, 100.0)
    ]  # fmt: skip
    job.train(100, n1_0=190.0)
    assert membership.status(job.group)["stragglers"], "nearly as slow"
    job.train(1, n1_0=120.0)
    assert membership.status(job.group)["stragglers"] == {}
    assert job.notes("straggler_over") == [{"worker_id": "n.1.0", "shard_ms": 120.0}]


def test_of_two_members_the_slower_one_can_be_a_straggler() -> None:
    job = Job(workers=2)
    job.train(40, n0_0=100.0, n1_0=201.0)
    assert [note["worker_id"] for note in job.notes("straggler")] == ["n.1.0"]


def test_ignored_stragglers_have_as_many_shards_as_the_others() -> None:
    job = Job(stragglers=Stragglers.IGNORE)
    job.train(200, **EVEN | {"n1_0": 900.0})
    assert len(job.committed) == 1 and not job.notes("straggler")


def test_a_name_outlives_a_loss_and_a_stream_that_was_cut() -> None:
    job = Job()
    job.train(40, **EVEN | {"n1_0": 250.0})
    status = membership.status(job.group)["stragglers"]
    top = job.group.top
    assert top is not None
    job.announce(1, entered=top.number, ring=RingState.LIVE)
    job.train(1)
    job.feed(WorkerDead("n.2.0", "killed"))
    job.feed(*(Report(w, 1, top.number, top.number, True, job.op, kept=job.op - 1) for w in ("n.0.0", "n.1.0")))
    job.feed(Progress("n.0.0", top.number, job.op))
    job.feed(*(RingUp(worker, job.committed[-1].number) for worker in job.committed[-1].ids))
    job.train(60)
    assert membership.status(job.group)["stragglers"] == status and len(job.notes("straggler")) == 1


def test_a_member_that_is_alone_is_no_straggler() -> None:
    job = Job(workers=2)
    job.train(40, n0_0=250.0, n1_0=100.0)
    assert job.group.stragglers.keys() == {"n.0.0"}
    top = job.group.top
    assert top is not None
    job.feed(WorkerDead("n.1.0", "killed"), Report("n.0.0", 1, top.number, top.number, True, job.op, kept=job.op - 1))
    job.feed(RingUp("n.0.0", job.committed[-1].number))
    job.train(1)
    assert job.members == ("n.0.0",) and job.group.stragglers == {}


def demoting(**options: Any) -> Job:
    """Three workers and a spare; n.1.0 is slow and has just been named."""
    job = Job(**{"spares": 1, "stragglers": Stragglers.DEMOTE, **options})
    job.train(STEADY_S + 1, **EVEN | {"n1_0": 250.0})
    assert [note["worker_id"] for note in job.notes("straggler")] == ["n.1.0"]
    return job


def swapped() -> Job:
    """The straggler n.1.0 and the spare n.3.0 have changed places; n.1.1 is a spare, in the slot of the straggler."""
    job = demoting()
    job.feed(Ready("n.3.0", 1))
    job.train(1)
    job.feed(Left("n.1.0", 2), WorkerDead("n.1.0", "exited with 0"))
    job.announce(1, 1)
    return job


def test_a_straggler_and_a_spare_change_places_in_one_generation() -> None:
    job = demoting()
    assert job.told(Invite) == ["n.3.0"] and len(job.committed) == 1, "it stays until the spare is ready"
    job.train(20)
    assert len(job.committed) == 1
    job.feed(Ready("n.3.0", 1))
    job.train(1)
    (swap,) = job.committed[1:]
    assert (swap.kind, swap.ids, swap.hold) == (Kind.PLANNED, ("n.0.0", "n.2.0", "n.3.0"), False)
    assert "n.1.0 drains: a shard takes it 250.0 ms" in swap.because
    job.feed(Left("n.1.0", swap.number))
    assert job.told(Release) == ["n.1.0"]
    job.feed(WorkerDead("n.1.0", "exited with 0"))
    job.announce(1, 1)
    job.train(300, n3_0=100.0)
    assert job.members == swap.ids and job.group.spares == {"n.1.1"}, "its slot keeps the next spare"


def test_without_a_spare_a_straggler_stays_and_its_shards_go() -> None:
    job = demoting(spares=0)
    job.train(100)
    assert job.members == ("n.0.0", "n.1.0", "n.2.0") and job.shares[1] == 1 and not job.notes("demoted")


def test_nobody_is_demoted_if_a_spare_that_dies_could_leave_too_few() -> None:
    job = demoting(min_workers=3)
    job.train(100)
    assert job.told(Invite) == [] and not job.notes("demoted")


def test_a_straggler_is_demoted_where_one_more_than_the_least_are_left_without_it() -> None:
    assert demoting(min_workers=2).told(Invite) == ["n.3.0"]


def test_members_are_compared_once_in_a_beat() -> None:
    job = Job()
    job.train(1.0, **EVEN)
    beat_s, compare_s = job.spec.timing.beat_s, job.group.compare_s
    for later_s, again in ((-0.5, False), (0.0, True)):
        job.now_s = compare_s + later_s * beat_s
        job.feed(Progress("n.0.0", 1, job.op, job.op, "step"))
        assert job.group.compare_s == (job.now_s + beat_s if again else compare_s)
    job.group.spec = replace(job.group.spec, max_workers=5000)  # of 5000 agents each speaks rarely
    job.group.slots, job.group.size, job.now_s = {"n": 1}, 5000, job.group.compare_s
    job.feed(Progress("n.0.0", 1, job.op, job.op, "step"))
    assert job.group.compare_s == job.now_s + job.group.timing.beat_s
    assert job.group.timing.beat_s > 4 * beat_s


def test_a_slot_is_not_demoted_again_and_again() -> None:
    job = swapped()
    job.train(40, n3_0=300.0)
    assert len(job.notes("demoted")) == 1 and job.told(Invite) == ["n.3.0", "n.1.1"], "another slot may be"
    job.feed(Ready("n.1.1", 2))
    job.train(1)
    job.feed(Left("n.3.0", job.committed[-1].number), WorkerDead("n.3.0", "exited with 0"))
    job.announce(3, 1)
    assert job.members == ("n.0.0", "n.2.0", "n.1.1")
    job.train(300, n1_1=250.0)
    assert len(job.notes("demoted")) == 2, "n.1 was demoted a short time ago"
    job.train(600)
    assert job.told(Invite)[2:] == ["n.3.1"]


def test_a_spare_whose_slot_was_not_demoted_is_preferred() -> None:
    job = swapped()
    job.announce(4)
    job.train(40, n3_0=300.0)
    assert job.told(Invite) == ["n.3.0", "n.4.0"], "n.1 was slow, and waits although its spare came earlier"


def test_a_straggler_that_recovers_before_the_spare_is_ready_stays() -> None:
    job = demoting()
    job.train(40, **EVEN)
    job.feed(Ready("n.3.0", 1))
    job.train(100)
    assert job.members == ("n.0.0", "n.1.0", "n.2.0") and not job.notes("demoted")


def test_a_loss_takes_a_demotion_back() -> None:
    """The spare may be the one that is lost, and then the straggler is needed."""
    job = demoting()
    job.feed(Ready("n.3.0", 1))
    job.now_s += 1.0
    job.feed(Progress("n.0.0", 1, job.op, job.op, "step", SHARDS, 100_000))
    assert len(job.committed) == 2 and "n.1.0" in job.group.drains
    job.feed(WorkerDead("n.2.0", "killed"))
    job.feed(*(Report(worker, 1, 2, 1, True, job.op, kept=job.op - 1) for worker in ("n.0.0", "n.1.0")))
    job.feed(Report("n.3.0", 1, 2, 0, False, 0))
    record = job.committed[-1]
    assert (record.kind, record.ids) == (Kind.LOSS, ("n.0.0", "n.1.0"))
    assert job.group.drains == {} and job.group.demoted_s == {}
    job.feed(*(RingUp(worker, record.number) for worker in record.ids))
    job.train(1)
    assert job.members == ("n.0.0", "n.1.0")


def test_a_demotion_that_took_effect_is_remembered_after_a_loss() -> None:
    job = demoting()
    job.feed(Ready("n.3.0", 1))
    job.train(1)
    job.feed(Left("n.1.0", 2), WorkerDead("n.1.0", "exited with 0"), WorkerDead("n.2.0", "killed"))
    job.feed(*(Report(worker, 1, 2, 2, True, job.op, kept=job.op - 1) for worker in ("n.0.0", "n.3.0")))
    assert job.committed[-1].ids == ("n.0.0", "n.3.0") and list(job.group.demoted_s) == ["n.1"]


def test_a_spare_on_another_node_is_preferred() -> None:
    job = Job(spares=1, stragglers=Stragglers.DEMOTE)
    job.feed(AgentUp("m", 0), Announce("m.0.0", "m", 0, 1, "host", 1, "same"))
    job.train(STEADY_S + 1, **EVEN | {"n1_0": 250.0})
    assert job.told(Invite) == ["m.0.0"], "a machine that is slow has slow spares"


@pytest.mark.parametrize("factor", [1.0, 0.5, -2.0, float("nan"), float("inf")])
def test_a_factor_that_would_name_everybody_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="slow_factor"):
        replace(Job().spec, slow_factor=factor)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=9))
def test_the_median_of_the_others_is_found_in_the_list_of_all(paces: list[int]) -> None:
    for rank, pace in enumerate(paces):
        others = paces[:rank] + paces[rank + 1 :]
        assert median_without(sorted(paces), pace) == median(others)
