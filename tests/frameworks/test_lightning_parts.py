"""What a part of a step does to a LightningModule: recorded, taken back, and had once on every worker."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import ConfigError
from runtime.frontends.frameworks.lightning import parts, trainer
from runtime.frontends.frameworks.plain_state import plain_attributes
from tests.frameworks.in_process import adapted
from tests.unit.runtime.frontends.ddp import threads

RANKS = 3


class Sum(nn.Module):
    """As a metric of torchmetrics."""

    def __init__(self, reduction: str = "dim_zero_sum") -> None:
        super().__init__()
        self._defaults = {"total": torch.zeros(2)}
        self._reductions = {"total": SimpleNamespace(__name__=reduction)}
        self.total, self.device = torch.zeros(2), torch.device("cpu")
        self._update_count, self._computed, self._forward_cache = 0, None, None

    def add(self, values: list[float]) -> None:
        self.total = self.total + torch.tensor(values)
        self._update_count += 1

    def compute(self) -> torch.Tensor:
        return self.total.sum()


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.losses = 0, [0.5]
        self.average, self.metric = torch.zeros(2), Sum()
        self.device = torch.device("cpu")
        self.logged: list[tuple[str, float]] = []
        self.told = False
        self.last, self.best, self.none = float("inf"), 0.0, None
        self._least, self.index, self.flag, self.example = float("inf"), None, None, None
        self.least = torch.tensor(float("inf"))

    def log(self, name: str, value: Any, **options: Any) -> None:
        number = float(value.compute() if isinstance(value, Sum) else value)
        self.logged.append((name, number))
        assert options["on_step"] is True
        assert options["on_epoch"] is False


class Scalars:
    """As a Step: the sums over all shards."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.shard = SimpleNamespace(index=0)

    def log(self, sum: dict[str, float]) -> None:
        for name, value in sum.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value


def fresh() -> tuple[Module, Any, Any]:
    return Module(), SimpleNamespace(_logger_connector=SimpleNamespace(_current_fx=None)), SimpleNamespace(_results={})


def one(rank: int, module: Module, loop: Any) -> None:
    """What a training step does in a rank."""
    module.seen += 1
    module.losses.append(float(rank))
    module.average = module.average + rank
    module.metric.add([1.0, rank])
    module.told = True
    given = {"on_step": True, "on_epoch": False}
    loop._results.log("training_step", "loss", torch.tensor(float(rank)), batch_size=rank + 1, **given)
    loop._results.log("training_step", "most", torch.tensor(float(rank)), reduce_fx="max", **given)
    loop._results.log("training_step", "sum", None, metric_attribute="metric", **given)
    if rank == 1:
        loop._results.log("training_step", "seldom", torch.tensor(7.0), **given)


def step(body: Any = one) -> tuple[Module, list[parts.Record]]:
    module, trainer, loop = fresh()
    scalars: Any = Scalars()
    for rank in range(RANKS):
        scalars.shard.index = rank
        with parts.recording(trainer, module, loop, lambda: 4) as record:
            body(rank, module, loop)
        parts.tell(scalars, module, 0, record)
    return module, parts.told(module, scalars.metrics, RANKS)


def test_a_part_is_taken_back_by_the_worker_that_computes_it() -> None:
    module, _ = step()
    assert (module.seen, module.losses, module.told, module.metric._update_count) == (0, [0.5], False, 0)
    assert module.average.tolist() == module.metric.total.tolist() == [0.0, 0.0]


def test_all_workers_have_a_step_once() -> None:
    """Also those that have computed no rank: what a rank alone has logged is in the scalars."""
    module, records = step()
    parts.have(module, records[0])
    assert (module.seen, module.losses, module.told) == (1, [0.5, 1.0], True)
    assert module.average.tolist() == [1.0, 1.0]
    assert module.metric.total.tolist() == [3.0, 3.0]
    assert sorted(module.logged) == [
        ("loss", 1.0), ("most", 2.0), ("seldom", 7.0), ("sum", 6.0)
    ]  # fmt: skip


@pytest.mark.parametrize("reduction", ["avg", "MEAN", "mean", torch.mean])
def test_a_mean_may_be_asked_for_by_any_name_that_lightning_takes(reduction: Any) -> None:
    def body(rank: int, module: Module, loop: Any) -> None:
        about = {"on_step": True, "on_epoch": False, "reduce_fx": reduction}
        loop._results.log("training_step", "loss", torch.tensor(float(rank)), **about)

    _, (record,) = step(body)
    assert [(row["name"], row["value"]) for row in record.logs] == [("loss", 1.0)]


def test_an_evaluation_has_its_parts_in_their_order() -> None:
    module, trainer, loop = fresh()
    for rank in range(RANKS):
        with parts.recording(trainer, module, loop, lambda: 4) as record:
            one(rank, module, loop)
        parts.have(module, parts.Record.of(record.plain()))
    assert (module.seen, module.losses) == (3, [0.5, 0.0, 1.0, 2.0])
    assert module.metric.total.tolist() == [3.0, 3.0]
    assert [value for name, value in module.logged if name == "loss"] == [0.0, 1.0, 2.0]


def test_what_a_step_does_not_carry_is_refused() -> None:
    def strings(rank: int, module: Module, loop: Any) -> None:
        module.losses.append("a")  # type: ignore[arg-type]

    def listed(rank: int, module: Module, loop: Any) -> None:
        module.metric._reductions["total"] = SimpleNamespace(__name__="dim_zero_cat")
        module.metric.add([1.0, 2.0])

    with pytest.raises(ConfigError, match=r"self\.losses what is no number"):
        step(strings)
    with pytest.raises(ConfigError, match="Sum in training_step"):
        step(listed)


def sets(rank: int, module: Any, loop: Any) -> None:
    """What a training step may write instead of adding to numbers."""
    graph = torch.tensor(float(rank), requires_grad=True)
    module.last, module.best, module.none = graph * 1.0, graph * 2.0, float(rank)
    module.new, module.count = graph * 3.0, rank
    module._least, module._calls, module.index, module.flag = rank + 1.0, rank, 7, rank == 1
    module.least.copy_(torch.minimum(module.least, torch.tensor(rank + 1.0)))


def test_attributes_that_are_set_have_the_mean_of_the_ranks_on_every_worker() -> None:
    """Also those that had infinity, None or no value, and a tensor in the place of a number."""
    module: Any
    module, records = step(sets)
    assert (module.last, module.best, module.none, hasattr(module, "new")) == (float("inf"), 0.0, None, False)
    parts.have(module, records[0])
    assert (float(module.last), float(module.best), module.none) == (1.0, 2.0, 1.0)
    assert (float(module.new), module.count) == (3.0, 1.0)
    assert not any(value.requires_grad for value in (module.last, module.best, module.new))
    assert (module._least, module._calls, float(module.least)) == (2.0, 1, 2.0)
    assert [(type(value), value) for value in (module.index, module.flag)] == [(int, 7), (bool, True)]


def test_what_is_no_number_stays_where_there_was_nothing() -> None:
    def example(rank: int, module: Any, loop: Any) -> None:
        if module.example is None:
            module.example = {"x": rank}

    assert step(example)[0].example == {"x": 0}


def test_an_evaluation_leaves_what_its_last_part_has_set() -> None:
    module: Any
    module, trainer, loop = fresh()
    for rank in range(RANKS):
        with parts.recording(trainer, module, loop, lambda: 4) as record:
            sets(rank, module, loop)
        parts.have(module, parts.Record.of(record.plain()))
    assert (float(module.last), float(module.best), float(module.new)) == (2.0, 4.0, 6.0)


def test_a_loss_that_is_kept_with_its_graph_is_copied_without() -> None:
    weight = torch.ones(1, requires_grad=True)
    holder = SimpleNamespace(losses=[weight * 2, {"a": weight * 3}], weight=weight)
    kept = plain_attributes(holder)
    assert [kept["losses"][0].item(), kept["losses"][1]["a"].item()] == [2.0, 3.0]
    assert not kept["losses"][0].requires_grad
    assert holder.losses[0].grad_fn is not None


def typed(value: Any) -> tuple[type, torch.dtype | None, float]:
    return type(value), getattr(value, "dtype", None), float(value)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ((torch.tensor(2.5, dtype=torch.float64),) * 3, (torch.Tensor, torch.float64, 2.5)),
        ((torch.tensor(2.5, dtype=torch.bfloat16),) * 3, (torch.Tensor, torch.bfloat16, 2.5)),
        ((torch.tensor(1), torch.tensor(2), torch.tensor(5)), (torch.Tensor, torch.int64, 3.0)),
        ((torch.tensor(False), torch.tensor(True), torch.tensor(False)), (torch.Tensor, torch.bool, 1.0)),
        ((torch.tensor(1), 2, 0.0), (torch.Tensor, torch.float32, 1.0)),
        ((torch.tensor(1, dtype=torch.int32), True, 4), (torch.Tensor, torch.int32, 2.0)),
        ((1, 4.0, 4), (float, None, 3.0)),
        ((True, 2, 3), (int, None, 2.0)),
        ((False, True, False), (bool, None, 1.0)),
        ((1, 2, 2), (float, None, 5 / 3)),
    ],
)
@pytest.mark.parametrize("name", ["none", "_least", "new", "least"])
def test_what_ranks_set_is_the_mean_of_all_of_them_as_the_widest_type(
    name: str, given: tuple[Any, ...], wanted: tuple[Any, ...]
) -> None:
    """Whatever was there before: None, an infinite number or tensor, or nothing."""

    def set_by_rank(rank: int, module: Any, loop: Any) -> None:
        setattr(module, name, given[rank])

    module, (record,) = step(set_by_rank)
    parts.have(module, record)
    assert typed(getattr(module, name)) == wanted


def test_a_tensor_may_become_a_number_and_truth_values_may_become_false() -> None:
    def body(rank: int, module: Any, loop: Any) -> None:
        module.finite, module.first, module.seldom = float(rank), False, rank > 1
        module.mask = ~module.mask

    module: Any
    with_all = Module.__init__

    def made(self: Any) -> None:
        with_all(self)
        self.finite, self.first, self.seldom = torch.tensor(9.0), True, True
        self.mask = torch.tensor([True, False])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Module, "__init__", made)
        module, (record,) = step(body)
    assert (float(module.finite), module.first, module.mask.tolist()) == (9.0, True, [True, False])
    parts.have(module, record)
    assert (module.finite, module.first, module.seldom) == (1.0, False, True)
    assert (module.mask.dtype, module.mask.tolist()) == (torch.bool, [False, True])


def test_a_micro_batch_finds_what_those_before_it_have_left() -> None:
    """As in a process of its own. Behind the step all workers have the mean of what the ranks had at its end."""
    module: Any
    module, trainer, loop = fresh()
    scalars: Any = Scalars()
    losses = ((4.0, 6.0), (3.0, 1.0), (2.0, 8.0))
    for own in losses:
        with parts.attributes(module) as changed:
            assert not hasattr(module, "lowest")
            for number, loss in enumerate(own):
                record = parts.Record()
                with parts.logs(record, trainer, module, loop, lambda: 4):
                    module.lowest = min(getattr(module, "lowest", loss), loss)
                    module.seen += 1
                    module.losses.append(loss)
                    loop._results.log("training_step", "loss", torch.tensor(loss), on_step=True, on_epoch=False)
                assert module.seen == number + 1
                parts.tell(scalars, module, number, record)
        parts.tell(scalars, module, 1, changed)
        assert (module.seen, module.losses) == (0, [0.5])
    for record in parts.told(module, scalars.metrics, RANKS):
        parts.have(module, record)
    assert (module.lowest, module.seen, module.losses) == ((4 + 1 + 2) / 3, 2, [0.5, 3.0, 5.0])
    assert module.logged == [("loss", 3.0), ("loss", 5.0)]


@pytest.fixture
def in_place() -> Iterator[Any]:
    """lightning.pytorch, adapted."""
    module: Any = pytest.importorskip("lightning.pytorch", reason="frameworks are installed by `make test-frameworks`")
    pytest.importorskip("accelerate")
    with adapted(lambda seams: trainer.install(seams, module)):
        yield module
        module.strategies.StrategyRegistry.remove("elastic")


@pytest.mark.parametrize("name", ["ddp", "ddp_find_unused_parameters_true", "ddp_spawn", "ddp_notebook", "ddp_mine"])
def test_a_registered_strategy_has_the_checkpoint_io_with_which_it_was_registered(name: str, in_place: Any) -> None:
    mine = importlib.import_module("lightning.pytorch.plugins.io").TorchCheckpointIO()
    registry = in_place.strategies.StrategyRegistry
    registry.register("ddp_mine", in_place.strategies.DDPStrategy, description="", checkpoint_io=mine)
    made: list[Any] = []
    try:
        threads.alone(lambda: made.append(in_place.Trainer(strategy=name, accelerator="cpu", devices=4)), 4)
    finally:
        registry.remove("ddp_mine")
    (strategy,) = (one.strategy for one in made)
    assert type(strategy).__name__ == "ElasticStrategy"
    assert (strategy.checkpoint_io is mine) == (name == "ddp_mine")
