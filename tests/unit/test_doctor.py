"""`elastic doctor --exact`: what it finds, and the reason that it names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic import cli, doctor
from elastic.doctor import Check, Difference, Report
from elastic.errors import ExitCode
from elastic.examination import Examination
from runtime.apart import Apart
from runtime.job import Job
from runtime.session import Session
from tests.unit.features import FEATURES, mlp, train
from tests.unit.jobs import Recorded, cross_entropy, make_job, one_thread


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def digest(feature: Any, session: Session) -> str:
    job = make_job(session)
    feature(job)
    found = job.digest()
    job.close()
    return found


# A process for each shard


@pytest.mark.parametrize(
    "name", ["dropout", "batch_norm", "gan", "random_transforms", "random_in_the_loop", "decisions_by_evaluation"]
)
def test_shards_in_processes_of_their_own_have_the_bits_of_a_plain_job(name: str) -> None:
    assert digest(FEATURES[name], Apart()) == digest(FEATURES[name], Recorded())


def test_what_goes_on_from_shard_to_shard_changes_them() -> None:
    def own_generator(job: Job) -> None:
        generator = torch.Generator().manual_seed(1)
        model = mlp()
        train(job, model, loss_of=lambda x, y: cross_entropy(model(x + torch.randn(6, generator=generator)), y))

    assert digest(own_generator, Apart()) != digest(own_generator, Recorded())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_shard_that_fails_ends_all_with_its_exit_code() -> None:
    def failing(job: Job) -> None:
        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if isinstance(job._session, Apart) and job._session._parent is not None:
                os._exit(7)
            return cross_entropy(model(x), y)  # type: ignore[no-any-return]

        model = mlp()
        train(job, model, loss_of=loss_of)

    child = os.fork()
    if child == 0:
        digest(failing, Apart())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# What is noted


def test_each_step_is_noted_with_the_state_it_finds_and_the_scripts_generators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    for name, value in Examination(path=str(path), steps=99).to_environment().items():
        monkeypatch.setenv(name, value)
    ended: list[int] = []
    monkeypatch.setattr("runtime.examiner.os._exit", ended.append)
    noise = torch.Generator().manual_seed(1)
    ours = np.random.default_rng(1)
    job = make_job()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(shards=2, total=2):
        for _ in step:
            loss = model(torch.randn(3, 6, generator=noise)).square().mean()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    job.close()
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [list(line["scalars"]) for line in lines] == [[], ["loss"], ["loss"]]
    assert next(iter(lines[0]["state"])) == "model.0.weight"
    assert len({line["state"]["model.0.weight"] for line in lines}) == 3
    assert len({line["generators"]["noise"] for line in lines}) == 3
    assert len({line["generators"]["ours"] for line in lines}) == 1 and ours is not None
    assert ended == [0], "the loop is over; what comes behind it would not be run"


# What is made of it


def lines(changes: dict[int, dict[str, Any]] | None = None) -> list[doctor.Line]:
    plain: list[doctor.Line] = [
        {
            "step": step,
            "shards": 4,
            "state": {"model.weight": f"w{step}", "optimizer.exp_avg": f"e{step}"},
            "scalars": {"loss": 1.0} if step else {},
            "samples": [[step]],
            "generators": {"noise": "n0"},
        }
        for step in range(4)
    ]
    for step, change in (changes or {}).items():
        plain[step] = {**plain[step], **change}
    return plain


def examined(monkeypatch: pytest.MonkeyPatch, runs: dict[str, Any], kernels: list[str] | None = None) -> Report:
    """Of runs that have noted these lines."""

    def noted(self: object, name: str, *, apart: bool = False) -> list[doctor.Line]:
        assert apart == (name == "apart")
        return list(runs.get(name, lines()))

    monkeypatch.setattr(doctor._Runs, "lines", noted)
    monkeypatch.setattr(doctor._Runs, "nondeterministic_kernels", lambda self: kernels or [])
    return doctor.examine(["python", "train.py"], 3)


def test_the_same_lines_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    report = examined(monkeypatch, {})
    assert report.exact
    assert list(report.text()) == [
        "3 steps of 4 shards",
        "  same bits  two runs, alike",
        "  same bits  each shard in a process of its own",
        "exact",
    ]


MOVING = {step: {"generators": {"noise": f"n{step}"}} for step in range(4)}
OTHER = {"state": {"model.weight": "?", "optimizer.exp_avg": "?"}}


@pytest.mark.parametrize(
    ("runs", "kernels", "check", "step", "what", "because"),
    [
        ({"again": lines({0: OTHER})}, [], 0, None, "model.weight, and 1 more", "before elastic.join()"),
        ({"again": lines({0: {"generators": {"noise": "?"}}, 2: OTHER})}, [], 0, 1, "model.weight", "give it a seed"),
        (
            {"again": lines({2: OTHER})},
            ["scatter_add"],
            0,
            1,
            "model.weight",
            "no deterministic kernel for scatter_add",
        ),
        ({"again": lines({3: {"scalars": {"loss": 2.0}}})}, [], 0, 2, "the logged loss", "decided by no seed"),
        ({"again": lines()[:2]}, [], 0, 2, "one run has fewer steps", "decided by no seed"),
        ({"apart": lines({2: OTHER})}, [], 1, 1, "model.weight, and 1 more", "an earlier one left in its process"),
        ({"once": lines(MOVING), "again": lines(MOVING), "apart": lines({1: OTHER})}, [], 1, 0, "model", "`noise`"),
        ({"apart": lines({1: {"samples": [[9]]}})}, [], 1, 0, "its samples", "an earlier one"),
    ],
)
def test_the_first_difference_is_named_with_its_likely_reason(
    monkeypatch: pytest.MonkeyPatch,
    runs: dict[str, Any],
    kernels: list[str],
    check: int,
    step: int | None,
    what: str,
    because: str,
) -> None:
    report = examined(monkeypatch, runs, kernels)
    difference = report.checks[check].difference
    assert not report.exact and len(report.checks) == check + 1
    assert difference is not None
    assert difference.step == step
    assert what in difference.what and because in difference.because
    assert list(report.text())[-1] == "not exact"


# The command

EXAMPLE = """
import torch, elastic
job = elastic.join()
noise = torch.Generator().manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
job.register(model=model, optimizer=optimizer)
for step in job.steps(shards=2, total=9):
    for _ in step:
        model(torch.randn(3, 4, generator=noise)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
open("model.pt", "w").write("of two steps")
"""


def test_a_real_script_is_examined_and_nothing_behind_its_loop_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(EXAMPLE)
    assert cli.main(["doctor", "--exact", "--steps", "2", "--json", "train.py"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["exact"], document["steps"], document["shards"]) == (False, 2, 2)
    alike, apart = document["checks"]
    assert alike["difference"] is None
    assert apart["difference"]["step"] == 0
    assert apart["difference"]["what"].startswith("model.weight")
    assert "the generator `noise` goes on from shard to shard" in apart["difference"]["because"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("raise SystemExit('no data')", [], "no data elastic: the script failed with exit code 1"),
        ("", [], "the script ended without a step"),
        ("", ["--steps", "0"], "--steps 0 must be at least 1"),
    ],
)
def test_what_cannot_be_examined_is_bad_input(
    script: str,
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(script)
    assert cli.main(["doctor", "--exact", *arguments, "train.py"]) == ExitCode.BAD_INPUT
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_report_is_json_as_a_whole() -> None:
    report = Report(3, 8, (Check("two runs, alike", Difference(1, "model.weight", "the clock")),))
    assert json.loads(json.dumps(report.document())) == {
        "exact": False,
        "steps": 3,
        "shards": 8,
        "checks": [
            {
                "name": "two runs, alike",
                "difference": {"step": 1, "what": "model.weight", "because": "the clock"},
            }
        ],
    }
