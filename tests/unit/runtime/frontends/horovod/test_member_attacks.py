"""Deaths and newcomers where they hurt: many tensors, calls that are under way, gradients that are half collected."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

import elastic.horovod.torch as hvd
from tests.unit.jobs import one_thread
from tests.unit.runtime.frontends.horovod import attacks
from tests.unit.runtime.frontends.horovod.members import Worker, together
from tests.unit.thoroughness import some


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with one_thread(), torch.autograd.set_multithreading_enabled(False):
        yield


def alike(workers: dict[str, Worker], names: set[str]) -> None:
    ended = [workers[name].weights for name in sorted(names)]
    assert ended[0] and all(weights == ended[0] for weights in ended)


@pytest.mark.parametrize("operation", some(range(1, attacks.OPERATIONS), 2, "horovod attacks"))
@pytest.mark.parametrize("options", [{}, {"compression": hvd.Compression.fp16}, {"op": hvd.Sum}])
def test_many_tensors_survive_a_death_in_any_operation(operation: int, options: dict[str, Any]) -> None:
    _, workers = together(3, partial(attacks.many, **options), kills={"w1": (operation, 0)})
    alike(workers, {"w0", "w2"})
    assert set(workers["w0"].sizes) <= {2, 3} and len(workers["w0"].sizes) == attacks.STEPS


@pytest.mark.parametrize("operation", some(range(3, 27), 6, "horovod rows"))
@pytest.mark.parametrize("dies", ["w0", "w1"])
def test_rows_of_a_lost_worker_are_there_or_missing_as_a_whole(operation: int, dies: str) -> None:
    _, workers = together(3, attacks.rows, kills={dies: (operation, 0)})
    alike(workers, {"w0", "w1", "w2"} - {dies})


@pytest.mark.parametrize("operation", some(range(3, 18), 5, "horovod roots"))
@pytest.mark.parametrize("dies", ["w0", "w1", "w2"])
def test_a_broadcast_is_that_of_its_root_whoever_is_lost(operation: int, dies: str) -> None:
    """If the root itself is lost in the call, it is that of the next one, or of the last."""
    lost = int(dies[1])
    _, workers = together(3, attacks.from_each_root, kills={dies: (operation, 0)})
    alike(workers, {"w0", "w1", "w2"} - {dies})
    for root, said in workers["w1" if lost == 0 else "w0"].samples:
        assert said == root or (root, said) == (lost, {0: 1, 1: 2, 2: 1}[lost])


def test_workers_that_step_by_adasum_end_with_one_model() -> None:
    """The moments of their optimizers are their own."""
    script = partial(attacks.many, op=hvd.Adasum)
    _, workers = together(2, script)
    alike(workers, {"w0", "w1"})
    _, workers = together(2, script, kills={"w1": (8, 0)})
    alike(workers, {"w0"})


def test_half_precision_and_a_newcomer() -> None:
    script = partial(attacks.many, dtype=torch.bfloat16, compression=hvd.Compression.fp16)
    world, workers = together(2, script, newcomers=1, asked_at=0, copy_at=1, admit_at=2)
    assert world.joined_at == {"n0": 2}
    alike(workers, {"w0", "w1", "n0"})


@pytest.mark.parametrize("dies_at", range(3))
def test_a_death_between_a_call_and_its_result(dies_at: int) -> None:
    _, workers = together(3, partial(attacks.under_way, dies_at=dies_at))
    alike(workers, {"w0", "w2"})
    # What w1 has brought counts; of the calls behind that the others have theirs alone, until they are numbered anew.
    assert workers["w0"].weights == [6.0] * (4 + dies_at) + [4.0] * (2 - dies_at) + [3.0] * 6


def test_grouped_calls_and_a_newcomer() -> None:
    world, workers = together(2, attacks.grouped, newcomers=1, asked_at=0, copy_at=2, admit_at=2)
    assert world.joined_at == {"n0": 2}
    assert set(workers["w0"].sizes) == {2, 3}
    alike(workers, {"w0", "w1", "n0"})


@pytest.mark.parametrize("dies", ["w0", "w2"])
def test_a_death_between_two_backward_calls_of_a_step(dies: str) -> None:
    _, workers = together(3, partial(attacks.accumulated, dies=dies))
    alike(workers, {"w0", "w1", "w2"} - {dies})


def test_a_function_that_fails_on_all_workers_goes_back_to_its_commit() -> None:
    """With its momentum, its samples and its values: the result is that of a run in which nothing has failed."""
    _, wanted = together(2, attacks.rolled_back)
    _, workers = together(2, partial(attacks.rolled_back, fails_at=4))
    assert {worker.calls for worker in workers.values()} == {1}
    assert workers["w0"].weights == wanted["w0"].weights
    alike(workers, {"w0", "w1"})
    samples = sorted(number for worker in workers.values() for _, number in worker.samples)
    assert samples == list(range(24))


@pytest.mark.parametrize("operation", some(range(8, 18), 2, "horovod rollback"))
def test_a_worker_is_lost_while_the_others_go_back(operation: int) -> None:
    _, workers = together(3, partial(attacks.rolled_back, fails_at=3), kills={"w0": (operation, 0)})
    alike(workers, {"w1", "w2"})


def test_a_function_that_never_commits_survives_a_death() -> None:
    _, workers = together(3, attacks.without_commits, kills={"w0": (4, 0)})
    alike(workers, {"w1", "w2"})
    assert workers["w1"].sizes == [3] * attacks.STEPS, "size() changes in a commit"
