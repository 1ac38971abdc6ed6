"""How often a healthy step makes the host wait for the device, counted where torch is asked for values.

Without a GPU every tensor is on the CPU, so what is counted is each call that would wait if its tensor were on a GPU:
not those on copies that the host has already.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from runtime.allreduce.reduction.host_copies import host_copies
from tests.unit.jobs import SHARDS, cross_entropy, make_job

WAITS = {
    *("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "is_nonzero"),
    *("equal", "allclose", "nonzero", "argwhere", "masked_select", "unique", "cpu", "numpy"),
}
PRODUCT = f"{Path(__file__).resolve().parents[4] / 'runtime'}/"
ON_THE_HOST = ("flat_pool.py", "random_state.py")
"""Whose tensors are always there."""


class Waits(TorchFunctionMode):
    """Counts by the module of the product that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.counting = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        copied = bool(given) and all(getattr(tensor, "on_the_host", False) for tensor in given)
        if self.counting and name in WAITS and not copied:
            asks = [frame.filename for frame in traceback.extract_stack() if frame.filename.startswith(PRODUCT)]
            where = asks[-1].rpartition("/")[2] if asks else "script"
            if where not in ON_THE_HOST:
                self.counted[f"{where}: {name}"] += 1
        if copied or name == "cpu":
            for tensor in tree_leaves(found):
                if isinstance(tensor, torch.Tensor):
                    tensor.on_the_host = True  # type: ignore[attr-defined]
        return found


def waits_of_a_step(layers: int, *, keeps_gradients: bool = False, logs: bool = True) -> Counter[str]:
    """Of the fourth step of a model with so many layers, each with a BatchNorm."""
    job = make_job()
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(layers)]
    model = nn.Sequential(*blocks, nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job.register(model=model, optimizer=optimizer)
    x, y = torch.randn(4, 6), torch.zeros(4, dtype=torch.long)
    waits = Waits()
    with waits:
        for step in job.steps(shards=SHARDS, total=5):
            waits.counting = step.index == 3
            for _ in step:
                loss = cross_entropy(model(x), y)
                loss.backward()
                if logs:
                    step.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not keeps_gradients)
            waits.counting = False
    job._detach()
    return waits.counted


@pytest.mark.parametrize("keeps_gradients", [False, True])
def test_a_step_waits_for_what_has_to_be_known_and_no_more_in_a_deeper_model(keeps_gradients: bool) -> None:
    a_shard = {
        "small_values.py: item": SHARDS,  # step.log()
        "host_copies.py: cpu": SHARDS,  # the counters of BatchNorm
    }
    a_pass = {
        "gradient_harvest.py: item": 1,  # whether all gradients are finite
        "gradient_harvest.py: tolist": 1,  # which buffers have changed
    }
    a_pass |= {"host_copies.py: cpu": SHARDS + 1} if keeps_gradients else {}
    for layers in (1, 6):
        assert waits_of_a_step(layers, keeps_gradients=keeps_gradients) == {**a_shard, **a_pass}


def test_a_step_that_logs_nothing_does_not_wait_for_a_loss() -> None:
    assert "small_values.py: item" not in waits_of_a_step(1, logs=False)


def test_the_fingerprint_is_read_at_once() -> None:
    job = make_job()
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    job.register(model=model)
    job.state.setdefault(mean=torch.zeros(3), other=torch.zeros(4))
    carrier = job._training.carrier
    carrier.freeze()
    waits = Waits()
    with waits:
        waits.counting = True
        carrier.fingerprint(3)
    assert waits.counted == {"host_copies.py: cpu": 2}, "of the parameters, and of job.state"
    job._detach()


def test_copies_are_those_of_each_tensor() -> None:
    numbers = [torch.arange(6).reshape(2, 3), torch.tensor(7), torch.tensor([True])]
    tensors = [*numbers, torch.zeros(0, 4), torch.rand(2, 2).t()]
    for copy, tensor in zip(host_copies(tensors), tensors, strict=True):
        assert copy.equal(tensor) and copy.dtype is tensor.dtype and copy.shape == tensor.shape
    assert host_copies([]) == []
