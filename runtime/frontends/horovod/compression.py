"""Compression.none and Compression.fp16: what becomes of a tensor on the way to the others."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """What a script may derive from: `compress` before a reduction, and `decompress` behind it."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """(what is reduced, what `decompress` needs)."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced tensor as it was before."""
        return tensor


class FP16Compressor(Compressor):
    """float32 and float64 are sent as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class HorovodCompression:
    """What DistributedOptimizer and allreduce take as compression=."""

    none = Compressor
    fp16 = FP16Compressor


Compression = HorovodCompression  # the name that scripts know
