"""The session of a job of one."""

from __future__ import annotations

import pytest
import torch

from runtime.allreduce.reduction.partial_sum import Partial, fold
from runtime.session import Op, OpKind
from runtime.worker.single import SingleSession

PASS = Op(OpKind.PASS, 6)


def leaf(unit: int) -> Partial:
    value = torch.full((2,), 0.1 * (unit + 1) ** 7)
    return Partial(unit, unit + 1, {"float32": value}, 1 << unit, 1.0, {"loss": ("mean", 0.1 * unit, 1.0)})


def test_all_units_are_handed_out_once_in_order() -> None:
    session = SingleSession()
    session.begin(PASS, {})
    assert [session.next_unit() for _ in range(7)] == [0, 1, 2, 3, 4, 5, None]


def test_the_result_is_the_sum_along_the_tree() -> None:
    """(0, 6) is (0, 4) + (4, 6); a plain running sum has other bits for these numbers."""
    session = SingleSession()
    session.begin(PASS, {})
    while (unit := session.next_unit()) is not None:
        session.unit_done(leaf(unit))
    result = session.finish()
    left = fold(fold(leaf(0), leaf(1)), fold(leaf(2), leaf(3)))
    expected = fold(left, fold(leaf(4), leaf(5)))
    assert result is not None
    assert torch.equal(result.flats["float32"], expected.flats["float32"])
    assert (result.node, result.has_grad, result.weight) == ((0, 6), 0b111111, 6.0)
    assert result.scalars == expected.scalars


def test_nothing_is_finished_before_every_unit_is_done() -> None:
    session = SingleSession()
    session.begin(PASS, {})
    session.next_unit()
    assert session.finish() is None


def test_operations_do_not_overlap() -> None:
    session = SingleSession()
    session.begin(PASS, {})
    with pytest.raises(RuntimeError, match="began inside"):
        session.begin(PASS, {})


def test_a_unit_outside_an_operation_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="outside an operation"):
        SingleSession().unit_done(leaf(0))
