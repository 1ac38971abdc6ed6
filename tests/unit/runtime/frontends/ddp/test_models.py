"""What models and their backward() may do in a torchrun script, with the same bits in every world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from elastic.errors import BufferChanged, NotInPlace
from tests.unit.runtime.frontends.ddp import threads
from tests.unit.runtime.frontends.ddp.test_mistakes import BATCHES, Setup, stopped
from tests.unit.runtime.frontends.ddp.threads import Main
from tests.unit.thoroughness import some


@pytest.fixture(autouse=True)
def seams() -> Iterator[None]:
    with threads.seams():
        yield


class Layer(nn.Module):
    """A layer whose output depends on how often it was called."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.linear(x) / self.calls


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.2))
        self.head, self.other = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.block(x))


class Either(Net):
    """Some batches use one head, and some the other."""

    def forward(self, x: torch.Tensor) -> Any:
        return (self.head if bool(x.sum() > 0) else self.other)(self.block(x))


class Dropped(Net):
    """Chance says which head a batch uses."""

    def forward(self, x: torch.Tensor) -> Any:
        return (self.head if torch.rand(()) < 0.5 else self.other)(self.block(x))


class Checkpointed(Net):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(checkpoint(self.block, x.requires_grad_(), use_reentrant=self.use_reentrant))


class Powered(Net):
    """A buffer that each forward() changes."""

    def __init__(self) -> None:
        super().__init__()
        self.block[0] = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6))


def static_later() -> DDP:
    model = DDP(Net())
    model._set_static_graph()
    assert model._get_ddp_logging_data() == {}
    return model


def hooked() -> DDP:
    net, norms = Net(), []

    def clamped(gradient: torch.Tensor) -> torch.Tensor:
        norms.append(gradient.norm().item())
        return gradient.clamp(-0.05, 0.05)

    def halved(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    def doubled(module: nn.Module, gradients: Any) -> Any:
        return tuple(2 * gradient for gradient in gradients)

    net.head.weight.register_hook(clamped)
    net.head.bias.register_post_accumulate_grad_hook(halved)
    net.head.register_full_backward_pre_hook(doubled)
    return DDP(net)


def counting() -> DDP:
    net = Net()
    net.block.append(Layer(6))
    return DDP(net)


MODELS: dict[str, Callable[[], Any]] = {
    "batch norm": lambda: DDP(Net()),
    "static graph": lambda: DDP(Net(), static_graph=True),
    "static graph, said later": static_later,
    "checkpointed": lambda: DDP(Checkpointed(use_reentrant=False)),
    "checkpointed, reentrant": lambda: DDP(Checkpointed(use_reentrant=True)),
    "hooks of gradients": hooked,
    "parameters that are not used": lambda: DDP(Net(), find_unused_parameters=True),
    "parameters that some batches use": lambda: DDP(Either(), find_unused_parameters=True),
    "parameters used at random": lambda: DDP(Dropped(), find_unused_parameters=True),
    "compiled": lambda: torch.compile(DDP(Net()), backend="aot_eager"),
    "compiled inside": lambda: DDP(torch.compile(Net(), backend="aot_eager")),
    "a layer that counts": counting,
}


def script(make: Callable[[], Any], wrapped: Callable[[Any], Any] = lambda model: model) -> Main:
    """wrapped: what the training loop calls, of the model."""

    def main() -> None:
        setup = Setup()
        model = make()
        setup.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        setup.model = wrapped(model)
        for epoch in range(2):
            setup.sampler.set_epoch(epoch)
            for x, y in setup.loader:
                setup.step(x, y)

    return main


@pytest.mark.parametrize("model", MODELS)
def test_a_model_has_the_same_bits_in_every_world_and_through_deaths_and_joins(model: str) -> None:
    main = script(MODELS[model])
    digest, ledger = threads.alone(main)
    assert len(ledger) == 2 * BATCHES
    death: dict[str, Any] = {"kills": {"w0": (4, 0)}}
    join: dict[str, Any] = {"newcomers": 1, "asked_at": BATCHES, "admit_at": BATCHES + 1}
    how: dict[str, Any]
    for workers, how in (*some(((1, {}), (2, {}), (3, {}), (3, death), (2, join)), 0, model), (3, death | join)):
        outcome = threads.together(workers, main, **how)
        assert outcome.errors == {}
        assert set(outcome.digests.values()) == {digest}
        assert all(lines == ledger for name, lines in outcome.ledgers.items() if name not in outcome.joined)


def test_a_buffer_that_forward_changes_is_named() -> None:
    stopped(script(lambda: DDP(Powered())), BufferChanged, r"weight.0._u, .*torchrun goes on with that of rank 0")


def test_a_model_that_sees_its_batch_in_backward_only_is_named() -> None:
    def whole(use_reentrant: bool) -> Main:
        return script(
            lambda: DDP(Net()),
            lambda model: lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant),
        )

    stopped(whole(use_reentrant=True), NotInPlace, "say use_reentrant=False")
    digest, _ = threads.alone(whole(use_reentrant=False))
    assert set(threads.together(2, whole(use_reentrant=False)).digests.values()) == {digest}
