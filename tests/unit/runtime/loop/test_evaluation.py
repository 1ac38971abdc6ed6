"""job.evaluate: exact means over the whole dataset, leaving no trace in modes, gradients and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import ConfigError, UsageError
from runtime.loop.job import Job
from tests.unit.jobs import Recorded, Setup, dataset, make_job, set_up


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = set_up(make_job())
    next(iter(setup.job.epochs(1)))
    yield setup
    setup.job._detach()


def evaluate(job: Job, fn: Any, **arguments: Any) -> dict[str, float]:
    return job.evaluate(fn, dataset(50), **arguments)


@pytest.mark.parametrize("batch_size", [1, 7, 25, 50, 1000])
def test_the_mean_is_over_samples_whatever_the_batches(setup: Setup, batch_size: int) -> None:
    x = dataset(50).tensors[0]
    result = evaluate(setup.job, lambda x, y: {"first": x[:, 0].double().mean(), "one": 1}, batch_size=batch_size)
    assert result == {"first": pytest.approx(x[:, 0].double().mean().item(), abs=1e-15), "one": 1.0}


def test_every_sample_is_given_once_in_order_of_the_dataset(setup: Setup) -> None:
    seen: list[int] = []

    def score(batch: torch.Tensor) -> dict[str, float]:
        seen.extend(batch.tolist())
        return {}

    assert setup.job.evaluate(score, list(range(200)), batch_size=3) == {}
    assert seen == list(range(200))


def test_models_are_in_evaluation_mode_and_each_part_gets_its_own_mode_back(setup: Setup) -> None:
    setup.model.get_submodule("1").eval()
    modes = {name: module.training for name, module in setup.model.named_modules()}

    def score(x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        assert not any(module.training for module in setup.model.modules())
        assert not torch.is_grad_enabled()
        return {}

    evaluate(setup.job, score)
    assert {name: module.training for name, module in setup.model.named_modules()} == modes
    assert torch.is_grad_enabled()


def test_only_the_named_models_are_switched(setup: Setup) -> None:
    other = nn.Dropout()

    def score(x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        assert setup.model.training and not other.training
        return {}

    evaluate(setup.job, score, models=other)
    evaluate(setup.job, score, models=[other])
    assert other.training


def test_modes_come_back_when_the_score_raises(setup: Setup) -> None:
    with pytest.raises(ZeroDivisionError):
        evaluate(setup.job, lambda x, y: {"bad": 1 / 0})
    assert setup.model.training


def test_random_scores_are_repeatable_and_the_scripts_rng_is_put_back(setup: Setup) -> None:
    torch.manual_seed(4)
    results = [evaluate(setup.job, lambda x, y: {"noise": torch.rand(())}) for _ in range(2)]
    after = torch.rand(1)
    torch.manual_seed(4)
    assert torch.equal(after, torch.rand(1))
    assert results[0] == results[1]


def test_a_batch_that_is_a_dict_is_one_argument(setup: Setup) -> None:
    samples = [{"x": torch.tensor(float(i))} for i in range(10)]
    assert setup.job.evaluate(lambda batch: {"x": batch["x"].mean()}, samples) == {"x": 4.5}


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x, y: 0.5, "returned a float; return a dict"),
        (lambda x, y: {"a": x}, r"a is a Tensor of shape"),
        (lambda x, y: {"elastic.a": 1}, "elastic.a"),
        (lambda x, y: {3: 1}, "3"),
    ],
)
def test_a_score_of_another_kind_is_named(setup: Setup, fn: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        evaluate(setup.job, fn)


@pytest.mark.parametrize(
    ("data", "batch_size", "words"), [([], 8, "empty"), (dataset(), 0, "batch_size=0"), (iter([1]), 8, "map-style")]
)
def test_a_dataset_that_cannot_be_evaluated_is_refused(setup: Setup, data: Any, batch_size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        setup.job.evaluate(lambda batch: {}, data, batch_size=batch_size)


def test_evaluation_after_the_loop_is_possible() -> None:
    with make_job(Recorded()) as job:
        set_up(job)
        assert list(job.epochs(1)) == [0]
        assert evaluate(job, lambda x, y: {"one": 1}) == {"one": 1.0}
