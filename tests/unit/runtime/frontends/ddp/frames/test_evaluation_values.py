"""What evaluations change in the frames of a script."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

from elastic.errors import NotInPlace
from runtime.frontends.ddp.evaluation.loop_values import LoopValues
from runtime.frontends.ddp.frames.evaluation_values import SUM_MAX, EvaluationValues, total
from runtime.frontends.ddp.frames.places import ScriptFrames

HERE = ScriptFrames()


def unknown(value: object) -> Any:
    """The type checker is to forget what it knows of a value that changes behind its back."""
    return value


def test_what_an_evaluation_adds_to_an_empty_dict_is_shared_out() -> None:
    sums: defaultdict[str, float] = defaultdict(float)
    values = EvaluationValues.read(HERE)
    found = []
    for loss in (1.0, 2.5):
        values.put_back(objects=False)
        sums["loss"] += loss
        found.append(values.added(0, 1))
    values.put_back(objects=False)
    values.add(total(found), 2)
    assert sums == {"loss": 1.75}


def test_numbers_by_class_are_shared_out() -> None:
    right, seen = {0: 1, 1: 0}, defaultdict[int, int](int)
    values = EvaluationValues.read(HERE)
    found = []
    for rank in (0, 1):
        values.put_back(objects=False)
        right[rank] += 2
        seen[rank] += 4
        found.append(values.added(rank, 1))
    values.put_back(objects=False)
    values.add(total(found), 2)
    assert (right, seen) == ({0: 2, 1: 1}, {0: 2, 1: 2})


class Late:
    mode: str

    def update(self) -> None:
        if not hasattr(self, "count"):
            self.count, self.shape, self.mode = 0, [2, 3], "test"
        self.count += 2


def test_what_has_come_as_an_attribute_is_shared_out() -> None:
    late = Late()
    values = EvaluationValues.read(HERE)
    found = []
    for rank in (0, 1):
        values.put_back(objects=False)
        late.update()
        late.update()
        found.append(values.added(rank, 1))
    values.put_back(objects=False)
    values.add(total(found), 2)
    assert (late.count, late.shape, late.mode) == (4, [2, 3], "test")


def test_a_flag_is_changed_if_a_rank_has_changed_it() -> None:
    bad, good, kept, mask = unknown(False), unknown(True), unknown(False), torch.tensor([False, True])
    values = EvaluationValues.read(HERE)
    found = []
    for rank in (0, 1, 2):
        values.put_back(objects=False)
        bad = bad or torch.tensor(rank == 1)
        good = good and rank == 2
        mask = mask | torch.tensor([rank > 0, True])
        found.append(values.added(rank, 1))
    values.put_back(objects=False)
    values.add(json.loads(json.dumps(total(found))), 3)
    assert (bad, good, kept, mask.tolist()) == (True, False, False, [True, True])


def test_a_number_that_was_none_is_shared_if_all_ranks_have_the_same() -> None:
    size, worst, layer = unknown(None), unknown(None), unknown(None)
    values = EvaluationValues.read(HERE)
    size, layer = 32, torch.nn.Linear(2, 2)
    same = [values.added(rank, 1) for rank in (0, 1)]
    values.put_back(objects=False)
    values.add(total(same), 2)
    assert (size, type(size), worst) == (32, int, None)
    size, found = None, []
    for rank in (0, 1):
        values.put_back(objects=False)
        worst = torch.tensor(0.5 + rank)
        found.append(values.added(rank, 1))
    values.put_back(objects=False)
    with pytest.raises(NotInPlace, match=r"^worst in .*, None that becomes a number of a rank's .*with math.inf"):
        values.add(total(found), 2)
    assert isinstance(layer, torch.nn.Linear)


@pytest.mark.parametrize("length", [2, 200])
def test_a_tensor_that_gets_longer_is_named(length: int) -> None:
    outputs, batch = torch.tensor([]), unknown(torch.zeros(2))
    values = EvaluationValues.read(HERE)
    batch = torch.ones(3)
    values.check_longer()
    outputs = torch.cat([outputs, torch.zeros(length)])
    with pytest.raises(NotInPlace, match=r"^outputs in .*, a tensor that gets longer,"):
        values.check_longer()
    assert batch.sum() == 3


def test_what_was_added_is_told_of_numbers_and_elements_and_flags() -> None:
    count, part, flag, text, sums, same = 1, 0.5, True, "a", torch.zeros(2), 4
    values = EvaluationValues.read(HERE)
    count, part, flag, text, same = count + 2, part - 0.25, False, "b", same + 0
    sums[1] += 3
    told = values.added(0, 1)
    added = {name.rpartition(" ")[2] if "sums" not in name else name[-6:]: value for name, value in told.items()}
    assert added == {"count": 2.0, "part": -0.25, "sums 1": 3.0, "flag": 1.0}
    assert (flag, text) == (False, "b")


def test_an_evaluation_without_a_number_is_seen() -> None:
    loss, best, sums = 0.0, math.inf, torch.zeros(2)
    values = EvaluationValues.read(HERE)
    loss += math.nan
    best = min(math.nan, best)
    sums += torch.tensor([math.inf, 1.0])
    found = [values.added(0, 1)]
    values.put_back(objects=False)
    assert (loss, best, sums.tolist()) == (0.0, math.inf, [0.0, 0.0])
    values.add(total(found), 2)
    assert math.isnan(loss) and math.isnan(best) and sums.tolist() == [math.inf, 0.5]


def test_lists_of_one_number_a_batch_become_the_average_of_the_ranks() -> None:
    losses, counts, tensors, other = [9.0], list[int](), deque[torch.Tensor](), unknown([1, 2])
    by_name = defaultdict[str, list[float]](list)
    sums = defaultdict[str, torch.Tensor](lambda: torch.zeros(2))
    values = EvaluationValues.read(HERE)
    found = []
    for rank in (0, 1):
        values.put_back(objects=False)
        other = [3, 4, 5]
        for batch in range(3):
            losses.append(batch + rank / 2)
            counts.append(batch + 2 * rank)
            tensors.append(torch.full((1,) * (batch % 2), batch + rank, dtype=torch.float16))
            by_name["loss"].append(batch + rank / 2)
            sums["loss"] += torch.tensor([1.0, rank])
        found.append(values.added(rank, 3))
    values.put_back(objects=False)
    values.add(total(found), 2)
    assert (losses, counts, other) == ([9.0, 0.25, 1.25, 2.25], [1, 2, 3], [1, 2])
    assert [(entry.tolist(), entry.dtype) for entry in tensors] == [
        (0.5, torch.float16),
        ([1.5], torch.float16),
        (2.5, torch.float16),
    ]
    assert {type(entry) for entry in losses} == {float} and {type(entry) for entry in counts} == {int}
    assert by_name == {"loss": [0.25, 1.25, 2.25]}
    assert sums["loss"].tolist() == [3.0, 1.5]


@pytest.mark.parametrize(
    "entries", [[1.0], [1.0, 2.0, 3.0], ["a", "b"], [True, False], [torch.zeros(2), torch.zeros(2)]]
)
def test_lists_of_other_things_are_named(entries: list[Any]) -> None:
    seen = list[Any]()
    values = EvaluationValues.read(HERE)
    seen += entries
    with pytest.raises(NotInPlace, match=r"^seen in .*, a list that gets other things than one number a batch"):
        values.added(0, 2)


def test_tensors_that_are_too_long_and_change_are_named() -> None:
    confusion, batch = torch.zeros(SUM_MAX + 1), unknown(torch.zeros(SUM_MAX + 1))
    values = EvaluationValues.read(HERE)
    batch = torch.ones(SUM_MAX + 1)
    assert values.added(0, 1) == {}
    confusion += batch
    with pytest.raises(NotInPlace, match=r"^confusion in .*, a tensor of more than 16,384 elements"):
        values.added(0, 1)


def test_what_all_have_added_is_shared_out() -> None:
    even, odd, part, sums, whole = (
        unknown(1),
        unknown(1),
        unknown(0.5),
        torch.zeros(2),
        torch.zeros(1, dtype=torch.int64),
    )
    values = EvaluationValues.read(HERE)
    even, odd, part = even + 8, odd + 2, part + 1.0
    sums += 2
    whole += 8
    added = values.added(0, 1)
    values.put_back(objects=True)
    values.add(added, 4)
    assert (even, type(even), odd, part) == (3, int, 1.5, 0.75)
    assert (sums.tolist(), whole.tolist(), whole.dtype) == ([0.5, 0.5], [2], torch.int64)


def test_tensors_of_whole_numbers_become_fractions_if_need_be() -> None:
    """Under each of their names. All that the ranks have added together is in N times the value."""
    right = torch.zeros(2, dtype=torch.int64)
    again = right
    values = EvaluationValues.read(HERE)
    right += torch.tensor([7, 8])
    found = total([values.added(0, 1)])
    values.put_back(objects=False)
    values.add(found, 4)
    assert right.tolist() == [1.75, 2.0] and again is right


def test_an_evaluation_adds_up_in_longer_tensors() -> None:
    confusion, outputs = torch.zeros(10, 10, dtype=torch.int64), torch.zeros(100)
    batch = torch.zeros(100)
    values = EvaluationValues.read(HERE)
    found = []
    for rank in (0, 1):
        values.put_back(objects=False)
        batch = torch.full((100,), 3.0 + rank)
        confusion[rank, 9] += 4
        found.append(values.added(0, 1))
    values.put_back(objects=False)
    values.add(total(found), 2)
    assert confusion.sum() == 4 and confusion[0, 9] == confusion[1, 9] == 2
    assert values.summed == {confusion.data_ptr()}
    assert batch.tolist() == [4.0] * 100 and not outputs.any(), "a batch is no sum"


def test_a_tensor_with_two_names_is_added_to_once() -> None:
    sums = torch.zeros(1)
    again = sums
    values = EvaluationValues.read(HERE)
    sums += 4
    added = values.added(0, 1)
    values.put_back(objects=True)
    values.add(added, 4)
    assert again.item() == 1.0


def test_a_tensor_of_flags_may_change_in_an_evaluation() -> None:
    seen = torch.zeros(3, dtype=torch.bool)
    values = EvaluationValues.read(HERE)
    seen[0] = True
    found = values.added(0, 1)
    values.put_back(objects=False)
    values.add(found, 4)
    assert seen.tolist() == [True, False, False]


def test_a_number_that_began_at_infinity_becomes_the_lowest_or_highest_of_all_ranks() -> None:
    lowest, highest, tensor = unknown(float("inf")), unknown(-float("inf")), unknown(float("inf"))
    values = EvaluationValues.read(HERE)
    found = []
    for rank, value in enumerate((3.0, 2.0, 4.0)):
        lowest, highest, tensor = min(lowest, value), max(highest, value), torch.tensor(min(tensor, value))
        found.append(values.added(rank, 1))
        values.put_back(objects=False)
    values.add(total(found), 3)
    assert (lowest, highest, tensor.item()) == (2.0, 4.0, 2.0)


def test_what_an_evaluation_adds_in_numpy_is_shared_out() -> None:
    correct, count, mean = unknown(0), unknown(np.int64(2)), unknown(0.0)
    values = EvaluationValues.read(HERE)
    found = []
    for rank in range(2):
        correct, count, mean = correct + np.int64(2 + rank), count + np.int64(4), mean + np.float32(0.5)
        found.append(json.loads(json.dumps(values.added(0, 1))))
        values.put_back(objects=False)
    values.add(total(found), 2)
    assert (correct, count, mean) == (2.5, 6, 0.5)
    assert (type(correct), type(count), type(mean)) == (np.float64, np.int64, np.float64)


class Meter:
    """Made in the loop, as those of a MetricLogger. It has its numbers in slots."""

    __slots__ = ("number", "total", "window")

    def __init__(self) -> None:
        self.total, self.number, self.window = 0.0, 0, 20


def test_objects_that_a_loop_puts_into_a_dict_get_the_numbers_of_all_ranks() -> None:
    meters: defaultdict[str, Meter] = defaultdict(Meter)
    values = LoopValues.read(HERE)
    found = []
    for losses in ([1.0, 2.0], [4.0]):
        values.put_back(objects=False)
        assert not meters, "each rank begins without them"
        for loss in losses:
            meters["loss"].total += loss
            meters["loss"].number += 1
        found.append(values.added(0, 1))
    values.put_back(objects=False)
    values.add(total(found), 2)
    assert (meters["loss"].total, meters["loss"].number, meters["loss"].window) == (3.5, 1.5, 20)
