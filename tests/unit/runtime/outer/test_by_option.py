"""`elastic run --outer` makes what a line of the script would make, and is refused where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import ConfigError, NoGradient, NotCarried
from runtime.asynchronous import Gossip
from runtime.asynchronous.loop import asynchronous
from runtime.loop.job import Job
from runtime.outer import DiLoCo, LocalSGD
from runtime.session import Session
from tests.unit.jobs import Recorded, configure, cross_entropy, dataset, make_job
from tests.unit.runtime.outer.outer_jobs import ADAMW, BATCH, REPLICAS, SAMPLES, MakeOuter, diloco
from tests.unit.worlds import World


def script(make_outer: MakeOuter | None, epochs: bool = False) -> Callable[[Session], str]:
    """A job of replicas; without make_outer its script says nothing of them."""

    def run(session: Session) -> str:
        job = make_job(session)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))
        optimizer = ADAMW(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        data = job.loader(dataset(SAMPLES), BATCH, shards=REPLICAS, shuffle=True)
        job.register(model=model, optimizer=optimizer, scheduler=scheduler)
        given: dict[str, Any] = {}
        length: dict[str, Any] = {} if epochs else {"epochs": 2}
        if make_outer is not None:
            given["outer"] = make_outer(model, optimizer)
            job.register(**given)
        for _ in job.epochs(2) if epochs else range(1):
            for step in job.steps(data, **given, **length):
                for x, y in step:
                    cross_entropy(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
        digest = job.digest()
        job.close()
        return digest

    return run


def sgd(lr: float, momentum: float) -> MakeOuter:
    return lambda model, optimizer: DiLoCo(
        model,
        optimizer,
        torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0),
        every=3,
    )


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("diloco:H=3", diloco()),
        ("diloco:H=3,moments=mean", diloco(moments="mean")),
        ("diloco:H=3,lr=0.5,momentum=0.8", sgd(0.5, 0.8)),
        ("diloco:H=3,lr=1,momentum=0", sgd(1.0, 0.0)),
        ("localsgd:H=2,moments=reset", lambda m, o: LocalSGD(m, o, every=2, moments="reset")),
    ],
)
@pytest.mark.parametrize("epochs", [False, True])
def test_the_option_is_the_line_bit_for_bit(option: str, line: MakeOuter, epochs: bool) -> None:
    by_line, by_option = Recorded(), Recorded(outer=option)
    assert script(None, epochs)(by_option) == script(line, epochs)(by_line)
    assert [one.samples for one in by_option.records] == [one.samples for one in by_line.records]


def test_any_world_a_death_and_a_newcomer_leave_the_bits_of_one_worker() -> None:
    quiet = script(None)(Recorded(outer="diloco:H=3"))
    for workers in (2, 3):
        world = World(workers, kills={"w1": (2, 1)}, outer="diloco:H=3")
        world.run(script(None), 1, 1, 2, 1)
        assert set(world.digests.values()) == {quiet}
        assert set(world.digests) == {*(f"w{i}" for i in range(workers) if i != 1), "n0"}


def test_a_run_goes_on_from_its_checkpoint_with_the_same_words_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, Settings(root=str(tmp_path), every="2 steps"))
    digest = script(None)(Recorded(outer="diloco:H=3"))
    entry = Series(storage_at(str(tmp_path))).names()[-1]
    configure(monkeypatch, Settings(root=str(tmp_path), resume=str(entry)))
    assert script(None)(Recorded(outer="diloco:H=3,lr=0.7")) == digest
    for line, option, said in (
        (None, "diloco:H=3,lr=0.5", "diloco:H=3,lr=0.5,momentum=0.9,moments=own"),
        (None, "diloco:H=2", "diloco:H=2,lr=0.7,momentum=0.9,moments=own"),
        (diloco(), "", "none"),
    ):
        with pytest.raises(ConfigError, match=f"begun with --outer diloco:H=3,.*, and goes on with {said}"):
            script(line)(Recorded(outer=option))


def begin(job: Job, **registered: Any) -> None:
    """Register, and begin the loop."""
    job.register(**registered)
    next(job.steps(job.loader(dataset(), 8, shards=2), total=2))


def set_up() -> tuple[Job, nn.Linear, torch.optim.Optimizer]:
    job = make_job(Recorded(outer="diloco:H=3"))
    model = nn.Linear(6, 2)
    return job, model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_script_that_makes_its_own_is_refused_and_told_what_to_write() -> None:
    job, model, optimizer = set_up()
    outer = DiLoCo(model, optimizer, every=3)
    with pytest.raises(ConfigError, match=r"job\.register\(mine=\.\.\.\) was given a DiLoCo.*leave --outer out"):
        job.register(model=model, optimizer=optimizer, mine=outer)
    job, model, optimizer = set_up()
    job.register(model=model, optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"job\.steps\(outer=\.\.\.\) was given a DiLoCo"):
        job.steps(shards=2, total=2, outer=DiLoCo(model, optimizer, every=3))


def test_the_inner_optimizer_must_be_clear() -> None:
    job, model, _ = set_up()
    with pytest.raises(ConfigError, match=r"the one optimizer that is registered.*there is none"):
        begin(job, model=model)
    job, model, optimizer = set_up()
    with pytest.raises(ConfigError, match="there are 2: first, second"):
        begin(job, model=model, first=optimizer, second=torch.optim.SGD([model.bias], lr=0.1))


def test_the_model_must_be_clear() -> None:
    job, model, optimizer = set_up()
    with pytest.raises(ConfigError, match="has the optimizer's parameters, and there is none"):
        begin(job, model=nn.Linear(6, 2), optimizer=optimizer)
    job, model, _ = set_up()
    head = nn.Linear(2, 2)
    both = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match="there are 2: body, head"):
        begin(job, body=model, head=head, optimizer=both)


def test_an_average_of_the_weights_is_no_second_model() -> None:
    job, model, optimizer = set_up()
    begin(job, model=model, average=nn.Linear(6, 2), optimizer=optimizer)


def test_a_body_that_steps_behind_the_inner_loop_is_told_where_to_step() -> None:
    job, model, optimizer = set_up()
    job.register(model=model, optimizer=optimizer)
    with pytest.raises(NoGradient, match=r"the inner loop has the whole of a training step: .*optimizer\.step\(\)"):
        for step in job.steps(job.loader(dataset(), 8, shards=2), total=2):
            for x, _ in step:
                model(x).square().mean().backward()
            optimizer.step()


def test_a_loop_that_is_not_of_replicas_is_refused() -> None:
    job, model, optimizer = set_up()
    gossip = Gossip(model, optimizer, every=2)
    train = job.loader(dataset(), 8, shards=2)
    job.register(model=model, optimizer=optimizer, gossip=gossip)
    with pytest.raises(ConfigError, match="this script has another loop; leave --outer out"):
        next(asynchronous(job, train, outer=gossip, total=2))


def test_data_without_a_place_is_refused_as_with_the_line() -> None:
    job, model, optimizer = set_up()
    job.register(model=model, optimizer=optimizer)
    with pytest.raises(ConfigError, match="stream"):
        job.steps(job.stream(lambda shard, epoch: iter([]), shards=2))
    job, model, optimizer = set_up()
    job.register(model=model, optimizer=optimizer)
    with pytest.raises(ConfigError, match="number of shards"):
        next(iter(job.epochs(1)))


def test_an_optimizer_whose_state_has_no_fixed_size_is_refused_as_with_the_line() -> None:
    job, model, _ = set_up()
    with pytest.raises(NotCarried):
        begin(job, model=model, optimizer=torch.optim.LBFGS(model.parameters()))
