"""The members of an elastic job: whoever dies or comes, the others go on, alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.unit.jobs import one_thread
from tests.unit.runtime.frontends.horovod.members import BATCH, SAMPLES, Worker, together, train
from tests.unit.thoroughness import some


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with one_thread(), torch.autograd.set_multithreading_enabled(False):
        yield


def alike(workers: dict[str, Worker], names: set[str]) -> None:
    """These workers have ended with one model and one metric."""
    ended = [workers[name] for name in sorted(names)]
    assert all(worker.weights == ended[0].weights for worker in ended)
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
    """Also one whose copy is older, and which goes with the results of the others until it has caught up."""
    script = partial(train, norm=False)  # buffers are a worker's own, and this world compares them in a newcomer
    world, workers = together(2, script, newcomers=1, asked_at=0, copy_at=copied, admit_at=admitted)
    assert world.joined_at == {"n0": admitted}
    alike(workers, {"w0", "w1", "n0"})
    assert set(workers["w0"].sizes) == {2, 3} and set(workers["n0"].sizes) <= {2, 3}
    members = [sample for name in ("w0", "w1", "n0") for sample in workers[name].samples]
    assert set(members) == {(epoch, number) for epoch in (0, 1) for number in range(SAMPLES)}


def test_a_newcomer_and_then_a_death() -> None:
    script = partial(train, norm=False)
    world, workers = together(2, script, kills={"w0": (16, 0)}, newcomers=1, asked_at=0, copy_at=1, admit_at=2)
    assert world.joined_at == {"n0": 2}
    alike(workers, {"w1", "n0"})


def test_commits_may_be_rare() -> None:
    script = partial(train, every=5)
    for kills in ({"w0": (4, 0)}, {"w1": (9, 0)}):
        _, workers = together(3, script, kills=kills)
        alike(workers, {"w0", "w1", "w2"} - kills.keys())
