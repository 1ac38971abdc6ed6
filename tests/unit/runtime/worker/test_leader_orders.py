"""What a worker tells a new leader again."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic.agent.worker.client import AgentClient
from elastic.protocol.messages import CheckpointComplete, Drain, EndRound, Generation, Home, Kind, Pointed, Word
from elastic.records.journal import Journal
from runtime.recovery.transfer.client import CopyClient
from runtime.worker.leader_orders import LeaderOrders
from runtime.worker.operations import OperationLoop
from runtime.worker.state_owner import SharedWorkerState

ME = "a.0.0"


def orders(sent: list[Word]) -> LeaderOrders:
    client: Any = SimpleNamespace(send=sent.append)
    shared: Any = SimpleNamespace(changed=threading.Condition())
    return LeaderOrders(
        cast(SharedWorkerState, shared), cast(CopyClient, None), cast(AgentClient, client), cast(Journal, None)
    )


def drain(term: int, left_ms: int, **more: Any) -> Drain:
    return Drain(term, ME, left_ms, "spot", **{"kind": "reclaim", "said_by": "EC2", **more})


def test_a_notice_is_one_value_until_it_is_another_one_or_taken_back() -> None:
    worker = orders([])
    assert worker.going is None
    worker.deliver(drain(1, 100_000))
    first = worker.going
    assert first is not None and (first.kind, first.source, first.because) == ("reclaim", "EC2", "spot")
    assert 90 < first.seconds_left <= 100
    assert first.deadline == pytest.approx(time.time() + first.seconds_left, abs=1.0)
    worker.deliver(drain(2, 101_000))
    assert worker.going is first, "a repetition that came late"
    worker.deliver(drain(2, 60_000))
    nearer = worker.going
    assert nearer is not None and nearer is not first and nearer.seconds_left <= 60
    worker.deliver(drain(2, 60_000, said_by="Slurm"))
    assert worker.going is not None and worker.going.source == "Slurm"
    worker.deliver(drain(1, 60_000, over=True))
    assert worker.going is not None, "of an older leader's term"
    worker.deliver(drain(2, 60_000, over=True))
    assert worker.going is None
    worker.deliver(drain(2, 60_000))
    assert worker.going is not None


def test_a_notice_whose_end_has_come_stands_when_it_is_repeated() -> None:
    worker = orders([])
    worker.deliver(drain(1, 0))
    first = worker.going
    worker.deliver(drain(2, 0))
    assert first is not None and worker.going is first and first.seconds_left == 0


def test_a_new_leader_hears_of_checkpoints_that_no_leader_has_answered_for() -> None:
    """The word may have come while there was none, and a job that is preempted goes on from what the pointer names."""
    sent: list[Word] = []
    answers: list[bool] = []
    worker, word = orders(sent), CheckpointComplete(ME, "_periodic", "step-000000000102.0.g1-c02cff6f")
    worker.deliver(Home(1, ME, 0))
    worker.pointed[word] = answers.append
    worker.deliver(Home(1, ME, 0))
    assert sent == []
    worker.deliver(Home(2, ME, 0))
    assert sent == [word]
    worker.deliver(Pointed(2, ME, word.series, word.entry, True))
    worker.deliver(Pointed(2, ME, word.series, word.entry, True))
    worker.deliver(Home(3, ME, 0))
    assert (sent, answers) == ([word], [True])


def test_a_round_is_over_for_this_worker_only_where_the_order_says_so() -> None:
    worker = orders([])
    position = SimpleNamespace(entered=3, reduced=7)
    loop: Any = SimpleNamespace(_orders=worker, _shared=SimpleNamespace(position=position))

    def over() -> bool:
        return bool(OperationLoop.round_over.fget(loop))  # type: ignore[attr-defined]

    assert not over()
    for order in (EndRound(2, ME, 3, 6), EndRound(2, ME, 2, 7), EndRound(1, ME, 3, 7)):
        worker.deliver(order)
        assert not over(), "of an operation or generation before, or of an older leader's term"
    worker.deliver(EndRound(2, ME, 3, 7))
    assert over()
    position.reduced = 8
    assert not over(), "the next round has begun"


def test_whoever_waits_is_told_of_each_order_but_not_of_an_older_leaders() -> None:
    worker, seen = orders([]), list[bool]()
    worker.on_order = lambda: seen.append(worker.going is not None)
    worker.deliver(Home(2, ME, 0))
    worker.deliver(drain(2, 60_000))
    worker.deliver(drain(1, 60_000, over=True))
    assert seen == [False, True], "what it orders holds by then"


def test_a_loss_between_two_looks_is_seen_although_a_planned_generation_followed() -> None:
    worker = orders([])
    kinds: Any = {4: Kind.PLANNED, 5: Kind.LOSS, 6: Kind.PLANNED, 7: Kind.PLANNED}
    worker._generations = {number: cast(Generation, SimpleNamespace(kind=kind)) for number, kind in kinds.items()}
    assert worker.planned(range(6, 8)) and worker.planned(range(8, 8))
    assert not worker.planned(range(5, 8))
    assert not worker.planned(range(3, 5)), "one that is not known any more"
