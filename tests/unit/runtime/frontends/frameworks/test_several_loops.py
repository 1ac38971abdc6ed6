"""Several training loops of one script, as two fit() of a framework, in worlds with deaths, newcomers and resumed runs:
no trace of them is left, in any loop and between two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import ConfigError, UnknownBatches
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.frameworks.plain_state import plain_attributes, set_attributes
from runtime.frontends.frameworks.rank_batches import RankBatches
from runtime.frontends.frameworks.step_loop import StepLoop
from runtime.loop.step import Step
from runtime.loop.training.gathering import gather
from runtime.session import LoopPlace, Session
from tests.unit.jobs import Recorded, dataset, make_job, one_thread
from tests.unit.runtime.frontends.frameworks.test_step_loop import loader
from tests.unit.thoroughness import some
from tests.unit.worlds import FakeMember, Killed, World

RANKS = 4
STEPS = 17
"""Of the four loops: 5, 4, 4, 4."""
Loss = Callable[[torch.Tensor, torch.Tensor], Any]


class Fit:
    """One loop of a framework over 4 steps an epoch. It stops behind the step in which its loss is below `enough`."""

    def __init__(self, script: RankScript, model: nn.Module, optimizer: torch.optim.Optimizer, enough: float) -> None:
        self.script, self.model, self.optimizer, self.enough = script, model, optimizer, enough
        self.losses: list[float] = []
        self.loop = StepLoop(script)
        self.loss: Loss = lambda x, y: F.cross_entropy(self.model(x), y)

    def state_dict(self) -> dict[str, Any]:
        return plain_attributes(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_attributes(self, state)

    def closure(self, batches: list[Any], step: Step) -> None:
        self.model.train()
        for x, y in batches[:1]:  # a newcomer that does not know its epoch may have none
            loss = self.loss(x, y)
            loss.backward()
            step.log(loss=float(loss.detach()))

    def train(self, epochs: int, samples: int = 70) -> list[float]:
        """Returns the loss of each step."""
        loop, source = self.loop, RankBatches(loader(samples), RANKS, 2, seed=0)
        if loop.begin(source, self, {"model": self.model, "optimizer": self.optimizer}):
            self.epochs(range(loop.epoch, epochs), len(source))
            loop.end()
            with torch.no_grad():  # as a framework that puts its best weights back
                next(self.model.parameters()).mul_(0.5)
        loop.close()
        source.close()
        return list(self.losses)

    def epochs(self, epochs: range, length: int) -> None:
        loop = self.loop
        for epoch in epochs:
            position = 0
            if loop.entered:
                loop.enter(self.closure)
                if loop.epoch > epoch:
                    continue
                loop.entered, position = False, loop.position
            else:
                loop.begin_epoch(epoch)
            for _ in range(position, length):
                assert loop.next()
                self.losses.append(loop.run(self.closure)["loss"])
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.losses[-1] < self.enough:
                    return


def net(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 2))


def adam(model: nn.Module, rate: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=rate)


def score(script: RankScript, model: nn.Module) -> float:
    """Of an evaluation that is spread over the workers, if others are here."""

    def part(number: int) -> float:
        with torch.no_grad():
            return float(model(dataset(30).tensors[0][number * 7 : number * 7 + 7]).sum())

    model.eval()
    parts = [part(number) for number in range(4)] if script.passing else gather(script.training, "score", 4, part)
    return sum(parts)


def train(job_of: Session, checkpoints: Settings | None = None) -> str:
    """Four loops: a model; its head alone, at a rate that follows from the first loop; a student of it; all of it again
    with the optimizer of the first loop."""
    job = make_job(job_of, checkpoints=checkpoints)
    script = RankScript(RANKS)
    script.connect(job)
    torch.manual_seed(1)
    model = net(8)
    optimizer = adam(model)
    said: list[Any] = [Fit(script, model, optimizer, 0.6).train(3)]
    said += [
        score(script, model),
        len(said[0]),
        float(torch.rand(())),
        float(optimizer.state_dict()["state"][0]["step"]),
    ]
    model[0].requires_grad_(False)
    rate = 0.01 + 0.001 * len(said[0]) + abs(said[1]) / 1000
    said.append(Fit(script, model, torch.optim.SGD(model[4].parameters(), rate, momentum=0.9), 0.0).train(1))
    said.append(score(script, model))
    student = net(5)
    fit = Fit(script, student, adam(student), 0.0)
    fit.loss = lambda x, y: F.mse_loss(student(x), model.eval()(x).detach())
    said.append(fit.train(2, samples=36))
    said.append(score(script, student))
    model[0].requires_grad_(True)
    said.append(Fit(script, model, optimizer, 0.0).train(1))
    said += [score(script, model), score(script, student), float(torch.rand(()))]
    training = script.training
    for end in training.loops.ends:
        assert cast(dict[str, Any], end.header["objects"]).keys() == {"model", "optimizer", "framework", "epoch"}
    training.end_loop()
    digest = job.digest()
    job.close()
    return f"{digest} {said}"


def ran(world: World, **how: Any) -> World:
    with one_thread():
        world.run(train, **how)
    return world


@pytest.fixture(scope="module")
def quiet() -> str:
    world = ran(World(1))
    assert world.errors == {}
    return world.digests["w0"]


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_every_world_has_the_same_bits_and_results(workers: int, quiet: str) -> None:
    world = ran(World(workers))
    assert {name: str(error) for name, error in world.errors.items()} == {}
    assert set(world.digests.values()) == {quiet}


DEATHS = [(operation, units) for operation in range(32) for units in (0, 1)]


@pytest.mark.parametrize(("operation", "units"), some(DEATHS, 8, "deaths in several loops"))
def test_a_death_in_any_operation_leaves_no_trace(operation: int, units: int, quiet: str) -> None:
    """Also in the evaluations between the loops, and where a loop begins."""
    world = ran(World(3, kills={"w0": (operation, units)}))
    assert {name for name, error in world.errors.items() if not isinstance(error, Killed)} == set()
    assert set(world.digests.values()) == {quiet}


@pytest.mark.parametrize(("step", "behind"), some([(s, b) for s in range(STEPS) for b in (0, 1)], 8, "joins in loops"))
def test_a_newcomer_has_what_the_loops_before_have_left(step: int, behind: int, quiet: str) -> None:
    """In each step of each loop; also with a copy of the step before, from the loop before."""
    world, earlier = World(2), max(0, step - behind)
    ran(world, newcomers=1, asked_at=earlier, copy_at=earlier, admit_at=step)
    assert {name: str(error) for name, error in world.errors.items()} == {}
    assert world.digests == dict.fromkeys(("w0", "w1", "n0"), quiet)


@pytest.mark.parametrize("step", some(list(range(1, STEPS)), 6, "resumed in loops"))
def test_a_run_that_goes_on_has_what_the_loops_before_have_left(step: int, quiet: str, tmp_path: Path) -> None:
    with one_thread():
        first = Recorded()
        train(first, Settings(root=str(tmp_path), every=f"{step} steps", keep="last 30"))
        assert len(first.records) == STEPS
        entry = next(name for name in Series(storage_at(str(tmp_path))).names() if name.step == step)
        session = Recorded()
        assert train(session, Settings(root=str(tmp_path), resume=str(entry))) == quiet
    assert session.records[0].step == step


def test_sums_of_integers_leave_no_trace_either() -> None:
    """Their exponents begin anew in each loop."""
    alone = ran(World(1, reduction="fixed"))
    world = World(3, kills={"w0": (25, 0)}, reduction="fixed")
    ran(world, newcomers=1, asked_at=13, copy_at=13, admit_at=14)
    assert {name for name, error in world.errors.items() if not isinstance(error, Killed)} == set()
    assert world.digests == dict.fromkeys(("w1", "w2", "n0"), alone.digests["w0"])


def test_a_loop_inside_of_a_loop_is_refused() -> None:
    def run(session: FakeMember) -> str:
        script = RankScript(RANKS)
        script.connect(make_job(session))
        model = net(8)
        fit = Fit(script, model, adam(model), 0.0)

        def inner(x: torch.Tensor, y: torch.Tensor) -> Any:
            return Fit(script, model, adam(model), 0.0).train(1)

        fit.loss = inner
        fit.train(1)
        return ""

    world = World(1)
    with one_thread():
        world.run(run)
    assert isinstance(world.errors["w0"], ConfigError)
    assert "inside of another one" in str(world.errors["w0"])


@pytest.mark.parametrize("beside", [0, 2])
def test_a_loop_is_refused_where_memory_lacks_for_what_the_one_before_has_left(
    beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers on one machine are asked at about the same time, and each takes its part. beside: others of them."""
    monkeypatch.setattr("runtime.loop.training.earlier_loops.available_bytes", lambda: 3000 if beside else 100)
    others = LoopPlace(1, 0, ("w0.0.0", *(f"w0.{slot + 1}.0" for slot in range(beside)), "w1.0.0"), "0" * 32)
    monkeypatch.setattr(FakeMember, "place", lambda self: others)

    def run(session: FakeMember) -> str:
        script = RankScript(RANKS)
        script.connect(make_job(session))
        model = net(8)
        Fit(script, model, adam(model), 0.0).train(1)
        with pytest.raises(ConfigError, match=f"lacks the memory .* each of its {beside + 1} workers"):
            Fit(script, model, adam(model), 0.0).train(1)
        script.leave()
        script.job.close()
        return "ended"

    world = World(1)
    with one_thread():
        world.run(run)
    assert world.digests == {"w0": "ended"}


def test_a_script_that_ends_before_the_loop_of_its_checkpoint_is_refused(tmp_path: Path) -> None:
    def run(loops: int, settings: Settings) -> None:
        script = RankScript(RANKS)
        script.connect(make_job(Recorded(), checkpoints=settings))
        torch.manual_seed(1)
        model = net(8)
        for _ in range(loops):
            Fit(script, model, adam(model), 0.0).train(1)
        script.leave()
        script.job.close()

    with one_thread():
        run(2, Settings(root=str(tmp_path), every="5 steps"))
        (last,) = Series(storage_at(str(tmp_path))).names()
        with pytest.raises(ConfigError, match="ended behind its training loop 0"):
            run(1, Settings(root=str(tmp_path), resume=str(last)))


def test_a_loop_for_data_parallel_models_behind_that_of_a_framework_is_refused() -> None:
    """Nobody would sum its gradients. In the framework's own loop the same calls are its business."""

    def run(session: FakeMember) -> str:
        script = RankScript(RANKS)
        script.connect(make_job(session))
        model = net(8)
        fit = Fit(script, model, adam(model), 0.0)

        def loss(x: torch.Tensor, y: torch.Tensor) -> Any:
            script.forward(reduces=True)
            script.before_backward()
            return F.cross_entropy(model(x), y)

        fit.loss = loss
        fit.train(1)
        script.before_backward()  # of something else
        script.forward(reduces=True)
        with pytest.raises(UnknownBatches):
            script.before_backward()
        script.leave()
        script.job.close()
        return "ended"

    world = World(1)
    with one_thread():
        world.run(run)
    assert world.digests == {"w0": "ended"}


def test_a_loop_behind_one_that_an_error_has_ended_is_refused() -> None:
    """Also behind its steps: a worker that came in the next one could not have what it has left."""

    def run(session: FakeMember) -> str:
        script = RankScript(RANKS)
        script.connect(make_job(session))
        model = net(8)
        fit = Fit(script, model, adam(model), 0.0)

        def close() -> None:
            raise ValueError("as a callback may raise at the end")

        fit.loop.close = close  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="a callback"):
            fit.train(1)
        with pytest.raises(ConfigError, match="ended with an error"):
            Fit(script, model, adam(model), 0.0).train(1)
        script.leave()
        script.job.close()
        return "ended"

    world = World(1)
    with one_thread():
        world.run(run)
    assert world.digests == {"w0": "ended"}
