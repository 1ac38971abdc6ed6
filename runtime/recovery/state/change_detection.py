"""Detection of changes of registered state inside a pass, where it must not change: workers run different shards.

Versions and data pointers are always compared, at well under a microsecond per tensor. Fused optimizers and writes
through `.data` change values without changing these, so a full snapshot adds a checksum of the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class StateMarks:
    """Marks of registered state at one moment. marks: name -> a value that compares equal while nothing changed."""

    marks: dict[str, object]
    full: bool


def tensor_mark(tensor: torch.Tensor, full: bool) -> object:
    """Version and address, and with `full` the value sum."""
    return (version_of(tensor), tensor.data_ptr(), value_sum(tensor) if full else 0)


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's version; 0 of one that was made in inference mode, where torch counts none."""
    return 0 if tensor.is_inference() else tensor._version


def value_sum(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bits as integers, modulo 2**64: unlike a sum of floats, no small change is lost in it."""
    if tensor.numel() == 0:
        return 0
    flat = tensor.detach().contiguous().reshape(-1)
    return int(flat.view(_WORDS[flat.element_size()]).sum(dtype=torch.int64).item())


def differences(before: StateMarks, now: StateMarks) -> list[str]:
    """Names whose marks differ, appeared or disappeared, in the order in which they were watched."""
    if before.marks == now.marks:
        return []
    names = dict.fromkeys((*before.marks, *now.marks))
    return [name for name in names if before.marks.get(name) != now.marks.get(name)]
