"""What a worker of `--ring nccl` finds in its environment."""

from __future__ import annotations

import pytest

from elastic.agent.worker.nccl_environment import connect_s, nccl_variables


@pytest.mark.parametrize(("workers", "seconds"), [(1, "21"), (8, "21"), (512, "72"), (1024, "123")])
def test_torch_waits_for_a_communicator_as_long_as_the_largest_world_may_take(workers: int, seconds: str) -> None:
    assert nccl_variables({}, workers)["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == seconds
    assert int(seconds) >= connect_s(workers)


def test_what_nccl_is_not_to_use_is_a_default_and_what_the_worker_needs_is_none() -> None:
    given = {"NCCL_NVLS_ENABLE": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "90", "TORCH_NCCL_DESYNC_DEBUG": "1"}
    variables = nccl_variables(given, 2)
    assert {"NCCL_NVLS_ENABLE", "TORCH_NCCL_NONBLOCKING_TIMEOUT"}.isdisjoint(variables)
    assert (variables["NCCL_RAS_ENABLE"], variables["TORCH_NCCL_DESYNC_DEBUG"]) == ("0", "0")
