"""Partial sums: added along the tree they have the same bits for every order of arrival."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.protocol.reduction_tree import next_fold
from runtime.allreduce.reduction.partial_sum import Partial, Siblings, fold, fold_meta, siblings

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def leaf(unit: int, *, note: str | None = None) -> Partial:
    generator = torch.Generator().manual_seed(unit)
    flat = torch.randn(33, generator=generator) * 10.0 ** (unit % 7)
    return Partial(
        unit,
        unit + 1,
        {"float32": flat, "float64": flat.double() / 3},
        has_grad=1 << unit,
        weight=0.1 * (unit + 1),
        scalars={"loss": ("mean", float(flat[0]), 0.1 * (unit + 1)), f"only {unit}": ("sum", 1.5, 1.0)},
        note=note,
    )


def bits(partial: Partial) -> tuple[object, ...]:
    return (json.dumps(partial.meta()), *(flat.numpy().tobytes() for flat in partial.flats.values()))


def folded(units: int, arrival: list[int]) -> Partial:
    held: dict[tuple[int, int], Partial] = {}
    for unit in arrival:
        held[unit, unit + 1] = leaf(unit)
        while (pair := next_fold(held, units)) is not None:
            left, right, above = pair
            held[above] = fold(held.pop(left), held.pop(right))
    assert list(held) == [(0, units)]
    return held[0, units]


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[int, list[int]]:
    units = draw(st.integers(1, 20))
    return units, draw(st.permutations(range(units)))


@patient
@given(arrivals())
def test_the_order_in_which_leaves_arrive_leaves_no_trace_in_the_sum(case: tuple[int, list[int]]) -> None:
    units, arrival = case
    assert bits(folded(units, arrival)) == bits(folded(units, list(range(units))))


def test_another_tree_would_give_other_bits() -> None:
    """Otherwise the tests above could not fail."""
    chain = leaf(0)
    for unit in range(1, 8):
        chain.flats = {name: chain.flats[name] + flat for name, flat in leaf(unit).flats.items()}
    assert not torch.equal(chain.flats["float32"], folded(8, list(range(8))).flats["float32"])


def test_a_fold_writes_into_the_right_side_by_default() -> None:
    left, right = leaf(0), leaf(1)
    before = left.flats["float32"].clone()
    total = fold(left, right)
    assert total.node == (0, 2)
    assert total.flats is right.flats
    assert torch.equal(left.flats["float32"], before)


def test_a_fold_into_the_left_side_keeps_the_right_side_and_has_the_same_bits() -> None:
    left, right = leaf(0), leaf(1)
    before = right.flats["float32"].clone()
    total = fold(left, right, into=left)
    assert total.flats is left.flats
    assert torch.equal(right.flats["float32"], before)
    assert bits(total) == bits(fold(leaf(0), leaf(1)))


@pytest.mark.parametrize(("left", "right"), [(0, 2), (1, 0), (0, 0)])
def test_only_neighbours_are_added(left: int, right: int) -> None:
    with pytest.raises(ValueError, match="not siblings"):
        fold(leaf(left), leaf(right))


def test_the_rest_of_a_sum_is_folded_without_looking_at_tensors() -> None:
    has_grad, weight, scalars, note, nonfinite = fold_meta(leaf(0, note="a"), leaf(1, note="b"))
    assert nonfinite == 0
    assert has_grad == 0b11
    assert weight == 0.1 + 0.2
    assert scalars["loss"][2] == 0.1 + 0.2
    assert scalars["only 0"] == scalars["only 1"] == ("sum", 1.5, 1.0)
    assert note == "a"


def test_the_note_is_that_of_the_leftmost_leaf_that_has_one() -> None:
    assert fold_meta(leaf(0), leaf(1, note="b"))[3] == "b"
    assert fold_meta(leaf(0), leaf(1))[3] is None


def test_floats_of_the_meta_survive_json() -> None:
    meta = fold(leaf(0), leaf(1)).meta()
    assert json.loads(json.dumps(meta)) == meta
    assert meta["weight"] == 0.1 + 0.2


def test_many_parameters_fit_the_bitmap() -> None:
    wide = Partial(0, 1, has_grad=1 << 5000)
    assert int(str(wide.meta()["has_grad"]), 16) == 1 << 5000


def test_a_leaf_is_added_to_its_siblings_as_far_as_they_are_held() -> None:
    """Of 8 units a member holds 4, 5, 6 and 0, and 7 is next."""
    held = {node: Partial(*node) for node in ((4, 6), (6, 7), (0, 1))}
    assert siblings((7, 8), held, 8) == Siblings((4, 8), ((held[6, 7], True), (held[4, 6], True)))
    assert siblings((1, 2), held, 8) == Siblings((0, 2), ((held[0, 1], True),))
    assert siblings((2, 3), held, 8) == Siblings((2, 3), ())
    assert siblings((6, 7), {(7, 8): held[4, 6]}, 8) == Siblings((6, 8), ((held[4, 6], False),))
