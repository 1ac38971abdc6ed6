"""`--ring nccl` by one member of a world, on the fake device: what hangs, fails and is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.gpu.fake.device import FakeDevice


@contextmanager
def connected(generation: int = 1, world_size: int = 2) -> Iterator[Any]:
    """Rank 0 of a world whose other members are not there, which the fake NCCL does not miss."""
    import torch

    from runtime.ring import nccl
    from runtime.ring.process_group import meeting

    members = [f"w{rank}" for rank in range(world_size)]
    with meeting(nccl.make_group, "127.0.0.1", torch.device("cuda", 0))(generation, members, 0) as met:
        transport = met.connect(met.offer)
    assert transport is not None
    try:
        yield transport
    finally:
        transport.close()


def exchanges() -> dict[str, int]:
    import torch

    device = FakeDevice.of_this_process()
    seen = {}
    with connected() as transport:
        mine = torch.empty(1000, dtype=torch.uint8, device="cuda")
        before = device.count("sends"), device.count("receives")
        with transport.attempt():
            transport.exchange({1: mine}, {1: torch.empty_like(mine)})
        seen["sends"], seen["receives"] = device.count("sends") - before[0], device.count("receives") - before[1]
        before = device.count("sums"), 0
        with transport.attempt():
            transport.add_up([mine.to(torch.int32), mine.to(torch.int16)])
        seen["sums"] = device.count("sums") - before[0]
    return {**seen, "aborts": device.count("aborts"), "used_after_free": device.count("used_after_free")}


def test_an_exchange_sends_to_every_member_and_a_sum_is_one_call_a_tensor(device: FakeDevice) -> None:
    assert device.call(exchanges) == {"sends": 2, "receives": 2, "sums": 2, "aborts": 1, "used_after_free": 0}
