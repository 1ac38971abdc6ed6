"""Small tensors of a device, read or written by the host at once: for each alone it would wait for the device."""

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


def device_copies(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The same in the same order, those of the CPU on that device. A GPU gets one copy for each dtype, for which the
    host does not wait."""
    found = list(tensors)
    alike: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors if device.type == "cuda" else ()):
        if tensor.device.type == "cpu":
            alike.setdefault(tensor.dtype, []).append(number)
    for numbers in alike.values():
        flat = torch.cat([tensors[number].reshape(-1) for number in numbers]).pin_memory()
        parts = flat.to(device, non_blocking=True).split([tensors[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            found[number] = part.reshape(tensors[number].shape)
    return found
