"""What decides the bits of a shard besides the script; it must be the same in all workers of an exact job."""

from __future__ import annotations

import torch


def fingerprint(threads: int, device: torch.device) -> str:
    """torch version, threads, CPU capability or device name; readable, because errors show it."""
    cuda = device.type == "cuda"
    where = torch.cuda.get_device_name(device) if cuda else f"CPU {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__}, {threads} threads, {where}"
