"""`elastic doctor --exact`: what it finds, and the reason that it names."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import traceback
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import torch
from torch import nn

from elastic import cli
from elastic.agent.worker.examination import Examination
from elastic.checkpoints.series import Series
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import ConfigError, ExitCode
from elastic.platforms.local import exactness_check
from elastic.platforms.local.exactness_check import ExactnessReport
from elastic.platforms.local.run_differences import Check, Difference, EndedRun, Line
from runtime.loop.job import Job
from runtime.loop.sinks.json_lines import JsonLines
from runtime.session import Session
from runtime.worker.isolated_shards import IsolatedSession
from runtime.worker.recorded_join import Joining, Recording
from tests.unit import features
from tests.unit.features import FEATURES, STEPS, anchored_in_a_variable, loader, mlp, train
from tests.unit.jobs import Recorded, cross_entropy, dataset, make_job


def digest(feature: Any, session: Session) -> str:
    job = make_job(session)
    feature(job)
    found = job.digest()
    job.close()
    return found


# A process for each shard


@pytest.mark.parametrize(
    "name",
    [
        "batch_norm",
        "random_in_the_loop",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("dropout", "gan", "random_transforms", "decisions_by_evaluation")
        ),
    ],
)
def test_shards_in_processes_of_their_own_have_the_bits_of_a_plain_job(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "STEPS", 2)
    assert digest(FEATURES[name], IsolatedSession()) == digest(FEATURES[name], Recorded())


def test_what_goes_on_from_shard_to_shard_changes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "STEPS", 2)

    def own_generator(job: Job) -> None:
        generator = torch.Generator().manual_seed(1)
        model = mlp()
        train(job, model, loss_of=lambda x, y: cross_entropy(model(x + torch.randn(6, generator=generator)), y))

    assert digest(own_generator, IsolatedSession()) != digest(own_generator, Recorded())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_shard_that_fails_ends_all_with_its_exit_code() -> None:
    def failing(job: Job) -> None:
        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if isinstance(job._session, IsolatedSession) and job._session._parent is not None:
                os._exit(7)
            return cross_entropy(model(x), y)  # type: ignore[no-any-return]

        model = mlp()
        train(job, model, loss_of=loss_of)

    child = os.fork()
    if child == 0:
        digest(failing, IsolatedSession())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# Entering in the middle


def entering(feature: Any, tmp_path: Path, at: int = 4) -> tuple[str, str]:
    """Digests: of a plain job of one, and of a newcomer that enters it in that step."""
    path = tmp_path / "recording"
    plain = digest(feature, Recording(path, at, torch.device("cpu")))
    assert plain == digest(feature, Recorded())
    return plain, digest(feature, Joining(path, torch.device("cpu")))


@pytest.mark.parametrize(
    "name",
    [
        "batch_norm",
        "gan",
        "random_once_an_epoch",
        "anchor",
        "evaluation_before_the_inner_loop",
        "mixed_parameter_dtypes",
    ],
)
def test_a_newcomer_in_the_middle_has_the_bits_of_a_plain_job(name: str, tmp_path: Path) -> None:
    plain, joined = entering(FEATURES[name], tmp_path)
    assert joined == plain


def test_weights_copied_into_a_variable_before_the_steps_are_a_newcomers_own(tmp_path: Path) -> None:
    plain, joined = entering(anchored_in_a_variable, tmp_path)
    assert joined != plain


def test_a_generator_drawn_from_before_the_inner_loop_begins_anew_in_a_newcomer(tmp_path: Path) -> None:
    def scaled(job: Job) -> None:
        generator = np.random.default_rng(1)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job.register(model=model, optimizer=optimizer)
        for step in job.steps(loader(job), total=STEPS):
            scale = generator.random()
            for x, y in step:
                (cross_entropy(model(x), y) * scale).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, joined = entering(scaled, tmp_path)
    assert joined != plain


def test_epochs_are_short_and_a_checkpoint_is_taken_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a stream too; sinks are not fed."""
    given = Examination(path=str(tmp_path / "lines"), steps=99, at=4, recording="x")
    for name, value in (given.to_environment() | Settings(root=str(tmp_path / "root")).to_environment()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os._exit", lambda code: None)
    for data in ("loader", "stream", "shards"):
        job = make_job()
        model = nn.Linear(6, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job.register(model=model, optimizer=optimizer)
        job.log_to(JsonLines(str(tmp_path / "sink")))
        source = (
            job.loader(dataset(), 8, shards=2)
            if data == "loader"
            else job.stream(lambda shard, epoch, skip: dataset().tensors[0].split(5)[skip:], shards=2)
        )
        steps = []
        for epoch in job.epochs(2):
            for step in job.steps(source) if data != "shards" else job.steps(shards=2, total=5):
                for _ in step:
                    model(torch.ones(6)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append((epoch, step.index, step.last_in_epoch))
        job.close()
        assert steps == [(index // 3, index, index % 3 == 2) for index in range(6)]
        assert {name.step for name in Series(storage_at(str(tmp_path / "root"))).names()} == {4}
    assert not (tmp_path / "sink").exists()


# What is noted


def test_each_step_is_noted_with_the_state_it_finds_and_the_scripts_generators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    for name, value in Examination(path=str(path), steps=99).to_environment().items():
        monkeypatch.setenv(name, value)
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    noise = torch.Generator().manual_seed(1)
    ours = np.random.default_rng(1)
    job = make_job()
    model = mlp()
    weights = list(model.parameters())
    anchor = [parameter.detach().clone() for parameter in weights]
    seen, teacher = {"steps": 0}, mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(shards=2, total=2):
        for _ in step:
            loss = model(torch.randn(3, 6, generator=noise)).square().mean()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        anchor[0].mul_(2)
        seen["steps"] += 1
    job.close()
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [list(line["scalars"]) for line in lines] == [[], ["loss"], ["loss"]]
    assert next(iter(lines[0]["state"])) == "model.0.weight"
    assert len({line["state"]["model.0.weight"] for line in lines}) == 3
    assert len({line["generators"]["noise"] for line in lines}) == 3
    assert len({line["generators"]["ours"] for line in lines}) == 1 and ours is not None
    variables = [line["variables"] for line in lines]
    assert {name for name in ("anchor", "seen", "teacher", "weights", "model") if name in variables[0]} == {
        "anchor",
        "seen",
        "teacher",
    }
    assert [len({line[name] for line in variables}) for name in ("anchor", "seen", "teacher")] == [3, 3, 1]
    assert teacher is not model and ended == [0], "the loop is over; what comes behind it would not be run"


# What is made of it


def lines(changes: dict[int, dict[str, Any]] | None = None) -> list[Line]:
    plain: list[Line] = [
        {
            "step": step,
            "shards": 4,
            "state": {"model.weight": f"w{step}", "optimizer.exp_avg": f"e{step}"},
            "scalars": {"loss": 1.0} if step else {},
            "samples": [[step]],
            "generators": {"noise": "n0"},
            "variables": {"anchor": "a0", "began": "12:00"},
        }
        for step in range(7)
    ]
    for step, change in (changes or {}).items():
        plain[step] = {**plain[step], **change}
    return plain


def examined(
    monkeypatch: pytest.MonkeyPatch, runs: dict[str, Any], kernels: list[str] | None = None, steps: int = 6
) -> ExactnessReport:
    """Of runs that have noted these lines."""

    def noted(self: object, name: str) -> list[Line]:
        return list(runs.get(name, lines()[{"resumed": 4, "joins": 4}.get(name, 0) :]))

    monkeypatch.setattr(exactness_check._Runs, "lines", noted)
    monkeypatch.setattr(exactness_check._Runs, "nondeterministic_kernels", lambda self: kernels or [])
    return exactness_check.examine(["python", "train.py"], steps)


def test_the_same_lines_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    report = examined(monkeypatch, {})
    assert report.exact
    assert list(report.text()) == [
        "6 steps of 4 shards",
        "  same bits  two runs, alike",
        "  same bits  each shard in a process of its own",
        "  same bits  from a checkpoint before step 4",
        "  same bits  a newcomer in step 4",
        "exact",
    ]


@pytest.mark.parametrize(("steps", "at"), [(1, 0), (6, 4)])
def test_what_has_too_few_steps_is_entered_by_nobody(monkeypatch: pytest.MonkeyPatch, steps: int, at: int) -> None:
    few = lines()[: at + 1]
    report = examined(monkeypatch, {"once": few, "again": few, "apart": few}, steps=steps)
    assert [check.tried for check in report.checks] == [True, True, False, False]
    assert f"  too short  a newcomer in step {at}" in list(report.text())


MOVING = {step: {"generators": {"noise": f"n{step}"}} for step in range(7)}
NAMED = {"variables": {"anchor": "?", "began": "12:01", "loss": "?"}}
DRAWN = {"generators": {"noise": "?"}, **NAMED}
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
        ({"resumed": lines({4: OTHER})[4:]}, [], 2, 4, "model.weight, and 1 more", "is run again by a run"),
        ({"resumed": lines({4: NAMED, 5: OTHER})[4:]}, [], 2, 4, "model.weight", "`anchor` is another one there"),
        ({"joins": lines({4: OTHER | NAMED, 6: OTHER})[4:]}, [], 3, 5, "model.weight", "`anchor` is another one there"),
        ({"joins": lines({4: DRAWN, 6: OTHER})[4:]}, [], 3, 5, "model.weight", "the generator `noise` begins anew"),
        ({"joins": lines({6: {"scalars": {"loss": 2.0}}})[4:]}, [], 3, 5, "the logged loss", "neither registered nor"),
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
    assert not report.exact and len(report.checks) == (4 if check else 1)
    assert [number for number, each in enumerate(report.checks) if each.difference is not None] == [check]
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
open("model.pt", "w").write("of six steps")
"""


class Forked:
    """subprocess.Popen for a script: a copy of this process runs it, which has imported torch already."""

    def __init__(self, command: list[str], *, env: dict[str, str], stderr: TextIO, **options: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(stderr.fileno(), 2)
                os.environ.clear()
                os.environ.update(env)
                runpy.run_path(command[-1], run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc(file=stderr)
                stderr.flush()
            finally:
                os._exit(code)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_real_script_is_examined_and_nothing_behind_its_loop_is_run(
    forked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if forked:
        monkeypatch.setattr(subprocess, "Popen", Forked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(EXAMPLE)
    assert cli.main(["doctor", "--exact", "--json", "train.py"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["exact"], document["steps"], document["shards"]) == (False, 6, 2)
    alike, apart, resumed, joins = document["checks"]
    assert alike["difference"] is None
    assert apart["difference"]["step"] == 0
    assert apart["difference"]["what"].startswith("model.weight")
    assert "the generator `noise` goes on from shard to shard" in apart["difference"]["because"]
    assert (resumed["difference"]["step"], joins["difference"]["step"]) == (4, 5)
    assert "the generator `noise` begins anew" in resumed["difference"]["because"]
    assert "the generator `noise` begins anew" in joins["difference"]["because"]
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


def test_the_run_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness_check._Runs, "run", lambda self, name, examination: EndedRun(3, [], None, ""))
    with pytest.raises(ConfigError, match="exit code 3 when it entered as a newcomer"):
        exactness_check._Runs(("train.py",), 6, tmp_path).lines("joins")


def test_without_a_checkpoint_it_is_said_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"could be written to {tmp_path}.*TMPDIR"):
        exactness_check._Runs(("train.py",), 6, tmp_path).lines("resumed")


def test_a_report_is_json_as_a_whole() -> None:
    report = ExactnessReport(3, 8, (Check("two runs, alike", Difference(1, "model.weight", "the clock")),))
    assert json.loads(json.dumps(report.document())) == {
        "exact": False,
        "steps": 3,
        "shards": 8,
        "checks": [
            {
                "name": "two runs, alike",
                "difference": {"step": 1, "what": "model.weight", "because": "the clock"},
                "tried": True,
            }
        ],
    }
