"""What a member takes for a header, and when."""

from __future__ import annotations

import pytest

from runtime.allreduce.reduction.headers import HeaderExchange
from runtime.allreduce.ring.frames import Frame, FrameKind, LinkError
from tests.unit.rings import rings


def test_a_header_comes_once_and_in_full_only_when_members_disagree() -> None:
    with rings(2) as built:
        one, other = (
            HeaderExchange(ring, 0, {}, {"worker_id": ring.me}, [], None, lambda rank: None) for ring in built
        )
        ((_, message),) = other._words.begin()
        frame = Frame(FrameKind.HEADER, built[0].generation, 0, len(message))
        with pytest.raises(LinkError, match="was not expected"):
            one.accept("w1", frame._replace(term=1))
        memory = one.accept("w1", frame)
        assert memory is not None and len(memory) == len(message)
        memory[:] = message
        assert [(worker, agrees) for worker, agrees, _ in one.take("w1", memory)] == [("w1", True)]
        with pytest.raises(LinkError, match="was not expected"):
            one.accept("w1", frame)
        assert one.accept("w1", frame._replace(term=1)) is None, "w1 knows already that some do not agree"
