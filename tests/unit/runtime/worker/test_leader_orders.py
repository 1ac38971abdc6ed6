"""What a worker tells a new leader again."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from elastic.agent.worker.client import AgentClient
from elastic.protocol.messages import CheckpointComplete, Home, Pointed, Word
from elastic.records.journal import Journal
from runtime.recovery.transfer.client import CopyClient
from runtime.worker.leader_orders import LeaderOrders
from runtime.worker.state_owner import SharedWorkerState

ME = "a.0.0"


def orders(sent: list[Word]) -> LeaderOrders:
    client: Any = SimpleNamespace(send=sent.append)
    shared: Any = SimpleNamespace(changed=threading.Condition())
    return LeaderOrders(
        cast(SharedWorkerState, shared), cast(CopyClient, None), cast(AgentClient, client), cast(Journal, None)
    )


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
