"""Every public name of torch's DistributedDataParallel, and every argument of its constructor, does what torch's does
or is refused with what to do instead: a name that a later torch adds fails here first."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from elastic.errors import NotInPlace
from runtime.frontends.ddp import wrapper
from tests.unit.runtime.frontends.ddp import threads

SIGNATURE = inspect.signature(DDP.__init__)
PUBLIC = {name for name in set(dir(DDP)) - set(dir(nn.Module)) if not name.startswith("_")}

ALIKE: dict[str, Callable[[Any], object]] = {
    "broadcast_buffers": lambda model: model.broadcast_buffers,
    "gather": lambda model: model.gather([None, None], 0),
    "join_device": lambda model: model.join_device,
    "join_process_group": lambda model: model.join_process_group is dist.group.WORLD,
    "require_manual_backward_finalization": lambda model: model.require_manual_backward_finalization,
    "scatter": lambda model: model.scatter((1,), {"mask": None}, [0]),
    "should_finalize_after_backward": lambda model: model.should_finalize_after_backward,
    "to_kwargs": lambda model: model.to_kwargs((1,), {"mask": None}, 0),
    "will_sync_module_buffers": lambda model: model.will_sync_module_buffers(),
}
"""Name -> a use whose value is that of a plain DistributedDataParallel."""

REFUSED: dict[str, Callable[[Any], object]] = {
    "finalize_backward": lambda model: model.finalize_backward(),
    "join_hook": lambda model: Join([model]),
    "register_comm_hook": lambda model: model.register_comm_hook(None, lambda state, bucket: None),
    "require_manual_backward_finalization": lambda model: setattr(model, "require_manual_backward_finalization", True),
}

TRAINED = {"no_sync", "join"}
"""What whole trainings use, in test_mistakes.py and tests/ddp_scripts, or what does nothing."""


def torchs(use: Callable[[Any], object]) -> object:
    """What a script of a world of one sees without us."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        return use(DDP(nn.Linear(2, 1)))
    finally:
        dist.destroy_process_group()


def ours(use: Callable[[Any], object], *arguments: Any, **options: Any) -> object:
    """What a script with logical ranks sees."""
    seen: list[object] = []

    def main() -> None:
        dist.init_process_group("gloo")
        model = DDP(nn.Linear(2, 1), *arguments, **options)
        seen.append(use(model))
        raise KeyboardInterrupt  # without a training

    with threads.seams(), pytest.raises(KeyboardInterrupt):
        threads.alone(main)
    return seen[0]


def test_every_public_name_is_known() -> None:
    assert PUBLIC - ALIKE.keys() - REFUSED.keys() - TRAINED == set()


@pytest.mark.parametrize("name", sorted(ALIKE.keys() & PUBLIC))
def test_a_name_means_what_it_means_in_torch(name: str) -> None:
    assert ours(ALIKE[name]) == torchs(ALIKE[name])


@pytest.mark.parametrize("name", sorted(REFUSED.keys() & PUBLIC))
def test_what_only_a_reducer_can_do_is_refused(name: str) -> None:
    with pytest.raises(NotInPlace, match="does not work with logical ranks"):
        ours(REFUSED[name])


@pytest.mark.skipif("finalize_backward" not in PUBLIC, reason="this torch finalizes backward by itself")
def test_manual_finalization_may_be_left_off() -> None:
    ours(lambda model: setattr(model, "require_manual_backward_finalization", False))


def test_every_argument_is_known() -> None:
    assert SIGNATURE.parameters.keys() - {"self"} - wrapper.ARGUMENTS - wrapper.INSTEAD.keys() == set()


@pytest.mark.parametrize("name", ["gradient_as_bucket_view", "batched_grad_copy", "lazy_bucket_allocation"])
def test_an_argument_about_memory_changes_nothing_and_can_be_read(name: str) -> None:
    if name in SIGNATURE.parameters:
        assert ours(lambda model: getattr(model, name)) is False
        assert ours(lambda model: getattr(model, name), **{name: True}) is True


def test_arguments_may_be_given_by_place() -> None:
    assert ours(lambda model: model.find_unused_parameters, None, None, 0, None, True, None, 10, True) is True


@pytest.mark.skipif("forward_sync_buffers" not in SIGNATURE.parameters, reason="this torch has broadcast_buffers alone")
def test_the_newer_name_of_broadcast_buffers_is_the_same_value() -> None:
    assert ours(lambda model: model.broadcast_buffers, forward_sync_buffers=False) is False


def test_what_torch_refuses_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'bucket_cap_gb'"):
        ours(lambda model: model, bucket_cap_gb=1)


def test_other_numbers_than_the_scripts_are_refused() -> None:
    half = type("_MixedPrecision", (), {})()
    with pytest.raises(NotInPlace, match=r"mixed_precision=.*torch\.autocast"):
        ours(lambda model: model, mixed_precision=half)


def test_an_argument_of_a_later_torch_is_refused_unless_it_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def later(self: Any, module: nn.Module, sums: str = "mean") -> None: ...

    monkeypatch.setattr(DDP, "__init__", later)
    ours(lambda model: model, sums="mean")
    with pytest.raises(NotInPlace, match=r"DistributedDataParallel\(sums=\).*Leave it out"):
        ours(lambda model: model, sums="max")


def test_what_is_replaced_is_there() -> None:
    newer = set() if "finalize_backward" in PUBLIC else {"_check_manual_backward_finalization_supported"}
    assert {name for name in wrapper.METHODS if not hasattr(DDP, name)} == newer
