"""Noticing that registered state changed while it must not: inside a pass, where workers run different shards.

Versions and data pointers are looked at every time; they cost well under a microsecond a tensor. Fused optimizers
and writes through `.data` change values without either, so a full snapshot adds a checksum of the values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class StateMarks:
    """What registered state looked like. marks: name -> something that compares equal while nothing changed."""

    marks: dict[str, object]
    full: bool


def tensor_mark(tensor: torch.Tensor, full: bool) -> object:
    """Version and address, and with `full` the value sum."""
    return (tensor._version, tensor.data_ptr(), value_sum(tensor) if full else 0)


def value_sum(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bits as integers, modulo 2**64: unlike a sum of floats it misses no small change."""
    if tensor.numel() == 0:
        return 0
    flat = tensor.detach().contiguous().reshape(-1)
    return int(flat.view(_WORDS[flat.element_size()]).sum(dtype=torch.int64).item())


def differences(before: StateMarks, now: StateMarks) -> list[str]:
    """Names whose marks differ, appeared or went, in the order they were watched."""
    names = dict.fromkeys((*before.marks, *now.marks))
    return [name for name in names if before.marks.get(name) != now.marks.get(name)]
