"""Any elastic script, any deaths, any newcomers: all that are there at the end have the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from elastic.errors import JoinMissed
from tests.unit.jobs import one_thread
from tests.unit.runtime.frontends.horovod.drawn_scripts import drawn
from tests.unit.runtime.frontends.horovod.members import together
from tests.unit.thoroughness import some
from tests.unit.worlds import Killed


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with one_thread(), torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.mark.parametrize("seed", some(range(400), 8, "drawn scripts"))
def test_a_newcomer_is_where_the_others_are_whatever_the_script_does(seed: int) -> None:
    case = drawn(seed)
    world, workers = together(
        case.workers,
        case.script.run,
        kills=case.kills,
        may_miss=True,
        newcomers=case.newcomers,
        asked_at=case.asked_at,
    )
    missed = {name for name, error in world.errors.items() if isinstance(error, JoinMissed)}
    killed = {name for name, error in world.errors.items() if isinstance(error, Killed)}
    assert missed <= {"n0", "n1"} and (killed or not missed), (case, world.errors)
    ended = [workers[name] for name in sorted(workers.keys() - missed - killed)]
    assert all(worker.weights == ended[0].weights and worker.weights for worker in ended), case
    for worker in ended:
        steps = [step for step, _ in worker.samples]
        assert steps == list(range(steps[0], case.script.steps + 1)) if steps else True, case
