"""Which loops around a call count its turns where nothing can be undone."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest

from runtime.frontends.ddp.frames.loop_shape import counting_loop

T = TypeVar("T")


def here() -> str | None:
    """As a model sees it that is called there."""
    found = counting_loop(of_this_file(sys._getframe(1)))
    return None if found is None else found.said


def of_this_file(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None and frame.f_code.co_filename == __file__:
        yield frame
        frame = frame.f_back


def progress(iterable: Iterable[T], total: int = 0) -> Iterable[T]:
    """As tqdm()."""
    return iterable


def in_a_function() -> str | None:
    return here()


def behind_a_loop_of_its_own() -> str | None:
    for _ in range(2):
        pass
    return here()


def in_a_while_of_its_own() -> str | None:
    while True:
        return here()


def in_a_for_of_its_own() -> str | None:
    for _ in [1]:
        return here()
    return None


def over_range() -> str | None:
    for _step in range(1000):
        return here()
    return None


def over_enumerated_range() -> str | None:
    for _i, _step in enumerate(range(3)):
        return here()
    return None


def over_shown_range() -> str | None:
    for _step in progress(enumerate(range(3)), total=3):
        return here()
    return None


def over_reversed_range() -> str | None:
    for _step in reversed(range(3)):
        return here()
    return None


def over_zip() -> str | None:
    for _step, _batch in zip([1], [2], strict=True):
        return here()
    return None


def over_islice() -> str | None:
    for _batch in islice([1, 2], 1):
        return here()
    return None


def over_islice_of_its_module() -> str | None:
    for _batch in itertools.islice([1, 2], 1):
        return here()
    return None


def over_range_by_a_function() -> str | None:
    for _step in range(3):
        return in_a_function()
    return None


def over_range_by_functions() -> str | None:
    for _step in range(3):
        return (lambda: behind_a_loop_of_its_own())()
    return None


def over_range_behind_another_loop() -> str | None:
    for _step in range(3):
        for _item in [1, 2]:
            pass
        return here()
    return None


def over_range_in_a_comprehension() -> str | None:
    for _step in range(3):
        return next(iter([here() for _ in [1]]))
    return None


COUNTED: list[tuple[Callable[[], str | None], str]] = [
    (over_range, "for _step in range(...)"),
    (over_enumerated_range, "for (_i, _step) in range(...)"),
    (over_shown_range, "for _step in range(...)"),
    (over_reversed_range, "for _step in range(...)"),
    (over_zip, "for (_step, _batch) in zip(...)"),
    (over_islice, "for _batch in islice(...)"),
    (over_islice_of_its_module, "for _batch in islice(...)"),
    (over_range_by_a_function, "for _step in range(...)"),
    (over_range_by_functions, "for _step in range(...)"),
    (over_range_behind_another_loop, "for _step in range(...)"),
    (over_range_in_a_comprehension, "for _step in range(...)"),
]


@pytest.mark.parametrize(("function", "loop"), COUNTED)
def test_a_loop_that_counts_turns_is_named_with_its_line(function: Callable[[], str | None], loop: str) -> None:
    found = function()
    assert found is not None
    place, _, text = found.partition(": ")
    file, _, line = place.rpartition(":")
    assert (file, text.replace("(", "").replace(")", "")) == (__file__, loop.replace("(", "").replace(")", ""))
    assert "for " in Path(__file__).read_text().splitlines()[int(line) - 1]


def over_a_list() -> str | None:
    for _batch in [1, 2]:
        return here()
    return None


def over_an_enumerated_list() -> str | None:
    for _i, _batch in enumerate(progress([1, 2], total=3)):
        return here()
    return None


def epochs_over_a_list() -> str | None:
    for _epoch in range(3):
        for _batch in [1, 2]:
            return here()
    return None


def epochs_over_a_list_by_a_function() -> str | None:
    for _epoch in range(3):
        return in_a_for_of_its_own()
    return None


def epochs_over_while() -> str | None:
    for _epoch in range(3):
        while True:
            return here()
    return None


def epochs_over_while_by_a_function() -> str | None:
    for _epoch in range(3):
        return in_a_while_of_its_own()
    return None


def while_behind_a_range() -> str | None:
    while True:
        for _ in range(3):
            pass
        return here()


NOT_COUNTED: list[Callable[[], str | None]] = [
    in_a_function,
    behind_a_loop_of_its_own,
    over_a_list,
    over_an_enumerated_list,
    epochs_over_a_list,
    epochs_over_a_list_by_a_function,
    epochs_over_while,
    epochs_over_while_by_a_function,
    while_behind_a_range,
]


@pytest.mark.parametrize("function", NOT_COUNTED)
def test_other_loops_are_not(function: Callable[[], str | None]) -> None:
    assert function() is None


def test_a_text_that_cannot_be_read_has_no_loops(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("for i in range(3)\n")
    for filename in ("<string>", str(tmp_path / "gone.py"), str(tmp_path / "broken.py")):
        found: dict[str, Any] = {"look": lambda: counting_loop([sys._getframe(1)])}
        exec(compile("for i in range(3):\n    result = look()\n", filename, "exec"), found)
        assert found["result"] is None


def test_a_function_that_is_defined_in_a_loop_is_not_called_by_it() -> None:
    for _fold in range(1):

        def train_step() -> str | None:
            return here()

        for _batch in [1, 2]:
            assert train_step() is None


def test_the_else_of_a_loop_is_not_inside_it() -> None:
    for _attempt in range(1):
        pass
    else:
        assert here() is None


def test_a_range_with_a_name_counts_turns_too() -> None:
    steps = range(3)
    for _step in steps:
        assert here() is not None


def test_a_range_that_is_given_by_keyword_counts_turns_too() -> None:
    for _step in progress(iterable=range(3)):
        assert here() is not None
