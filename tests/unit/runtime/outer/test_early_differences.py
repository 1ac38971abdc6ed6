"""Differences that are sent while further inner steps are made: what was sent is what the replica has at last."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.allreduce.reduction import early_sums
from tests.unit.jobs import Recorded, cross_entropy, dataset, make_job
from tests.unit.runtime.loop.test_overlap import Early
from tests.unit.runtime.outer.outer_jobs import ADAMW, OuterJob, Seen, diloco
from tests.unit.runtime.outer.test_quorum import with_quorum

KINDS: dict[str, dict[str, Any]] = {
    "delayed": {"delay": 1},
    "reset moments": {"delay": 2, "moments": "reset"},
    "streaming and mixed": {"every": 6, "fragments": 2, "delay": 2, "alpha": 0.25},
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of tiny models."""
    monkeypatch.setattr(early_sums, "PART_ELEMENTS_MIN", 1)


@pytest.mark.parametrize(
    ("reduction", "compression"), [("exact", "none"), ("fixed", "none"), ("exact", "bf16"), ("exact", "int8")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_difference_that_left_early_is_the_one_of_the_round(kind: str, reduction: str, compression: str) -> None:
    job = OuterJob(diloco(**KINDS[kind]))
    early, late = Early(reduction, compression), Recorded(reduction, compression)
    assert job.train(make_job(early), Seen()) == job.train(make_job(late), Seen())
    assert len(early.passes) >= 6
    assert all(offered > 0 and right for offered, _, right in early.passes)


@pytest.mark.parametrize("least", [1, 4], ids=["replicas are left out", "all are trained"])
def test_with_a_quorum_a_worker_trains_its_last_replica_whose_difference_leaves_early(least: int) -> None:
    job = OuterJob(with_quorum(least, delay=2))
    early = Early("exact", "none")
    assert job.train(make_job(early), Seen()) == job.train(make_job(Recorded()), Seen())
    assert early.passes and all(offered > 0 and right for offered, _, right in early.passes)


def test_without_delay_there_is_nothing_to_send_early() -> None:
    session = Early("exact", "none")
    OuterJob(diloco()).train(make_job(session), Seen())
    assert session.cuts == () and session.passes == []


def accumulated(session: Recorded, at: list[int]) -> str:
    """A script that steps in each second inner step only: its gradients are there when the difference is taken. at:
    gets how many gradients there are in each inner step."""
    job = make_job(session)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2)
    optimizer = ADAMW(model.parameters())
    outer = diloco(every=4, delay=1)(model, optimizer)
    data = job.loader(dataset(64), 8, shards=4, shuffle=True)
    job.register(model=model, optimizer=optimizer, outer=outer)
    for step in job.steps(data, epochs=1, outer=outer):
        for inner, (x, y) in enumerate(step):
            at.append(sum(parameter.grad is not None for parameter in model.parameters()))
            cross_entropy(model(x), y).backward()
            if inner % 2:
                optimizer.step()
                optimizer.zero_grad()
    digest = job.digest()
    job.close()
    return digest


def test_gradients_that_a_script_accumulates_stay_when_a_difference_leaves() -> None:
    seen: dict[str, list[int]] = {"early": [], "late": []}
    early = Early("exact", "none")
    assert accumulated(early, seen["early"]) == accumulated(Recorded(), seen["late"])
    assert early.passes and all(offered > 0 and right for offered, _, right in early.passes)
    assert seen["early"] == seen["late"] == [0, 0, *[0, 2] * (len(seen["late"]) // 2 - 1)], "behind two rehearsals"


def test_a_replica_that_ends_in_nan_takes_back_what_has_left() -> None:
    """Its parameters become infinite behind the moment at which its finite difference was sent."""

    def digest_of(session: Recorded) -> str:
        job = make_job(session)
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 2)
        optimizer = ADAMW(model.parameters())
        outer = diloco(every=3, delay=1)(model, optimizer)
        job.register(model=model, optimizer=optimizer, outer=outer)
        for step in job.steps(shards=4, total=4, outer=outer, nonfinite="skip"):
            for shard in step:
                bad = (step.index, shard.index, shard.inner) == (1, 3, 2)
                (model(torch.randn(4, 6)).square().mean() * (torch.inf if bad else 1.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert (step.metrics.get("elastic.nonfinite", 0.0) == 1.0) == (step.index == 1)
        digest = job.digest()
        job.close()
        return digest

    early = Early("exact", "none")
    assert digest_of(early) == digest_of(Recorded())
    assert [right for _, _, right in early.passes] == [True, False, True, True]
