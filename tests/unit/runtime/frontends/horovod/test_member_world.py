"""The members of an elastic job: whoever dies or comes, the others go on, alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import elastic.horovod.torch as hvd
from elastic.errors import ElasticError
from runtime.loop import loops
from tests.unit.jobs import one_thread
from tests.unit.runtime.frontends.horovod.members import BATCH, SAMPLES, Worker, together, train
from tests.unit.thoroughness import some
from tests.unit.worlds import FakeMember


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with one_thread(), torch.autograd.set_multithreading_enabled(False):
        yield


def alike(workers: dict[str, Worker], names: set[str]) -> None:
    """These workers have ended with one model and one metric."""
    ended = [workers[name] for name in sorted(names)]
    assert all(worker.weights == ended[0].weights for worker in ended)
    assert {worker.counted for worker in ended} == {ended[0].counted}
    assert {worker.metric for worker in ended} == {float(sum(range(len(ended))))}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_workers_divide_each_epoch_and_train_one_model(number: int) -> None:
    _, workers = together(number)
    alike(workers, set(workers))
    samples = sorted(sample for worker in workers.values() for sample in worker.samples)
    assert samples == [(epoch, number) for epoch in (0, 1) for number in range(SAMPLES)]
    assert {worker.steps for worker in workers.values()} == {2 * SAMPLES // BATCH // number}
    assert {tuple(set(worker.sizes)) for worker in workers.values()} == {(number,)}
    assert {worker.calls for worker in workers.values()} == {1}


@pytest.mark.parametrize("operation", some((1, 2, 3, 4, 5, 6, 7, 20), 3, "horovod members"))
def test_a_lost_worker_costs_its_own_batch_and_no_step(operation: int) -> None:
    _, workers = together(3, kills={"w0": (operation, 0)})
    alive = {"w1", "w2"}
    alike(workers, alive)
    # What it had trained, it had trained; the batch in which it died may be missing.
    trained = [sample for worker in workers.values() for sample in worker.samples]
    missing = {(epoch, number) for epoch in (0, 1) for number in range(SAMPLES)} - set(trained)
    assert len(missing) <= BATCH
    before_the_first_step = operation < 3
    assert all(set(workers[name].sizes) == ({2} if before_the_first_step else {3, 2}) for name in alive)
    assert all(workers[name].calls == (1 if before_the_first_step else 2) for name in alive)


@pytest.mark.parametrize(("copied", "admitted"), some([(1, 1), (2, 2), (1, 3), (4, 6), (9, 9)], 2, "horovod newcomers"))
def test_a_newcomer_takes_part_from_the_commit_in_which_it_is_admitted(copied: int, admitted: int) -> None:
    """Also one for which no commit has waited, and which goes with the results of the others until it has caught up."""
    script = partial(train, norm=False)  # buffers are a worker's own, and this world compares them in a newcomer
    world, workers = together(2, script, newcomers=1, asked_at=0, copy_at=copied, admit_at=admitted)
    assert world.joined_at == {"n0": admitted}
    assert {name for name, session in world.sessions.items() if session.asked_to_hold} == {"n0"}
    alike(workers, {"w0", "w1", "n0"})
    assert set(workers["w0"].sizes) == {2, 3} and set(workers["n0"].sizes) <= {2, 3}
    members = [sample for name in ("w0", "w1", "n0") for sample in workers[name].samples]
    assert set(members) == {(epoch, number) for epoch in (0, 1) for number in range(SAMPLES)}


def test_a_newcomer_and_then_a_death() -> None:
    script = partial(train, norm=False)
    world, workers = together(2, script, kills={"w0": (16, 0)}, newcomers=1, asked_at=0, copy_at=1, admit_at=2)
    assert world.joined_at == {"n0": 2}
    alike(workers, {"w1", "n0"})


def test_a_commit_waits_in_its_pass_while_a_newcomer_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pass of a millisecond a newcomer with a large model would hardly ever begin to copy."""
    waits = SimpleQueue[float]()
    monkeypatch.setattr(loops, "time", SimpleNamespace(sleep=waits.put))
    together(2, train)
    assert waits.qsize() == 0
    monkeypatch.setattr(FakeMember, "due", True)
    together(2, partial(train, every=5))
    assert waits.qsize() > 0 and {waits.get() for _ in range(waits.qsize())} == {loops.WINDOW_S}


def test_commits_may_be_rare() -> None:
    script = partial(train, every=5)
    for kills in ({"w0": (4, 0)}, {"w1": (9, 0)}):
        _, workers = together(3, script, kills=kills)
        alike(workers, {"w0", "w1", "w2"} - kills.keys())


def test_a_plain_value_may_be_a_workers_own() -> None:
    """As the times in Horovod's elastic benchmark: the workers still end alike."""

    def script(worker: Worker) -> None:
        @hvd.elastic.run  # type: ignore[untyped-decorator]
        def body(state: Any) -> None:
            for _ in range(3):
                state.seconds = [*state.seconds, 1.5 + hvd.rank()]
                state.commit()

        state = hvd.elastic.ObjectState(seconds=[])
        body(state)
        worker.metric = float(sum(state.seconds))

    _, workers = together(2, script)
    assert {worker.metric for worker in workers.values()} == {4.5, 7.5}


def refused(script: Callable[[Worker], None], workers: int = 2) -> str:
    """What the workers are told."""
    with pytest.raises(ElasticError) as told:
        together(workers, script)
    return str(told.value)


def optimizer_of(model: nn.Module) -> Any:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def test_steps_outside_of_the_function_are_refused() -> None:
    def script(worker: Worker) -> None:
        model = nn.Linear(2, 1)
        optimizer = optimizer_of(model)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    assert "outside of a function with @hvd.elastic.run" in refused(script)


@pytest.mark.parametrize("op", ["Min", "Sum"])
def test_workers_in_different_collectives_are_told_which(op: str) -> None:
    def script(worker: Worker) -> None:
        @hvd.elastic.run  # type: ignore[untyped-decorator]
        def body(state: Any) -> None:
            if hvd.rank():
                hvd.allgather(torch.ones(2))
            else:
                hvd.allreduce(torch.ones(2), op=getattr(hvd, op), name="job.loss")

        body(hvd.elastic.ObjectState(epoch=0))

    told = refused(script)
    assert "hvd.allgather(float32[-1])" in told and f" hvd.allreduce(float32[2], op={op}) 'job.loss' after" in told


def test_a_worker_with_fewer_batches_than_the_others_is_told_so() -> None:
    """As where a newcomer's DistributedSampler has another number of ranks than those of the others."""

    def script(worker: Worker) -> None:
        @hvd.elastic.run  # type: ignore[untyped-decorator]
        def body(state: Any) -> None:
            for _ in range(4 - hvd.rank()):
                state.commit()

        body(hvd.elastic.ObjectState(epoch=0))
        hvd.allreduce(torch.ones(1), name="metric")

    told = refused(script)
    assert "equally many batches" in told and "metric" in told


def test_a_script_that_only_asks_who_it_is_ends_well() -> None:
    together(2, lambda worker: print(hvd.rank(), hvd.size()))


def test_join_is_refused_and_so_are_values_that_cannot_be_copied() -> None:
    assert "ElasticSampler" in refused(lambda worker: print(hvd.join()))

    def script(worker: Worker) -> None:
        hvd.elastic.run(lambda state: None)(hvd.elastic.ObjectState(thing=object()))

    assert "object" in refused(script)


def test_a_second_call_of_the_function_is_refused() -> None:
    """A newcomer would begin in the first one, while the others are in the second."""

    def script(worker: Worker) -> None:
        for _ in range(2):
            hvd.elastic.run(lambda state: state.commit())(hvd.elastic.ObjectState(epoch=0))

    assert "a second time in an elastic job" in refused(script)


def test_all_collectives_of_members() -> None:
    """Small ones and large ones, before the function and in it."""

    def script(worker: Worker) -> None:
        rank = hvd.rank()
        assert hvd.allreduce(torch.tensor([1.0 + rank]), op=hvd.Sum).tolist() == [3.0]
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1), root_rank=0)
        cannot_be_sent = object()
        assert hvd.broadcast_object({"rank": rank} if rank else cannot_be_sent, root_rank=1) == {"rank": 1}

        @hvd.elastic.run  # type: ignore[untyped-decorator]
        def body(state: Any) -> None:
            large = torch.arange(5000.0) + rank
            assert hvd.allgather(large[: 3000 + rank]).numel() == 6001
            assert torch.equal(hvd.allreduce(large), torch.arange(5000.0) + 0.5)
            assert torch.equal(hvd.allreduce(large.double(), op=hvd.Max), torch.arange(5000.0).double() + 1)
            assert torch.equal(hvd.broadcast(large, 1), torch.arange(5000.0) + 1)
            assert hvd.allreduce(large.half() * 0 + rank, op=hvd.Sum).dtype is torch.float16
            assert hvd.allreduce(torch.tensor([3, 4]) + rank, op=hvd.Average).tolist() == [3, 4]
            assert hvd.allreduce(torch.tensor([2.0, 0.0]), op=hvd.Adasum).tolist() == [2.0, 0.0]
            assert hvd.alltoall(torch.arange(4) + 10 * rank).tolist()[:2] == [2 * rank, 2 * rank + 1]
            assert hvd.allgather_object([rank, "x" * 9000]) == [[0, "x" * 9000], [1, "x" * 9000]]
            hvd.barrier()
            state.rank = rank
            state.save()
            state.sync()
            assert state.rank == 0

        body(hvd.elastic.ObjectState(rank=0))

    together(2, script)
