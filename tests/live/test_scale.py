"""A job of a hundred nodes on one machine: the leader in earnest, agents without workers."""

from __future__ import annotations

import asyncio

import pytest

from elastic.store.embedded import EmbeddedEtcd
from tests.bench.scale import measure

pytestmark = pytest.mark.long


def test_a_hundred_agents_form_lose_three_and_are_adopted_in_few_messages() -> None:
    """What does not depend on the machine's speed: writes of the store, messages, bytes."""
    with EmbeddedEtcd() as etcd:
        figures = asyncio.run(measure(etcd, 100))
    assert not figures.failed
    assert figures.etcd_writes == 1
    assert figures.form_orders == 2.0, "the leader's welcome and the first generation"
    assert figures.loss_orders < 2.0, "to leave the ring, and the generation without the lost one: to 99"
    assert figures.loss_down < 400 and figures.resign_down < 400
