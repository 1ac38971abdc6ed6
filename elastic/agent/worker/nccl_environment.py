"""What NCCL, and torch above it, read from the environment of a worker that uses them (`--ring nccl`).

torch reads most of this once, at its first use, and C++ threads read the environment while it is changed. So the agent
sets these variables where the worker starts, before torch is there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

CONNECT_S = 20.0
PEER_S = 0.1
"""See connect_s."""

_OURS = {
    # torch's own reaction to a failed exchange would be to end the process; here the generation ends.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # it switches that reaction on
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Told to peers by a store that is closed by then.
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    # After an error of NCCL the watchdog would describe the last exchanges, and wait a minute for others to do so; a
    # communicator cannot be freed meanwhile.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_FR_BUFFER_SIZE": "0",
}

_DEFAULTS = {
    # A member that aborts would free multicast memory that others on its machine still write to.
    "NCCL_NVLS_ENABLE": "0",
    # A thread that listens for NCCL's own diagnosis, on a port without any authentication.
    "NCCL_RAS_ENABLE": "0",
}


def connect_s(world_size: int) -> float:
    """Seconds in which the groups of so many members have to find each other; less if a member is lost meanwhile. Each
    member connects to each other one, one after the other, so it grows with the world: 20.8 s for 8 members, 122 s for
    1024."""
    return CONNECT_S + PEER_S * world_size


def nccl_variables(given: Mapping[str, str], workers_limit: int) -> dict[str, str]:
    """The variables of a worker, besides the given ones, in a job of at most so many workers.

    A given value for the seconds, or for what NCCL is not to use, is kept."""
    # Nothing else ends the wait for a communicator that is being made: torch then holds a lock that an abort needs.
    defaults = {**_DEFAULTS, "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(connect_s(workers_limit)))}
    return {**{name: value for name, value in defaults.items() if name not in given}, **_OURS}
