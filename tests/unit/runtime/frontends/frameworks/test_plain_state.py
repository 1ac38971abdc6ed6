"""What is carried of an object that a user wrote, and what is left."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch

from runtime.frontends.frameworks.plain_state import (
    DEPTH_MAX,
    ELEMENTS_MAX,
    VALUES_MAX,
    is_plain,
    plain_attributes,
    set_attributes,
)


class Thing:
    """With attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


PLAIN: dict[str, Any] = {
    "nothing": None,
    "number": 3,
    "text": "ä",
    "pair": (1, [2.5, True]),
    "by name": {"a": [1], 2: {"b": None}},
    "counts": Counter("abca"),
    "ordered": OrderedDict(b=1, a=2),
    "tensor": [torch.tensor(2.5)],
    "lists": defaultdict(list, {"loss": [0.5]}),
    "deep": nested(DEPTH_MAX),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_are_carried_as_copies_of_the_same_type(name: str) -> None:
    value = PLAIN[name]
    there = Thing(value=value)
    found = plain_attributes(there)
    other = Thing(value="other", own=1)
    set_attributes(other, found)
    assert vars(other) == {"value": value, "own": 1}
    assert type(vars(other)["value"]) is type(value)


def test_a_copy_is_not_changed_with_the_original() -> None:
    there = Thing(lists={"a": [1]})
    found = plain_attributes(there)
    vars(there)["lists"]["a"].append(2)
    other = Thing()
    set_attributes(other, found)
    vars(other)["lists"]["a"].append(3)
    assert found == {"lists": {"a": [1]}}


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        len,
        [1, object()],
        {(1, 2): 3},
        torch.zeros(ELEMENTS_MAX + 1),
        torch.nn.Parameter(torch.zeros(1)),
        list(range(VALUES_MAX + 1)),
        [[0] * 200 for _ in range(200)],
        nested(DEPTH_MAX + 1),
    ],
)
def test_what_is_no_plain_value_or_is_data_stays_where_it_is(value: object) -> None:
    assert not is_plain(value)
    assert plain_attributes(Thing(value=value, number=1)) == {"number": 1}


def test_a_list_that_contains_itself_is_left() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert plain_attributes(Thing(circle=circle)) == {}


def test_names_can_be_left_out() -> None:
    assert plain_attributes(Thing(a=1, b=2), without=frozenset({"a"})) == {"b": 2}
