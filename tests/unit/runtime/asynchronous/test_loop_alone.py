"""The loop in a job of one: samples, numbers against a reference, checkpoints, and what a script must not do."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import ConfigError, NotCarried, UsageError
from elastic.protocol.local_phase import DROPPED, LOST, STALENESS, UPDATES
from runtime.asynchronous import Asynchronous, Gossip, asynchronous
from runtime.asynchronous.local_training import LocalTraining
from runtime.loop.job import Job
from runtime.outer import DiLoCo
from tests.unit.jobs import Recorded, cross_entropy, dataset, make_job

SHARDS, EVERY, ROUNDS = 4, 3, 5
BATCH, SAMPLES = 8, 48
SGD = partial(torch.optim.SGD, lr=0.1)


def model_of(job: Job) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))


def parts(kind: type[LocalTraining] = Asynchronous, optimizer_of: Any = SGD) -> Any:
    """(job, model, optimizer, outer, data), registered."""
    job = make_job()
    model = model_of(job)
    optimizer = optimizer_of(model.parameters())
    outer = kind(model, optimizer, every=2)
    job.register(model=model, optimizer=optimizer, outer=outer)
    return job, model, optimizer, outer, job.loader(dataset(SAMPLES), BATCH, shards=SHARDS)


def train(
    job: Job, kind: type[LocalTraining] = Asynchronous, total: int = ROUNDS, phase_s: float = 60.0, **options: Any
) -> tuple[str, list[dict[str, float]], list[int]]:
    """(digest, metrics of the phases, inner indices)."""
    model = model_of(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    outer = kind(model, optimizer, every=EVERY, **options)
    data = job.loader(dataset(SAMPLES), BATCH, shards=SHARDS, shuffle=True)
    job.register(model=model, optimizer=optimizer, outer=outer)
    metrics, indices = [], []
    for phase in asynchronous(job, data, outer=outer, total=total, phase_s=phase_s):
        for x, y in phase:
            indices.append(phase.inner_index)
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + phase.inner_index)
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            phase.log(loss=loss)
        metrics.append(phase.metrics)
    digest = job.digest()
    job.close()
    return digest, metrics, indices


@pytest.mark.parametrize("kind", [Asynchronous, Gossip])
def test_every_unit_is_trained_once(kind: type[LocalTraining]) -> None:
    session = Recorded()
    _, metrics, indices = train(make_job(session), kind)
    assert sorted(indices) == sorted(
        round * EVERY + inner for round in range(ROUNDS) for inner in range(EVERY) for _ in range(SHARDS)
    )
    assert sum(one[UPDATES] for one in metrics) == pytest.approx(SHARDS * ROUNDS)
    assert metrics[-1][LOST] == 0
    assert session.records[-1].scalars["loss"] == pytest.approx(metrics[-1]["loss"])


def test_one_worker_is_never_stale() -> None:
    _, metrics, _ = train(make_job())
    assert metrics[-1][STALENESS] == 0


@pytest.mark.parametrize("kind", [Asynchronous, Gossip])
def test_phases_leave_no_trace_in_the_numbers_of_one_worker(kind: type[LocalTraining]) -> None:
    """Units go on over the end of a phase: many short phases are one long one."""
    long, short = train(make_job(), kind), train(make_job(), kind, phase_s=1e-9)
    assert len(short[1]) > 5 * len(long[1])
    assert long[2] == short[2]
    if kind is Asynchronous:
        assert long[0] == short[0]


def test_a_resume_between_two_phases_goes_on(tmp_path: Path) -> None:
    """Units in progress are begun anew, all others are trained once."""
    taking = Settings(root=str(tmp_path), every="10 steps", keep="last 100")
    _, _, indices = train(make_job(checkpoints=taking), phase_s=1e-9)
    entries = Series(storage_at(str(tmp_path))).names()
    assert entries
    for entry in entries[:2]:
        resumed = train(make_job(checkpoints=Settings(root=str(tmp_path), resume=str(entry))), phase_s=1e-9)
        done = entry.step // EVERY  # each phase was one inner step
        assert len(resumed[2]) == len(indices) - EVERY * done
        assert resumed[2] == indices[EVERY * done :]


def test_what_a_script_must_not_do() -> None:
    job = make_job()
    model = model_of(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = job.loader(dataset(SAMPLES), BATCH, shards=SHARDS)
    for options in (
        {"lr": 0.0},
        {"momentum": 1.0},
        {"max_staleness": -1},
        {"max_age_s": 0.0},
        {"late": "wait"},
        {"every": 0},
        {"lr": "0.7"},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"momentum": None},
        {"max_staleness": "4"},
        {"max_age_s": True},
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            Asynchronous(model, optimizer, **({"every": 1} | options))
    with pytest.raises(ConfigError, match="no trained one"):
        Asynchronous(model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), every=1)
    with pytest.raises(NotCarried, match="float64"):
        Gossip(model.double(), optimizer, every=1)
    outer = Asynchronous(model.float(), optimizer, every=2)
    job.register(model=model, optimizer=optimizer)
    with pytest.raises(ConfigError, match="register"):
        next(asynchronous(job, data, outer=outer, total=2))
    with pytest.raises(ConfigError, match="needs a job"):
        asynchronous(job, [1], outer=outer, total=2)  # type: ignore[arg-type]
    for phase_s in (0, "60", float("nan")):
        with pytest.raises(ConfigError, match="phase_s"):
            asynchronous(job, data, outer=outer, total=2, phase_s=phase_s)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="seed"):
        Gossip(model.float(), optimizer, every=1, seed="a")  # type: ignore[arg-type]
    for momentum in (1.0, -0.1, "0.5"):
        with pytest.raises(ConfigError, match="momentum"):
            Gossip(model.float(), optimizer, every=1, momentum=momentum)  # type: ignore[arg-type]


def test_each_kind_has_a_loop_of_its_own() -> None:
    job = make_job()
    model = model_of(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = job.loader(dataset(SAMPLES), BATCH, shards=SHARDS)
    with pytest.raises(ConfigError, match=r"DiLoCo; it takes .*job\.steps\(train, outer=outer\)"):
        asynchronous(job, data, outer=DiLoCo(model, optimizer, every=2), total=2)  # type: ignore[arg-type]
    for kind in (Asynchronous, Gossip):
        outer: Any = kind(model, optimizer, every=2)
        with pytest.raises(ConfigError, match=r"for phase in elastic\.asynchronous\(job"):
            job.steps(data, total=2, outer=outer)


def test_the_inner_loop_ends_by_itself() -> None:
    job, _, _, outer, data = parts()
    phases = asynchronous(job, data, outer=outer, total=2)
    phase = next(phases)
    with pytest.raises(UsageError, match="inner loop"):
        phase.log(loss=1.0)
    with pytest.raises(UsageError, match="inner loop"):
        _ = phase.inner_index
    next(phase)
    with pytest.raises(UsageError, match="reserved"):
        phase.log(**{"elastic.loss": 1.0})
    with pytest.raises(UsageError, match="break"):
        next(phases)


@pytest.mark.parametrize("kind", [Asynchronous, Gossip])
def test_a_unit_whose_parameters_are_not_finite_is_dropped(kind: type[LocalTraining]) -> None:
    job, model, optimizer, outer, data = parts(kind)
    metrics = []
    for number, phase in enumerate(asynchronous(job, data, outer=outer, total=2, phase_s=1e-9)):
        for x, y in phase:
            loss = cross_entropy(model(x), y) * (float("nan") if number == 1 else 1.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        metrics.append(phase.metrics)
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert sum(one.get(DROPPED, 0.0) for one in metrics) == 1.0


@pytest.mark.parametrize("phase_s", [1e-9, 60.0])
@pytest.mark.parametrize("kind", [Asynchronous, Gossip])
def test_a_worker_trains_on_behind_a_unit_that_was_dropped(kind: type[LocalTraining], phase_s: float) -> None:
    """The moments of its optimizer were not finite either: no later unit would have been."""
    job, model, optimizer, outer, data = parts(kind, partial(torch.optim.AdamW, lr=0.01))
    metrics, inner = [], 0
    moments: list[torch.Tensor] = []
    for phase in asynchronous(job, data, outer=outer, total=3, phase_s=phase_s):
        for x, y in phase:
            inner += 1
            loss = cross_entropy(model(x), y) * (float("nan") if inner == 2 else 1.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        metrics.append(phase.metrics)
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert sum(one.get(DROPPED, 0.0) for one in metrics) == 1.0
    assert sum(one.get(UPDATES, 0.0) for one in metrics) == pytest.approx(3 * SHARDS)
    assert moments and all(bool(moment.isfinite().all()) for moment in moments)


def test_a_resumed_job_with_another_total_trains_what_is_left_of_it(tmp_path: Path) -> None:
    taking = Settings(root=str(tmp_path), every="10 steps", keep="last 100")
    train(make_job(checkpoints=taking), phase_s=1e-9)
    entry = Series(storage_at(str(tmp_path))).names()[1]
    for total in (ROUNDS + 2, ROUNDS - 1):
        resumed = train(
            make_job(checkpoints=Settings(root=str(tmp_path), resume=str(entry))), total=total, phase_s=1e-9
        )
        done = entry.step // EVERY
        assert len(resumed[2]) == (total * SHARDS - done) * EVERY, total
        assert {*resumed[2]} <= {*range(total * EVERY)}


def test_what_bfloat16_rounds_away_is_no_part_of_an_update() -> None:
    job = make_job()
    torch.manual_seed(0)
    model = nn.Linear(6, 2).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    outer = Asynchronous(model, optimizer, every=1, lr=0.9, momentum=0.0)
    data = job.loader(dataset(SAMPLES), BATCH, shards=SHARDS)
    job.register(model=model, optimizer=optimizer, outer=outer)
    values = []
    for phase in asynchronous(job, data, outer=outer, total=3):
        for number, (x, y) in enumerate(phase):
            optimizer.param_groups[0]["lr"] = 0.5 if number == 0 else 0.0
            cross_entropy(model(x.bfloat16()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number > 0:
                values.append(torch.cat([held.state.values for held in outer._store.owned().values()]).clone())
    assert not torch.equal(values[0], values[0].bfloat16().float()), "nothing was rounded away"
    assert all(torch.equal(one, values[0]) for one in values)


def test_calls_of_all_workers_have_no_place_in_the_inner_loop() -> None:
    job, model, optimizer, outer, data = parts()

    def evaluated(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": cross_entropy(model(x), y)}

    for number, phase in enumerate(asynchronous(job, data, outer=outer, total=2, phase_s=1e-9)):
        for x, y in phase:
            for call in (
                partial(job.evaluate, evaluated, dataset(8)),
                partial(job.log, a=1.0),
                partial(job.allreduce, 1.0),
            ):
                with pytest.raises(UsageError, match=r"inner loop of elastic\.asynchronous"):
                    call()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert job.allreduce(float(number)) == number


def test_the_loop_has_no_epochs() -> None:
    job, _, _, outer, data = parts()
    for _ in job.epochs(2):
        with pytest.raises(ConfigError, match=r"job\.epochs"):
            next(asynchronous(job, data, outer=outer, total=2))
        break


def test_a_piece_without_an_owner_or_with_two_is_summed_once_more() -> None:
    """Between the sums an owner has died, and its mirror has become the owner."""
    model = nn.Linear(4, 4)
    outer = Asynchronous(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    before = outer.flat.read()
    vectors, pieces = 3 * outer.flat.elements, 16
    for present in (0.0, 2.0):
        sums = {"float32": torch.full((vectors + pieces,), 1.0), "float64": torch.ones(pieces, dtype=torch.float64)}
        sums["float32"][vectors + 5] = present
        assert not outer.take_sums(sums, 2)
        assert torch.equal(outer.flat.read(), before)
    assert outer.take_sums({"float32": torch.ones(vectors + pieces), "float64": torch.ones(pieces).double()}, 2)
    assert torch.equal(outer.flat.read(), torch.ones(outer.flat.elements))
