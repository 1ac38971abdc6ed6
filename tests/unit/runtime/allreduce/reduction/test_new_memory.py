"""Memory for many tensors at once."""

from __future__ import annotations

import errno
import gc
import mmap
import weakref

import pytest
import torch

from elastic.errors import NoMemory
from runtime.allreduce.reduction.flat_pool import ALIGNMENT, HUGE_BYTES, room_for


@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 64, 65], [HUGE_BYTES + 1, 7, 1000]])
def test_every_tensor_has_its_size_and_its_own_aligned_place(sizes: list[int]) -> None:
    tensors = room_for(sizes)
    assert [tensor.numel() for tensor in tensors] == sizes
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert bool((tensor == number).all()) and tensor.dtype == torch.uint8
        assert tensor.storage_offset() % ALIGNMENT == 0


def test_memory_that_the_system_does_not_have_is_named_with_its_size() -> None:
    with pytest.raises(NoMemory, match="no 1,152,921,504,606,846,976 bytes of memory"):
        room_for([1 << 60])


def test_the_last_tensor_keeps_the_memory() -> None:
    kept = room_for([HUGE_BYTES, 8])[1].fill_(7)
    gone = weakref.ref(kept.untyped_storage())
    gc.collect()
    assert kept.tolist() == [7] * 8
    del kept
    gc.collect()
    assert gone() is None


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("mmap.mmap", Small)
    (tensor,) = room_for([HUGE_BYTES])
    assert tensor.fill_(7)[-1].item() == 7
