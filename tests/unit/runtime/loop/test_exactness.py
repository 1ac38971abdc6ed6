"""Every feature of PyTorch in docs/exactness.md: a run with kills and a newcomer has the bits of the quiet run."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from runtime.loop.job import Job
from runtime.loop.step import Step
from runtime.session import Session
from tests.unit.features import FEATURES, STEPS, Feature, anchored_in_a_variable, loader, mlp, train
from tests.unit.jobs import Recorded, configure, cross_entropy, dataset, ledger, make_job
from tests.unit.thoroughness import some
from tests.unit.worlds import Killed, World

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs" / "exactness.md"


def run(feature: Feature, session: Session) -> str:
    job = make_job(session)
    feature(job)
    digest = job.digest()
    job.close()
    return digest


@cache
def quiet_run(name: str, reduction: str, compression: str) -> tuple[str, list[object]]:
    """Digest and ledger of a feature in a job of one; two tests of each feature ask for it."""
    session = Recorded(reduction, compression)
    return run(FEATURES[name], session), ledger(session)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize(
    ("reduction", "compression"),
    [
        ("exact", "none"),
        pytest.param("fixed", "none", marks=pytest.mark.long),
        pytest.param("exact", "bf16", marks=pytest.mark.long),
        pytest.param("exact", "int8", marks=pytest.mark.long),
        pytest.param("exact", "fp16", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", FEATURES)
def test_a_run_with_kills_and_a_newcomer_has_the_bits_of_the_quiet_run(
    name: str, reduction: str, compression: str
) -> None:
    """w1 dies in the second operation, and w0, the oldest, in the fifth; between them a newcomer copies the
    state of one step and enters in the next."""
    feature = FEATURES[name]
    digest, lines = quiet_run(name, reduction, compression)
    world = World(3, kills={"w1": (2, 0), "w0": (5, 0)}, reduction=reduction, compression=compression)
    world.run(lambda session: run(feature, session), newcomers=1, asked_at=1, copy_at=1, admit_at=2)
    assert {worker: type(error) for worker, error in world.errors.items()} == {"w0": Killed, "w1": Killed}
    assert world.digests == {"w2": digest, "n0": digest}
    assert ledger(world.sessions["w2"]) == lines
    assert ledger(world.sessions["n0"]) == lines[world.joined_at["n0"] :]
    assert len(lines) == STEPS


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("name", some(list(FEATURES), 30, "resumed"))
def test_a_run_that_goes_on_from_the_middle_of_an_epoch_has_the_bits_of_the_quiet_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the checkpoint before step 4, the middle one of the second epoch, where there are epochs."""
    session = Recorded()
    configure(monkeypatch, Settings(root=str(tmp_path), every="4 steps"))
    digest = run(FEATURES[name], session)
    (entry,) = Series(storage_at(str(tmp_path))).names()
    configure(monkeypatch, Settings(root=str(tmp_path), resume=str(entry)))
    resumed = Recorded()
    assert run(FEATURES[name], resumed) == digest
    assert ledger(resumed) == ledger(session)[4:] != []


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",  # all but the last stage, which takes most of the time
        pytest.param(
            "inductor",
            marks=(
                pytest.mark.long,
                pytest.mark.skipif(shutil.which("g++") is None, reason="it needs a C++ compiler, and there is none"),
            ),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_has_the_bits_of_the_quiet_run(backend: str) -> None:
    """Compiled anew by every worker, as in a job: with dropout, so that compiled random numbers count too."""

    def compiled(job: Job) -> None:
        torch._dynamo.reset()
        model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.3))
        train(job, cast(nn.Module, torch.compile(model, backend=backend)))

    quiet = run(compiled, Recorded())
    world = World(2, kills={"w0": (3, 0)})
    world.run(lambda session: run(compiled, session), newcomers=1, asked_at=0, admit_at=1)
    assert {type(error) for error in world.errors.values()} == {Killed}
    assert world.digests == {"w1": quiet, "n0": quiet}


def test_a_newcomer_reads_tensors_of_job_state_at_the_start_of_its_epoch() -> None:
    """Four steps are an epoch's three and one more: there the newcomer enters, with what the first has left."""

    def centred(job: Job) -> None:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        job.register(model=model, optimizer=optimizer)
        job.state.setdefault(mean=torch.zeros(6))
        data = loader(job)
        for _ in job.epochs(2):
            mean = job.state.mean.clone()
            for step in job.steps(data):
                for x, y in step:
                    cross_entropy(model(x - mean), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            job.state.mean = model.get_parameter("0.weight").detach().mean(0)

    quiet = run(centred, Recorded())
    world = World(2)
    world.run(lambda session: run(centred, session), newcomers=1, asked_at=3, admit_at=4)
    assert world.digests == {"w0": quiet, "w1": quiet, "n0": quiet}


def test_a_generator_of_the_scripts_own_is_not_exact() -> None:
    """The counter-example: such a generator goes on from shard to shard, and no two workers have the same shards."""

    def own_generator(job: Job) -> None:
        generator = torch.Generator().manual_seed(1)
        model = mlp()
        train(job, model, loss_of=lambda x, y: cross_entropy(model(x + torch.randn(6, generator=generator)), y))

    world = World(2)
    world.run(lambda session: run(own_generator, session))
    assert world.digests["w0"] == world.digests["w1"] != run(own_generator, Recorded())


@pytest.mark.parametrize("asked_at", [0, 1, 2])
@pytest.mark.parametrize("copy_at", [2, 3])
def test_a_newcomer_that_drew_for_another_step_than_it_entered_goes_through_that_as_if_it_were_none(
    asked_at: int, copy_at: int
) -> None:
    """It sees step asked_at, draws before its inner loop, and finds the others in step copy_at. What is drawn changes
    the state before the loop, and is used behind it."""

    def scaling(job: Job) -> None:
        model = mlp(nn.BatchNorm1d(8))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        job.register(model=model, optimizer=optimizer)
        job.state.setdefault(drawn=0.0)
        for step in job.steps(loader(job), total=STEPS):
            scale = random.random()
            job.state.drawn += scale
            for x, y in step:
                cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(scale)
            optimizer.step()
            optimizer.zero_grad()
            job.state.told = job.once(lambda number: number, scale)

    quiet = run(scaling, Recorded())
    world = World(2, kills={"w0": (12, 0)})
    world.run(lambda session: run(scaling, session), newcomers=1, asked_at=asked_at, copy_at=copy_at, admit_at=copy_at)
    assert {worker: type(error) for worker, error in world.errors.items()} == {"w0": Killed}
    assert world.digests == {"w1": quiet, "n0": quiet}
    assert world.joined_at == {"n0": copy_at if asked_at == copy_at else copy_at + 2}


def test_weights_copied_into_a_variable_before_the_steps_are_not_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counter-example to `anchor`, by a newcomer and by a run that goes on in the second epoch."""
    configure(monkeypatch, Settings(root=str(tmp_path), every="4 steps"))
    quiet = run(anchored_in_a_variable, Recorded())
    (entry,) = Series(storage_at(str(tmp_path))).names()
    configure(monkeypatch, Settings(root=str(tmp_path), resume=str(entry)))
    assert run(anchored_in_a_variable, Recorded()) != quiet
    configure(monkeypatch, Settings(root=str(tmp_path)))
    for feature, same in ((anchored_in_a_variable, False), (FEATURES["anchor"], True)):
        world = World(2)
        world.run(partial(run, feature), newcomers=1, asked_at=4, admit_at=4)
        assert world.joined_at == {"n0": 4} and len(set(world.digests.values())) == 1
        assert (world.digests["n0"] == run(feature, Recorded())) is same


@pytest.mark.parametrize("asked_at", [0, 1, 2])
@pytest.mark.parametrize("copy_at", [2, 3])
@pytest.mark.parametrize("every", [1, 3])
def test_a_newcomer_that_was_told_for_another_step_than_it_entered_goes_through_that_as_if_it_were_none(
    asked_at: int, copy_at: int, every: int
) -> None:
    """As above, with what all workers do together before the loop, in every step or in some; a worker dies in it."""

    def telling(job: Job) -> None:
        model = mlp(nn.BatchNorm1d(8))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        job.register(model=model, optimizer=optimizer)
        job.state.setdefault(told=0, least=10.0)
        for step in job.steps(loader(job), total=STEPS):
            scale = 1.0
            if step.index % every == 0:
                scale = job.evaluate(lambda x, y: {"scale": model(x).square().mean()}, dataset())["scale"]
                less = scale < job.state.least
                job.state.least = min(scale, job.state.least)
                if less:
                    job.state.told = job.once(lambda number: number + 1, job.state.told)
                job.log(scale=scale)
            for x, y in step:
                cross_entropy(model(x), y).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(scale)
            optimizer.step()
            optimizer.zero_grad()

    session = Recorded()
    quiet = run(telling, session)
    world = World(3, kills={"w0": (1 + 3 * asked_at, 0)})
    world.run(lambda session: run(telling, session), newcomers=1, asked_at=asked_at, copy_at=copy_at, admit_at=copy_at)
    assert {worker: type(error) for worker, error in world.errors.items()} == {"w0": Killed}
    assert world.digests == dict.fromkeys(("w1", "w2", "n0"), quiet)
    assert world.joined_at == {"n0": copy_at if asked_at == copy_at else copy_at + 2}
    assert ledger(world.sessions["n0"]) == ledger(session)[world.joined_at["n0"] :]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("by", ["index", "epoch", "state", "its names"])
def test_what_a_script_makes_of_its_place_before_the_inner_loop_is_of_the_step_that_a_newcomer_enters(
    by: str, passes: int
) -> None:
    """It asks in step 1 and copies the state in step 3; in the second pass of a step it computes shards."""

    def read(job: Job, step: Step) -> float:
        match by:
            case "index":
                return 0.1 * step.index
            case "epoch":
                return 0.2 * step.epoch + 0.1 * step.last_in_epoch
            case "state":
                return float(job.state.p)
            case _:
                return 0.1 * len([key for key in job.state if key.startswith("seen")])

    def reading(job: Job) -> None:
        model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.1))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        job.register(model=model, optimizer=optimizer)
        job.state.setdefault(p=0.1)
        for step in job.steps(loader(job), total=STEPS):
            factor = 1.0 + (noted := read(job, step))
            dropout = model[2]
            assert isinstance(dropout, nn.Dropout)
            dropout.p = min(0.1 + noted, 0.8)
            for _ in range(passes):
                for x, y in step:
                    cross_entropy(model(x), y).backward()
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad.mul_(factor)
                optimizer.step()
                optimizer.zero_grad()
            job.state.p += 0.1
            setattr(job.state, f"seen{step.index}", True)

    quiet = run(reading, Recorded())
    world = World(2)
    world.run(lambda session: run(reading, session), newcomers=1, asked_at=1, copy_at=3, admit_at=3)
    assert world.errors == {} and world.digests == dict.fromkeys(("w0", "w1", "n0"), quiet)


def lazily_in_the_second_pass(job: Job) -> None:
    """A GradScaler makes its scale in the first scale(), which a worker without a shard never calls by itself."""
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.05), torch.amp.GradScaler("cpu", init_scale=8.0)
    job.register(model=model, optimizer=optimizer, scaler=scaler)
    for step in job.steps(loader(job, shards=1), total=STEPS):
        for x, y in step:
            cross_entropy(model(x), y).backward()
        optimizer.zero_grad()
        for x, y in step:
            scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def lazily_where_nothing_is_skipped(job: Job) -> None:
    """The same in the first pass, of which one worker of two skips the only shard that it has."""
    model = mlp()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.05), torch.amp.GradScaler("cpu", init_scale=8.0)
    job.register(model=model, optimizer=optimizer, scaler=scaler)
    for step in job.steps(loader(job, shards=2), total=STEPS):
        for x, y in step:
            if step.shard.index == step.index % 2:
                step.skip()
                continue
            scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("lazily", [lazily_in_the_second_pass, lazily_where_nothing_is_skipped])
def test_workers_without_a_shard_have_what_a_shard_makes_first(
    lazily: Callable[[Job], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newcomer, and all but one of those that go on from a checkpoint; and those that skip what they have."""
    configure(monkeypatch, Settings(root=str(tmp_path), every="4 steps"))
    quiet = run(lazily, Recorded())
    world = World(2)
    world.run(partial(run, lazily), newcomers=1, asked_at=2, copy_at=2, admit_at=2)
    assert world.errors == {} and world.digests == dict.fromkeys(("w0", "w1", "n0"), quiet)
    entry = Series(storage_at(str(tmp_path))).names()[0]
    configure(monkeypatch, Settings(root=str(tmp_path), resume=str(entry)))
    resumed = World(2)
    resumed.run(partial(run, lazily))
    assert resumed.errors == {} and resumed.digests == dict.fromkeys(("w0", "w1"), quiet)


def test_large_tensors_of_job_state_do_not_keep_a_script_from_calls_before_the_steps() -> None:
    """The state is carried and compared there; only the script's own reads are refused."""

    def calling(job: Job) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        job.register(model=model, optimizer=optimizer)
        job.state.setdefault(queue=torch.zeros(20_000))
        data = loader(job)
        for epoch in job.epochs(2):
            assert job.once(str, epoch) == str(epoch) and len(job.digest()) == 64
            for step in job.steps(data):
                for x, y in step:
                    cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                job.state.queue.add_(1.0)

    quiet = run(calling, Recorded())
    world = World(2)
    world.run(partial(run, calling), newcomers=1, asked_at=1, copy_at=1, admit_at=1)
    assert world.errors == {} and world.digests == dict.fromkeys(("w0", "w1", "n0"), quiet)


def test_the_page_has_a_row_for_every_feature_and_no_other() -> None:
    rows = set(re.findall(r"^\|[^|]+\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert rows == set(FEATURES)


def test_every_test_that_the_page_names_exists() -> None:
    here = {path.name: path for path in (ROOT / "tests" / "unit").rglob("test_*.py")}
    text = PAGE.read_text(encoding="utf-8")
    files = set(re.findall(r"`(test_\w+\.py)`", text))
    tests = set(re.findall(r"`(test_\w+)`", text))
    assert len(files) > 5 and len(tests) > 5
    assert files - here.keys() == set()
    sources = "".join(here[name].read_text(encoding="utf-8") for name in files)
    assert {name for name in tests if f"def {name}(" not in sources} == set()
