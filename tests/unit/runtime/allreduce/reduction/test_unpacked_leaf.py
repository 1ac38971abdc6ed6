"""Gradients that are added without being copied first: the same bits, and only where nobody else can write to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from runtime.allreduce.reduction.buffers import Buffer
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.allreduce.reduction.leaves.unpacked_leaf import owns_its_gradient
from runtime.allreduce.reduction.partial_sum import Partial, fold


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.allreduce.reduction.leaves.layout.LOOSE_ELEMENTS", 0)


class Net(nn.Module):
    """Parameters of several shapes and memory formats, and a buffer, behind the gradients of a flat tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload, unused-ignore]
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.last(self.norm(self.convolve(x)).mean((2, 3)))
        return answer + self.unused.sum()


def net() -> tuple[Net, Harvest]:
    torch.manual_seed(0)
    model = Net()
    buffers = [
        Buffer(f"norm.{name}", model.norm, name, "mean", (buffer.dtype, buffer.shape))
        for name, buffer in model.norm.named_buffers()
        if buffer.is_floating_point()
    ]
    return model, Harvest(list(model.named_parameters()), buffers)


def leaf(model: Net, harvest: Harvest, shard: int, weight: float = 1.0, *, copied: bool = False) -> Partial:
    harvest.before(shard)
    model(torch.randn(2, 3, 5, 5)).square().mean().backward()
    held = [parameter.grad for parameter in model.parameters()] if copied else []
    found = harvest.leaf(shard, weight, {})
    assert bool(found.loose) == (not copied)
    del held
    return found


def bits(partial: Partial) -> bytes:
    partial.settle()
    return partial.flats["float32"].numpy().tobytes()


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.1])
@pytest.mark.parametrize("copied", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("into_left", [False, True])
def test_a_sum_has_the_bits_of_the_sum_of_copies(weight: float, copied: tuple[bool, bool], into_left: bool) -> None:
    model, harvest = net()
    harvest.begin_pass(1, 2, 0)
    left, right = (leaf(model, harvest, shard, weight, copied=True) for shard in (0, 1))
    expected = bits(fold(left, right))
    left, right = (leaf(model, harvest, shard, weight, copied=how) for shard, how in enumerate(copied))
    other = right if into_left else left
    before = None if other.loose else bits(other)
    assert bits(fold(left, right, into=left if into_left else right)) == expected
    assert before is None or bits(other) == before


def test_a_loose_sibling_of_a_fold_that_is_undone_stays_as_it_was() -> None:
    model, harvest = net()
    harvest.begin_pass(1, 2, 0)
    held, expected = leaf(model, harvest, 0), bits(leaf(model, harvest, 0))
    fold(held, leaf(model, harvest, 1))
    assert held.loose
    assert bits(held) == expected


def test_small_gradients_are_copied() -> None:
    """Finding out whether they may stay takes longer."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("runtime.allreduce.reduction.leaves.layout.LOOSE_ELEMENTS", 3)
        found = []
        for elements in (2, 3):
            parameter = nn.Parameter(torch.ones(elements))
            harvest = Harvest([("p", parameter)])
            harvest.begin_pass(0, 0, 0)
            harvest.before(0)
            parameter.sum().backward()
            found.append(bool(harvest.leaf(0, 1.0, {}).loose))
    assert found == [False, True]


def test_settled_it_is_the_copy() -> None:
    model, harvest = net()
    harvest.begin_pass(1, 2, 0)
    copied, loose = (leaf(model, harvest, 0, 3.0, copied=how) for how in (True, False))
    assert (loose.has_grad, loose.weight) == (copied.has_grad, copied.weight)
    assert bits(loose) == bits(copied)
    assert loose.loose == {}


def test_it_reads_the_gradient_where_backward_left_it() -> None:
    parameter = nn.Parameter(torch.ones(3))
    harvest = Harvest([("p", parameter)])
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    (parameter * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert parameter.grad is not None
    address = parameter.grad.data_ptr()
    found = harvest.leaf(0, 1.0, {})
    assert found.loose["float32"]._parts[0].data_ptr() == address


@pytest.mark.parametrize(
    "hold",
    [
        lambda gradient: gradient,
        lambda gradient: [gradient],
        lambda gradient: gradient[1:],
        lambda gradient: gradient.detach(),
        lambda gradient: gradient.data,
        lambda gradient: gradient.numpy(),
        lambda gradient: gradient.untyped_storage(),
    ],
)
def test_a_gradient_that_somebody_else_can_write_to_is_copied(hold: Callable[[torch.Tensor], object]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    (2 * parameter).sum().backward()
    assert owns_its_gradient(parameter)
    assert parameter.grad is not None
    held = hold(parameter.grad)
    assert not owns_its_gradient(parameter)
    del held
    assert owns_its_gradient(parameter)


def test_a_script_that_keeps_its_gradients_may_change_them_later() -> None:
    parameter = nn.Parameter(torch.ones(2))
    harvest = Harvest([("p", parameter)])
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    parameter.grad = kept = torch.tensor([1.0, 2.0])
    first = harvest.leaf(0, 2.0, {})
    assert kept.tolist() == [1.0, 2.0]
    kept.zero_()
    harvest.before(1)
    parameter.grad = torch.tensor([3.0, 5.0])
    assert fold(first, harvest.leaf(1, 2.0, {})).flats["float32"].tolist() == [8.0, 14.0]


def test_a_gradient_of_two_parameters_is_copied() -> None:
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    harvest = Harvest([("one", one), ("two", two)])
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    one.grad = two.grad = torch.tensor([1.0, 2.0])
    assert harvest.leaf(0, 3.0, {}).flats["float32"].tolist() == [3.0, 6.0, 3.0, 6.0]


def test_where_a_parameter_has_no_gradient_all_are_copied() -> None:
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    harvest = Harvest([("one", one), ("two", two)])
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    one.grad = torch.tensor([1.0, 2.0])
    found = harvest.leaf(0, 1.0, {})
    assert (found.flats["float32"].tolist(), found.has_grad, found.loose) == ([1.0, 2.0, 0.0], 0b01, {})
