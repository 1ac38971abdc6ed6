"""What the leader takes from an agent."""

from __future__ import annotations

import pytest

from elastic.protocol.messages import Announce, SlotGivenUp, Word, WorkerDead
from elastic.rendezvous.service import _own_word
from elastic.wire.codec import WireError


def announce(worker_id: str, node: str) -> Announce:
    return Announce(worker_id, node, 0, 1, "h", 1, "torch")


@pytest.mark.parametrize("word", [announce("a.0.1", "a"), WorkerDead("a.0.1", "killed"), SlotGivenUp("a", 0, "failed")])
def test_an_agent_speaks_for_its_own_node(word: Word) -> None:
    assert _own_word("a", word) is word


@pytest.mark.parametrize(
    "word",
    [
        announce("b.0.1", "a"),
        announce("a.0.1", "b"),
        announce("a.0.1", ""),
        announce("", "a"),
        WorkerDead("b.0.1", "killed"),
        SlotGivenUp("b", 0, "failed"),
    ],
)
def test_an_agent_does_not_speak_for_another_node(word: Word) -> None:
    with pytest.raises(WireError, match="the agent of a spoke for"):
        _own_word("a", word)
