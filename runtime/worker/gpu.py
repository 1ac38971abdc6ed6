"""A worker's GPU: which one it is, and which exceptions say that it, its driver or NCCL has failed, so that the script
need not be wrong."""

from __future__ import annotations

import torch
import torch.distributed as dist

_SAYS = ("CUDA error", "NCCL error", "CUDNN_STATUS_EXECUTION_FAILED", "CUDNN_STATUS_INTERNAL_ERROR")
"""Libraries of torch report such errors as plain RuntimeErrors."""
_OF_THE_SCRIPT = ("device-side assert triggered", "CUDA error: out of memory")
"""A kernel that is given wrong values, such as an index behind the end, stops itself; memory is used up by a script."""


def uuid_of(device: torch.device) -> str:
    """The GPU's own name, which it has in whatever order GPUs are counted; "" for a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""


def is_of_device(error: BaseException | None) -> bool:
    """Whether the error, or one from which it was raised, is a failure of the device."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if _is_failure(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _is_failure(error: BaseException) -> bool:
    text = str(error)
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    if any(said in text for said in _OF_THE_SCRIPT):
        return False
    return isinstance(error, torch.AcceleratorError | dist.DistBackendError) or any(said in text for said in _SAYS)
