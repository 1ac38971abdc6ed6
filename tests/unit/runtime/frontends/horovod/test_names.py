"""Horovod's names in a script that was started alone, with two ranks, and with logical ranks."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import elastic.horovod
import elastic.horovod.torch as hvd
from elastic.errors import ConfigError, NotInPlace
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.horovod import current, elastic_mode
from runtime.frontends.horovod.interrupts import BadArgument, NotInitialized
from runtime.frontends.horovod.trained_modules import modules_of, of_none
from runtime.frontends.horovod.world import RankStanding
from tests.unit.jobs import Recorded, make_job
from tests.unit.runtime.frontends.ddp import threads

ROOT = Path(__file__).parents[5]


@pytest.fixture
def alone() -> Iterator[None]:
    """A script that was started with python."""
    current.shutdown()
    hvd.init()
    yield
    current.shutdown()


@pytest.fixture
def ranks() -> Iterator[RankScript]:
    """A script of four ranks that this thread runs."""
    current.shutdown()
    with threads.seams():
        script = RankScript(4)
        script.connect(make_job(Recorded()))
        script.enter()
        hvd.init()
        yield script
        current.shutdown()


def test_every_name_is_there_and_nothing_is_imported_before_it_is_used() -> None:
    for name in hvd.__all__:
        assert getattr(hvd, name) is not None
    with pytest.raises(AttributeError, match="tensorflow"):
        hvd.tensorflow  # noqa: B018
    program = "import elastic, sys; assert not any('horovod' in name or name == 'torch' for name in sys.modules)"
    faced = "import elastic.horovod.torch, sys; assert 'torch' not in sys.modules"
    for text in (program, faced):
        subprocess.run([sys.executable, "-c", text], check=True, cwd=ROOT)
    assert (hvd.gloo_built(), hvd.nccl_built(), hvd.mpi_threads_supported()) == (True, False, False)
    assert list(map(int, (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product))) == list(range(6))


@pytest.mark.parametrize("name", ["rank", "size", "local_rank", "cross_size", "barrier", "join"])
def test_a_call_before_init_is_named(name: str) -> None:
    current.shutdown()
    with pytest.raises(NotInitialized, match=rf"hvd\.{name}\(\).*before hvd\.init\(\)"):
        getattr(hvd, name)()
    with pytest.raises(ValueError, match="allreduce"):
        hvd.allreduce(torch.ones(1))
    assert not hvd.is_initialized()


def test_one_rank_gets_back_what_it_brings(alone: None) -> None:
    assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_rank(), hvd.is_homogeneous()) == (0, 1, 1, 0, True)
    x = torch.tensor([1.0, 2.0])
    assert hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Sum, prescale_factor=2.0)).tolist() == [2.0, 4.0]
    assert x.tolist() == [2.0, 4.0], "in place"
    assert [one.tolist() for one in hvd.grouped_allreduce([x, x], op=hvd.Max)] == [[2.0, 4.0]] * 2
    assert hvd.allgather(x).tolist() == [2.0, 4.0] and hvd.reducescatter(x).tolist() == [2.0, 4.0]
    assert hvd.alltoall(x, splits=[2])[1].tolist() == [2]
    assert (hvd.broadcast_object({"a": 1}), hvd.allgather_object(3), hvd.join()) == ({"a": 1}, [3], 0)
    weight = torch.ones(2, requires_grad=True)
    hvd.allreduce(weight * 3, op=hvd.Sum).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 3.0]


def test_a_timeline_is_of_a_job_and_is_begun_before_it_is_stopped(
    alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="elastic run"):
        hvd.start_timeline("trace.json")
    with pytest.raises(BadArgument, match="no timeline has begun"):
        hvd.stop_timeline()
    monkeypatch.setenv("ELASTIC_JOB_DIR", str(tmp_path / "none"))
    hvd.start_timeline(str(tmp_path / "trace.json"))
    with pytest.raises(BadArgument, match=r"trace\.json has begun"):
        hvd.start_timeline("other.json")
    with pytest.raises(ConfigError, match="was not written"):
        hvd.stop_timeline()


def test_a_commit_holds_for_weights_that_were_tied_before(alone: None) -> None:
    """A commit is written over the one before, in which they had one memory."""
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    state = hvd.elastic.TorchState(nn.Sequential(first, second))
    second.weight = nn.Parameter(torch.full((2, 2), 7.0))
    nn.init.constant_(first.weight, 5.0)
    state.commit()
    nn.init.zeros_(first.weight)
    state.restore()
    assert [layer.weight.mean().item() for layer in (first, second)] == [5.0, 7.0]


def test_a_commit_takes_tensors_that_want_gradients_or_share_their_elements(alone: None) -> None:
    """As an optimizer of a script's own may have in its state."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight] = {"teacher": nn.Parameter(torch.ones(3)), "scale": torch.ones(1).expand(3)}
    state = hvd.elastic.TorchState(None, optimizer)
    for _ in range(2):
        optimizer.state[weight]["teacher"] = nn.Parameter(torch.full((3,), 2.0))
        state.commit()
    optimizer.state[weight].clear()
    state.restore()
    assert [value.sum().item() for value in optimizer.state[weight].values()] == [6.0, 3.0]


def test_a_state_goes_back_to_its_commit_as_often_as_it_is_asked_to(alone: None) -> None:
    """An optimizer takes the tensors that it is given for its own, and would change those of the commit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state = hvd.elastic.TorchState(model, optimizer, epoch=0)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()

    def now() -> list[Any]:
        moments = [entry["momentum_buffer"].clone() for entry in optimizer.state.values()]
        return [*moments, *(tensor.clone() for tensor in model.state_dict().values())]

    for epoch in range(3):
        step()
        state.epoch = epoch
        state.commit()
        committed = now()
        for _ in range(2):
            step()
            state.epoch = -1
            state.restore()
            assert all(map(torch.equal, now(), committed)) and state.epoch == epoch


def test_another_thread_may_ask_who_it_is(alone: None) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(hvd.size).result() == 1


def test_wrong_arguments_are_named(alone: None) -> None:
    x = torch.ones(3)
    calls: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: hvd.allreduce(x, average=True, op=hvd.Sum), "give one of them"),
        (lambda: hvd.allreduce(3.0), "float"),
        (lambda: hvd.broadcast(x, 1), "root_rank=1"),
        (lambda: hvd.alltoall(x, splits=[1]), "splits"),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), "without a dimension"),
        (lambda: hvd.allreduce(x.long(), op=hvd.Adasum), "floats"),
        (lambda: hvd.broadcast_parameters(3, 0), "state_dict"),
        (lambda: hvd.add_process_set([0, 7]), "different ranks"),
        (lambda: hvd.ProcessSet([0]).size(), "was not added"),
    )
    for call, said in calls:
        with pytest.raises(BadArgument, match=said):
            call()
    with pytest.raises(ConfigError, match="no MPI"):
        hvd.init(comm=[0])


def optimizer_of(model: nn.Module, **options: Any) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), **options)


def test_the_optimizer_is_the_one_that_was_given(alone: None) -> None:
    model = nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer: Any = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), op=hvd.Sum)
    assert id(optimizer) == id(plain) and torch.optim.SGD in type(optimizer).__mro__
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert torch.equal(model.weight, before - 1.0) and optimizer.param_groups[0]["lr"] == 0.5
    copied = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(copied)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(BadArgument, match="zero_grad"):
        optimizer.zero_grad()
    optimizer.synchronize()
    nn.utils.clip_grad_value_(model.parameters(), 0.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert not any(weight.grad is None or weight.grad.any() for weight in model.parameters())
    optimizer.zero_grad()


def test_an_optimizer_counts_its_backward_calls(alone: None) -> None:
    model = nn.Linear(2, 1)
    optimizer = optimizer_of(model, backward_passes_per_step=2)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(BadArgument, match="backward_passes_per_step=2"):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"gradient_predivide_factor": 2.0, "op": 1}, "hvd.Average only"),
        ({"groups": -1}, "groups"),
        ({"groups": [[3]]}, "list of parameters"),
        ({"op": 17}, "no reduction"),
    ],
)
def test_options_of_an_optimizer_are_checked(alone: None, options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        optimizer_of(nn.Linear(2, 1), **options)


def test_names_of_parameters_are_checked(alone: None) -> None:
    model = nn.Linear(2, 1)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    for named, said in (
        ([("a", model.weight), ("a", model.bias)], "a twice"),
        ([("a", model.weight)], "no name"),
        ([model.weight, model.bias], "pairs"),
    ):
        with pytest.raises(BadArgument, match=said):
            hvd.DistributedOptimizer(plain, named_parameters=named)
    optimizer_of(model)
    with pytest.raises(BadArgument, match="one already"):
        hvd.DistributedOptimizer(optimizer_of(model))


def test_a_state_goes_back_to_its_commit_if_the_script_says_so(alone: None) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = hvd.elastic.TorchState(model, optimizer, batch=3)
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.batch)])
    raised: list[BaseException] = [hvd.HorovodInternalError("lost"), hvd.HostsUpdatedInterrupt(skip_sync=True)]
    committed = model.weight.detach().clone()

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> list[float]:
        seen = [state.batch, float(model.weight.detach())]
        state.batch += 1
        with torch.no_grad():
            model.weight.add_(1.0)
        if raised:
            raise raised.pop(0)
        return seen

    assert train(state) == [4, float(committed) + 1.0], "the second interrupt keeps what was done"
    assert resets == [3, 4]
    state.commit()
    state.model = other = nn.Linear(1, 1)
    with torch.no_grad():
        other.weight.add_(1.0)
    state.batch = 9
    state.restore()
    assert state.batch == 5 and state.model is other


def test_a_sampler_deals_what_is_left(alone: None) -> None:
    sampler = hvd.elastic.ElasticSampler(list(range(6)), shuffle=False)
    sampler.record_batch(0, 2)
    state = hvd.elastic.TorchState(sampler=sampler)
    state.on_reset()
    assert list(sampler) == [2, 3, 4, 5] and len(sampler) == 4
    sampler.load_state_dict({"epoch": 1, "processed_num": 5})
    assert list(sampler) == [5]
    sampler.set_epoch(2)
    assert len(list(sampler)) == 6


@pytest.mark.parametrize(("left", "dealt"), [(1, [[0]] * 4), (3, [[0], [1], [2], [0]]), (0, [[]] * 4)])
def test_each_rank_has_equally_many_samples_however_few_are_left(
    monkeypatch: pytest.MonkeyPatch, left: int, dealt: list[list[int]]
) -> None:
    found = []
    for rank in range(4):
        standing = SimpleNamespace(standing=RankStanding(rank, 4))
        monkeypatch.setattr(elastic_mode, "here", lambda call, standing=standing: standing)
        sampler = hvd.elastic.ElasticSampler(range(left), shuffle=False)
        found.append(list(sampler))
        assert len(sampler) == len(found[-1])
    assert found == dealt


def test_modules_are_found_by_their_parameters() -> None:
    student, teacher = nn.Linear(2, 2), nn.Linear(2, 2)
    both = nn.ModuleList([student, teacher])
    assert modules_of(list(student.parameters())) == [student], "the part that has them all"
    assert modules_of(list(both.state_dict().values())) == [both]
    loose = nn.Parameter(torch.ones(1))
    assert modules_of([loose]) == [] and of_none([loose, student.weight], [student]) == [loose]


def test_logical_ranks_refuse_what_they_cannot(ranks: RankScript) -> None:
    assert (hvd.size(), hvd.local_size(), hvd.join()) == (4, 4, 3)
    model = nn.Linear(2, 1)
    with pytest.raises(BadArgument, match="without --ranks"):
        optimizer_of(model, op=hvd.Adasum)
    loose = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="belong to no"):
        hvd.DistributedOptimizer(torch.optim.SGD([loose], lr=1.0))
    with pytest.raises(BadArgument, match="part of the ranks"):
        hvd.add_process_set([0, 1])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with pytest.raises(BadArgument, match="rank 0's"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    optimizer = optimizer_of(model)
    assert ranks.objects.by_kind["model"] == [model], "once"
    with pytest.raises(NotInPlace, match=r"steps without a backward\(\) of its model behind a batch"):
        optimizer.step()


TWO_RANKS = """
import torch
import elastic.horovod.torch as hvd
from elastic.errors import Disagree
hvd.init()
rank = hvd.rank()
x = torch.ones(3) * (rank + 1)
assert hvd.size() == 2 and hvd.local_rank() == rank
assert hvd.allreduce(x).tolist() == [1.5] * 3 and hvd.allreduce(x.short(), op=hvd.Sum).tolist() == [3] * 3
assert hvd.allreduce(x, op=hvd.Adasum).tolist() == [1.5] * 3
assert hvd.allgather(x[: rank + 1]).tolist() == [1.0, 2.0, 2.0]
assert hvd.broadcast(x > 1, 1).tolist() == [True] * 3
assert hvd.alltoall(torch.arange(4) + 10 * rank).tolist() == [2 * rank, 2 * rank + 1, 10 + 2 * rank, 11 + 2 * rank]
assert hvd.reducescatter(torch.arange(5.0), op=hvd.Sum).tolist() == ([6.0, 8.0] if rank else [0.0, 2.0, 4.0])
assert hvd.allgather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
one = torch.tensor(rank == 1)
assert torch.equal(hvd.allreduce(one, op=hvd.Max), torch.tensor(True)), "no dimension more"
assert hvd.allreduce(torch.ones(2, 0), op=hvd.Adasum).shape == (2, 0)
assert hvd.allgather(torch.tensor(rank)).tolist() == [0, 1] and hvd.allgather(torch.ones(0, 2)).shape == (0, 2)
assert hvd.allgather(torch.ones(3 - rank, 0)).shape == (5, 0)
try:
    hvd.allgather(x) if rank else hvd.allreduce(x)
except Disagree as error:
    assert "rank 0: allreduce" in str(error) and "rank 1: allgather" in str(error)
else:
    raise AssertionError("different calls were not seen")
class CannotBeSent:
    def __reduce__(self):
        raise AssertionError("only the root sends its object")
assert hvd.broadcast_object({"rank": rank} if rank else CannotBeSent(), 1) == {"rank": 1}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank, momentum=0.9)
(model(torch.ones(2)) * (rank + 1)).sum().backward()
optimizer.step()
hvd.broadcast_optimizer_state(optimizer, root_rank=1)
assert optimizer.param_groups[0]["lr"] == 1.1
assert optimizer.state[model.bias]["momentum_buffer"].tolist() == [2.0]
own = hvd.add_process_set([1])
if rank:
    assert hvd.broadcast_object("own", 1, process_set=own) == "own"
if rank:
    assert hvd.allreduce(x, op=hvd.Sum, process_set=own).tolist() == [2.0] * 3
if not rank:
    hvd.barrier()  # the other one has joined
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [1.0] * 3
assert hvd.join() == 0
norm = hvd.SyncBatchNorm(3)
whole = torch.arange(12.0).reshape(4, 3).requires_grad_()
out = norm(whole[2 * rank :][:2])
wanted = torch.nn.BatchNorm1d(3)
assert torch.allclose(out, wanted(whole)[2 * rank :][:2], atol=1e-5)
assert torch.allclose(norm.running_var, wanted.running_var)
for dtype, mean, near in ((torch.float32, 1000.0, 4e-3), (torch.float16, 10.0, 1e-2), (torch.bfloat16, 10.0, 5e-2)):
    whole = (mean + 0.5 * torch.randn(8, 3, 20, 20, generator=torch.Generator().manual_seed(1))).to(dtype)
    own = slice(0, 2) if rank == 0 else slice(2, 8)
    part, norm, wanted = whole[own].requires_grad_(), hvd.SyncBatchNorm(3), torch.nn.BatchNorm2d(3).double()
    whole = whole.detach().double().requires_grad_()
    out, of_whole = norm(part), wanted(whole)
    assert out.dtype is dtype and torch.allclose(out.double(), of_whole[own], atol=near), (dtype, out, of_whole)
    assert torch.allclose(norm.running_var.double(), wanted.running_var, atol=1e-4)
    out.float().pow(3).sum().backward()
    of_whole.pow(3).sum().backward()
    assert part.grad.dtype is dtype and torch.allclose(part.grad.double(), whole.grad[own], atol=40 * near), dtype
from runtime.frontends.horovod.arithmetic import adasum
factors = torch.tensor([[1.0, -1.0], [5.0, 1.0]])
weight, scale, *copies = [torch.nn.Parameter(torch.ones(shape)) for shape in (2, (), 2, 2)]
optimizer = hvd.DistributedOptimizer(torch.optim.Adam([weight, scale], lr=0.1), op=hvd.Adasum)
alone = [torch.optim.Adam([copy], lr=0.1) for copy in copies]
for _ in range(2):
    optimizer.zero_grad()
    (weight * factors[rank]).sum().add(scale).backward()
    optimizer.synchronize()  # reduces nothing
    assert weight.grad.tolist() == factors[rank].tolist()
    optimizer.step()
    before = copies[0].detach().clone()
    for own, copy, factor in zip(alone, copies, factors):
        copy.grad = factor
        own.step()
    with torch.no_grad():
        change = adasum([copy - before for copy in copies])
        for copy in copies:
            copy.copy_(before + change)
assert torch.equal(weight, copies[0]) and scale.shape == (), (weight, copies)
try:
    with optimizer.skip_synchronize():
        raise AssertionError("skip_synchronize() was not refused")
except ValueError as error:
    assert "hvd.Adasum" in str(error)
weight = torch.ones(2, requires_grad=True)
hvd.allgather(weight * (rank + 1)).sum().backward()
assert weight.grad.tolist() == [rank + 1.0] * 2
hvd.shutdown()
hvd.init()
hvd.barrier()
"""


def test_two_ranks_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=_environment())
    assert done.returncode == 0, done.stderr


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_numbers_of_workers_of_a_function_are_checked() -> None:
    for np, least, most in ((0, None, None), (2, 3, None), (2, None, 1)):
        with pytest.raises(ConfigError, match=r"ascending|at least 1"):
            elastic.horovod.run(print, np=np, min_np=least, max_np=most)
