"""Blocks of 8 bits: how close they are, that errors average to 0, and that torch and kernel.c have the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.allreduce.fixed_point import conversion
from runtime.allreduce.fixed_point.int8_blocks import BLOCK_BYTES, CODES, add, has_nonfinite, pack, stored, unpack


@pytest.fixture(params=["kernel", "torch"])
def _both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(conversion, "kernel", lambda: None)


def packed(values: Tensor) -> Tensor:
    out = torch.empty(stored(len(values)), dtype=torch.int8)
    pack(values, out)
    return out


def unpacked(blocks: Tensor, length: int) -> Tensor:
    out = torch.empty(length)
    unpack(blocks, out)
    return out


def drawn(length: int, seed: int) -> Tensor:
    """Values with whole blocks of zeros, and tiny and large ones."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([1.0, 1e-20, 1e-32, 1e30, 0.0])[
        torch.randint(0, 5, (-(-length // CODES),), generator=generator)
    ]
    return torch.randn(length, generator=generator) * sizes.repeat_interleave(CODES)[:length]


@pytest.mark.usefixtures("_both")
@pytest.mark.parametrize("length", [0, 1, CODES - 1, CODES, CODES + 1, 5 * CODES + 17])
def test_no_value_is_off_by_a_step(length: int) -> None:
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    blocks = packed(values)
    assert len(blocks) == -(-length // CODES) * BLOCK_BYTES
    found = unpacked(blocks, length)
    for at in range(0, length, CODES):
        of, said = values[at : at + CODES], found[at : at + CODES]
        step = of.abs().max() / 127
        assert (of - said).abs().max() <= step * 1.0001
        assert said[of.abs().argmax()].isclose(of[of.abs().argmax()])


@pytest.mark.usefixtures("_both")
def test_zeros_stay_zeros_and_so_do_values_too_small_for_a_step() -> None:
    values = torch.zeros(3 * CODES)
    values[CODES] = 1.0
    values[2 * CODES :] = 1e-31
    assert unpacked(packed(values), len(values)).nonzero().flatten().tolist() == [CODES]


@pytest.mark.usefixtures("_both")
def test_errors_are_0_on_average() -> None:
    """Also those of a value which is a hundredth of a step: to the nearest it would be 0 each time."""
    generator = torch.Generator().manual_seed(7)
    times = 20_000
    values = torch.linspace(-1, 1, CODES).repeat(times, 1)
    values[:, 100] = 0.01 / 127
    values *= 1 + 0.01 * torch.rand(times, 1, generator=generator)
    errors = (unpacked(packed(values.reshape(-1)), values.numel()).view_as(values) - values) * 127
    assert errors.mean(0).abs().max() < 5 * 0.5 / times**0.5
    assert errors[:, 100].max() > 0.9, "it is a whole step at times"


@pytest.mark.usefixtures("_both")
@pytest.mark.parametrize("into", ["left", "right", "new"])
def test_a_sum_is_that_of_the_values_rounded_once_more(into: str) -> None:
    left, right = packed(drawn(1000, 1)), packed(drawn(1000, 2))
    wanted = packed(unpacked(left, 4 * CODES) + unpacked(right, 4 * CODES))
    out = {"left": left, "right": right, "new": torch.empty_like(left)}[into]
    assert add(left, right, out) is out
    assert out.equal(wanted)


@pytest.mark.usefixtures("_both")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_makes_its_block_undefined_and_no_other(bad: float) -> None:
    values = torch.ones(3 * CODES)
    assert not has_nonfinite(packed(values))
    values[CODES + 5] = bad
    blocks = packed(values)
    assert has_nonfinite(blocks)
    for found in (unpacked(blocks, len(values)), unpacked(add(blocks, packed(torch.ones(3 * CODES)), blocks), 756)):
        assert found.isnan().nonzero().flatten().tolist() == list(range(CODES, 2 * CODES))


def test_a_sum_beyond_float32_is_found() -> None:
    blocks = packed(torch.full((10,), 3e38))
    assert has_nonfinite(add(blocks, blocks.clone(), blocks))


@pytest.mark.skipif(conversion.kernel() is None, reason="there is no compiler here")
def test_torch_and_the_kernel_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, found = conversion.kernel(), []
    for native in (kernel, None):
        monkeypatch.setattr(conversion, "kernel", lambda native=native: native)
        of_native = []
        for seed in range(40):
            length = 1 + 997 * seed
            one, other = drawn(length, seed), drawn(length, 100 + seed)
            one[length // 2] = [1.0, float("nan"), float("inf"), 3e38][seed % 4]
            blocks = [packed(one), packed(other)]
            blocks.append(add(blocks[0], blocks[1], torch.empty_like(blocks[0])))
            of_native += [*blocks, unpacked(blocks[-1], length)]
        found.append(of_native)
    for ours, theirs in zip(*found, strict=True):
        assert ours.view(torch.uint8).equal(theirs.view(torch.uint8))
