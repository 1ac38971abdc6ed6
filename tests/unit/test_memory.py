"""Memory for many tensors at once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from runtime.memory import ALIGNMENT, HUGE_BYTES, room_for


@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 64, 65], [HUGE_BYTES + 1, 7, 1000]])
def test_every_tensor_has_its_size_and_its_own_aligned_place(sizes: list[int]) -> None:
    tensors = room_for(sizes)
    assert [tensor.numel() for tensor in tensors] == sizes
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number).all()) and tensor.dtype == torch.uint8
        assert tensor.storage_offset() % ALIGNMENT == 0


def test_the_last_tensor_keeps_the_memory() -> None:
    kept = room_for([HUGE_BYTES, 8])[1].fill_(7)
    gone = weakref.ref(kept.untyped_storage())
    gc.collect()
    assert kept.tolist() == [7] * 8
    del kept
    gc.collect()
    assert gone() is None
