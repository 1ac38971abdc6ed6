"""Which exponent a block gets, and what is too large for it."""

from __future__ import annotations

import pytest
import torch

from runtime.allreduce.fixed_point.conversion import NOTHING
from runtime.allreduce.fixed_point.exponents import (
    FALL,
    INT32,
    INT64,
    NARROW_UNITS_MAX,
    ROOM,
    BlockExponents,
    Owners,
    Range,
    exponents,
    followed,
    overflowed,
)


def short(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int16)


@pytest.mark.parametrize(("units", "bits"), [(1, 30), (2, 29), (3, 28), (8, 27), (9, 26), (64, 24)])
def test_leaves_share_the_bits_of_the_sum(units: int, bits: int) -> None:
    assert INT32.per_leaf(units) == bits
    assert units * 2**bits < 2**31


@pytest.mark.parametrize("of", [INT32, INT64])
def test_a_pass_as_large_as_the_one_before_fits_with_headroom(of: Range) -> None:
    references = followed(short(NOTHING, NOTHING), short(-5, 7))
    chosen = exponents(references, of, 8)
    assert (chosen + short(-5, 7)).tolist() == [of.per_leaf(8) - of.headroom] * 2
    assert not overflowed(chosen, short(-5 + of.headroom, 7 + of.headroom), of, 8)
    assert overflowed(chosen, short(-5, 8 + of.headroom), of, 8)


def test_a_reference_rises_at_once_and_falls_slowly() -> None:
    references = followed(short(3 * FALL), short(10))
    assert references.tolist() == [10 * FALL]
    for _ in range(FALL):
        references = followed(references, short(2))
    assert references.tolist() == [9 * FALL]
    for _ in range(100 * FALL):
        references = followed(references, short(2))
    assert references.tolist() == [2 * FALL]


def test_a_block_of_zeros_keeps_its_reference() -> None:
    assert followed(short(10 * FALL, NOTHING), short(NOTHING, NOTHING)).tolist() == [10 * FALL, NOTHING]


def test_a_block_without_a_reference_gets_the_exponent_of_the_largest_values() -> None:
    chosen = exponents(short(NOTHING, 5 * FALL, -3 * FALL), INT32, 8)
    assert chosen[0] == chosen[1] < chosen[2]


def test_a_block_has_room_for_the_largest_values_of_its_parameter() -> None:
    """Two parameters of three blocks and of two, with a block between them that has values of both."""
    owners = Owners.find([25, 20], 8, torch.device("cpu"))
    assert owners.of.tolist() == [0, 0, 0, 2, 1, 1]
    references = short(10 * FALL, -20 * FALL, NOTHING, 15 * FALL, 5 * FALL, 4 * FALL)
    chosen = exponents(references, INT32, 8, owners)
    assert not overflowed(chosen, short(*(ROOM + top for top in (10, 10, 10, 15, 5, 5))), INT32, 8)
    less = INT32.headroom - ROOM
    assert (chosen - chosen[0]).tolist() == [0, less, less, -5, 5, 5 + less]


def test_a_parameter_without_any_reference_gets_the_exponent_of_the_largest_values() -> None:
    owners = Owners.find([8, 8], 8, torch.device("cpu"))
    chosen = exponents(short(NOTHING, 5 * FALL), INT32, 8, owners)
    assert chosen[0] == chosen[1]


def test_without_any_reference_the_exponents_are_the_highest_and_all_but_tiny_values_are_too_large() -> None:
    chosen = exponents(short(NOTHING, NOTHING), INT32, 8)
    assert chosen.tolist() == [INT32.highest] * 2
    assert overflowed(chosen, short(NOTHING, -20), INT32, 8)
    assert not overflowed(chosen, short(NOTHING, NOTHING), INT32, 8)


def test_extreme_tops_stay_numbers() -> None:
    """The largest float32 and float64 are below 2**128 and 2**1024, and scales must be normal numbers."""
    assert exponents(short(128 * FALL), INT32, 64).item() > -126
    assert exponents(short(1024 * FALL), INT64, 1 << 20).item() > -1022


def test_another_number_of_blocks_begins_anew() -> None:
    state = BlockExponents(always_wide=False)
    state.learn("pass 0: float32 gradients", short(1, 2))
    assert state.of("pass 0: float32 gradients", 2).tolist() == [FALL, 2 * FALL]
    assert state.of("pass 0: float32 gradients", 3).tolist() == [NOTHING] * 3
    assert state.of("pass 1: float32 gradients", 2).tolist() == [NOTHING] * 2


def test_the_state_is_copied_and_not_shared() -> None:
    donor, newcomer = BlockExponents(always_wide=False), BlockExponents(always_wide=False)
    donor.learn("a", short(1, 2))
    newcomer.load_state_dict(donor.state_dict())
    held = donor.state_dict()["references"]["a"]
    donor.learn("a", short(5, 5))
    assert newcomer.of("a", 2).tolist() == held.tolist() == [FALL, 2 * FALL]


def test_many_shards_or_a_wish_make_float32_wide() -> None:
    state = BlockExponents(always_wide=False)
    state.units = NARROW_UNITS_MAX
    assert not state.wide
    state.units += 1
    assert state.wide
    assert BlockExponents(always_wide=True).wide
