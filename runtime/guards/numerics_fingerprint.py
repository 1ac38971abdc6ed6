"""What decides the bits of a shard besides the script; it must be the same in all workers of an exact job.

A worker says the first part when it announces itself. The script may change the second part at any time, so members
compare it before each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.backends import cuda, cudnn

_ANY: Any = torch.backends
"""Its types lack the newer names."""

_SETTINGS: Mapping[str, Callable[[], object]] = {
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
    "cudnn.enabled": lambda: cudnn.enabled,
    "cudnn.benchmark": lambda: cudnn.benchmark,
    "cudnn.deterministic": lambda: cudnn.deterministic,
    # Of the older names, such as allow_tf32, some raise once a newer one was set; the newer ones always tell both.
    "fp32_precision": lambda: _ANY.fp32_precision,
    "cuda.matmul.fp32_precision": lambda: cuda.matmul.fp32_precision,
    "cudnn.fp32_precision": lambda: _ANY.cudnn.fp32_precision,
    "cudnn.conv.fp32_precision": lambda: _ANY.cudnn.conv.fp32_precision,
    "cudnn.rnn.fp32_precision": lambda: _ANY.cudnn.rnn.fp32_precision,
    "fp16 sums": lambda: cuda.matmul.allow_fp16_reduced_precision_reduction,
    "bf16 sums": lambda: cuda.matmul.allow_bf16_reduced_precision_reduction,
    "flash attention": cuda.flash_sdp_enabled,
    "memory-efficient attention": cuda.mem_efficient_sdp_enabled,
    "cuDNN attention": cuda.cudnn_sdp_enabled,
}


def fingerprint(threads: int, device: torch.device) -> str:
    """torch version, threads, CPU capability or device name and libraries; readable, because errors show it."""
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, cuDNN {cudnn.version()}"
    else:
        where = f"CPU {torch.backends.cpu.get_cpu_capability()}"
    return f"torch {torch.__version__}, {threads} threads, {where}"


def settings(device: torch.device) -> dict[str, str]:
    """What torch is told now about how to compute on a GPU: name -> value. {} on a CPU, where none of it counts."""
    if device.type != "cuda":
        return {}
    return {f"torch's {name}": str(read()) for name, read in _SETTINGS.items()}
