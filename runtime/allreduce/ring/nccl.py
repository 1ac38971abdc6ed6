"""NCCL between the GPUs of a generation's members; no other module calls NCCL.

A communicator is made for each generation and never grows or shrinks. It is non-blocking: the thread that waits for it
must be able to see that the generation has ended. How torch and NCCL behave besides is set in the environment, by
elastic/agent/worker/nccl_environment.py.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, Store, get_debug_level, set_debug_level

from elastic.errors import ConfigError
from runtime import torch_names
from runtime.allreduce.ring.process_group import TransportGroup

_NEVER = timedelta(days=365)
"""No timeout: other parts decide whether a member is gone."""
_quiet = threading.Lock()
"""Held while torch's debug mode is off."""


def check_device(device: torch.device) -> None:
    """Raise ConfigError if a worker on this device cannot use NCCL."""
    if device.type != "cuda":
        raise ConfigError(f"--ring nccl is for GPUs, and the device of this worker is {device}; use --ring tcp")
    if not dist.is_nccl_available():
        raise ConfigError(f"--ring nccl: torch {torch.__version__} was built without NCCL; use --ring tcp")
    torch_names.check(torch_names.OF_NCCL)


def make_group(store: Store, rank: int, world_size: int, generation: int, device: torch.device) -> TransportGroup:
    """See process_group.MakeGroup."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options.config.blocking = 0
    options._timeout = _NEVER
    # In torch's debug mode a group ends the process after an error, whatever else is said.
    with _quiet:
        level = get_debug_level()
        set_debug_level(DebugLevel.OFF)
        try:
            group = nccl(store, rank, world_size, options)
        finally:
            set_debug_level(level)
    group.eager_connect_single_device(device)
    made: TransportGroup = group
    return made
