"""All members get everybody's entry, in whatever order messages come, and each sends few."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.allreduce.reduction.dissemination import RADIX, Dissemination, encode


def spread(world_size: int, choose: st.DataObject | None = None) -> list[int]:
    """Deliver all messages; how many each member has sent."""
    entries = [f"entry of {rank}".encode() * (rank % 3) for rank in range(world_size)]
    members = [Dissemination(rank, world_size, entry) for rank, entry in enumerate(entries)]
    under_way = [(rank, *message) for rank, member in enumerate(members) for message in member.begin()]
    sent = [0] * world_size
    while under_way:
        at = choose.draw(st.integers(0, len(under_way) - 1)) if choose else -1
        sender, to, message = under_way.pop(at)
        assert members[to].awaits(sender) and not members[to].complete
        _, then = members[to].take(sender, message)
        under_way += [(to, *message) for message in then]
        sent[sender] += 1
        assert not members[to].awaits(sender)
    for member in members:
        assert member.complete and not member.to_send
        assert [member.entries[rank] for rank in range(world_size)] == entries
    return sent


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.data())
def test_everybody_gets_all_entries_in_any_order_of_messages(world_size: int, data: st.DataObject) -> None:
    spread(world_size, data)


@pytest.mark.parametrize("world_size", [2, 3, RADIX, RADIX + 1, 16, 32, 63, 64, 65, 100, 512, 1000])
def test_each_member_sends_few_messages(world_size: int) -> None:
    sent = spread(world_size)
    assert max(sent) <= min(world_size - 1, math.ceil(4 * math.log2(world_size)))


def test_up_to_the_radix_all_send_to_all_at_once() -> None:
    member = Dissemination(3, RADIX, b"me")
    assert sorted(to for to, _ in member.begin()) == [rank for rank in range(RADIX) if rank != 3]


@pytest.mark.parametrize("message", [b"", b"\0\0", encode([b"x"])[:-1], encode([b"x"]) + b"y", encode([b"x", b"y"])])
def test_a_message_of_another_size_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="bytes for"):
        Dissemination(0, 2, b"me").take(1, message)


def test_a_message_that_nobody_owes_is_refused() -> None:
    member = Dissemination(0, 2, b"me")
    member.take(1, encode([b"x"]))
    with pytest.raises(ValueError, match="expected"):
        member.take(1, encode([b"x"]))
