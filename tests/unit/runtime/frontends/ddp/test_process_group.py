"""torch.distributed of a script with logical ranks answers as torch's own does where there is nothing to share out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tests.unit.runtime.frontends.ddp import threads


def torchs(use: Callable[[], object], backend: Any = None) -> object:
    """What a script of a world of one sees without us."""
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        return use()
    finally:
        dist.destroy_process_group()


def ours(use: Callable[[], object], *backend: Any, **options: Any) -> object:
    """What a script with logical ranks sees."""
    seen: list[object] = []

    def main() -> None:
        dist.init_process_group(*backend, **options)
        seen.append(use())
        raise KeyboardInterrupt  # without a training

    with threads.seams(), pytest.raises(KeyboardInterrupt):
        threads.alone(main)
    return seen[0]


def backends() -> list[str]:
    """Those of the world, and of groups with and without a backend of their own."""
    return [dist.get_backend(), *(dist.get_backend(dist.new_group(backend=name)) for name in (None, "gloo"))]


@pytest.mark.parametrize("backend", [(), (None,), ("gloo",), ("GLOO",), ("cpu:gloo",)], ids=repr)
def test_the_backend_is_the_one_that_the_script_has_asked_for(backend: tuple[Any, ...]) -> None:
    assert ours(backends, *backend) == torchs(backends, *backend)


def test_a_backend_that_is_not_built_in_is_named_too() -> None:
    def named() -> str:
        return dist.get_backend()

    assert ours(named, "nccl") == "nccl"
    assert ours(named, "cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:nccl"
    assert ours(named, device_id=torch.device("cuda", 0)) == "nccl"


def test_a_group_that_is_none_has_no_backend() -> None:
    with threads.seams(), pytest.raises(ValueError, match="not been initialized"):
        threads.alone(lambda: print(dist.get_backend()))
