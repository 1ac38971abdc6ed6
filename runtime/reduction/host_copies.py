"""Small tensors of a device, read by the host at once: each read alone would make the host wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def host_copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies on the CPU, in the same order. The host waits once for each device and dtype among them."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(number)
    found: dict[int, torch.Tensor] = {}
    for numbers in alike.values():
        flats = [tensors[number].detach().reshape(-1) for number in numbers]
        parts = torch.cat(flats).cpu().split([flat.numel() for flat in flats])
        for number, part in zip(numbers, parts, strict=True):
            found[number] = part.reshape(tensors[number].shape)
    return [found[number] for number in range(len(tensors))]
