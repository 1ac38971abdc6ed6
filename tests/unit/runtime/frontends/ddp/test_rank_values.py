"""What a collective of logical ranks gives, from values of ranks, of workers with several ranks, and with some lost."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from runtime.frontends.ddp.process_group import LiveRank
from runtime.frontends.ddp.rank_values import RankValue, by_rank, lost, reduce, stood_in


def each(*values: float) -> list[RankValue]:
    """One value a rank."""
    return [RankValue((rank,), torch.tensor(value)) for rank, value in enumerate(values)]


@pytest.mark.parametrize(("op", "result"), [("sum", 10.0), ("avg", 2.5), ("max", 4.0), ("min", 1.0), ("product", 24.0)])
def test_every_rank_counts_once_in_whatever_order_they_come(op: str, result: float) -> None:
    values = each(1.0, 2.0, 3.0, 4.0)
    assert reduce(values, op, 4).item() == reduce(values[::-1], op, 4).item() == result


@pytest.mark.parametrize(
    ("op", "result"), [("sum", 11.0), ("avg", 2.75), ("max", 5.0), ("min", 2.0), ("product", 40.0)]
)
def test_a_value_of_several_ranks_counts_for_each_of_them(op: str, result: float) -> None:
    values = [RankValue((0, 1, 3), torch.tensor(2.0)), RankValue((2,), torch.tensor(5.0))]
    assert reduce(values, op, 4).item() == result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_the_result_has_the_type_and_the_shape_of_what_was_brought(op: str, dtype: torch.dtype) -> None:
    for shape in ((), (1,), (2, 3)):
        values = [RankValue((0, 1), torch.ones(shape, dtype=dtype)), RankValue((2,), torch.ones(shape, dtype=dtype))]
        result = reduce(values, op, 3)
        assert (result.dtype, result.shape) == (dtype, torch.Size(shape))


def test_floats_are_added_in_float64() -> None:
    values = [
        RankValue((0,), torch.tensor(1e8)),
        RankValue((1,), torch.tensor(1.0)),
        RankValue((2,), torch.tensor(-1e8)),
    ]
    assert reduce(values, "sum", 3).item() == 1.0


def test_whole_numbers_beyond_the_precision_of_floats_are_added_exactly() -> None:
    values = [RankValue((0,), torch.tensor(2**60)), RankValue((1, 2), torch.tensor(1))]
    assert reduce(values, "sum", 3).item() == 2**60 + 2


def test_a_nan_of_one_rank_is_that_of_all() -> None:
    for op in ("sum", "avg", "max", "min", "product"):
        assert reduce(each(1.0, float("nan"), 2.0), op, 3).isnan()


@pytest.mark.parametrize("op", ["max", "min", "avg", "product"])
def test_lost_ranks_do_not_count(op: str) -> None:
    full, rest = each(3.0, 2.0, 5.0), [RankValue((1,), torch.tensor(2.0)), RankValue((3,), torch.tensor(5.0))]
    assert reduce(rest, op, 4).item() == reduce(full[1:], op, 2).item()


def test_a_sum_with_lost_ranks_is_scaled_to_all() -> None:
    values = [RankValue((1,), torch.tensor(2.0)), RankValue((3,), torch.tensor(4.0))]
    assert reduce(values, "sum", 4).item() == 12.0
    assert lost(values, 4) == [0, 2]
    assert lost(each(1.0, 2.0), 2) == []


def test_a_rank_that_two_workers_bring_counts_once() -> None:
    values = [
        RankValue((0, 1, 2), torch.tensor(7.0)),
        RankValue((0,), torch.tensor(1.0)),
        RankValue((3,), torch.tensor(2.0)),
    ]
    for order in (values, values[::-1]):
        assert reduce(order, "sum", 4).item() == 1.0 + 7.0 + 7.0 + 2.0
        assert [row.item() for row in by_rank(order, 4)] == [1.0, 7.0, 7.0, 2.0]


def test_a_value_of_no_rank_counts_for_nobody() -> None:
    values = [RankValue((), torch.tensor(9.0)), *each(1.0, 2.0)]
    assert reduce(values, "max", 2).item() == 2.0
    assert [row.item() for row in by_rank(values, 2)] == [1.0, 2.0]


def test_a_worker_stands_in_for_ranks_that_were_lost_where_it_has_one_value_for_all_its_ranks() -> None:
    values = [RankValue((2, 3), torch.tensor(7.0)), RankValue((1,), torch.tensor(5.0))]
    assert [row.item() for row in by_rank(stood_in(values, 5), 5)] == [5.0, 5.0, 7.0, 7.0, 5.0]
    assert lost(stood_in(values, 5), 5) == []


def test_by_rank_names_the_ranks_that_were_lost() -> None:
    with pytest.raises(ValueError, match=r"ranks \[0, 2\] were lost"):
        by_rank([RankValue((1,), torch.tensor(1))], 3)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_value_of_four_ranks_gives_the_same_bits_whoever_brings_it(op: str, dtype: torch.dtype) -> None:
    check_worlds(op, dtype, 4)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_one_float64_of_six_ranks_gives_the_same_bits_whoever_brings_it(op: str) -> None:
    check_worlds(op, torch.float64, 6)


def test_a_float64_product_gives_the_same_bits_whoever_brings_it() -> None:
    check_worlds("product", torch.float64, 4)


def test_a_scaled_sum_of_whole_numbers_is_exact_where_it_can_be() -> None:
    assert reduce([RankValue((0,), torch.tensor(2**30 + 1))], "sum", 2).item() == 2**31 + 2


def test_the_mean_of_one_whole_number_is_that_number() -> None:
    assert reduce([RankValue((0, 1), torch.tensor(2**30 + 1))], "avg", 2).item() == 2**30 + 1


def check_worlds(op: str, dtype: torch.dtype, ranks: int) -> None:
    value = torch.rand(500, dtype=dtype, generator=torch.Generator().manual_seed(0))
    one = reduce([RankValue(tuple(range(ranks)), value)], op, ranks)
    for workers in range(2, ranks + 1):
        owned = [tuple(rank for rank in range(ranks) if rank * workers // ranks == worker) for worker in range(workers)]
        assert torch.equal(reduce([RankValue(own, value) for own in owned], op, ranks), one)


def test_a_rank_that_is_sent_is_a_number() -> None:
    """In a container that is copied it stays what is asked at each moment."""
    rank = LiveRank(3)
    assert type(pickle.loads(pickle.dumps(rank))) is int
    assert copy.deepcopy([rank])[0] is rank
    assert copy.copy(rank) is rank
