"""Training scripts, one for each feature of PyTorch whose bits must not depend on the world.

Each takes a job, registers, trains to the end, and is short enough to be read: it is what docs/exactness.md promises.
"""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from runtime.data.loader import Loader
from runtime.loop.job import Job
from tests.unit.jobs import cross_entropy, dataset

Feature = Callable[[Job], None]
FEATURES: dict[str, Feature] = {}
"""By the name in the table of docs/exactness.md."""
STEPS = 6
SHARDS = 4
BATCH = 16


def feature(fn: Feature) -> Feature:
    FEATURES[fn.__name__] = fn
    return fn


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *(middle or [nn.ReLU()]), nn.Linear(8, 2))


def loader(job: Job, batch_size: int = BATCH, shards: int = SHARDS, **arguments: Any) -> Loader:
    return job.loader(dataset(), batch_size, shards=shards, shuffle=True, **arguments)


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


Loss = Callable[[torch.Tensor, torch.Tensor], Any]


def train(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    data: Loader | None = None,
    loss_of: Loss | None = None,
    after: Callable[[int, dict[str, float]], object] = lambda step, metrics: None,
    zeros: bool = False,
    **registered: Any,
) -> None:
    """The plain loop. after: called behind optimizer.step() with the step's number and metrics. zeros: gradients are
    set to zero behind a step, not dropped."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.05)
    job.register(model=model, optimizer=optimizer, **registered)
    compute = loss_of or (lambda x, y: cross_entropy(model(x), y))
    for step in job.steps(loader(job) if data is None else data, total=STEPS):
        for x, y in step:
            loss = compute(x, y)
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not zeros)
        after(step.index, step.metrics)


def tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 11, (48, 5), generator=generator)
    return TensorDataset(ids, ids.sum(1) % 2)


def token_loader(job: Job) -> Loader:
    return job.loader(tokens(), BATCH, shards=SHARDS, shuffle=True)


# Layers


@feature
def dropout(job: Job) -> None:
    train(job, mlp(nn.ReLU(), nn.Dropout(0.5)))


@feature
def batch_norm(job: Job) -> None:
    train(job, mlp(nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8, momentum=None)))


@feature
def layer_norm(job: Job) -> None:
    train(job, mlp(nn.LayerNorm(8), nn.GELU(), nn.GroupNorm(2, 8)))


@feature
def attention(job: Job) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.head(self.block(self.embed(ids)).mean(1))
            return hidden

    train(job, Small(), data=token_loader(job))


@feature
def recurrent(job: Job) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Embedding(11, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.lstm(self.embed(ids))[0][:, -1])
            return scores

    train(job, Small(), data=token_loader(job))


@feature
def convolution_channels_last(job: Job) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(24, 2))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, unused-ignore]
    expand = nn.Linear(6, 12)
    both = nn.ModuleDict({"expand": expand, "model": model})
    train(job, both, loss_of=lambda x, y: cross_entropy(model(expand(x).view(-1, 2, 2, 3)), y))


@feature
def embedding(job: Job) -> None:
    train(job, nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(20, 2)), data=token_loader(job))


@feature
def embedding_sparse(job: Job) -> None:
    model = nn.Sequential(nn.EmbeddingBag(11, 4, sparse=True), nn.Linear(4, 2))
    train(job, model, torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), data=token_loader(job))


@feature
def tied_weights(job: Job) -> None:
    tied = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11, bias=False))
    tied.get_submodule("1").weight = tied.get_submodule("0").weight

    def loss_of(ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(tied(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    train(job, tied, data=token_loader(job), loss_of=loss_of)


@feature
def activation_checkpointing(job: Job) -> None:
    model = mlp(nn.ReLU(), nn.Dropout(0.3))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)

    train(job, model, loss_of=loss_of)


@feature
def weight_norm(job: Job) -> None:
    model = mlp()
    nn.utils.parametrizations.weight_norm(model.get_submodule("0"))
    train(job, model)


@feature
def declared_buffers(job: Job) -> None:
    class Counting(nn.Module):
        mean: torch.Tensor
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean.lerp_(x.mean(0), 0.1)
                self.seen.add_(1)
            scores: torch.Tensor = self.inner(x - self.mean)
            return scores

    model = Counting()
    train(job, model, buffers={"model.mean": "mean", "model.seen": "first"})


class StatisticsInParameters(nn.Module):
    """As Keras on torch: running statistics are parameters that are not trained, and are under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        kept = {"moving/mean": nn.Parameter(torch.zeros(6), requires_grad=False)}
        self.layer, self.model = nn.ParameterDict(kept), nn.ParameterDict(kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.layer["moving/mean"]
        if self.training:
            with torch.no_grad():
                mean.lerp_(x.mean(0), 0.1)
        scores: torch.Tensor = self.inner(x - mean)
        return scores


@feature
def statistics_in_parameters(job: Job) -> None:
    train(job, StatisticsInParameters(), buffers={"model.layer.moving/mean": "mean"})


@feature
def nonpersistent_buffers(job: Job) -> None:
    """One that the script changes between passes, and one that each shard changes."""

    class Scaled(nn.Module):
        scale: torch.Tensor
        mean: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.register_buffer("scale", torch.ones(1), persistent=False)
            self.register_buffer("mean", torch.zeros(6), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.lerp_(x.mean(0), 0.1)
            scores: torch.Tensor = self.inner((x - self.mean) * self.scale)
            return scores

    model = Scaled()
    train(job, model, after=lambda step, metrics: model.scale.mul_(1.1), buffers={"model.mean": "mean"})


# The script's own values


@feature
def dictionaries_in_job_state(job: Job) -> None:
    model = mlp()
    job.state.setdefault(seen=defaultdict(int), ranking=OrderedDict(b=0.5, a=0.1), order={"b": 1})

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(model(x), y) * job.state.ranking["a"] * (1 + job.state.seen.get("b", 0))

    def after(step: int, metrics: dict[str, float]) -> None:
        job.state.seen["ab"[step % 2]] += 1
        job.state.ranking.move_to_end("b")
        job.state.ranking["a"] += 0.1
        job.state.order = {str(-step): step} | job.state.order

    train(job, model, loss_of=loss_of, after=after)
    assert list(job.state.order) == [str(-step) for step in reversed(range(STEPS))] + ["b"]


@feature
def tensors_in_job_state(job: Job) -> None:
    model = mlp()
    job.state.setdefault(means=[torch.zeros(6, device=job.device)])

    def after(step: int, metrics: dict[str, float]) -> None:
        weight: torch.Tensor = model.get_parameter("0.weight").detach()
        job.state.means = [job.state.means[0].lerp(weight.mean(0), 0.5), *job.state.means]

    train(job, model, loss_of=lambda x, y: cross_entropy(model(x - job.state.means[0]), y), after=after)


@feature
def attributes_set_at_each_step(job: Job) -> None:
    """No copy has them, but every step sets them before it computes."""
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.1))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    job.register(model=model, optimizer=optimizer)
    job.state.setdefault(p=0.1)
    norm, dropout = cast(nn.BatchNorm1d, model[1]), cast(nn.Dropout, model[2])
    for step in job.steps(loader(job), total=STEPS):
        norm.momentum = 1 / (1 + step.index)
        dropout.p = job.state.p
        for x, y in step:
            cross_entropy(model(x), y).backward()
        update(optimizer)
        job.state.p += 0.1


@feature
def attributes_set_at_each_epoch(job: Job) -> None:
    model = mlp(nn.Dropout(0.1))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    job.register(model=model, optimizer=optimizer)
    data = loader(job)
    for epoch in job.epochs(2):
        cast(nn.Dropout, model[1]).p = 0.2 + 0.3 * epoch
        for step in job.steps(data):
            for x, y in step:
                cross_entropy(model(x), y).backward()
            update(optimizer)


# Parameters that come and go


@feature
def frozen_parameters(job: Job) -> None:
    model = mlp()
    model.get_submodule("0").requires_grad_(False)
    train(job, model)


@feature
def unfrozen_in_mid_run(job: Job) -> None:
    model = mlp(nn.BatchNorm1d(8))
    model.get_submodule("0").requires_grad_(False)

    def after(step: int, metrics: dict[str, float]) -> None:
        if step in (0, 3):
            model.get_submodule("0").requires_grad_(step == 0)
            model.get_submodule("2").requires_grad_(step == 3)

    train(job, model, after=after, zeros=True)


@feature
def unused_parameters(job: Job) -> None:
    """None is not zero: weight decay must not move the unused ones."""
    model = nn.ModuleDict({"used": mlp(), "unused": nn.Linear(3, 3)})
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.3)
    train(job, model, optimizer, loss_of=lambda x, y: cross_entropy(model["used"](x), y))


@feature
def unused_in_some_shards(job: Job) -> None:
    model = nn.ModuleDict({"always": mlp(), "rare": nn.Linear(6, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(loader(job), total=STEPS):
        for x, y in step:
            scores = model["always"](x)
            if step.shard.index == 1 and step.index % 2:
                scores = scores + model["rare"](x)
            cross_entropy(scores, y).backward()
        update(optimizer)


# Passes


@feature
def several_backwards_a_shard(job: Job) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(loader(job), total=STEPS):
        for x, y in step:
            scores = model(x)
            cross_entropy(scores, y).backward(retain_graph=True)
            scores.square().mean().mul(0.1).backward()
            for half in x.chunk(2):
                model(half).abs().mean().mul(0.1).backward()
        update(optimizer)


@feature
def gan(job: Job) -> None:
    g, d = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)), nn.Linear(6, 1)
    of_g, of_d = torch.optim.Adam(g.parameters(), 0.01), torch.optim.Adam(d.parameters(), 0.02)
    job.register(g=g, d=d, of_g=of_g, of_d=of_d)
    for step in job.steps(loader(job), total=STEPS):
        of_d.zero_grad()
        for x, _ in step:
            fake = g(torch.randn(len(x), 3, device=job.device)).detach()
            loss: Any = F.softplus(-d(x)).mean() + F.softplus(d(fake)).mean()
            loss.backward()
            step.log(d=loss)
        of_d.step()
        of_g.zero_grad()
        for x, _ in step:
            loss = F.softplus(-d(g(torch.randn(len(x), 3, device=job.device)))).mean()
            loss.backward()
            step.log(g=loss)
        of_g.step()


@feature
def modes_in_the_inner_loop(job: Job) -> None:
    """What a shard sets lasts until the shard ends; behind the inner loop the modes are those from before it."""
    model, critic = mlp(nn.BatchNorm1d(8), nn.Dropout(0.3)), nn.Linear(2, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *critic.parameters()], 0.05)
    job.register(model=model, critic=critic, optimizer=optimizer)
    for step in job.steps(loader(job), total=STEPS):
        for x, _ in step:
            model.eval()
            with torch.no_grad():
                scores = model(x)
            loss: Any = F.softplus(-critic(scores)).mean()
            loss.backward()
        update(optimizer)
        for x, y in step:
            cross_entropy(model(x), y).backward()
        update(optimizer)


@feature
def sharpness_aware(job: Job) -> None:
    """SAM: the gradient at the worst point nearby, found with a first pass."""
    model = mlp(nn.Dropout(0.2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(loader(job), total=STEPS):
        for x, y in step:
            cross_entropy(model(x), y).backward()
        climbed = []
        with torch.no_grad():
            parameters: list[torch.Tensor] = [p for p in model.parameters() if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
            for parameter in parameters:
                assert parameter.grad is not None
                climbed.append(parameter.grad * (0.05 / (norm + 1e-12)))
                parameter.add_(climbed[-1])
        optimizer.zero_grad()
        for x, y in step:
            cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, climbed)
        update(optimizer)


# Optimizers


@feature
def several_models_and_optimizers(job: Job) -> None:
    encoder, head = nn.Linear(6, 4), nn.Linear(4, 2)
    of_encoder = torch.optim.SGD(encoder.parameters(), 0.1, momentum=0.9, nesterov=True)
    of_head = torch.optim.RMSprop(head.parameters(), 0.01)
    job.register(encoder=encoder, head=head, of_encoder=of_encoder, of_head=of_head)
    for step in job.steps(loader(job), total=STEPS):
        for x, y in step:
            cross_entropy(head(encoder(x).tanh()), y).backward()
        for optimizer in (of_encoder, of_head):
            update(optimizer)


def with_optimizer(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Feature:
    def train_with(job: Job) -> None:
        model = mlp(nn.BatchNorm1d(8))
        train(job, model, make(model.parameters()))

    return train_with


FEATURES["sgd"] = with_optimizer(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01))
FEATURES["sgd_foreach"] = with_optimizer(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True))
FEATURES["sgd_fused"] = with_optimizer(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True))
FEATURES["adam"] = with_optimizer(lambda p: torch.optim.Adam(p, 0.02, amsgrad=True, foreach=False))
FEATURES["adam_foreach"] = with_optimizer(lambda p: torch.optim.Adam(p, 0.02, foreach=True))
FEATURES["adam_fused"] = with_optimizer(lambda p: torch.optim.Adam(p, 0.02, fused=True))
FEATURES["adamw"] = with_optimizer(lambda p: torch.optim.AdamW(p, 0.02, foreach=False))
FEATURES["adamw_foreach"] = with_optimizer(lambda p: torch.optim.AdamW(p, 0.02, foreach=True))
FEATURES["adamw_fused"] = with_optimizer(lambda p: torch.optim.AdamW(p, 0.02, fused=True))


class Lion(torch.optim.Optimizer):
    """Sign of a momentum (Chen et al. 2023), as a script would write it."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            fast, slow = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.sub_(group["lr"] * torch.lerp(parameter.grad, momentum, fast).sign())
                momentum.lerp_(parameter.grad, 1 - slow)


FEATURES["custom_optimizer"] = with_optimizer(lambda p: Lion(p, 0.01))


@feature
def parameter_groups(job: Job) -> None:
    model = mlp()
    groups = [
        {"params": model.get_submodule("0").parameters(), "lr": 0.01, "weight_decay": 0.1},
        {"params": model.get_submodule("2").parameters(), "lr": 0.1, "betas": (0.8, 0.9)},
    ]
    train(job, model, torch.optim.AdamW(groups))


def with_scheduler(make: Callable[[torch.optim.Optimizer], LRScheduler]) -> Feature:
    def train_with(job: Job) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
        scheduler = make(optimizer)
        train(job, model, optimizer, after=lambda step, metrics: scheduler.step(), scheduler=scheduler)

    return train_with


FEATURES["scheduler_cosine"] = with_scheduler(lambda o: CosineAnnealingLR(o, STEPS))
FEATURES["scheduler_lambda"] = with_scheduler(lambda o: LambdaLR(o, lambda step: 1 / (1 + step)))
FEATURES["scheduler_one_cycle"] = with_scheduler(lambda o: OneCycleLR(o, 0.3, total_steps=STEPS + 1))
FEATURES["scheduler_warmup"] = with_scheduler(
    lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, STEPS)], milestones=[2])
)


@feature
def scheduler_on_plateau(job: Job) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    train(job, model, optimizer, after=lambda step, metrics: scheduler.step(metrics["loss"]), scheduler=scheduler)


@feature
def learning_rate_by_hand(job: Job) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.2)

    def after(step: int, metrics: dict[str, float]) -> None:
        optimizer.param_groups[0]["lr"] = 0.2 * metrics["loss"] / (step + 1)

    train(job, model, optimizer, after=after)


def with_clipping(clip: Callable[[nn.Module], object]) -> Feature:
    def train_with(job: Job) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        job.register(model=model, optimizer=optimizer)
        for step in job.steps(loader(job), total=STEPS):
            for x, y in step:
                (cross_entropy(model(x), y) * 10).backward()
            clip(model)
            update(optimizer)

    return train_with


FEATURES["clip_norm"] = with_clipping(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
FEATURES["clip_norm_foreach"] = with_clipping(
    lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
)
FEATURES["clip_value"] = with_clipping(lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1))


@feature
def transposed_parameters(job: Job) -> None:
    """A fused optimizer pairs elements of a parameter and of its state as they lie in memory."""
    model = mlp(nn.Linear(8, 8), nn.Tanh())
    hidden = model[1]
    assert isinstance(hidden, nn.Linear)
    hidden.weight = nn.Parameter(torch.randn(8, 8).t())
    train(job, model, torch.optim.AdamW(model.parameters(), 0.05, fused=True))


@feature
def ema(job: Job) -> None:
    model = mlp(nn.BatchNorm1d(8))
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    train(job, model, after=lambda step, metrics: average.update_parameters(model), average=average)


@feature
def ema_by_hand(job: Job) -> None:
    model = mlp()
    average = copy.deepcopy(model).requires_grad_(False)

    def after(step: int, metrics: dict[str, float]) -> None:
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)

    train(job, model, after=after, average=average)


# Precision


@feature
def bf16_autocast(job: Job) -> None:
    model = mlp(nn.LayerNorm(8))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    train(job, model, loss_of=loss_of)


@feature
def grad_scaler(job: Job) -> None:
    """With a step that overflows in one shard only: all workers leave it out, and halve the scale."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    job.register(model=model, optimizer=optimizer, scaler=scaler)
    for step in job.steps(loader(job), total=STEPS):
        for x, y in step:
            loss = cross_entropy(model(x), y)
            if step.index == 3 and step.shard.index == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@feature
def bf16_parameters(job: Job) -> None:
    model = mlp(nn.BatchNorm1d(8)).to(torch.bfloat16)
    train(job, model, loss_of=lambda x, y: cross_entropy(model(x.bfloat16()), y))


@feature
def mixed_parameter_dtypes(job: Job) -> None:
    a, b, c = nn.Linear(6, 8), nn.Linear(8, 8).to(torch.bfloat16), nn.Linear(8, 2).double()
    model = nn.ModuleList([a, b, c])
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    train(job, model, optimizer, loss_of=lambda x, y: cross_entropy(c(b(a(x).bfloat16()).double()), y))


# Data


def jitter(sample: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = sample
    return x * random.uniform(0.5, 1.5) + torch.randn(6) * 0.1 + float(np.random.normal()), y


@feature
def random_transforms(job: Job) -> None:
    train(job, mlp(), data=loader(job, transform=jitter))


@feature
def random_in_the_loop(job: Job) -> None:
    """The script draws its own batches; without data the loop gives it seeded generators."""
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(shards=SHARDS, total=STEPS):
        for shard in step:
            x = torch.randn(8, 6, device=job.device) * random.random() + np.random.rand()
            x += torch.rand(6, generator=shard.generator).to(job.device) + shard.numpy.random()
            model(x).square().mean().backward()
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight) * 1e-3)
        update(optimizer)


@feature
def random_once_an_epoch(job: Job) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.register(model=model, optimizer=optimizer)
    data = loader(job)
    for _ in job.epochs(2):
        noise = torch.randn(6, device=job.device) * random.random()
        for step in job.steps(data):
            for x, y in step:
                cross_entropy(model(x + noise), y).backward()
            update(optimizer)


@feature
def random_before_the_inner_loop(job: Job) -> None:
    """Mixup with one ratio for all shards, which is used behind the inner loop too."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(loader(job), total=STEPS):
        ratio = float(np.random.beta(0.4, 0.4))
        for x, y in step:
            mixed = model(ratio * x + (1 - ratio) * x.flip(0))
            (ratio * cross_entropy(mixed, y) + (1 - ratio) * cross_entropy(mixed, y.flip(0))).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 + ratio)
        update(optimizer)


@feature
def anchor(job: Job) -> None:
    """A term that pulls to the weights with which the epoch began: they are registered, and change behind its steps."""
    model = mlp()
    anchor = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.register(model=model, optimizer=optimizer, anchor=anchor)
    data = loader(job)
    for _ in job.epochs(2):
        for step in job.steps(data):
            for x, y in step:
                (cross_entropy(model(x), y) + distance(model, anchor.parameters())).backward()
            update(optimizer)
        anchor.load_state_dict(model.state_dict())


def anchored_in_a_variable(job: Job) -> None:
    """Not exact: a newcomer and a run that goes on come to this line with other weights."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.register(model=model, optimizer=optimizer)
    data = loader(job)
    for _ in job.epochs(2):
        anchor = [parameter.detach().clone() for parameter in model.parameters()]
        for step in job.steps(data):
            for x, y in step:
                (cross_entropy(model(x), y) + distance(model, anchor)).backward()
            update(optimizer)


def distance(model: nn.Module, anchor: Iterable[torch.Tensor]) -> torch.Tensor:
    pairs = zip(model.parameters(), anchor, strict=True)
    return torch.stack([(parameter - old).square().sum() for parameter, old in pairs]).sum()


@feature
def state_read_once_an_epoch(job: Job) -> None:
    """Values that steps change; where an epoch begins they are read, and set, too."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.register(model=model, optimizer=optimizer)
    job.state.setdefault(p=0.1, mean=torch.zeros(6, device=job.device), epochs=0)
    data = loader(job)
    for _ in job.epochs(2):
        scale, mean = 1.0 + job.state.p, job.state.mean.clone()
        job.state.p *= 0.5
        job.state.epochs += 1
        for step in job.steps(data):
            for x, y in step:
                (scale * cross_entropy(model(x - mean), y)).backward()
            update(optimizer)
            job.state.p += 0.1  # type: ignore[operator]
            job.state.mean.add_(0.01 * (step.index + 1))


@feature
def random_behind_the_steps(job: Job) -> None:
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.register(model=model, optimizer=optimizer)
    data = loader(job)
    for _ in job.epochs(2):
        for step in job.steps(data):
            for x, y in step:
                cross_entropy(model(x), y).backward()
            update(optimizer)
        with torch.no_grad():
            model.weight.add_(torch.randn_like(model.weight) * random.random())


@feature
def shards_not_divisible_by_workers(job: Job) -> None:
    train(job, mlp(nn.BatchNorm1d(8)), data=loader(job, 17, 7))


@feature
def one_shard(job: Job) -> None:
    train(job, mlp(nn.BatchNorm1d(8)), data=loader(job, 16, 1))


@feature
def more_workers_than_shards(job: Job) -> None:
    train(job, mlp(nn.BatchNorm1d(8)), data=loader(job, 16, 2))


@feature
def shards_of_different_sizes(job: Job) -> None:
    train(job, mlp(nn.BatchNorm1d(8)), data=loader(job, 18))


@feature
def padded_tail(job: Job) -> None:
    train(job, mlp(), data=loader(job, 16, tail="pad"))


@feature
def weighted_sampling(job: Job) -> None:
    """Two sources of 40 and 10 samples, mixed half and half."""
    weights = [0.5 / 40] * 40 + [0.5 / 10] * 10
    train(job, mlp(nn.BatchNorm1d(8)), data=job.loader(dataset(50), BATCH, shards=SHARDS, weights=weights, tail="pad"))


@feature
def ragged_batches_with_weigh(job: Job) -> None:
    """Sequences of different lengths; the mean is over tokens, whatever shard they are in."""
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(token_loader(job), total=STEPS):
        for ids, _ in step:
            kept = torch.arange(4, device=job.device) < (ids[:, :1] % 4 + 1)
            scores = model(ids[:, :-1]).flatten(0, 1)
            losses = F.cross_entropy(scores, ids[:, 1:].flatten(), reduction="none").view(kept.shape)
            loss: Any = losses[kept].mean()
            loss.backward()
            step.weigh(int(kept.sum()))
            step.log(loss=loss, sum={"tokens": kept.sum()})
        update(optimizer)


@feature
def skipped_shards_and_sums(job: Job) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(loader(job), total=STEPS, gradients="sum"):
        for x, y in step:
            if step.shard.index == step.index % SHARDS:
                step.skip()
                continue
            F.cross_entropy(model(x), y, reduction="sum").backward()
        update(optimizer)


@feature
def evaluation_before_the_inner_loop(job: Job) -> None:
    """As nanoGPT: what is evaluated every second step, before it, decides its rate, and is used behind the loop too."""
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.2))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    job.register(model=model, optimizer=optimizer)
    job.state.setdefault(best=float("inf"), evaluations=0, told=0.0)
    for step in job.steps(loader(job), total=STEPS):
        loss, better = 0.0, False
        if step.index % 2 == 0:
            loss = job.evaluate(lambda x, y: {"loss": F.cross_entropy(model(x), y)}, dataset())["loss"]
            better = job.once(lambda loss, best: loss < best, loss, job.state.best)
            job.state.evaluations += 1
            if better:
                job.state.best = loss
            optimizer.param_groups[0]["lr"] = 0.05 * loss
        for x, y in step:
            cross_entropy(model(x), y).backward()
        update(optimizer)
        job.state.told += loss + better


@feature
def decisions_by_evaluation(job: Job) -> None:
    model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.2))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    job.register(model=model, optimizer=optimizer)
    job.state.setdefault(best=float("inf"), bad=0)
    data = loader(job)
    for _ in job.epochs(2):
        for step in job.steps(data):
            for x, y in step:
                cross_entropy(model(x), y).backward()
            update(optimizer)
            loss = job.evaluate(lambda x, y: {"loss": F.cross_entropy(model(x), y)}, dataset())["loss"]
            if loss < job.state.best:
                job.state.best = loss
            else:
                job.state.bad += 1
                optimizer.param_groups[0]["lr"] *= 0.5


@feature
def logged_outside_the_passes(job: Job) -> None:
    """What an evaluation gave is in the record of a step, wherever it was: before the first one, before and behind an
    inner loop, behind the steps of an epoch, before those of the next one, behind the loop."""
    model = mlp(nn.BatchNorm1d(8))
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    job.register(model=model, optimizer=optimizer)
    data = loader(job)

    def score() -> float:
        return job.evaluate(lambda x, y: {"loss": F.cross_entropy(model(x), y)}, dataset())["loss"]

    for epoch in job.epochs(2):
        job.log(begin=score())
        for step in job.steps(data):
            if step.index in (0, 2, 3):
                job.log(early=score())
            for x, y in step:
                loss = cross_entropy(model(x), y)
                loss.backward()
                step.log(loss=loss)
            update(optimizer)
            if step.index % 2:
                job.log(late=score(), **{"a/b": torch.tensor(step.metrics["loss"])})
        job.log(end=score(), epoch=epoch)
    job.log(final=score())
