"""job.log, once with tensors, and what all workers do together between the hand-out of a step and its pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic
from elastic.checkpoints.settings import Settings
from elastic.errors import Disagree, LeaderOnly, NotCarried, UsageError
from runtime.loop.step import Step
from tests.unit.jobs import Recorded, Setup, make_job, set_up
from tests.unit.worlds import FakeMember, World


def train(setup: Setup, step: Step) -> None:
    for _ in step:
        setup.model(torch.randn(4, 6)).square().mean().backward()
    setup.optimizer.step()
    setup.optimizer.zero_grad()


def steps(setup: Setup, total: int = 4) -> Iterator[Step]:
    yield from setup.job.steps(shards=4, total=total)


# job.log


def test_a_value_is_in_the_record_of_the_step_in_progress_or_of_the_last_one(tmp_path: Path) -> None:
    session = Recorded()
    setup = set_up(make_job(session))
    job = setup.job
    job.log_to(elastic.JsonLines(tmp_path / "metrics.jsonl"))
    for epoch in job.epochs(2):
        job.log(**{f"begin {epoch}": 1})
        for step in job.steps(shards=4, total=2):
            job.log(early=step.index)
            for _ in step:
                setup.model(torch.randn(4, 6)).square().mean().backward()
                step.log(index=step.index)
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            job.log(late=torch.tensor(step.index + 0.5))
        job.log(**{f"end {epoch}": 2})
    job.log(final=float("nan"))
    assert len(session.records) == 3, "the last one is open"
    job.close()
    logged = [{k: v for k, v in record.scalars.items() if k != "final"} for record in session.records]
    every = [{"early": i, "index": i, "late": i + 0.5} for i in range(4)]
    assert logged == [
        {**every[0], "begin 0": 1},
        {**every[1], "end 0": 2, "begin 1": 1},
        every[2],
        {**every[3], "end 1": 2},
    ]
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4 and '"final": "nan"' in lines[3] and "final" not in lines[2]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": "low"}, "job.log: loss is a str"),
        ({"loss": torch.zeros(2)}, r"job.log: loss is a Tensor of shape \(2,\)"),
        ({"elastic.loss": 1}, "are reserved; rename 'elastic.loss'"),
        ({"twice": 1}, "twice was logged twice for one step"),
    ],
)
def test_what_cannot_be_logged_is_refused(values: dict[str, Any], words: str) -> None:
    setup = set_up(make_job())
    for step in steps(setup):
        train(setup, step)
        setup.job.log(twice=0)
        with pytest.raises(UsageError, match=words):
            setup.job.log(**values)
        setup.job._detach()
        break


def test_a_place_where_nothing_can_be_logged_is_named() -> None:
    setup = set_up(make_job())
    with pytest.raises(UsageError, match=r"job.log\(\) came before the loop"):
        setup.job.log(a=1)
    with pytest.raises(LeaderOnly, match=r"job.log\(\) was called inside job.once"):
        for step in steps(setup):
            train(setup, step)
            setup.job.once(lambda: setup.job.log(a=1))
    setup.job._detach()
    setup = set_up(make_job())
    with pytest.raises(UsageError, match="pass 0 of step 0; call it behind"):
        for step in steps(setup):
            for _ in step:
                setup.job.log(a=1)
    setup.job._detach()


def test_a_name_of_the_pass_is_not_overwritten() -> None:
    setup = set_up(make_job())
    with pytest.raises(UsageError, match=r"loss: logged by job\.log and by step\.log for step 0"):
        for step in steps(setup):
            setup.job.log(loss=1)
            for _ in step:
                setup.model(torch.randn(4, 6)).square().mean().backward()
                step.log(loss=2)
            setup.optimizer.step()
            setup.optimizer.zero_grad()
    setup.job._detach()


@pytest.mark.parametrize("last", [False, True])
def test_workers_that_log_different_values_are_named_with_them(last: bool) -> None:
    """Before the next pass, or at the end of the script."""

    def script(session: FakeMember) -> str:
        setup = set_up(make_job(session))
        for step in steps(setup):
            train(setup, step)
            if not last:
                setup.job.log(rank=setup.job.rank)
                setup.job.once(int)
        setup.job.log(rank=setup.job.rank)
        setup.job.close()
        return ""

    world = World(2)
    world.run(script)
    assert {type(error) for error in world.errors.values()} == {Disagree}
    assert 'job.log: w0={"rank": 0.0}, w1={"rank": 1.0}' in str(world.errors["w0"])


# once


def test_once_gives_tensors_of_one_element_to_all_workers() -> None:
    def script(session: FakeMember | Recorded) -> str:
        setup = set_up(make_job(session))
        found: list[Any] = []
        for step in steps(setup):
            train(setup, step)
            loss = setup.model(torch.ones(4, 6)).mean()
            found += [
                setup.job.once(lambda mean: mean, loss),
                setup.job.once(lambda: {"a": [torch.tensor([3]), 1], "b": "c"}),
            ]
            assert found[-2].dtype == torch.float32 and found[-2].shape == () and not found[-2].requires_grad
            assert torch.equal(found[-2], loss.detach())
            assert found[-1]["a"][0].tolist() == [3] and found[-1]["a"][1:] == [1] and found[-1]["b"] == "c"
            with pytest.raises(NotCarried, match="JSON cannot carry"):
                make_job().shared("a", lambda: torch.zeros(1))
        digest = setup.job.digest()
        setup.job.close()
        return digest

    alone = script(Recorded())
    world = World(2, kills={"w0": (5, 0)})
    world.run(script, newcomers=1, asked_at=0, admit_at=1)
    assert set(world.digests) == {"w1", "n0"} and set(world.digests.values()) == {alone}


# Between the hand-out of a step and its pass


def test_a_stop_before_the_inner_loop_reaches_a_newcomer_that_enters_in_that_step() -> None:
    """It hears of it with the pass, because the call that carried it was over before."""
    last = 2

    def script(session: FakeMember | Recorded) -> str:
        setup = set_up(make_job(session))
        for step in steps(setup, 20):
            if step.index == last and session.worker_id == "w1":
                setup.job.stop("enough")
            setup.job.once(int)
            train(setup, step)
        digest = setup.job.digest()
        setup.job.close()
        return digest

    world = World(2)
    world.run(script, newcomers=1, asked_at=last, admit_at=last)
    assert world.errors == {}
    assert len(set(world.digests.values())) == 1 and len(world.digests) == 3
    assert {len(session.records) for session in world.sessions.values()} == {last + 1, 1}


def test_a_save_before_the_inner_loop_is_a_checkpoint_of_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in Settings(root=str(tmp_path), every="off").to_environment().items():
        monkeypatch.setenv(name, value)
    setup = set_up(make_job(Recorded()))
    for step in steps(setup, 3):
        where = setup.job.save("entry")
        train(setup, step)
    setup.job.close()
    assert where.endswith("/entry")
    assert [path for path in tmp_path.glob("entry/*") if path.is_dir()]


def test_what_was_called_there_is_named_so() -> None:
    def script(session: FakeMember) -> str:
        setup = set_up(make_job(session))
        for step in steps(setup):
            if setup.job.rank == 1:
                setup.job.once(int)
            train(setup, step)
        return ""

    world = World(2)
    world.run(script)
    assert {type(error) for error in world.errors.values()} == {Disagree}
    assert "w1: job.once(int) before step 0" in str(world.errors["w0"])
