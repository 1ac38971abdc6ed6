"""Floats to integers and back: what the compiled kernel and torch make of them has the same bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.allreduce.fixed_point import conversion
from runtime.allreduce.fixed_point.conversion import NONFINITE, NOTHING, decode, encode

WAYS = [(torch.float32, torch.int32), (torch.float32, torch.int64), (torch.float64, torch.int64)]
BITS = {torch.int32: 30, torch.int64: 61}


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "torch":
        monkeypatch.setattr(conversion, "kernel", lambda: None)
    elif conversion.kernel() is None:
        pytest.skip("kernel.c was not compiled at the installation: there was no C compiler")
    yield request.param


def test_a_machine_with_a_compiler_has_the_kernel() -> None:
    assert (conversion.kernel() is not None) == (shutil.which("cc") is not None)


@pytest.mark.parametrize(("source", "into"), WAYS)
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 255, 16 * 64 + 3, 5000])
def test_a_value_is_rounded_to_the_nearest_multiple(
    way: str, source: torch.dtype, into: torch.dtype, length: int
) -> None:
    values = torch.randn(length, dtype=source, generator=torch.Generator().manual_seed(length))
    exponents = torch.arange(-(-length // 16)).to(torch.int16) % 20
    out = torch.full((length,), 7, dtype=into)
    tops = encode(values, exponents, 16, out)
    scale = torch.pow(2.0, exponents.double()).repeat_interleave(16)[:length]
    assert out.equal((values.double() * scale).round().to(into))
    blocks = values.double().abs().split(16) if length else ()
    assert tops.tolist() == [int(torch.frexp(block.max())[1]) for block in blocks]
    back = torch.full((length,), 7, dtype=source)
    decode(out, exponents, 16, back)
    assert back.equal((out.double() / scale).to(source))


@pytest.mark.parametrize(("source", "into"), WAYS)
def test_halves_go_to_the_even_neighbour(way: str, source: torch.dtype, into: torch.dtype) -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, -0.49999997], dtype=source)
    out = torch.empty(8, dtype=into)
    encode(values, torch.zeros(1, dtype=torch.int16), 16, out)
    assert out.tolist() == [0, 2, 2, 0, -2, -2, 0, 0]


def test_the_largest_integers_are_exact(way: str) -> None:
    values = torch.tensor([2.0**61, -(2.0**61), 2.0**61 - 2.0**9, 2.0**33 + 1.0, -(2.0**52) - 1.0], dtype=torch.float64)
    out = torch.empty(5, dtype=torch.int64)
    encode(values, torch.zeros(1, dtype=torch.int16), 16, out)
    assert out.tolist() == [2**61, -(2**61), 2**61 - 2**9, 2**33 + 1, -(2**52) - 1]


@pytest.mark.parametrize(("source", "into"), WAYS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_the_top_of_a_block_says_what_is_in_it(way: str, source: torch.dtype, into: torch.dtype, bad: float) -> None:
    values = torch.zeros(6 * 4, dtype=source)
    values[4] = 1.0  # below 2, not below 1
    values[8] = -0.75
    values[12:14] = torch.tensor([bad, 1.0])
    values[16] = torch.finfo(source).tiny / 4  # subnormal
    values[20] = -0.0
    tops = encode(values, torch.zeros(6, dtype=torch.int16), 4, torch.empty(24, dtype=into))
    smallest = -126 if source is torch.float32 else -1022
    assert tops.tolist() == [NOTHING, 1, 0, NONFINITE, smallest, NOTHING]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_kernel_has_the_bits_of_torch(data: st.DataObject) -> None:
    if conversion.kernel() is None:
        pytest.skip("kernel.c was not compiled at the installation: there was no C compiler")
    source, into = data.draw(st.sampled_from(WAYS))
    floats = st.floats(width=32 if source is torch.float32 else 64, allow_nan=False, allow_infinity=False)
    values = torch.tensor(data.draw(st.lists(floats, max_size=70)), dtype=source)
    blocks = -(-len(values) // 8)
    zeros = torch.zeros(blocks, dtype=torch.int16)
    # The largest exponents with which every integer is in range.
    tops = encode(values, zeros, 8, torch.empty(len(values), dtype=torch.int64)).to(torch.int32)
    least = -126 if into is torch.int32 else -1022
    exponents = (BITS[into] - tops).clamp(least, 100).to(torch.int16)
    found: list[tuple[Any, ...]] = []
    for kernel in (conversion.kernel(), None):
        out, back = torch.empty(len(values), dtype=into), torch.empty_like(values)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conversion, "kernel", lambda kernel=kernel: kernel)
            again = encode(values, exponents, 8, out)
            decode(out, exponents, 8, back)
        found.append((again.tolist(), out.tolist(), back.view(torch.uint8).tolist()))
    assert found[0] == found[1]
    assert found[0][0] == tops.tolist()


def test_a_kernel_of_another_source_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = conversion.library()
    source = tmp_path / "kernel.c"
    source.write_bytes(conversion.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(conversion, "SOURCE", source)
    assert conversion.library().name != before.name
