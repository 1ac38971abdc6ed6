"""Boxes are what index arithmetic on a tensor of numbers says that they are."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.recovery.kept.boxes import Box, missing


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A part of a tensor of this shape, perhaps an empty one."""
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offset, tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True)))


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    return shape, draw(st.lists(boxes(shape), min_size=1, max_size=6))


def marked(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    """True where the box is."""
    found = torch.zeros(shape, dtype=torch.bool)
    found[box.within(Box.whole(shape))] = True
    return found


@given(shapes_and_boxes())
def test_what_two_boxes_have_in_common(given: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, found = given
    one, other = found[0], found[-1]
    common = one.common(other)
    wanted = marked(shape, one) & marked(shape, other)
    assert torch.equal(torch.zeros(shape, dtype=torch.bool) if common is None else marked(shape, common), wanted)
    assert (common is None) == (not wanted.any())


@given(shapes_and_boxes())
def test_what_of_a_box_is_in_no_other_one(given: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (wanted, *held) = given
    left = marked(shape, wanted)
    for box in held:
        left &= ~marked(shape, box)
    assert missing(wanted, held) == int(left.sum())


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_a_box_in_a_shard_is_the_same_part_of_the_tensor(data: st.DataObject, sizes: list[int]) -> None:
    shape = tuple(sizes)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    outer = data.draw(boxes(shape))
    inner = outer.common(data.draw(boxes(shape)))
    if inner is not None:
        shard = whole[outer.within(Box.whole(shape))]
        assert torch.equal(shard[inner.within(outer)], whole[inner.within(Box.whole(shape))])


def test_a_scalar_is_one_element() -> None:
    scalar = Box.whole(())
    assert scalar.elements == 1 and scalar.common(scalar) == scalar
    assert missing(scalar, []) == 1 and missing(scalar, [scalar]) == 0
