"""What a copy of the state is: everything registered, bit for bit, into objects that keep their identity."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import Counter, OrderedDict, UserString, defaultdict
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.testing._internal.two_tensor import TwoTensor

from elastic.errors import ConfigError, ElasticError, NotCarried, StateChanged, Unregistered
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state.change_detection import value_sum
from runtime.recovery.state.encoding import NamedTensor, decode, device_for, encode, from_blob, to_blob
from runtime.recovery.state.script_state import without_tensors
from runtime.recovery.state.training_state import Carrier, Values

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.1), nn.Linear(5, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()


def carried(values: Values | None = None, buffers: dict[str, str] | None = None, **objects: object) -> Carrier:
    carrier = Carrier(values or Values())
    carrier.register(buffers, **objects)
    carrier.freeze()
    return carrier


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer, Carrier]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    return model, optimizer, carried(model=model, optimizer=optimizer)


def sent_by(describe: Callable[[], tuple[dict[str, Json], list[NamedTensor]]]) -> dict[str, Json]:
    """The header of a copy as the other side gets it."""
    found: dict[str, Json] = json.loads(json.dumps(describe()[0]))
    return found


def sent(carrier: Carrier) -> tuple[dict[str, Json], list[torch.Tensor]]:
    """A copy as the other side gets it: text and bytes, sharing nothing."""
    header, blobs = carrier.capture()
    return json.loads(json.dumps(header, allow_nan=False)), [blob.clone() for blob in blobs]


def test_another_thread_copies_no_rate_that_the_script_is_about_to_set_again() -> None:
    _, optimizer, carrier = trained()
    group, found = optimizer.param_groups[0], list[dict[str, Json]]()
    carrier.unsettle()
    group["lr"] = 0.5
    thread = threading.Thread(target=lambda: found.append(sent_by(carrier.describe_settled)), daemon=True)
    thread.start()
    thread.join(0.1)
    assert not found
    group["lr"] = 0.25
    carrier.settle()
    thread.join(60.0)
    assert [header["objects"] for header in found] == [sent(carrier)[0]["objects"]]


# Registering


def test_registering_after_the_first_step_is_refused() -> None:
    _, optimizer, carrier = trained()
    with pytest.raises(ConfigError, match="after the first step"):
        carrier.register(again=optimizer)


def test_a_name_is_registered_once() -> None:
    carrier = Carrier(Values())
    carrier.register(model=network())
    with pytest.raises(ConfigError, match=r"model=.* twice"):
        carrier.register(model=network(1))


def test_an_object_is_registered_once() -> None:
    model = network()
    with pytest.raises(ConfigError, match="b and a are the same object"):
        Carrier(Values()).register(a=model, b=model)


def test_a_refused_call_registers_nothing() -> None:
    carrier = Carrier(Values())
    with pytest.raises(ConfigError, match=r"list has no state_dict"):
        carrier.register(model=network(), optimizers=[1])
    assert carrier.objects == {}


class DistributedDataParallel(nn.Module):
    """Named like torch's wrapper, which needs a process group to be made."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


class FSDPModule:
    """Named like what fully_shard() puts before a module's own class."""


class Sharded(FSDPModule, nn.Linear):
    pass


class DTensor(torch.Tensor):
    """Named like torch's, which needs a process group to be made."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (DistributedDataParallel, "wrapped in DistributedDataParallel"),
        (lambda: nn.Sequential(Sharded(2, 2)), r"thing\.0 is sharded by FSDPModule, .* is not carried yet"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), r"thing\.1 is a SyncBatchNorm"),
        (lambda: torch.optim.LBFGS(network().parameters()), "LBFGS"),
        (lambda: torch.optim.SparseAdam(network().parameters()), "SparseAdam"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(make: Callable[[], object], words: str) -> None:
    with pytest.raises(NotCarried, match=words):
        Carrier(Values()).register(thing=make())


def test_a_parameter_that_is_sharded_is_refused_as_such() -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(DTensor))
    with pytest.raises(
        NotCarried, match=r"model\.weight is a DTensor, and state that is sharded .* is not carried yet"
    ):
        carried(model=model)


def test_a_tensor_of_an_optimizer_that_holds_others_is_refused_by_name() -> None:
    """It would come back as a plain tensor."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["m"] = TwoTensor(torch.ones(2), torch.zeros(2))
    with pytest.raises(NotCarried, match=r"optimizer\.state\.0\.m is a .*TwoTensor"):
        carried(model=model, optimizer=optimizer).describe()


class AcceleratedOptimizer(torch.optim.Optimizer):
    """As accelerate.Accelerator().prepare() returns it: it hands everything on, is an Optimizer by class only."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


class AcceleratedScheduler:
    """Of the same library: no LRScheduler."""

    def __init__(self, scheduler: LRScheduler, optimizer: torch.optim.Optimizer) -> None:
        self.scheduler = scheduler
        self.optimizers = [optimizer]

    def state_dict(self) -> Any:
        return self.scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.scheduler.load_state_dict(state)


class WarmUp:
    """A wrapper with a state of its own."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler
        self.steps = 0

    def state_dict(self) -> Any:
        return {**self.scheduler.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state.pop("steps")
        self.scheduler.load_state_dict(state)


def test_a_wrapper_without_a_state_of_its_own_is_what_it_wraps() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    plain = carried(model=model, optimizer=optimizer, scheduler=scheduler)
    outer = AcceleratedOptimizer(optimizer)
    carrier = carried(model=model, optimizer=outer, scheduler=AcceleratedScheduler(scheduler, outer))
    assert carrier.optimizers() == {"optimizer": optimizer}
    assert carrier.schedulers() == {"scheduler": scheduler}
    assert carrier.digest() == plain.digest()
    with pytest.raises(ConfigError, match="outer and optimizer are the same object"):
        carried(model=model, optimizer=optimizer, outer=outer)
    warm = WarmUp(scheduler)
    assert carried(model=model, warm=warm).objects["warm"] is warm


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="model: no parameter has requires_grad"):
        carried(model=network().requires_grad_(False))


def test_a_frozen_model_beside_a_trained_one_is_welcome() -> None:
    """A teacher, or a moving average of the weights."""
    carrier = carried(model=network(), teacher=network(1).requires_grad_(False))
    assert {name.split(".")[0] for name, _ in carrier.parameters()} == {"model"}


def test_a_lazy_layer_must_know_its_shape() -> None:
    with pytest.raises(ConfigError, match=r"model\.0\.weight has no shape yet"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
        carried(model=model)


def test_an_optimizer_of_an_unregistered_parameter_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(Unregistered, match="parameter group 0 of optimizer"):
        carried(model=model, optimizer=optimizer)


def test_freezing_twice_is_freezing_once() -> None:
    carrier = carried(model=network())
    names = [name for name, _ in carrier.parameters()]
    carrier.freeze()
    assert [name for name, _ in carrier.parameters()] == names


def test_a_shared_parameter_counts_once() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    carrier = carried(model=nn.Sequential(first, second))
    assert [name for name, _ in carrier.parameters()] == ["model.0.weight", "model.0.bias", "model.1.bias"]


def test_parameters_follow_requires_grad() -> None:
    model = network()
    carrier = carried(model=model)
    model[0].requires_grad_(False)
    assert "model.0.weight" not in dict(carrier.parameters())


class Compiled(nn.Module):
    """Names its module as torch.compile does, without importing a compiler."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_a_compiled_model_has_the_names_and_the_digest_of_the_plain_one() -> None:
    plain = carried(model=network())
    outside = carried(model=Compiled(network()))
    inner = network()
    inner[1] = Compiled(inner[1])
    inside = carried(model=inner)
    assert plain.digest() == outside.digest() == inside.digest()
    assert [b.name for b in inside.float_buffers()] == ["model.1.running_mean", "model.1.running_var"]
    outside.load(*sent(plain))
    inside.load(*sent(plain))


def test_batchnorm_buffers_are_found_by_kind() -> None:
    carrier = carried(model=network())
    assert [(b.name, b.merge) for b in carrier.float_buffers()] == [
        ("model.1.running_mean", "mean"),
        ("model.1.running_var", "mean"),
    ]
    assert [(b.name, b.merge) for b in carrier.int_buffers()] == [("model.1.num_batches_tracked", "first")]


def test_a_norm_without_statistics_has_no_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.LayerNorm(2))
    carrier = carried(model=model)
    assert carrier.float_buffers() == carrier.int_buffers() == []


class Queue(nn.Module):
    """As in contrastive learning: old features and where the next go."""

    def __init__(self, places: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("queue", torch.zeros(3))
        self.register_buffer("at", torch.zeros(places, dtype=torch.int64))


def test_declared_buffers_have_their_rule() -> None:
    carrier = carried(model=Queue(), buffers={"model.queue": "mean", "model.at": "first"})
    assert [(b.name, b.merge) for b in carrier.float_buffers()] == [("model.queue", "mean")]
    assert [(b.name, b.merge) for b in carrier.int_buffers()] == [("model.at", "first")]


@pytest.mark.parametrize(
    ("buffers", "places", "words"),
    [
        ({"model.queue": "last"}, 1, '"mean" or "first"'),
        ({"model.at": "mean"}, 1, r"model\.at .*cannot be merged"),
        ({"model.at": "first"}, 5000, "5000 elements"),
        ({"model.que": "mean"}, 1, r"names model\.que, but no registered module has such a buffer"),
        ({"model.weight": "mean"}, 1, r"names model\.weight, but .* that is not trained"),
    ],
)
def test_a_wrong_buffer_rule_is_refused(buffers: dict[str, str], places: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        carried(model=Queue(places), buffers=buffers)


# A copy


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    lambda p: torch.optim.Adagrad(p),
    lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1),
    lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.Adafactor(p),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_process_that_never_stepped_goes_on_with_the_donors_bits(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    donor = network()
    donor_optimizer = make(donor.parameters())
    train(donor, donor_optimizer)
    newcomer = network(1)
    newcomer_optimizer = make(newcomer.parameters())
    kept = [id(thing) for thing in (*newcomer.parameters(), *newcomer.buffers())]
    source = carried(model=donor, optimizer=donor_optimizer)
    target = carried(model=newcomer, optimizer=newcomer_optimizer)
    assert source.digest() != target.digest()

    target.load(*sent(source))

    assert source.digest() == target.digest()
    assert [id(thing) for thing in (*newcomer.parameters(), *newcomer.buffers())] == kept
    for model, optimizer in ((donor, donor_optimizer), (newcomer, newcomer_optimizer)):
        torch.manual_seed(3)
        train(model, optimizer)
    assert source.digest() == target.digest()


SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda o: lr_scheduler.StepLR(o, 2),
    lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.PolynomialLR(o)]),
]


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
@pytest.mark.parametrize("make", SCHEDULERS)
def test_the_learning_rates_of_a_copy_are_those_of_the_donor(make: Callable[[Any], Any]) -> None:
    rates: list[list[float]] = []
    carriers = []
    schedulers = []
    for _ in range(2):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
        schedulers.append(make(optimizer))
        carriers.append(carried(model=model, optimizer=optimizer, scheduler=schedulers[-1]))
        rates.append([])
    for _ in range(3):
        schedulers[0].step()
    carriers[1].load(*sent(carriers[0]))
    assert carriers[0].digest() == carriers[1].digest()
    for _ in range(4):
        for i in range(2):
            schedulers[i].step()
            rates[i] += carriers[i].learning_rates()
    assert rates[0] == rates[1]


def test_a_plateau_scheduler_is_copied() -> None:
    """Its state holds an infinity, which strict JSON cannot say."""
    pairs = []
    for _ in range(2):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        pairs.append((scheduler, carried(model=model, optimizer=optimizer, scheduler=scheduler)))
    pairs[1][1].load(*sent(pairs[0][1]))
    pairs[0][0].step(1.0)
    pairs[0][0].step(2.0)
    assert pairs[0][1].digest() != pairs[1][1].digest()
    pairs[1][1].load(*sent(pairs[0][1]))
    assert pairs[0][1].digest() == pairs[1][1].digest()
    assert pairs[1][1].learning_rates() == (0.05,)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_gradient_scaler_is_copied_enabled_or_not(enabled: bool) -> None:
    donor = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
    newcomer = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
    carried(scaler=newcomer).load(*sent(carried(scaler=donor)))
    assert newcomer.get_scale() == (8.0 if enabled else 1.0)


def test_modes_frozen_layers_and_hyperparameters_travel() -> None:
    donor, donor_optimizer, source = trained()
    donor[1].eval()
    donor[0].requires_grad_(False)
    donor_optimizer.param_groups[0] |= {"lr": 0.125, "weight_decay": 0.5, "betas": (0.5, 0.75)}
    newcomer, newcomer_optimizer, target = trained()
    target.load(*sent(source))
    assert [part.training for part in newcomer] == [True, False, True, True]
    assert [parameter.requires_grad for parameter in newcomer[0].parameters()] == [False, False]
    group = newcomer_optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.125, 0.5, (0.5, 0.75))


def test_state_of_another_dtype_than_its_parameter_is_not_rounded() -> None:
    """torch's load_state_dict would cast the float32 moment of a bfloat16 parameter."""

    class Wide(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        def fill(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["moment"] = torch.full(parameter.shape, 1 / 3)

    carriers = []
    for seed in range(2):
        model = network(seed).bfloat16()
        optimizer = Wide(model.parameters())
        if seed == 0:
            optimizer.fill()
        carriers.append(carried(model=model, optimizer=optimizer))
    carriers[1].load(*sent(carriers[0]))
    assert carriers[0].digest() == carriers[1].digest()


class Preconditioned(torch.optim.Optimizer):
    """Keeps tensors in lists and dicts, as SOAP and Shampoo do, and some state that is of no parameter."""

    def __init__(self, params: Any, *, fill: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        for parameter in self.param_groups[0]["params"] if fill else ():
            inner = {"Q": torch.full((2, 2), 1 / 7), "at": torch.tensor([16777217])}
            self.state[parameter] = {"GG": [torch.full((2,), 1 / 3), inner], "step": 3}
        if fill:
            self.state["global"] = {"k": torch.full((2,), 1 / 3, dtype=torch.float64), "n": 2}  # type: ignore[index]


def test_tensors_within_the_state_of_an_optimizer_are_not_rounded_and_its_own_keys_are_carried() -> None:
    models = [network(seed).bfloat16() for seed in range(2)]
    optimizers = [Preconditioned(model.parameters(), fill=number == 0) for number, model in enumerate(models)]
    donor, newcomer = (carried(model=model, optimizer=one) for model, one in zip(models, optimizers, strict=True))
    newcomer.load(*sent(donor))
    assert donor.digest() == newcomer.digest()
    first = optimizers[1].state[next(models[1].parameters())]
    assert first["GG"][0].dtype == torch.float32 and first["GG"][1]["at"].tolist() == [16777217]
    own: Any = optimizers[1].state["global"]  # type: ignore[index]
    assert own["k"].dtype == torch.float64 and own["n"] == 2


def test_a_copy_of_contiguous_tensors_shares_their_memory() -> None:
    model, _, carrier = trained()
    header, blobs = carrier.capture()
    names = [entry["name"] for entry in header["tensors"]]  # type: ignore[union-attr, call-overload, index]
    assert blobs[names.index("model.0.weight")].data_ptr() == model.get_parameter("0.weight").data_ptr()
    assert all(blob.dtype == torch.uint8 and blob.dim() == 1 for blob in blobs)
    again, same_blobs = carrier.capture()
    assert again == header
    assert [blob.data_ptr() for blob in same_blobs] == [blob.data_ptr() for blob in blobs]


def test_a_loaded_copy_does_not_share_the_received_bytes() -> None:
    _, _, source = trained()
    _, _, target = trained()
    header, blobs = sent(source)
    target.load(header, blobs)
    for blob in blobs:
        blob.fill_(77)
    assert source.digest() == target.digest()


def test_a_channels_last_parameter_keeps_its_layout_and_its_bits() -> None:
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        convolution = nn.Conv2d(3, 4, 3)
        convolution.weight.data = convolution.weight.data.to(memory_format=torch.channels_last)
        models.append(convolution)
    source, target = carried(model=models[0]), carried(model=models[1])
    target.load(*sent(source))
    assert torch.equal(models[0].weight, models[1].weight)
    assert models[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert source.fingerprint(0) == target.fingerprint(0)


def test_bytes_at_an_odd_address_are_read_all_the_same() -> None:
    """A receiver may cut blobs out of one large buffer."""
    _, _, source = trained()
    _, _, target = trained()
    header, blobs = sent(source)
    odd = [torch.cat([torch.zeros(1, dtype=torch.uint8), blob])[1:] for blob in blobs]
    target.load(header, odd)
    assert source.digest() == target.digest()


class Loose(nn.Module):
    """With buffers that state_dict() leaves out."""

    scale: torch.Tensor
    cache: torch.Tensor | None

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("scale", torch.full((2,), scale), persistent=False)
        self.register_buffer("cache", None, persistent=False)
        self.register_buffer("positions", torch.arange(1.0).expand(3), persistent=False)


def test_buffers_that_state_dict_leaves_out_are_copied() -> None:
    torch.manual_seed(0)
    donor, newcomer = Loose(3.0), Loose()
    donor.cache, donor.positions = torch.arange(4), torch.arange(3.0)
    there, ours, scale = carried(model=newcomer), carried(model=donor), newcomer.scale
    there.load(*sent(ours))
    assert newcomer.scale is scale and newcomer.scale.tolist() == [3.0, 3.0]
    assert newcomer.cache is not None and newcomer.cache.tolist() == [0, 1, 2, 3]
    assert there.digest() == ours.digest() and there.capture()[0] == ours.capture()[0]
    donor.cache = None
    there.load(*sent(ours))
    assert newcomer.cache is None
    assert all("scale" not in key for key in newcomer.state_dict())


def test_buffers_that_state_dict_leaves_out_count_in_the_digest_and_the_fingerprint() -> None:
    model = Loose()
    carrier = carried(model=model)
    digest, marks = carrier.digest(), [carrier.buffer_fingerprint(step) for step in range(8)]
    model.scale.mul_(2)
    assert carrier.digest() != digest
    assert [carrier.buffer_fingerprint(step) for step in range(8)] != marks


def test_a_copy_with_other_buffers_does_not_fit() -> None:
    other = Loose()
    other.register_buffer("more", torch.ones(1), persistent=False)
    with pytest.raises(ConfigError, match="model differs in more"):
        carried(model=Loose()).load(*sent(carried(model=other)))
    bare = Loose()
    bare._buffers.clear()
    with pytest.raises(ConfigError, match="model differs in cache, positions, scale"):
        carried(model=Loose()).load(*sent(carried(model=bare)))


def test_a_tensor_of_job_state_that_drifted_is_in_the_fingerprint_within_a_turn() -> None:
    values = Values()
    values.setdefault(queue=torch.zeros(5000))
    carrier = carried(values, model=network())
    marks = [carrier.fingerprint(step) for step in range(8)]
    values.queue[4321] = 1e-6
    assert [carrier.fingerprint(step) for step in range(8)] != marks


@pytest.mark.parametrize("twice", [False, True])
def test_during_a_pass_the_copy_has_the_buffers_of_its_start(twice: bool) -> None:
    """twice: the model has its norm under two names."""
    model, _, carrier = trained()
    if twice:
        model[0].add_module("norm", model[1])
    before = carrier.digest()
    for buffer in (*carrier.float_buffers(), *carrier.int_buffers()):
        buffer.base = buffer.live.clone()
    model(torch.ones(4, 3))
    assert carrier.digest() == before
    for buffer in (*carrier.float_buffers(), *carrier.int_buffers()):
        buffer.base = None
    assert carrier.digest() != before


def wider(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    header["tensors"][0]["shape"].append(2)


def other_dtype(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    header["tensors"][0]["dtype"] = "int32"


def unknown_dtype(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    header["tensors"][0]["dtype"] = "object"


def fewer_blobs(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    blobs.pop()


def short_blob(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    blobs[3] = blobs[3][:-1]


def other_format(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    header["format"] = 0


def no_optimizer(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    del header["objects"]["optimizer"]


def renamed_layer(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    state = header["objects"]["model"]["state"]
    state["stem.weight"] = state.pop("0.weight")


def other_groups(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    header["objects"]["optimizer"]["state"]["param_groups"].append({"params": []})


def tensor_out_of_range(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    header["objects"]["model"]["state"]["0.weight"] = {"__tensor__": 10_000}


def a_word_for_a_tensor(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    header["objects"]["model"]["state"]["0.weight"] = "none"


def unknown_marker(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    header["state"]["x"] = {"__reduce__": ["os.system", "true"]}


def nothing(header: dict[str, Any], blobs: list[torch.Tensor]) -> None:
    header.clear()


@pytest.mark.parametrize(
    "damage",
    [
        *(wider, other_dtype, unknown_dtype, fewer_blobs, short_blob, other_format, no_optimizer, renamed_layer),
        *(other_groups, tensor_out_of_range, a_word_for_a_tensor, unknown_marker, nothing),
    ],
)
def test_a_copy_that_does_not_fit_changes_nothing(damage: Callable[[dict[str, Any], list[torch.Tensor]], None]) -> None:
    _, _, source = trained()
    model, optimizer, target = trained()
    train(model, optimizer)
    header, blobs = sent(source)
    damage(header, blobs)
    before = target.digest()
    with pytest.raises(ConfigError, match="does not fit this script"):
        target.load(header, blobs)
    assert target.digest() == before


def test_extra_state_of_a_module_is_carried_when_it_is_plain() -> None:
    class Counting(nn.Linear):
        seen: dict[str, int]

        def get_extra_state(self) -> dict[str, int]:
            return self.seen

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.seen = state

    donor, newcomer = Counting(2, 2), Counting(2, 2)
    donor.seen, newcomer.seen = {"a": 3}, {}
    carried(model=newcomer).load(*sent(carried(model=donor)))
    assert newcomer.seen == {"a": 3}
    donor.seen = {"a": object()}  # type: ignore[dict-item]
    with pytest.raises(NotCarried, match=r"model\._extra_state\.a is a builtins\.object"):
        carried(model=donor)


# Encoding

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
KEYS = st.text(max_size=4) | st.integers() | st.sampled_from(["__tensor__", "__float__", "__dict__", "__bytes__"])
NESTED = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.builds(
            defaultdict,
            st.sampled_from([None, bool, int, float, str, list, tuple, dict, OrderedDict, Counter]),
            st.dictionaries(KEYS, inner, max_size=4),
        )
    ),
    max_leaves=12,
)


@patient
@given(NESTED)
def test_every_nested_value_comes_back_equal_and_of_the_same_types(value: object) -> None:
    text = json.dumps(encode(value, "x", []), allow_nan=False)
    back = decode(json.loads(text), lambda i: pytest.fail("no tensor was given"))
    assert back == value
    assert repr(back) == repr(value)


def test_tensors_counters_and_special_floats_come_back() -> None:
    value = {
        1: torch.arange(3),
        "nested": [(torch.tensor(1.5),), {"__tensor__": torch.zeros(0)}],
        "counts": Counter({3: 1, 5: 2}),
        "rates": [float("inf"), float("-inf"), -0.0, np.float64(0.1)],
        "ordered": OrderedDict(b=1, a=2),
    }
    tensors: list[NamedTensor] = []
    back = decode(json.loads(json.dumps(encode(value, "v", tensors), allow_nan=False)), lambda i: tensors[i][1])
    assert [name for name, _ in tensors] == ["v.1", "v.nested.0.0", "v.nested.1.__tensor__"]
    assert torch.equal(back[1], torch.arange(3))
    assert isinstance(back["nested"][0], tuple)
    assert type(back["counts"]) is Counter and back["counts"] == value["counts"]
    assert repr(back["rates"]) == "[inf, -inf, -0.0, 0.1]"
    assert type(back["ordered"]) is OrderedDict and list(back["ordered"]) == ["b", "a"]
    nan = decode(encode(float("nan"), "x", []), lambda i: torch.empty(0))
    assert nan != nan


class Color(IntEnum):
    RED = 1


class Ranking(list[int]):
    pass


class Table(dict[str, int]):
    pass


class Ordered(OrderedDict[str, int]):
    pass


class Name(str):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, {2}]}, r"x\.a\.1 is a builtins\.set"),
        (np.float32(1), r"x is a numpy\.float32"),
        ({1.5: 0}, "x has a key of type float"),
        (torch.eye(2).to_sparse(), "x is a tensor"),
        (bytearray(b"raw"), r"builtins\.bytearray"),
        (lambda: 0, r"builtins\.function"),
        (np.ones(2), r"x is a numpy\.ndarray.*; write torch\.from_numpy\(x\)"),
        (np.int64(2), r"x is a numpy\.int64.*; write x\.item\(\)"),
        (Color.RED, r"x is a .*Color.*; write x\.value"),
        ({"a": Ranking([2, 1])}, r"x\.a is a .*Ranking, and would come back as a plain list; write list\(x\)"),
        (Table(a=1), r"x is a .*Table, and would come back as a plain dict"),
        (Ordered(a=1), r"x is a .*Ordered, and would come back as a plain OrderedDict"),
        (Name("a"), r"x is a .*Name, and would come back as a plain str"),
        (UserString("a"), "x is a collections.UserString"),
        (
            defaultdict(lambda: 0),
            r"x is a defaultdict whose default_factory is .*<lambda>.*x\.setdefault\(key, default\)",
        ),
        ({"a": defaultdict(set)}, r"x\.a is a defaultdict whose default_factory is set"),
        (defaultdict(Table), r"default_factory is Table"),
    ],
)
def test_other_types_are_refused_with_their_path(value: object, words: str) -> None:
    with pytest.raises(NotCarried, match=words):
        encode(value, "x", [])


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(NotCarried, match="contains itself"):
        encode(loop, "x", [])


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int8, torch.int64, torch.bool],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_a_tensor_of_any_dtype_comes_back_from_its_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    name = str(dtype).removeprefix("torch.")
    back = from_blob(to_blob(tensor), name, shape)
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)


# Comparing


def test_equal_scripts_have_equal_digests_and_every_part_counts() -> None:
    values = Values()
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    carrier = carried(values, model=model, optimizer=optimizer)
    twin = network()
    assert carrier.digest() == carried(model=twin, optimizer=torch.optim.Adam(twin.parameters())).digest()
    seen = {carrier.digest()}

    def change(number: int) -> None:
        digest = carrier.digest()
        assert digest not in seen, f"change {number} was not noticed"
        seen.add(digest)

    values.setdefault(best=0.0)
    change(0)
    values.best = -0.0
    change(1)
    values.best = 0
    change(2)
    values.best = False
    change(3)
    values.best = "0"
    change(4)
    values.best = torch.zeros(2)
    change(5)
    values.best = torch.zeros(1, 2)
    change(6)
    optimizer.param_groups[0]["lr"] = 0.5
    change(7)
    model.get_buffer("1.num_batches_tracked").add_(1)
    change(8)
    train(model, optimizer, 1)
    change(9)


def test_the_digest_does_not_depend_on_the_order_of_registration() -> None:
    model, optimizer, carrier = trained()
    assert carried(optimizer=optimizer, model=model).digest() == carrier.digest()


def test_the_digest_of_a_known_state_is_known() -> None:
    """It is compared between runs, machines and versions."""
    values = Values()
    values.setdefault(best=0.1, steps=[1, 2], mean=torch.ones(2))
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    known = "9739531ee84ed2cf90b3da74d601c7ec565b56c95f1bdefd15803720e22ce6ec"
    assert carried(values, model=model).digest() == known


def test_what_lies_between_the_elements_of_a_parameter_is_not_in_the_fingerprint() -> None:
    """A copy has the elements only, so a newcomer has other bytes there, as every worker has after torch.empty."""

    def with_gaps(between: float) -> Carrier:
        model = nn.Linear(4, 3)
        model.weight = nn.Parameter(torch.full((3, 8), between)[:, ::2])
        return carried(model=model)

    ours, theirs = with_gaps(1.0), with_gaps(2.0)
    theirs.load(*sent(ours))
    assert ours.digest() == theirs.digest()
    assert all(ours.fingerprint(step) == theirs.fingerprint(step) for step in range(8))


def test_a_drifted_parameter_is_in_the_fingerprint_within_a_turn() -> None:
    first, second = nn.Linear(100, 100), nn.Linear(100, 100)
    second.load_state_dict(first.state_dict())
    ours, theirs = carried(model=first), carried(model=second)
    assert all(ours.fingerprint(step) == theirs.fingerprint(step) for step in range(20))
    with torch.no_grad():
        second.weight[57, 3] += 1e-6
    differing = [step for step in range(20) if ours.fingerprint(step) != theirs.fingerprint(step)]
    assert 0 < len(differing) < 20


def test_rates_and_values_are_in_every_fingerprint() -> None:
    _, optimizer, carrier = trained()
    before = carrier.fingerprint(4)
    optimizer.param_groups[0]["lr"] *= 2
    assert carrier.fingerprint(4) != before
    optimizer.param_groups[0]["lr"] /= 2
    assert carrier.fingerprint(4) == before
    carrier.values.seen = 1
    assert carrier.fingerprint(4) != before


def test_a_fingerprint_of_ten_million_parameters_takes_under_half_a_millisecond() -> None:
    model = nn.Sequential(*(nn.Linear(1000, 1000, device="meta").to_empty(device="cpu") for _ in range(10)))
    carrier = carried(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    took: list[float] = []
    for step in range(50):
        start = time.perf_counter()
        carrier.fingerprint(step)
        took.append(time.perf_counter() - start)
    assert min(took) < 0.0005


# Watching


def scaled(model: nn.Sequential) -> None:
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)


def replaced(model: nn.Sequential) -> None:
    weight = model.get_parameter("0.weight")
    weight.data = weight.data * 2


def behind_its_back(model: nn.Sequential) -> None:
    model.get_parameter("0.weight").data[0, 0] += 1.0


def frozen(model: nn.Sequential) -> None:
    model.get_parameter("0.weight").requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "full", "noticed"),
    [
        (scaled, False, True),
        (replaced, False, True),
        (frozen, False, True),
        (behind_its_back, False, False),
        (behind_its_back, True, True),
    ],
)
def test_a_changed_parameter_is_named(change: Callable[[nn.Sequential], None], full: bool, noticed: bool) -> None:
    model, _, carrier = trained()
    before = carrier.watch(full=full)
    change(model)
    assert carrier.changed(before) == (["parameter model.0.weight"] if noticed else [])


def test_tensors_of_inference_mode_are_watched_without_a_version() -> None:
    values = Values()
    with torch.inference_mode():
        values.best = torch.ones(3)
    carrier = carried(values, model=network())
    before = carrier.watch(full=True)
    assert carrier.changed(before) == []
    with torch.inference_mode():
        values.best.add_(1.0)
    assert carrier.changed(before) == ["job.state.best"]


def test_a_pass_as_it_should_be_changes_nothing() -> None:
    model, _, carrier = trained()
    before = carrier.watch(full=True)
    model(torch.ones(4, 3)).sum().backward()
    assert carrier.changed(before) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model: model.append(Queue()), {"buffer model.2.at", "buffer model.2.queue"}),
        (lambda model: model.__setitem__(0, Queue()), {"buffer model.0.at", "buffer model.0.queue"}),
        (lambda model: model.__delitem__(1), {"buffer model.1.at", "buffer model.1.queue"}),
        (lambda model: model[1].register_buffer("more", torch.zeros(1)), {"buffer model.1.more"}),
    ],
)
def test_buffers_that_come_and_go_in_a_pass_are_named(
    change: Callable[[nn.Sequential], object], named: set[str]
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Queue())
    carrier = carried(model=model)
    before = carrier.watch()
    change(model)
    assert named <= set(carrier.changed(before))


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")
def test_rates_schedulers_values_and_other_buffers_are_named() -> None:
    model = Queue()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = Values()
    values.setdefault(seen=[1], mean=torch.zeros(2))
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    carrier = carried(values, {"model.at": "first"}, model=model, optimizer=optimizer, scheduler=scheduler)
    before = carrier.watch()
    scheduler.step()
    model.get_buffer("queue").add_(1)
    model.get_buffer("at").add_(1)
    values.seen.append(2)
    values.mean.add_(1)
    assert carrier.changed(before) == [
        "buffer model.queue",
        "learning rate of optimizer, group 0",
        "scheduler scheduler",
        "job.state.seen",
        "job.state.mean",
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex128])
def test_the_value_sum_sees_one_flipped_value(dtype: torch.dtype) -> None:
    tensor = torch.ones(1000).to(dtype)
    before = value_sum(tensor)
    assert value_sum(tensor.clone()) == before
    tensor[500] = 0
    assert value_sum(tensor) != before


# job.state


def test_values_are_attributes_with_defaults() -> None:
    values = Values()
    values.setdefault(best=0.5, seen=0)
    values.best = 0.75
    values.setdefault(best=0.0)
    assert values.best == 0.75
    assert values.keys() == ["best", "seen"] and dict(values.items()) == {"best": 0.75, "seen": 0}
    assert "best" in values and list(values) == ["best", "seen"]
    del values.seen
    with pytest.raises(AttributeError, match=r"setdefault\(seen="):
        _ = values.seen


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        ("fn", print, NotCarried, r"job\.state\.fn is a builtins\.builtin_function"),
        ("nested", {"a": {1}}, NotCarried, r"job\.state\.nested\.a is a builtins\.set"),
        ("counts", defaultdict(lambda: 1), NotCarried, r"job\.state\.counts is a defaultdict whose default_factory is"),
        ("w", nn.Parameter(torch.ones(1)), NotCarried, r"job\.state\.w is a Parameter.*x\.detach\(\)"),
        ("w", {"a": torch.ones(1, requires_grad=True)}, NotCarried, r"job\.state\.w\.a is a tensor that requires a"),
        ("z", [torch.ones(1, dtype=torch.complex64).conj()], NotCarried, r"job\.state\.z\.0 is a conjugate view"),
        ("z", torch.ones(1, dtype=torch.complex64).conj().imag, NotCarried, r"job\.state\.z is a conj.*resolve_neg"),
        ("files", {"\udcff.bin": torch.ones(1)}, NotCarried, r"job\.state\.files has the key '\\udcff"),
        ("keys", 1, ConfigError, r"job\.state\.keys cannot be used"),
        ("_private", 1, ConfigError, "cannot be used"),
    ],
)
def test_values_of_other_types_and_reserved_names_are_refused(
    key: str, value: object, error: type[ElasticError], words: str
) -> None:
    values = Values()
    with pytest.raises(error, match=words):
        setattr(values, key, value)
    assert values.keys() == []


def test_a_tensor_at_several_places_is_one_tensor_in_a_newcomer() -> None:
    """Such as the counter of steps that an optimizer's parameters share."""
    optimizers, carriers = [], []
    for _ in range(2):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        steps = torch.zeros(())
        for parameter in model.parameters():
            optimizer.state[parameter]["step"] = steps
        carriers.append(carried(model=model, optimizer=optimizer))
        optimizers.append(optimizer)
    donor, newcomer = carriers
    ends = torch.ones(2)
    donor.values.setdefault(ends=[ends, ends])
    newcomer.load(*donor.capture())
    for optimizer in optimizers:
        next(iter(optimizer.state.values()))["step"].add_(1)
    newcomer.values.ends[0].add_(1)
    assert [state["step"].item() for state in optimizers[1].state.values()] == [1.0] * 6
    assert newcomer.values.ends[1].tolist() == [2.0, 2.0]
    donor.values.ends[0].add_(1)
    assert newcomer.digest() == donor.digest()
    packed = json.loads(json.dumps(donor.values.to_json(packed=True)))
    newcomer.values.update_from_json(packed, torch.device)
    newcomer.values.ends[0].add_(1)
    assert newcomer.values.ends[1].tolist() == [3.0, 3.0]


def test_values_are_read_only_in_a_pass() -> None:
    values = Values()
    values.setdefault(best=0.5)
    values.lock()
    with pytest.raises(StateChanged, match=r"job\.state\.best"):
        values.best = 1.0
    with pytest.raises(StateChanged, match=r"job\.state\.best"):
        del values.best
    values.setdefault(best=2.0)
    assert values.best == 0.5
    values.unlock()
    values.best = 1.0
    assert values.best == 1.0


def test_values_with_few_tensors_reach_a_newcomer_before_the_copy() -> None:
    values, there = Values(), Values()
    values.setdefault(best=float("inf"), steps=(1, 2), mean=[torch.ones(1)], queue=torch.ones(20_000))
    there.setdefault(best=0.0, mean=[torch.zeros(1)], queue=torch.zeros(20_000), own=1)
    there.update_from_json(json.loads(json.dumps(values.to_json(packed=True), allow_nan=False)), torch.device)
    assert (there.best, there.steps, there.mean[0].item(), there.own) == (float("inf"), (1, 2), 1.0, 1)
    assert there.queue.sum() == 0
    assert values.to_json() == {"best": {"__float__": "inf"}, "steps": {"__tuple__": [1, 2]}}


def test_large_tensors_are_not_read_where_a_newcomer_lacks_them() -> None:
    values = Values()
    values.setdefault(mean=torch.ones(1), queue=[torch.ones(20_000)])
    values.begin_early()
    assert values.mean.item() == 1.0
    with pytest.raises(NotCarried, match=r"job\.state\.queue was read before the steps of an epoch.*65536 bytes"):
        _ = values.queue
    values.queue = [torch.zeros(20_000)]
    assert values.queue[0].sum() == 0, "a newcomer does the same"
    values.begin_early()
    values.end_early()
    assert len(values.queue) == 1


def test_hooks_get_the_values_without_tensors_as_they_were() -> None:
    values = Values()
    values.setdefault(counts=defaultdict(int, a=1), mean=torch.ones(1), steps=(1, 2))
    of_checkpoint = {key: encode(value, key, []) for key, value in values.items()}
    for told in (values.to_json(packed=True), of_checkpoint):
        assert repr(without_tensors(told)) == "{'counts': defaultdict(<class 'int'>, {'a': 1}), 'steps': (1, 2)}"


def test_a_loaded_copy_brings_exactly_the_donors_values() -> None:
    here, there = Values(), Values()
    here.setdefault(best=0.5, mean=torch.ones(3), raw=b"\x00raw")
    there.setdefault(own=1)
    there.lock()
    carried(there, model=network()).load(*sent(carried(here, model=network())))
    assert there.keys() == ["best", "mean", "raw"] and torch.equal(there.mean, torch.ones(3))
    assert there.raw == b"\x00raw"


@pytest.mark.parametrize(
    ("kind", "own", "wanted"),
    [("cpu", "cpu", "cpu"), ("cpu", "cuda:1", "cpu"), ("cuda", "cuda:1", "cuda:1"), ("cuda", "cpu", "cpu")],
)
def test_what_was_on_a_device_belongs_on_this_workers_own(kind: str, own: str, wanted: str) -> None:
    assert device_for(kind, torch.device(own)) == torch.device(wanted)


def test_tensors_come_back_on_the_device_they_had() -> None:
    """The header is a GPU's, the device here one that stores nothing: a tensor shows where it would have gone."""
    here, there = Values(), Values()
    here.setdefault(mean=torch.ones(3), queue=[torch.ones(2)])
    header, blobs = sent(carried(here, model=network()))
    entries: Any = header["tensors"]
    assert {entry["device"] for entry in entries} == {"cpu"}
    for entry in entries:
        if entry["name"] != "job.state.mean":
            entry["device"] = "cuda"
    carrier = Carrier(there, torch.device("meta"))
    model = network(1)
    carrier.register(model=model)
    carrier.freeze()
    carrier.load(header, blobs)
    assert there.queue[0].is_meta and not there.mean.is_meta
    assert torch.equal(there.mean, torch.ones(3))
    assert all(parameter.device == torch.device("cpu") for parameter in model.parameters()), "they stay where they are"
