"""Any elastic script, any deaths, any newcomers: all that are there at the end have the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.jobs import one_thread
from tests.unit.runtime.frontends.horovod.drawn_scripts import DrawnScript, drawn
from tests.unit.runtime.frontends.horovod.members import together
from tests.unit.thoroughness import some
from tests.unit.worlds import Killed


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with one_thread(), torch.autograd.set_multithreading_enabled(False):
        yield


def script(**fields: Any) -> DrawnScript:
    plain = {"between": "none", "behind": "none", "evaluation": "none", "evaluates_first": False, "light": False}
    return DrawnScript(**{"steps": 8, "every": 1, "first": 8, "epoch": 8, "top": ("sum",), **plain, **fields})


@pytest.mark.parametrize(("copied", "admitted"), [(0, 2), (1, 1), (1, 3), (5, 7), (3, 8)])
def test_a_newcomer_makes_the_collectives_at_the_top_of_the_function_with_the_others(
    copied: int, admitted: int
) -> None:
    """Its copy may be of an earlier commit than the one in which it is admitted: it goes on with their results."""
    world, workers = together(2, script().run, newcomers=[(copied, admitted)])
    assert world.joined_at == {"n0": admitted}
    assert {name: worker.weights for name, worker in workers.items()} == dict.fromkeys(workers, workers["w0"].weights)
    for name in ("w0", "w1"):
        assert [step for step, _ in workers[name].samples] == list(range(1, 9)), "no step is done twice"


@pytest.mark.parametrize("operation", range(10))
def test_a_donor_that_is_lost_before_it_has_told_of_its_copy(operation: int) -> None:
    """The newcomer has copied in the second commit. Whoever misses the donor there begins its function at its top."""
    world, workers = together(3, script().run, kills={"w0": (operation, 0)}, newcomers=[(2, 4)])
    assert world.joined_at == {"n0": 4}
    assert workers["w1"].weights == workers["w2"].weights == workers["n0"].weights != []
    assert len(workers["w1"].samples) == 8


@pytest.mark.parametrize("seed", some(range(400), 8, "drawn scripts"))
def test_a_newcomer_is_where_the_others_are_whatever_the_script_does(seed: int) -> None:
    case = drawn(seed)
    kills, newcomers = case.kills, case.newcomers
    world, workers = together(case.workers, case.script.run, kills=kills, newcomers=newcomers, asked_at=case.asked_at)
    killed = {name for name, error in world.errors.items() if isinstance(error, Killed)}
    ended = [workers[name] for name in sorted(workers.keys() - killed)]
    assert all(worker.weights == ended[0].weights and worker.weights for worker in ended), case
    assert {f"n{number}" for number in range(len(newcomers))} == world.joined_at.keys()
    for worker in ended:
        steps = [step for step, _ in worker.samples]
        assert steps == list(range(steps[0] if steps else case.script.steps + 1, case.script.steps + 1)), case
