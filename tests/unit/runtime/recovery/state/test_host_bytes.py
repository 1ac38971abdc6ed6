"""The bytes of tensors of the CPU; those of a GPU are read in tests/gpu/fake/test_copies.py."""

from __future__ import annotations

import pytest
import torch

from runtime.recovery.state import host_bytes
from runtime.recovery.state.encoding import to_blob
from runtime.recovery.state.host_bytes import HostBytes

TENSORS = [
    torch.arange(6, dtype=torch.int16).reshape(2, 3),
    torch.arange(12.0).reshape(3, 4).t(),
    torch.tensor(7),
    torch.zeros(0, 4),
    torch.tensor([True, False, True]),
]


def test_slices_have_the_bytes_in_row_major_order() -> None:
    state = HostBytes(TENSORS)
    assert state.sizes == [12, 48, 8, 0, 3]
    wanted = [to_blob(tensor) for tensor in TENSORS]
    for part in ([(0, 0, 12), (1, 0, 5)], [(1, 5, 48), (2, 0, 8)], [(4, 1, 3)]):
        for piece, (number, start, end) in zip(state.read(part), part, strict=True):
            assert piece.dtype is torch.uint8 and piece.equal(wanted[number][start:end])


def test_what_needs_no_copy_is_a_view() -> None:
    blobs = HostBytes(TENSORS).blobs()
    assert [blob.data_ptr() == tensor.data_ptr() for blob, tensor in zip(blobs, TENSORS, strict=True)] == [
        tensor.is_contiguous() for tensor in TENSORS
    ]
    assert all(blob.equal(to_blob(tensor)) for blob, tensor in zip(blobs, TENSORS, strict=True))


@pytest.mark.parametrize("most", [5, 12, 71])
def test_a_copy_in_parts_is_complete(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_bytes, "CHUNK_BYTES", most)
    state = HostBytes(TENSORS)
    rooms = [torch.full((size,), 255, dtype=torch.uint8) for size in state.sizes]
    state.copy_to(rooms)
    assert all(room.equal(to_blob(tensor)) for room, tensor in zip(rooms, TENSORS, strict=True))
