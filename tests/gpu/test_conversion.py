"""runtime/allreduce/fixed_point/gpu_kernel.py has the bits of torch, and takes less time."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch

from runtime.allreduce.fixed_point import conversion
from runtime.allreduce.fixed_point.conversion import decode, encode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here: nothing of this was tried")

WAYS = [(torch.float32, torch.int32), (torch.float32, torch.int64), (torch.float64, torch.int64)]
BLOCK = 256
ELEMENTS = 124_000_000


def values_of(length: int, dtype: torch.dtype) -> torch.Tensor:
    """Of all sizes, with halves, zeros of both signs, and what is below the normal numbers."""
    made = torch.Generator().manual_seed(length)
    sizes = torch.randint(-60, 60, (length,), generator=made)
    values = torch.randn(length, dtype=dtype, generator=made) * torch.exp2(sizes.to(dtype))
    values[::7] = torch.randint(-5, 5, (len(values[::7]),), generator=made).to(dtype) + 0.5
    values[::11], values[::13] = 0.0, -0.0
    values[::17] = torch.finfo(dtype).tiny / 8
    return values


@pytest.mark.parametrize(("source", "into"), WAYS)
@pytest.mark.parametrize("block", [16, BLOCK])
@pytest.mark.parametrize("length", [1, 15, 255, 257, 4099, 1_000_003])
def test_the_bits_are_those_of_torch(
    source: torch.dtype, into: torch.dtype, block: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_of(length, source).cuda()
    largest = torch.stack([part.abs().max() for part in values.cpu().split(block)])
    fitting = (29 if into is torch.int32 else 60) - torch.frexp(largest)[1]
    exponents = fitting.clamp(-100, 100).to(torch.int16).cuda()
    found = []
    for triton in (True, False):
        assert (conversion._gpu_kernel(values, block) is not None) == triton
        integers = torch.empty(length, dtype=into, device="cuda")
        tops = encode(values, exponents, block, integers)
        back = torch.empty_like(values)
        decode(integers, exponents, block, back)
        found.append((integers, tops, back))
        monkeypatch.setattr(conversion, "_gpu_kernel", lambda values, block: None)
    assert all(ours.equal(torchs) for ours, torchs in zip(*found, strict=True))


def test_what_a_conversion_costs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints; nothing is compared with anything."""
    values = torch.randn(ELEMENTS, device="cuda")
    exponents = torch.full((-(-ELEMENTS // BLOCK),), 20, dtype=torch.int16, device="cuda")
    integers, back = torch.empty(ELEMENTS, dtype=torch.int32, device="cuda"), torch.empty_like(values)
    for way in ("Triton", "torch"):
        to = median_ms(lambda: encode(values, exponents, BLOCK, integers))
        fro = median_ms(lambda: decode(integers, exponents, BLOCK, back))
        with capsys.disabled():
            print(f"\n{ELEMENTS:,} float32 to integers by {way}: {to:.2f} ms; back: {fro:.2f} ms", end="")
        monkeypatch.setattr(conversion, "_gpu_kernel", lambda values, block: None)


def median_ms(call: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return statistics.median(times[2:])
