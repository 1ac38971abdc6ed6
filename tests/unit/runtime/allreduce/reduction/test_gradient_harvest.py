"""One pass on one worker: what a shard reads, what it leaves behind, and what the result writes."""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from elastic.errors import NotCarried
from runtime.allreduce.reduction.buffers import Buffer
from runtime.allreduce.reduction.gradient_harvest import Harvest
from runtime.allreduce.reduction.partial_sum import Partial, fold
from runtime.data.random_state import ShardRandom
from runtime.recovery.state.training_state import Carrier, Values


def carried(buffers: dict[str, str] | None = None, **objects: object) -> Carrier:
    carrier = Carrier(Values())
    carrier.register(buffers, **objects)
    carrier.freeze()
    return carrier


def harvest_of(carrier: Carrier) -> Harvest:
    return Harvest(carrier.parameters(), carrier.float_buffers(), carrier.int_buffers(), modes=carrier.modes)


class Net(nn.Module):
    """A model with every kind of state that a pass touches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.norm(self.first(x))
        answer: torch.Tensor = self.last(nn.functional.dropout(hidden, 0.5))
        return answer


def net() -> tuple[Net, Harvest]:
    torch.manual_seed(0)
    model = Net()
    return model, harvest_of(carried(model=model))


def in_a_pass() -> tuple[Net, Harvest]:
    model, harvest = net()
    harvest.begin_pass(1, 0, 0)
    return model, harvest


def run(model: nn.Module, harvest: Harvest, shard: int, weight: float = 1.0, rows: int = 5) -> Partial:
    harvest.before(shard)
    model(torch.randn(rows, 3)).square().mean().backward()
    return harvest.leaf(shard, weight, {})


def copy_of(partial: Partial) -> list[bytes]:
    partial.settle()
    return [flat.numpy().tobytes() for flat in partial.flats.values()]


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_a_leaf_depends_on_the_shard_and_not_on_what_ran_before_it() -> None:
    model, harvest = in_a_pass()
    alone = run(model, harvest, 3)
    run(model, harvest, 0)
    again = run(model, harvest, 3)
    other = run(model, harvest, 4)
    assert copy_of(again) == copy_of(alone) and again.meta() == alone.meta()
    assert copy_of(other) != copy_of(alone)


@pytest.mark.parametrize("place", [(2, 0, 0, 3), (1, 1, 0, 3), (1, 0, 1, 3), (1, 0, 0, 2)])
def test_random_numbers_differ_by_seed_step_pass_and_shard(place: tuple[int, int, int, int]) -> None:
    _, harvest = net()
    seen = []
    for seed, step, pass_no, shard in ((1, 0, 0, 3), place):
        harvest.begin_pass(seed, step, pass_no)
        own = ShardRandom(harvest.before(shard))
        private = (own.seed, torch.rand((), generator=own.generator).item(), own.numpy.random())
        seen.append([*draws(), *private])
    assert all(first != second for first, second in zip(*seen, strict=True))


def test_random_numbers_after_a_pass_do_not_depend_on_the_shards_run_here() -> None:
    model, harvest = net()
    seen = []
    for shards in ((0, 1), (1, 0), (0, 1, 1)):
        harvest.begin_pass(1, 4, 0)
        leaves = {shard: run(model, harvest, shard) for shard in shards}
        harvest.install(fold(leaves[0], leaves[1]), "mean")
        seen.append(draws())
    assert seen[0] == seen[1] == seen[2]


def test_random_numbers_after_a_pass_that_does_not_count_are_the_same_too() -> None:
    model, harvest = net()
    seen = []
    for counts in (True, False):
        harvest.begin_pass(1, 4, 0)
        result = run(model, harvest, 0)
        if counts:
            harvest.install(result, "mean")
        else:
            harvest.leave_out()
        seen.append(draws())
        with pytest.raises(RuntimeError, match="no pass has begun"):
            harvest.before(0)
    assert seen[0] == seen[1]


def test_a_dropped_shard_leaves_no_trace() -> None:
    """A rehearsal comes before the first shard of a worker, and some workers have no shard."""
    model, harvest = in_a_pass()
    before = draws()
    buffers = [buffer.clone() for buffer in model.buffers()]
    harvest.before(0)
    model(torch.randn(5, 3)).sum().backward()
    harvest.drop_shard()
    assert draws() == before
    assert all(torch.equal(old, new) for old, new in zip(buffers, model.buffers(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_leaf_is_the_weighted_gradient_and_takes_it_away() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    bias = nn.Parameter(torch.ones(2))
    harvest = Harvest([("weight", weight), ("bias", bias)])
    assert harvest.groups() == {"float32": 8}
    harvest.begin_pass(0, 0, 0)
    harvest.before(5)
    weight.grad = torch.arange(6.0).view(2, 3)
    leaf = harvest.leaf(5, 2.5, {"loss": ("mean", 1.0, 2.5)})
    assert leaf.node == (5, 6)
    assert leaf.flats["float32"].tolist() == [0.0, 2.5, 5.0, 7.5, 10.0, 12.5, 0.0, 0.0]
    assert (leaf.has_grad, leaf.weight, leaf.scalars) == (0b01, 2.5, {"loss": ("mean", 1.0, 2.5)})
    assert weight.grad is None


def test_a_mean_is_divided_once_by_the_total_weight() -> None:
    weight = nn.Parameter(torch.ones(1))
    harvest = Harvest([("weight", weight)])
    harvest.begin_pass(0, 0, 0)
    leaves = []
    for shard, (gradient, samples) in enumerate(((0.1, 3.0), (0.7, 4.0))):
        harvest.before(shard)
        weight.grad = torch.tensor([gradient])
        leaves.append(harvest.leaf(shard, samples, {}))
    result = fold(leaves[0], leaves[1])
    total = torch.tensor([0.1]) * 3.0 + torch.tensor([0.7]) * 4.0
    harvest.install(result, "sum")
    assert weight.grad is not None and torch.equal(weight.grad, total)
    harvest.install(result, "mean")
    assert torch.equal(weight.grad, total / 7.0)
    assert torch.equal(result.flats["float32"], total)


@pytest.mark.parametrize("gradients", ["mean", "sum"])
def test_what_the_user_does_to_a_gradient_does_not_reach_the_result(gradients: Literal["mean", "sum"]) -> None:
    model, harvest = in_a_pass()
    result = run(model, harvest, 0)
    before = copy_of(result)
    harvest.install(result, gradients)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model(torch.ones(4, 3)).sum().backward()
    model.zero_grad(set_to_none=False)
    assert copy_of(result) == before


def test_a_gradient_that_the_script_keeps_is_not_overwritten_by_the_next_pass() -> None:
    model, harvest = net()
    kept: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    for step in range(3):
        harvest.begin_pass(1, step, 0)
        harvest.install(run(model, harvest, 0), "mean")
        gradient = model.first.weight.grad
        assert gradient is not None
        kept.append(gradient)
        copies.append(gradient.clone())
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))
    assert not torch.equal(kept[0], kept[1])


def test_no_gradient_is_not_a_zero_gradient() -> None:
    """A parameter that nobody used must not be moved by weight decay or momentum."""
    model, harvest = in_a_pass()
    result = fold(run(model, harvest, 0), run(model, harvest, 1))
    model.unused.weight.grad = torch.ones(2, 2)
    harvest.install(result, "mean")
    assert [p.grad is None for p in model.unused.parameters()] == [True, True]
    assert model.last.weight.grad is not None


def test_a_gradient_of_one_shard_counts_for_all() -> None:
    weight = nn.Parameter(torch.ones(1))
    harvest = Harvest([("weight", weight)])
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    without = harvest.leaf(0, 1.0, {})
    harvest.before(1)
    weight.grad = torch.tensor([3.0])
    harvest.install(fold(without, harvest.leaf(1, 1.0, {})), "mean")
    assert weight.grad is not None and weight.grad.item() == 1.5


def test_memory_of_an_earlier_leaf_does_not_show_through() -> None:
    weight = nn.Parameter(torch.ones(4))
    harvest = Harvest([("weight", weight)])
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    weight.grad = torch.full((4,), 7.0)
    harvest.leaf(0, 1.0, {})
    harvest.before(1)
    assert harvest.leaf(1, 1.0, {}).flats["float32"].tolist() == [0.0] * 4


def test_a_skipped_shard_counts_for_nothing_whatever_it_computed() -> None:
    model, harvest = in_a_pass()
    counted = run(model, harvest, 0)
    alone = copy_of(counted)
    harvest.before(1)
    (model(torch.full((5, 3), float("inf"))).sum() * float("nan")).backward()
    skipped = harvest.leaf(1, 0.0, {})
    assert (skipped.has_grad, skipped.weight, skipped.note) == (0, 0.0, None)
    assert copy_of(fold(counted, skipped)) == alone


def test_what_the_script_left_in_a_gradient_is_no_part_of_the_next_pass() -> None:
    found = []
    for left in (False, True):
        model, harvest = net()
        for parameter in model.parameters() if left else ():
            parameter.grad = torch.ones_like(parameter)
        harvest.begin_pass(1, 0, 0)
        found.append(copy_of(run(model, harvest, 0)))
    assert found[0] == found[1]


def test_a_result_that_is_not_accepted_leaves_no_gradient_and_the_buffers_from_before() -> None:
    model, harvest = net()
    before = [buffer.clone() for buffer in model.buffers()]
    harvest.begin_pass(1, 0, 0)
    result = run(model, harvest, 0)
    result.flats["float32"][0] = float("inf")
    asked: list[str] = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def refuse(names: list[str]) -> bool:
        asked.extend(names)
        return False

    harvest.install(result, "mean", refuse)
    assert len(asked) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))


def test_if_every_shard_is_skipped_nothing_changes() -> None:
    model, harvest = net()
    before = [buffer.clone() for buffer in model.buffers()]
    harvest.begin_pass(1, 0, 0)
    harvest.install(fold(run(model, harvest, 0, weight=0.0), run(model, harvest, 1, weight=0.0)), "mean")
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_are_weighed_and_summed_in_float32(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(1, dtype=dtype))
    harvest = Harvest([("weight", weight)])
    assert harvest.groups() == {"float32": 1}
    harvest.begin_pass(0, 0, 0)
    leaves = []
    for shard in range(2):
        harvest.before(shard)
        weight.grad = torch.tensor([0.1], dtype=dtype)
        leaves.append(harvest.leaf(shard, 3.0, {}))
    total = fold(leaves[0], leaves[1])
    assert total.flats["float32"].item() == torch.tensor(0.1, dtype=dtype).float().item() * 6.0
    harvest.install(total, "mean")
    assert weight.grad is not None and weight.grad.dtype == dtype
    assert weight.grad.item() == torch.tensor(0.1, dtype=dtype).item()


def test_each_width_has_a_flat_tensor_of_its_own() -> None:
    wide, narrow = nn.Parameter(torch.ones(2, dtype=torch.float64)), nn.Parameter(torch.ones(3))
    harvest = Harvest([("wide", wide), ("narrow", narrow)])
    assert harvest.groups() == {"float64": 2, "float32": 3}
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    wide.grad = torch.full((2,), 1 / 3, dtype=torch.float64)
    narrow.grad = torch.full((3,), 0.5)
    leaf = harvest.leaf(0, 3.0, {})
    leaf.settle()
    assert leaf.flats["float64"].tolist() == [1 / 3 * 3.0] * 2
    assert leaf.flats["float32"].tolist() == [1.5] * 3
    harvest.install(leaf, "mean")
    assert wide.grad.dtype == torch.float64 and narrow.grad.dtype == torch.float32


def test_a_complex_parameter_is_refused_by_name() -> None:
    with pytest.raises(NotCarried, match=r"model\.z has dtype torch\.complex64, which is not summed; use float32"):
        Harvest([("model.z", nn.Parameter(torch.ones(1, dtype=torch.complex64)))])


def test_sparse_gradients_are_summed_dense() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    harvest = Harvest(list(table.named_parameters()))
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    table(torch.tensor([1, 3, 1])).sum().backward()
    harvest.install(harvest.leaf(0, 1.0, {}), "mean")
    assert table.weight.grad is not None
    assert table.weight.grad.layout == torch.strided
    assert table.weight.grad[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0, 0.0]


def test_a_gradient_has_the_memory_layout_of_its_parameter() -> None:
    convolution = nn.Conv2d(3, 4, 2)
    convolution.weight.data = convolution.weight.data.to(memory_format=torch.channels_last)
    harvest = Harvest(list(convolution.named_parameters()))
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    convolution(torch.randn(1, 3, 4, 4)).sum().backward()
    expected = convolution.weight.grad
    assert expected is not None
    harvest.install(harvest.leaf(0, 1.0, {}), "mean")
    assert convolution.weight.grad is not None
    assert torch.equal(convolution.weight.grad, expected)
    assert convolution.weight.grad.stride() == convolution.weight.stride()


# Buffers


def test_every_shard_starts_from_the_same_statistics() -> None:
    model, harvest = in_a_pass()
    starts = []
    for shard in range(3):
        harvest.before(shard)
        starts.append([buffer.clone() for buffer in model.buffers()])
        model(torch.randn(5, 3)).sum().backward()
        harvest.leaf(shard, 1.0, {})
    for start in starts[1:]:
        assert all(torch.equal(one, other) for one, other in zip(start, starts[0], strict=True))


def test_merged_statistics_are_the_weighted_mean_and_batches_count_once() -> None:
    model, harvest = in_a_pass()
    seen: list[torch.Tensor] = []
    leaves: list[Partial] = []
    for shard, weight in enumerate((1.0, 3.0)):
        harvest.before(shard)
        model(torch.randn(5, 3)).sum().backward()
        assert model.norm.running_mean is not None
        seen.append(model.norm.running_mean.clone())
        leaves.append(harvest.leaf(shard, weight, {}))
    harvest.install(fold(leaves[0], leaves[1]), "sum")
    assert model.norm.running_mean is not None and model.norm.num_batches_tracked is not None
    assert torch.equal(model.norm.running_mean, (seen[0] * 1.0 + seen[1] * 3.0) / 4.0)
    assert model.norm.num_batches_tracked.item() == 1


def test_statistics_that_no_shard_changed_keep_their_bits() -> None:
    """w * x + w * x divided by 2 * w is not always x: a frozen norm would drift."""
    model, harvest = net()
    model.norm.eval()
    assert model.norm.running_mean is not None
    model.norm.running_mean.fill_(0.1)
    before = [buffer.clone() for buffer in model.buffers()]
    for step in range(3):
        harvest.begin_pass(1, step, 0)
        leaves = [run(model, harvest, shard, weight=3.0) for shard in range(3)]
        assert leaves[0].note is None
        harvest.install(fold(fold(leaves[0], leaves[1]), leaves[2]), "mean")
    assert all(torch.equal(old, new) for old, new in zip(before, model.buffers(), strict=True))


def test_a_graph_over_two_shards_survives_the_reset_of_the_buffers() -> None:
    """autograd saves running statistics and would refuse a buffer whose version moved."""
    model, harvest = in_a_pass()
    harvest.before(0)
    loss = model(torch.randn(5, 3)).sum()
    harvest.before(1)
    loss.backward()
    assert harvest.leaf(1, 1.0, {}).has_grad


class Queue(nn.Module):
    features: torch.Tensor
    average: torch.Tensor
    at: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("features", torch.zeros(2))
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("wide", torch.zeros(1, dtype=torch.float64))  # of a dtype that no parameter has
        self.register_buffer("at", torch.zeros(1, dtype=torch.int64))


def test_declared_buffers_are_merged_by_their_rule() -> None:
    model = Queue()
    rules = {"model.features": "first", "model.average": "mean", "model.wide": "mean", "model.at": "first"}
    harvest = harvest_of(carried(rules, model=model))
    harvest.begin_pass(0, 0, 0)
    leaves: list[Partial] = []
    for shard in range(2):
        harvest.before(shard)
        for buffer in model.buffers():
            buffer.add_(shard + 0.5 if buffer.is_floating_point() else shard + 1)
        leaves.append(harvest.leaf(shard, 3.0, {}))
    harvest.install(fold(leaves[0], leaves[1]), "mean")
    assert model.features.tolist() == [0.5, 0.5]
    assert model.average.tolist() == [1.0, 1.0]
    assert model.get_buffer("wide").tolist() == [1.0]
    assert model.at.tolist() == [1]


def test_an_integer_that_the_first_shard_leaves_alone_stays_as_it_was() -> None:
    model = Queue()
    model.register_buffer("filled", torch.zeros(1, dtype=torch.int64))
    harvest = harvest_of(carried({"model.at": "first", "model.filled": "first"}, model=model))
    for changed_by_the_first in (model.at, None):
        start = [model.at.item(), model.get_buffer("filled").item()]
        harvest.begin_pass(0, 0, 0)
        leaves: list[Partial] = []
        for shard, changed in enumerate((changed_by_the_first, model.get_buffer("filled"))):
            harvest.before(shard)
            if changed is not None:
                changed.add_(1)
            leaves.append(harvest.leaf(shard, 1.0, {}))
        harvest.install(fold(leaves[0], leaves[1]), "mean")
        now = [model.at.item(), model.get_buffer("filled").item()]
        assert now == [start[0] + (changed_by_the_first is not None), start[1]]


def test_batch_norm_counts_a_step_whose_first_shard_is_skipped() -> None:
    model, harvest = in_a_pass()
    leaves = []
    for shard in range(2):
        harvest.before(shard)
        model(torch.randn(6, 3)).sum().backward()
        leaves.append(harvest.leaf(shard, float(shard), {}))
    harvest.install(fold(leaves[0], leaves[1]), "mean")
    assert model.norm.num_batches_tracked == 1


def test_the_note_of_a_leaf_is_plain_json() -> None:
    model, harvest = in_a_pass()
    leaf = run(model, harvest, 0)
    meta = json.loads(json.dumps(leaf.meta()))
    assert meta["note"] == {"integers": {"model.norm.num_batches_tracked": 1}}


def test_a_copy_taken_during_a_pass_shows_its_start() -> None:
    torch.manual_seed(0)
    model = Net()
    carrier = carried(model=model)
    harvest = harvest_of(carrier)
    before = carrier.digest()
    harvest.begin_pass(1, 0, 0)
    result = run(model, harvest, 0)
    assert carrier.digest() == before
    harvest.install(result, "mean")
    assert carrier.digest() != before


def test_a_copy_loaded_during_a_pass_is_its_new_start() -> None:
    """A newcomer copies the state of the pass it is in and then installs that pass's result."""
    results: list[Partial] = []
    carriers: list[Carrier] = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Net()
        carriers.append(carried(model=model))
        harvest = harvest_of(carriers[-1])
        if seed == 0:
            model.norm(torch.randn(7, 4))
            model.norm.eval()
        harvest.begin_pass(1, 0, 0)
        if seed == 0:
            results.append(run(model, harvest, 0))
        else:
            header, blobs = carriers[0].capture()
            carriers[1].load(header, [blob.clone() for blob in blobs])
            harvest.install(results[0], "mean")
    assert carriers[0].digest() == carriers[1].digest()


def test_a_shard_outside_a_pass_is_an_error() -> None:
    _, harvest = net()
    with pytest.raises(RuntimeError, match="no pass has begun"):
        harvest.before(0)


def test_buffers_of_a_moved_model_are_found() -> None:
    """module.to() replaces buffers; the old tensors would be merged for nobody."""
    model = nn.BatchNorm1d(2)
    buffer = Buffer("running_mean", model, "running_mean", "mean", (torch.float32, torch.Size([2])))
    model.double()
    assert buffer.live.dtype == torch.float64


def test_several_passes_of_a_step_have_gradients_of_their_own() -> None:
    """As in a GAN: each pass replaces what the one before left in the parameters."""
    model, harvest = net()
    gradients: list[Any] = []
    for pass_no in range(2):
        harvest.begin_pass(1, 0, pass_no)
        harvest.install(run(model, harvest, 0), "mean")
        assert model.last.weight.grad is not None
        gradients.append(model.last.weight.grad.clone())
    harvest.begin_pass(1, 0, 0)
    assert model.last.weight.grad is None
    assert not torch.equal(gradients[0], gradients[1])


def test_the_mode_that_a_shard_sets_ends_with_it_and_no_newcomer_is_given_it() -> None:
    """A newcomer that copied the state in the middle of such a shard computed the next pass in evaluation mode."""
    model = Net()
    carrier = carried(model=model)
    harvest = harvest_of(carrier)
    model.norm.eval()
    harvest.begin_pass(0, 0, 0)
    harvest.before(0)
    model.eval()
    model.norm.train()
    copied: Any = carrier.capture()[0]["objects"]
    assert copied["model"]["evaluating"] == ["norm"]
    model(torch.randn(5, 3)).square().mean().backward()
    leaf = harvest.leaf(0, 1.0, {})
    harvest.before(1)
    assert [module.training for module in (model, model.first, model.norm)] == [True, True, False]
    model.eval()
    harvest.install(leaf, "mean")
    assert [module.training for module in (model, model.first, model.norm)] == [True, True, False]
    model.eval()
    copied = carrier.capture()[0]["objects"]
    assert "first" in copied["model"]["evaluating"], "between two passes the modes are those of now"
