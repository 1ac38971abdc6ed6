"""Words that come too late, or of strangers: a leader that obeyed them would end what goes on."""

from __future__ import annotations

import pytest

from elastic.protocol.membership import Committed, State
from elastic.protocol.membership.roster import Stage
from elastic.protocol.messages import Generation, Kind, Member, Plan
from elastic.protocol.worker_state import WorkerState
from tests.membership_step import step
from tests.unit.elastic.protocol.test_membership import Job

BEGUN = (
    "0 job workers=2 min=1 max=3",
    "0 elected 1",
    "0 announce a",
    "0 announce b",
    "0 committed",
    "0 ringup a 1",
    "0 ringup b 1",
    "1 progress a 1 3",
    "1 progress b 1 3",
)


@pytest.mark.parametrize(
    "late",
    [
        ("2 ready x 1",),
        ("2 drain x",),
        ("2 undrain x",),
        ("2 finished x 1 digest",),
        ("2 left x 1",),
        ("2 dead x",),
        ("2 progress x 1 9",),
    ],
    ids=lambda late: str(late[0]).split()[1],
)
def test_a_word_of_a_stranger_changes_nothing(late: tuple[str, ...]) -> None:
    job = Job()
    assert job.group.state is State.FORMING
    for line in BEGUN:
        job.feed(line)
    before = job.group
    said = [answer for line in late for answer in job.feed(line)]
    after = job.group
    assert not said
    assert (after.state, after.chain, set(after.workers)) == (before.state, before.chain, set(before.workers))


def test_what_came_of_another_record_than_the_one_awaited_is_no_answer() -> None:
    job = Job()
    for line in (*BEGUN, "2 announce c", "2 ready c 1"):
        job.feed(line)
    assert job.group.committing is not None
    group, actions = step(job.group, Committed(7), 3.0)
    assert group.committing == job.group.committing and group.chain == job.group.chain and not actions


def test_who_waits_as_a_spare_or_has_to_go_does_not_hold_up_the_ring_with_its_copies() -> None:
    job = Job()
    for line in (*BEGUN, "2 announce c", "2 drain c", "2 ready c 1 outdated=5"):
        job.feed(line)
    assert job.group.state is State.RUNNING and not job.group.awaited.slot


def test_a_member_that_asks_to_be_admitted_stays_a_member() -> None:
    job = Job()
    for line in (*BEGUN, "2 ready a 1"):
        job.feed(line)
    assert job.group.workers["a"].stage is Stage.MEMBER and job.group.committing is None


def test_a_report_while_the_job_ends_starts_nothing() -> None:
    job = Job()
    for line in (*BEGUN, "2 finished a 1 digest"):
        job.feed(line)
    assert job.group.state is State.CLOSING
    assert not job.feed("3 report b promise=1 entered=1 reduced=3")
    assert job.group.state is State.CLOSING


def test_a_late_word_of_one_that_was_to_leave_with_all_others_does_not_end_the_job() -> None:
    """All drain, a takes it back, and the generation with it is in effect."""
    job = Job()
    for line in (*BEGUN, "2 drain a left=0", "2 drain b left=0", "3 committed", "3 committed"):
        job.feed(line)
    assert job.group.chain[-1].ids == ()
    number = job.group.chain[-1].number
    for line in ("3 undrain a", "3 committed", f"4 progress a {number + 1} 4"):
        job.feed(line)
    assert job.group.running is not None and job.group.running.ids == ("a",)
    job.feed(f"5 left b {number}")
    assert job.group.state is State.RUNNING


def test_a_newcomer_finds_the_address_of_any_member_it_knows_of() -> None:
    def record(number: int, kind: Kind, *workers: str) -> Generation:
        members = tuple(Member(worker, worker, "host", 5000 + rank, rank) for rank, worker in enumerate(workers))
        return Generation(number, kind, 1, members, Plan(), "")

    position = WorkerState("c", record=record(1, Kind.FORM, "a", "b"), pending=(record(2, Kind.PLANNED, "a", "c"),))
    known = [position.known(worker) for worker in "abcx"]
    assert [member.port if member else None for member in known] == [5000, 5001, 5001, None]
