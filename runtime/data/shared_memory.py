"""Passes a batch from one process to another on this machine, through memory that belongs to no file system.

A parcel is a memfd: it is freed with its last descriptor and mapping, however its processes end, and is limited by the
memory of the machine, not by the size of /dev/shm (64 MB in many containers). Its layout: a count n (u64), n lengths
(u64), then n blocks, each aligned. The first block is a pickle (protocol 5), the others are its out-of-band buffers.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

import torch

ALIGNMENT = 64
"""Bytes; torch aligns its own memory in the same way."""

_LENGTH = struct.Struct("<Q")
_SPARSE = frozenset({torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_WRAPPING = b"."
"""A byte that accompanies a descriptor, which cannot be sent alone."""


class _Pickler(pickle.Pickler):
    """Sends plain tensors out of band, with their strides: a kernel may choose its order of summation by strides."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "cpu" and not obj.requires_grad and obj.layout in _SPARSE:
            return _sparse(obj)
        if not _is_plain(obj):
            return NotImplemented
        span = 1 + sum((size - 1) * stride for size, stride in zip(obj.size(), obj.stride(), strict=True))
        # As bytes, because numpy has no bfloat16.
        memory = obj.as_strided((span,), (1,)).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(memory), obj.dtype, tuple(obj.size()), obj.stride())


def _is_plain(value: object) -> bool:
    """Whether it is a plain tensor; torch pickles subclasses, other layouts and devices, and those with a gradient."""
    return (
        type(value) is torch.Tensor
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
        and value.numel() > 0
    )


def _sparse(tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
    """A call that makes the same sparse tensor. torch's own pickle of it has the receiver's torch keep the tensor until
    the next torch.load()."""
    if tensor.layout is torch.sparse_coo:
        return _coordinates, (tensor._indices(), tensor._values(), tuple(tensor.size()), tensor.is_coalesced())
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = tensor.crow_indices() if by_row else tensor.ccol_indices()
    plain = tensor.col_indices() if by_row else tensor.row_indices()
    return _compressed, (compressed, plain, tensor.values(), tuple(tensor.size()), tensor.layout)


def _coordinates(
    indices: torch.Tensor, values: torch.Tensor, size: tuple[int, ...], is_coalesced: bool
) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, size, check_invariants=False, is_coalesced=is_coalesced)


def _compressed(
    compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor, size: tuple[int, ...], layout: torch.layout
) -> torch.Tensor:
    return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=False)


def _tensor(memory: Any, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype).as_strided(size, stride)


def pack(value: object) -> int:
    """A descriptor of the parcel, which the caller has to close. Raises what pickle raises."""
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    blocks = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    numbers = [len(blocks), *(block.nbytes for block in blocks)]
    parcel = os.memfd_create("batch", os.MFD_CLOEXEC)
    try:
        with open(parcel, "wb", closefd=False) as file:
            file.write(b"".join(map(_LENGTH.pack, numbers)))
            for block in blocks:
                file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
                file.write(block)
        return parcel
    except BaseException:
        os.close(parcel)
        raise


def unpack(parcel: int) -> Any:
    """The value. Its tensors keep and use the parcel's memory; no descriptor is kept."""
    size = os.fstat(parcel).st_size
    memory = torch.from_file(f"/proc/self/fd/{parcel}", shared=True, size=size, dtype=torch.uint8).numpy().data
    (count,) = _LENGTH.unpack_from(memory, 0)
    offset, blocks = (1 + count) * _LENGTH.size, []
    for position in range(1, 1 + count):
        (length,) = _LENGTH.unpack_from(memory, position * _LENGTH.size)
        offset += -offset % ALIGNMENT
        blocks.append(memory[offset : offset + length])
        offset += length
    return pickle.loads(blocks[0], buffers=blocks[1:])


def send(to: socket.socket, value: object) -> None:
    """Send a value to the process at the other end of a Unix socket. Raises OSError, and what pickle raises."""
    parcel = pack(value)
    try:
        socket.send_fds(to, [_WRAPPING], [parcel])
    finally:
        os.close(parcel)


def receive(sender: socket.socket) -> Any:
    """The next value; waits for it. Raises EOFError if the sender has ended, and OSError."""
    wrapping, parcels, _, _ = socket.recv_fds(sender, len(_WRAPPING), 1)
    if not wrapping:
        raise EOFError
    if not parcels:  # the kernel drops a descriptor that this process has no room for
        raise OSError(errno.EMFILE, "no room for another descriptor; raise the limit of open files (ulimit -n)")
    try:
        return unpack(parcels[0])
    finally:
        os.close(parcels[0])
