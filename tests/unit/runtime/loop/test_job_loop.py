"""The loop a user writes, in a job of one."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elastic.agent.worker.environment import WorkerEnvironment
from elastic.config import JobSpec
from elastic.errors import ConfigError, NoSteps, UsageError
from elastic.protocol.shard_advice import Worlds
from elastic.protocol.worker_slot import Spawn
from runtime.loop.job import Job
from runtime.loop.passes import PassWork, Place
from runtime.loop.step import Step
from runtime.session import Session
from tests.unit.jobs import BATCH, SHARDS, Recorded, Setup, cross_entropy, dataset, make_job, set_up, train
from tests.unit.worlds import FakeMember, World


@pytest.fixture
def session() -> Recorded:
    return Recorded()


@pytest.fixture
def job(session: Recorded) -> Iterator[Job]:
    job = make_job(session)
    yield job
    job._detach()


def linear(job: Job, features: int = 1) -> nn.Linear:
    """A model whose gradient is easy to say: y = w x."""
    model = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(model.weight)
    job.register(model=model)
    return model


def whole(step: Step, model: nn.Module, *, clear: bool = True) -> None:
    for x, _ in step:
        model(x).sum().backward()
    if clear:
        model.zero_grad()


# Steps


@pytest.mark.parametrize(
    ("worlds", "advised"), [(Worlds(3, 3, 1), "shards=8: with 3 workers a node sends 1.5 times"), (None, "")]
)
def test_a_job_on_several_nodes_is_told_once_that_another_number_of_shards_is_better(
    job: Job,
    worlds: Worlds | None,
    advised: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    spec = JobSpec(name="job", command=("train",), workers=3)
    told = WorkerEnvironment.of_job(
        spec,
        tmp_path,
        0,
        Spawn("a.0.0", restarted=False),
        agent_socket="a.sock",
        address="10.0.0.7",
        certs=None,
        worlds=worlds,
    )
    for name, value in told.to_environ().items():
        monkeypatch.setenv(name, value)
    set_up(job)
    for _ in range(2):
        job.loader(dataset(50), BATCH, shards=8)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("elastic: ")]
    assert len(lines) == bool(advised) and all(advised in line for line in lines)


def test_a_loop_inside_epochs_counts_steps_over_the_whole_job(job: Job) -> None:
    setup = set_up(job)
    data = job.loader(dataset(50), BATCH, shards=SHARDS)
    seen = []
    for epoch in job.epochs(2):
        steps = job.steps(data)
        assert (len(steps), steps.initial) == (3, 0)
        for step in steps:
            whole(step, setup.model)
            seen.append((step.index, step.epoch, step.total, step.last_in_epoch))
            assert step.epoch == epoch
    expected = [
        (0, 0, 6, False),
        (1, 0, 6, False),
        (2, 0, 6, True),
        (3, 1, 6, False),
        (4, 1, 6, False),
        (5, 1, 6, True),
    ]
    assert seen == expected


@pytest.mark.parametrize(
    ("arguments", "epochs"), [({"epochs": 2}, [0, 0, 0, 1, 1, 1]), ({"total": 5}, [0, 0, 0, 1, 1]), ({"total": 1}, [0])]
)
def test_a_bare_loop_repeats_the_data_as_long_as_it_is_told(
    job: Job, arguments: dict[str, Any], epochs: list[int]
) -> None:
    setup = set_up(job)
    seen = []
    steps = job.steps(job.loader(dataset(50), BATCH, shards=SHARDS), **arguments)
    for step in steps:
        whole(step, setup.model)
        seen.append(step)
    assert [step.epoch for step in seen] == epochs
    assert len(steps) == len(epochs)
    assert {step.total for step in seen} == {len(epochs)}
    assert seen[-1].last_in_epoch


def test_an_epoch_hands_out_each_of_its_samples_once_and_another_epoch_another_order(
    job: Job, session: Recorded
) -> None:
    setup = set_up(job)
    for step in job.steps(job.loader(dataset(48), BATCH, shards=SHARDS, shuffle=True), epochs=2):
        whole(step, setup.model)
    job.close()
    orders: list[list[Any]] = []
    for epoch in range(2):
        records = [record for record in session.records if record.epoch == epoch]
        orders.append([index for record in records for shard in record.samples for index in shard])  # type: ignore
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(48))
    assert orders[0] != orders[1]


def test_the_gradient_of_a_step_is_the_mean_over_all_samples(job: Job) -> None:
    model = linear(job, 6)
    data = job.loader(dataset(), BATCH, shards=SHARDS)
    step = next(job.steps(data, total=1))
    for x, _ in step:
        model(x).mean().backward()
    expected = torch.stack([dataset()[i][0] for i in range(BATCH)]).mean(0)
    torch.testing.assert_close(model.weight.grad, expected.unsqueeze(0))


def test_shards_of_different_sizes_are_weighted_by_their_samples(job: Job) -> None:
    """18 samples over 4 shards: 5, 5, 4, 4."""
    model = linear(job, 6)
    step = next(job.steps(job.loader(dataset(), 18, shards=SHARDS), total=1))
    for x, _ in step:
        loss = model(x).mean()
        loss.backward()
        step.log(first=x[:, 0].mean())
    x = torch.stack([dataset()[i][0] for i in range(18)])
    torch.testing.assert_close(model.weight.grad, x.mean(0).unsqueeze(0))
    assert step.metrics["first"] == pytest.approx(x[:, 0].double().mean().item())


def test_gradients_sum_adds_the_shards_without_weights(job: Job) -> None:
    model = linear(job, 6)
    step = next(job.steps(job.loader(dataset(), 18, shards=SHARDS), total=1, gradients="sum"))
    for x, _ in step:
        model(x).sum().backward()
    x = torch.stack([dataset()[i][0] for i in range(18)])
    torch.testing.assert_close(model.weight.grad, x.sum(0).unsqueeze(0))


def test_weigh_makes_a_mean_over_tokens(job: Job) -> None:
    model = linear(job)
    step = next(job.steps(shards=3, total=1))
    for shard in step:
        tokens = shard.index + 1
        (model(torch.ones(1)) * shard.index).sum().backward()
        step.weigh(tokens)
        step.log(value=float(shard.index), sum={"tokens": tokens})
    mean = (0 * 1 + 1 * 2 + 2 * 3) / 6
    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(mean)
    assert step.metrics == {"value": pytest.approx(mean), "tokens": 6.0}


def test_a_skipped_shard_counts_in_nothing(job: Job) -> None:
    model = linear(job)
    step = next(job.steps(shards=2, total=1))
    for shard in step:
        (model(torch.ones(1)) * (shard.index + 1)).sum().backward()
        step.log(value=float(shard.index + 1))
        if shard.index == 0:
            step.skip()
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 2.0
    assert step.metrics == {"value": 2.0}


def test_a_step_of_which_every_shard_is_skipped_changes_nothing(job: Job) -> None:
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    job.register(model=model)
    before = job.digest()
    for step in job.steps(shards=2, total=2):
        for _ in step:
            model(torch.randn(4, 1))
            step.skip()
        assert step.metrics == {}
        assert all(parameter.grad is None for parameter in model.parameters())
    assert job.digest() == before


def test_a_parameter_without_gradient_in_every_shard_keeps_none_and_is_not_stepped(job: Job) -> None:
    """None is not zero: weight decay must not move it."""
    used, unused = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.AdamW([*used.parameters(), *unused.parameters()], lr=0.1, weight_decay=0.5)
    job.register(used=used, unused=unused, optimizer=optimizer)
    before = unused.weight.item()
    for step in job.steps(shards=2, total=2):
        for _ in step:
            used(torch.ones(1)).backward()
        assert unused.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    assert unused.weight.item() == before


def test_a_parameter_with_a_gradient_in_one_shard_only_has_one(job: Job) -> None:
    rare, always = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    job.register(rare=rare, always=always)
    step = next(job.steps(shards=4, total=1))
    for shard in step:
        loss = always(torch.ones(1))
        if shard.index == 2:
            loss = loss + rare(torch.ones(1))
        loss.sum().backward()
    assert rare.weight.grad is not None
    assert rare.weight.grad.item() == 0.25


def test_parameters_may_be_frozen_and_unfrozen_between_steps(job: Job) -> None:
    body, head = nn.Linear(1, 1), nn.Linear(1, 1)
    body.requires_grad_(False)
    job.register(body=body, head=head)
    for step in job.steps(shards=2, total=2):
        for _ in step:
            head(body(torch.ones(1))).backward()
        assert (body.weight.grad is None) == (step.index == 0)
        for module in (body, head):
            module.zero_grad()
        body.requires_grad_(True)


# Randomness and the data-free loop


def test_without_data_the_body_gets_the_shard_and_draws_from_its_own_seed(job: Job) -> None:
    model = linear(job)
    drawn: dict[tuple[int, int], tuple[float, ...]] = {}
    for step in job.steps(shards=2, total=2):
        for shard in step:
            model(torch.ones(1)).backward()
            assert step.shard is shard
            draws = (
                torch.rand(1).item(),
                float(np.random.rand()),
                random.random(),
                torch.rand(1, generator=shard.generator).item(),
                float(shard.numpy.random()),
            )
            drawn.setdefault((step.index, shard.index), draws)
            assert drawn[step.index, shard.index] == draws, "the rehearsal drew other numbers"
        model.zero_grad()
    assert len({draws for draws in drawn.values()}) == 4


def test_the_rng_after_a_pass_depends_on_the_step_only(job: Job) -> None:
    model = linear(job)
    after = []
    for step in job.steps(shards=2, total=3):
        for shard in step:
            torch.rand(shard.index + 1)
            model(torch.ones(1)).backward()
        after.append(torch.rand(1).item())
        torch.rand(step.index + 5)
        model.zero_grad()
    assert len(set(after)) == 3


def test_a_rehearsal_leaves_no_trace(session: Recorded) -> None:
    """In step 0 two shards are run and thrown away: the body runs V + 2 times, all else as if it ran V times."""
    setup = set_up(make_job(session))
    batchnorm = setup.model.get_submodule("1")
    runs = 0
    step = next(setup.job.steps(setup.job.loader(dataset(), BATCH, shards=SHARDS), total=1))
    for x, y in step:
        runs += 1
        cross_entropy(setup.model(x), y).backward()
        step.log(sum={"runs": 1})
    assert runs == SHARDS + 2
    assert step.metrics == {"runs": SHARDS}
    assert int(batchnorm.get_buffer("num_batches_tracked")) == 1
    setup.job._detach()


# Metrics and the ledger


def test_metrics_are_a_float64_mean_and_empty_before_the_pass(job: Job) -> None:
    model = linear(job)
    step = next(job.steps(shards=4, total=1))
    assert step.metrics == {}
    for shard in step:
        model(torch.ones(1)).backward()
        step.log(mean={"loss/train": torch.tensor(0.1)}, other=shard.index)
    assert step.metrics == {"loss/train": float(torch.tensor(0.1)), "other": 1.5}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda step: (step.log(a=1), step.log(a=2)), "logged twice"),
        (lambda step: step.log(a=1, sum={"a": 1}), "logged twice"),
        (lambda step: step.log(mean={"elastic.x": 1}), "reserved"),
        (lambda step: step.log(a=torch.zeros(2)), r"a is a Tensor of shape \(2,\)"),
        (lambda step: step.log(a="high"), "a is a str"),
        (lambda step: step.weigh(0), "must be positive"),
        (lambda step: step.weigh(float("nan")), "must be positive"),
    ],
)
def test_what_cannot_be_logged_or_weighed_is_named(job: Job, call: Any, words: str) -> None:
    linear(job)
    step = next(job.steps(shards=2, total=1))
    next(iter(step))
    with pytest.raises((UsageError, ConfigError), match=words):
        call(step)


@pytest.mark.parametrize(
    "call", [lambda s: s.log(a=1), lambda s: s.weigh(1), lambda s: s.skip(), lambda s: s.shard.index]
)
def test_what_belongs_into_the_inner_loop_says_so_outside(job: Job, call: Any) -> None:
    model = linear(job)
    for step in job.steps(shards=2, total=1):
        for _ in step:
            model(torch.ones(1)).backward()
        with pytest.raises(UsageError, match="for batch in step"):
            call(step)


def test_a_step_is_applied_when_the_next_is_asked_for(job: Job, session: Recorded) -> None:
    setup = set_up(job)
    for step in job.steps(job.loader(dataset(), BATCH, shards=SHARDS), total=3):
        assert [record.step for record in session.records] == list(range(step.index))
        whole(step, setup.model)
    job.close()
    assert [record.step for record in session.records] == [0, 1, 2]


def test_a_record_holds_rates_scalars_and_the_samples_of_each_shard(job: Job, session: Recorded) -> None:
    setup = set_up(job, learning_rate=0.5)
    for step in job.steps(job.loader(dataset(), 10, shards=SHARDS), total=2):
        for x, y in step:
            cross_entropy(setup.model(x), y).backward()
            step.log(sum={"n": len(y)})
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        setup.scheduler.step()
    job.close()
    first, second = session.records
    assert (first.step, first.epoch, first.world_size, first.generation) == (0, 0, 1, 1)
    assert first.samples == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert first.scalars == {"n": 10.0}
    assert (first.lr, second.lr) == ((0.5,), (0.45,))


def test_a_large_step_is_recorded_by_hashes(job: Job) -> None:
    samples = 5000
    data = job.loader(list(range(samples)), samples, shards=2)
    first, _ = PassWork(2, data, "mean", frozenset()).samples(Place(0, 0, 0, 1, True))
    expected = hashlib.sha256(np.arange(samples // 2, dtype="<i8").tobytes()).hexdigest()
    assert first == {"n": samples // 2, "sha256": expected}


def test_a_step_that_fails_is_not_applied(session: Recorded) -> None:
    with pytest.raises(ZeroDivisionError), make_job(session) as job:
        model = linear(job)
        for step in job.steps(shards=2, total=3):
            for shard in step:
                model(torch.ones(1)).backward()
                if step.index == 1 and shard.index == 1:
                    1 / 0  # noqa: B018
            model.zero_grad()
    assert [record.step for record in session.records] == [0]
    ((error, step_no, shard_no),) = session.failures
    assert (type(error), step_no, shard_no) == (ZeroDivisionError, 1, 1)
    assert session.closed_with is None


def test_closing_applies_the_last_step_and_hands_over_the_digest(session: Recorded) -> None:
    setup = set_up(make_job(session))
    with setup.job as job:
        for step in job.steps(job.loader(dataset(), BATCH, shards=SHARDS), total=5):
            whole(step, setup.model)
            if step.index == 1:
                break
    assert [record.step for record in session.records] == [0, 1]
    assert session.closed_with == job.digest()


# Schedulers, scalers, compiled graphs


def test_training_is_the_same_as_plain_pytorch_where_that_has_one_batch_a_step() -> None:
    """One shard without BatchNorm and Dropout: nothing is left to differ but the division by a weight of 1."""

    def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)

    plain, optimizer, scheduler = model_and_optimizer()
    for step in range(6):
        x, y = dataset()[step % 3 * BATCH : step % 3 * BATCH + BATCH]
        cross_entropy(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    job = make_job()
    model, optimizer, scheduler = model_and_optimizer()
    job.register(model=model, optimizer=optimizer, scheduler=scheduler)
    for running in job.steps(job.loader(dataset(), BATCH, shards=1), epochs=2):
        for x, y in running:
            cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    job.close()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_grad_scaler_skips_a_step_with_infinite_gradients_and_goes_on(job: Job) -> None:
    model = linear(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    job.register(optimizer=optimizer, scaler=scaler)
    weights = []
    for step in job.steps(shards=2, total=3):
        for shard in step:
            factor = float("inf") if (step.index, shard.index) == (1, 1) else 1.0
            scaler.scale(model(torch.full((1,), factor))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(model.weight.item())
    assert weights == [-1.0, -1.0, -2.0]
    assert scaler.get_scale() == 2.0


def test_the_same_script_ends_in_the_same_digest_and_another_seed_in_another() -> None:
    digests = [train(set_up(make_job(seed=seed))) for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


# Stopping


def test_stop_in_a_pass_ends_both_loops_after_that_step(job: Job, session: Recorded) -> None:
    setup = set_up(job)
    data = job.loader(dataset(), BATCH, shards=SHARDS)
    epochs = []
    for epoch in job.epochs(5):
        epochs.append(epoch)
        for step in job.steps(data):
            for x, _ in step:
                setup.model(x).sum().backward()
                if step.index == 4:
                    job.stop("found it")
            setup.optimizer.zero_grad()
            assert all(not name.startswith("elastic.") for name in step.metrics)
    assert epochs == [0, 1]
    job.close()
    assert session.records[-1].step == 4


def test_stop_after_a_pass_travels_with_the_next_one(job: Job, session: Recorded) -> None:
    model = linear(job)
    for step in job.steps(shards=2, total=9):
        for _ in step:
            model(torch.ones(1)).backward()
        model.zero_grad()
        if step.index == 2:
            job.stop("enough")
    job.close()
    assert session.records[-1].step == 3


def test_stop_after_the_steps_of_an_epoch_costs_no_further_step(job: Job, session: Recorded) -> None:
    setup = set_up(job)
    data = job.loader(dataset(), BATCH, shards=SHARDS)
    for epoch in job.epochs(5):
        for step in job.steps(data):
            whole(step, setup.model)
        if epoch == 1:
            job.stop("no improvement")
    job.close()
    assert session.records[-1].step == 5


# Arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "needs data"),
        ({"shards": 0, "total": 1}, "shards=0 must be an integer of at least 1"),
        ({"shards": 2.0, "total": 1}, "shards=2.0"),
        ({"shards": 2}, "needs total="),
        ({"shards": 2, "total": 0}, "total=0"),
        ({"shards": 2, "epochs": 3}, "needs total="),
        ({"shards": 2, "total": 1, "gradients": "average"}, "gradients='average'"),
        ({"data": "loader", "shards": 2, "total": 1}, "leave shards= out"),
        ({"data": "loader"}, "needs one of total="),
        ({"data": "loader", "total": 1, "epochs": 1}, "needs one of total="),
        ({"data": [1, 2], "total": 1}, "wrap the dataset"),
    ],
)
def test_arguments_of_steps_that_do_not_go_together_are_refused(
    job: Job, arguments: dict[str, Any], words: str
) -> None:
    set_up(job)
    if arguments.get("data") == "loader":
        arguments = {**arguments, "data": job.loader(dataset(), BATCH, shards=SHARDS)}
    with pytest.raises(ConfigError, match=words):
        job.steps(**arguments)


@pytest.mark.parametrize("arguments", [{"total": 3}, {"epochs": 3}, {"total": 1, "epochs": 1}])
def test_an_epoch_of_data_needs_no_length(job: Job, arguments: dict[str, Any]) -> None:
    set_up(job)
    data = job.loader(dataset(), BATCH, shards=SHARDS)
    for _ in job.epochs(1):
        with pytest.raises(ConfigError, match=r"inside job\.epochs\(\)"):
            job.steps(data, **arguments)


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "3"])
def test_epochs_wants_a_positive_integer(job: Job, n: Any) -> None:
    with pytest.raises(ConfigError, match="epochs="):
        job.epochs(n)


def test_another_number_of_shards_is_refused(job: Job) -> None:
    job.loader(dataset(), BATCH, shards=4)
    with pytest.raises(ConfigError, match="fixed for the whole job"):
        job.loader(dataset(), BATCH, shards=2)


def test_a_loop_without_a_registered_model_is_refused(job: Job) -> None:
    with pytest.raises(ConfigError, match=r"job\.register\(model="):
        job.steps(shards=2, total=1)


def test_register_after_the_first_step_is_refused(job: Job) -> None:
    setup = set_up(job)
    next(job.steps(shards=2, total=1))
    with pytest.raises(ConfigError, match="before the loop"):
        job.register(late=setup.model)


# state, print, once


def test_a_value_set_before_the_loop_is_kept_by_setdefault(job: Job) -> None:
    job.state.best = 3
    job.state.setdefault(best=0, seen=1)
    assert dict(job.state.items()) == {"best": 3, "seen": 1}


def test_once_gives_a_value_that_is_not_a_number(job: Job) -> None:
    set_up(job)
    for _ in job.epochs(1):
        found = job.once(lambda: {"loss": float("nan"), "best": [float("inf")]})
        assert str(found) == "{'loss': nan, 'best': [inf]}"


def test_once_gives_the_value_and_runs_it_once_with_the_rngs_put_back(job: Job) -> None:
    set_up(job)
    calls = []

    def sample(prompt: str) -> list[str]:
        calls.append(torch.rand(3))
        return [prompt, "text"]

    for _ in job.epochs(1):
        torch.manual_seed(5)
        assert job.once(sample, "a") == ["a", "text"]
        after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    assert len(calls) == 1


def closed(session: Session, *, epochs: int, evaluates: bool = False) -> str:
    """A script that trains without job.steps()."""
    job = make_job(session)
    model = nn.Linear(6, 2)
    job.register(model=model)
    for _ in job.epochs(epochs):
        if evaluates:
            job.evaluate(lambda x, y: {"loss": F.cross_entropy(model(x), y)}, dataset())
    job.close()
    return job.digest()


def test_several_workers_that_have_done_nothing_together_are_told() -> None:
    world = World(2)
    world.run(lambda session: closed(session, epochs=2))
    assert {worker: type(error) for worker, error in world.errors.items()} == {"w0": NoSteps, "w1": NoSteps}
    assert [len(session.failures) for session in world.sessions.values()] == [1, 1]


def test_a_worker_is_told_also_if_the_others_have_failed_before_it() -> None:
    world = World(2)
    jobs = {name: make_job(FakeMember(world, name, joining=False)) for name in world.members}
    for name, job in jobs.items():
        with pytest.raises(NoSteps, match=r"without one step of job\.steps\(\).*--workers 1"):
            job.close()
        world.members.remove(name)


def test_several_workers_may_evaluate_only_and_one_may_train_as_it_likes() -> None:
    world = World(2)
    world.run(lambda session: closed(session, epochs=1, evaluates=True))
    assert not world.errors and len(world.digests) == 2
    assert closed(Recorded(), epochs=2)


def test_print_prints_on_the_leader(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    job.print("a", 1, sep="-")
    assert capsys.readouterr().out == "a-1\n"


def test_the_idle_of_a_world_larger_than_v_are_said(session: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    session.world_size = 6
    job = make_job(session)
    set_up(job)
    job.steps(shards=4, total=1)
    assert "6 workers for 4 shards: 2 are idle, without a shard" in capsys.readouterr().out


def test_the_attributes_of_a_job_of_one() -> None:
    job = make_job(Recorded())
    assert (job.rank, job.world_size, job.local_rank, job.is_leader, job.restarted) == (0, 1, 0, True, False)
    assert job.device == torch.device("cpu")
    assert job.worker_id.count(".") == 2


def test_whoever_watches_is_told_once_how_far_the_job_goes() -> None:
    told: list[dict[str, object]] = []

    class Told(Recorded):
        def note(self, event: str, **fields: object) -> None:
            if event == "steps_planned":
                told.append(fields)

    job = make_job(Told())
    setup = set_up(job)
    train(setup, epochs=3)
    assert told == [{"total": len(setup.metrics), "shards": SHARDS}]
    job = make_job(Told())
    model = linear(job)
    for step in job.steps(shards=4, total=5):
        for _ in step:
            model(torch.ones(1, 1)).sum().backward()
        model.zero_grad()
    job._detach()
    assert told[1:] == [{"total": 5, "shards": 4}]


@pytest.mark.parametrize("call", ["once", "evaluate"])
@pytest.mark.parametrize("then", ["the next step", "the same call", "the end"])
def test_a_caught_error_of_a_function_that_all_workers_wait_for_is_named(call: str, then: str) -> None:
    """The worker cannot go on, because it has not done what the others wait for."""

    def fails(*batch: torch.Tensor) -> dict[str, float]:
        raise OSError("disk full")

    def body(setup: Setup) -> None:
        for _ in range(2 if then == "the same call" else 1):
            try:
                setup.job.once(fails) if call == "once" else setup.job.evaluate(fails, dataset())
            except OSError:
                continue

    with pytest.raises(UsageError, match=rf"job.{call}.*fails.* was left by an error of its function"):
        train(set_up(make_job()), epochs=1 if then == "the end" else 2, body=body)
