"""A new leader hears from an agent what the old one had heard, as it is now."""

from __future__ import annotations

from dataclasses import replace

from elastic.agent.standing_words import RECORDS_KEPT, StandingWords
from elastic.protocol.messages import (
    Announce,
    BuildFailedReport,
    DrainOver,
    DrainWish,
    Failed,
    Finished,
    Generation,
    Kind,
    Member,
    Plan,
    Progress,
    Quiesce,
    Ready,
    Report,
    RingBrokenReport,
    RingState,
    RingUp,
    SlotGivenUp,
    Word,
    WorkerDead,
    WorkerFrozen,
)
from elastic.protocol.worker_state import WorkerState, step

ANNOUNCE = Announce("a.0.0", "a", 0, 100, "127.0.0.1", 5000, "numerics")


def after(*words: Word) -> tuple[Word, ...]:
    standing = StandingWords()
    for word in (ANNOUNCE, *words):
        standing.heard(word)
    return standing.words()


def test_a_newcomer_is_announced_as_it_announced_itself() -> None:
    assert after() == (ANNOUNCE,)
    assert after(Ready("a.0.0", 3)) == (replace(ANNOUNCE, ready=True),)


def test_an_invited_newcomer_is_announced_as_such() -> None:
    standing = StandingWords()
    standing.heard(ANNOUNCE)
    for worker_id in ("a.0.0", "a.1.0"):
        standing.invited(worker_id)
    standing.heard(Ready("a.0.0", 3))
    assert standing.words() == (replace(ANNOUNCE, invited=True, ready=True),)


def test_a_newcomer_keeps_the_number_that_a_leader_gave_it() -> None:
    standing = StandingWords()
    standing.heard(ANNOUNCE)
    for worker_id in ("a.0.0", "a.1.0"):
        standing.at_home(worker_id, 3)
    assert standing.words() == (replace(ANNOUNCE, home=3),)


def test_a_stepping_worker_is_announced_where_it_stands() -> None:
    live = replace(ANNOUNCE, entered=2, ring=RingState.LIVE, reduced=9)
    assert after(RingUp("a.0.0", 2), Progress("a.0.0", 2, 7), Progress("a.0.0", 2, 9, 8)) == (live,)


def test_a_broken_ring_stays_broken_until_another_is_up() -> None:
    for broken in (
        RingBrokenReport("a.0.0", 1),
        BuildFailedReport("a.0.0", 1, ("b.0.0",)),
        Report("a.0.0", 1, 1, 1, True, 0),
    ):
        said = after(RingUp("a.0.0", 1), broken, Progress("a.0.0", 1, 0))
        assert said == (replace(ANNOUNCE, entered=1, ring=RingState.ABORTED),)
        said = after(RingUp("a.0.0", 1), broken, RingUp("a.0.0", 2))
        assert said == (replace(ANNOUNCE, entered=2, ring=RingState.LIVE),)


def test_what_stays_true_is_said_again_after_the_announcement() -> None:
    wish, finished = DrainWish("a.0.0", "spot notice", 90_000), Finished("a.0.0", 1, "digest")
    assert after(wish, finished) == (ANNOUNCE, wish, finished)


def test_a_wish_that_is_taken_back_is_not_said_again() -> None:
    assert after(DrainWish("a.0.0", "spot notice", 90_000), DrainOver("a.0.0")) == (ANNOUNCE,)


def test_a_dead_worker_is_only_dead() -> None:
    dead = WorkerDead("a.0.0", "killed by SIGKILL")
    given_up = SlotGivenUp("a", 0, "because", 1)
    assert after(DrainWish("a.0.0", "why", 1), dead, given_up) == (dead, given_up)


def test_a_thawed_worker_is_not_called_frozen_to_a_later_leader() -> None:
    frozen = WorkerFrozen("a.0.0", "state T")
    assert after(frozen) == (ANNOUNCE, frozen)
    standing = StandingWords()
    standing.heard(ANNOUNCE)
    standing.heard(frozen)
    standing.thawed("a.0.0")
    assert standing.words() == (ANNOUNCE,)


def test_rank_0_is_that_of_the_generation_which_was_entered_not_of_one_announced() -> None:
    """A planned record is known before it takes effect; until then the old leader speaks."""
    standing = StandingWords()
    standing.heard(ANNOUNCE)
    assert standing.leader == ""
    standing.published(_record(1, "a.0.0", "b.0.0"))
    assert standing.leader == "a.0.0", "it may print before it says that it has entered"
    standing.heard(RingUp("a.0.0", 1))
    standing.published(_record(2, "b.0.0"))
    assert standing.leader == "a.0.0"
    standing.heard(Progress("a.0.0", 2, 5))
    assert standing.leader == "b.0.0"


def test_old_records_are_forgotten() -> None:
    standing = StandingWords()
    standing.heard(replace(ANNOUNCE, entered=1))
    for number in range(1, 3 * RECORDS_KEPT):
        standing.published(_record(number, "a.0.0"))
    standing.heard(Progress("a.0.0", 1, 0))
    assert standing.leader == ""


def test_the_record_in_effect_stays_however_many_are_planned_meanwhile() -> None:
    """In a long evaluation, newcomers come and go, and each plans a generation that does not take effect."""
    standing = StandingWords()
    standing.published(_record(1, "b.0.0", "a.0.0"))
    for word in (ANNOUNCE, RingUp("a.0.0", 1)):
        standing.heard(word)
    for number in range(2, 3 * RECORDS_KEPT):
        standing.published(replace(_record(number, "b.0.0", "a.0.0", "c.0.0"), kind=Kind.PLANNED))
    assert standing.has_others("a"), "a notice would end its workers instead of letting them leave"
    assert standing.leader == "b.0.0"


def _record(number: int, *workers: str) -> Generation:
    members = tuple(Member(worker, worker[0], "h", 1, rank) for rank, worker in enumerate(workers))
    return Generation(number, Kind.LOSS, number, members, Plan(), "")


def test_a_pending_ring_says_nothing_about_the_ring_that_steps() -> None:
    standing = StandingWords()
    planned = Generation(2, Kind.PLANNED, 1, (Member("a.0.0", "a", "127.0.0.1", 5000, 0),), Plan(), "a join")
    standing.published(planned)
    for word in (ANNOUNCE, RingUp("a.0.0", 1), RingUp("a.0.0", 2), BuildFailedReport("a.0.0", 2, ("b.0.0",))):
        standing.heard(word)
    assert standing.words() == (replace(ANNOUNCE, entered=1, ring=RingState.LIVE),)


def test_a_worker_that_finished_before_it_died_has_not_been_lost() -> None:
    finished, dead = Finished("a.0.0", 1, "digest"), WorkerDead("a.0.0", "exited with 0")
    assert after(finished, dead) == (finished, dead)


def test_what_ends_the_job_is_said_to_the_next_leader_also_when_its_worker_is_gone() -> None:
    """Members whose weights differ say so, and exit; if nobody leads just then, the job would go on from a snapshot."""
    differ, dead = Failed("a.0.0", 1, "step 7", "the weights differ", 5), WorkerDead("a.0.0", "exited with 5")
    assert after(differ, dead) == (differ, dead)
    raised = replace(differ, exit_code=1)
    assert after(raised, dead) == (dead,), "another process takes the worker's place"


def test_a_park_order_covers_every_generation_that_workers_here_may_have_entered() -> None:
    """Below the generation entered it would be taken for the word of a leader that is behind, and the ring would go on
    without any leader."""
    standing = StandingWords()
    assert standing.newest == 0
    standing.heard(replace(ANNOUNCE, entered=7))
    assert standing.newest == 7, "of an agent that was replaced, which has seen no record"
    standing.published(Generation(9, Kind.PLANNED, 7, (), Plan(), "planned"))
    assert standing.newest == 9
    record = Generation(7, Kind.LOSS, 7, (Member("a.0.0", "a", "127.0.0.1", 5000, 0),), Plan(), "lost")
    worker = WorkerState(me="a.0.0", record=record, entered=7, ring=RingState.LIVE)
    parked, actions = step(worker, Quiesce(1, 0, standing.newest))
    assert parked.ring is RingState.ABORTED and actions


def test_a_node_knows_whether_its_generation_has_members_elsewhere() -> None:
    standing = StandingWords()
    standing.published(replace(_record(1), members=(Member("a.0.0", "a", "h", 1, 0), Member("b.0.0", "b", "h", 1, 1))))
    assert not standing.has_others("a"), "nobody here has entered it"
    for word in (ANNOUNCE, RingUp("a.0.0", 1)):
        standing.heard(word)
    assert standing.has_others("a")
    standing.published(replace(_record(2), members=(Member("a.0.0", "a", "h", 1, 0),)))
    standing.heard(Progress("a.0.0", 2, 1))
    assert not standing.has_others("a")


def test_an_operation_that_was_completed_in_a_ring_shows_that_the_ring_is_up() -> None:
    standing = StandingWords()
    lost = replace(_record(2, "a.0.0", "b.0.0"), kind=Kind.LOSS, plan=Plan(op=7))
    standing.published(lost)
    standing.published(replace(lost, number=3, base=2, kind=Kind.PLANNED, plan=Plan()))
    told = [standing.shows(Progress("a.0.0", *said)) for said in ((2, 7), (2, 8), (1, 8), (3, 8))]
    assert told == [False, True, False, False], "of that operation; no earlier ring, nor one that is only planned"
