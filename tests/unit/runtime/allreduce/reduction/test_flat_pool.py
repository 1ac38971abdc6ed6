"""Memory that is used again only when nobody can see it any more."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from runtime.allreduce.reduction.flat_pool import KEPT_MAX, Flats


def test_dropped_memory_is_used_again() -> None:
    flats = Flats(torch.float32, 1000)
    flat = flats.take()
    assert flat.shape == (1000,) and flat.dtype == torch.float32
    address = flat.data_ptr()
    del flat
    assert flats.take().data_ptr() == address


@pytest.mark.parametrize(
    "look",
    [
        lambda flat: flat,
        lambda flat: flat[3:7],
        lambda flat: flat.view(10, 100).detach()[2],
        lambda flat: torch.split(flat, [500, 500])[1],
        lambda flat: flat.view(torch.uint8),
        lambda flat: flat.numpy(),
        lambda flat: memoryview(flat.numpy())[4:8],
        lambda flat: memoryview(flat.view(torch.uint8).numpy()),
        lambda flat: np.asarray(flat.numpy()[5:]),
        lambda flat: flat.untyped_storage(),
    ],
)
def test_memory_that_somebody_can_see_is_left_alone(look: Callable[[torch.Tensor], object]) -> None:
    flats = Flats(torch.float32, 1000)
    flat = flats.take()
    address = flat.data_ptr()
    seen = look(flat)
    del flat
    other = flats.take()
    assert other.data_ptr() != address
    del seen
    assert flats.take().data_ptr() == address


def test_a_gradient_that_is_still_in_a_parameter_is_left_alone() -> None:
    """Only C++ refers to it there."""
    flats = Flats(torch.float32, 4)
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    flat = flats.take()
    address = flat.data_ptr()
    parameter.grad = flat.view(2, 2).detach()
    del flat
    assert flats.take().data_ptr() != address
    parameter.grad = None
    assert address in [flats.take().data_ptr() for _ in range(2)]


def test_views_of_the_parts_are_made_once_and_keep_no_memory_from_being_used_again() -> None:
    flats = Flats(torch.float32, 6, like=[torch.zeros(2, 2), torch.zeros(2)])
    flat = flats.take()
    address = flat.data_ptr()
    parts = flats.parts(flat)
    parts[0].fill_(1)
    parts[1].fill_(2)
    assert flat.tolist() == [1, 1, 1, 1, 2, 2]
    del flat
    again = flats.take()
    assert again.data_ptr() == address and flats.parts(again) is parts
    assert flats.parts(flats.take()) is not parts


@pytest.mark.parametrize("shapes", [[(2, 2), (2,)], [(6,), (0,)], [(0, 3), (6,), (0,)]])
def test_memory_with_parts_is_left_alone_while_the_tensor_or_a_gradient_made_of_a_part_is_there(
    shapes: list[tuple[int, ...]],
) -> None:
    flats = Flats(torch.float32, 6, like=[torch.zeros(shape) for shape in shapes])
    parameter = torch.nn.Parameter(torch.zeros(max(shapes)))
    flat = flats.take()
    address = flat.data_ptr()
    parts = flats.parts(flat)
    assert flats.take().data_ptr() != address
    parameter.grad = parts[shapes.index(max(shapes))].detach()
    del flat
    assert flats.take().data_ptr() != address
    parameter.grad = None
    assert flats.take().data_ptr() == address


def test_another_members_flat_tensor_has_parts_too() -> None:
    flats = Flats(torch.float32, 6, like=[torch.zeros(2, 2), torch.zeros(2)])
    first, second = flats.parts(torch.arange(6.0))
    assert (first.tolist(), second.tolist()) == ([[0, 1], [2, 3]], [4, 5])


def test_free_memory_is_bounded() -> None:
    flats = Flats(torch.float64, 8)
    held = [flats.take() for _ in range(2 * KEPT_MAX)]
    assert len({flat.data_ptr() for flat in held}) == 2 * KEPT_MAX
    del held
    assert len(flats._kept) == KEPT_MAX


def test_no_elements_are_no_special_case() -> None:
    assert Flats(torch.float32, 0).take().shape == (0,)


def test_threads_never_get_the_same_memory() -> None:
    flats = Flats(torch.int64, 64)
    wrong: list[int] = []

    def use(number: int) -> None:
        for _ in range(200):
            flat = flats.take().fill_(number)
            if not bool((flat == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
