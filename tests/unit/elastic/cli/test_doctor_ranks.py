"""`elastic doctor --ranks`: which runs it makes, and what it says of what they have noted."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic import cli
from elastic.agent.worker.environment import RANKS
from elastic.agent.worker.examination import Examination
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.platforms.local import examined_runs, rank_findings, ranks_check
from elastic.platforms.local.examined_runs import ScriptRuns
from elastic.platforms.local.rank_findings import RULES, Limit, RanksReport
from elastic.platforms.local.run_differences import EndedRun, Line
from runtime.frontends.ddp import mistakes


def lines(changes: dict[int, dict[str, Any]] | None = None, first: int = 0, steps: int = 6) -> list[Line]:
    plain = [
        {
            "step": step,
            "shards": 4,
            "state": {"model.weight": f"w{step}", "optimizer.exp_avg": f"e{step}"},
            "scalars": {},
            "samples": [[step]],
            "generators": {},
            "variables": {"count": f"c{step}", "loss": "l"},
            "sizes": [],
        }
        for step in range(steps + 1)
    ]
    for step, change in (changes or {}).items():
        plain[step] = {**plain[step], **change}
    return plain[first:]


def ended(noted: list[Line], raised: Line | None = None, exit_code: int | None = None) -> EndedRun:
    code = exit_code if exit_code is not None else int(raised is not None)
    return EndedRun(code, noted, raised, "Traceback of the script\n")


def raised(name: str = "NotInPlace", *, ours: bool = True, place: str = f"{Path.cwd()}/train.py:31") -> Line:
    return {"raised": name, "ours": ours, "message": f"{name}: write {Path.cwd()}/train.py otherwise", "place": place}


OTHER = {"state": {"model.weight": "?", "optimizer.exp_avg": "?"}}
CENTER = {"sizes": [["center in main", "tensor", 128, 64]]}
GOOD = {
    "once": ended(lines()),
    "backwards": ended(lines()),
    "again": ended(lines()),
    "joins": ended(lines(first=4)),
    "resumed": ended(lines(first=4)),
}


class Runs:
    """In place of real processes: what each run leaves, and which there were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **runs: EndedRun | list[EndedRun]) -> None:
        self.made: list[tuple[str, Examination]] = []
        self.environment: Mapping[str, str] = {}
        left = {name: list(run) if isinstance(run, list) else [run] for name, run in {**GOOD, **runs}.items()}

        def run(script: ScriptRuns, name: str, examination: Examination, title: str = "") -> EndedRun:
            self.made.append((name, examination))
            self.environment = script.environment
            return left[name].pop(0)

        monkeypatch.setattr(ScriptRuns, "run", run)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.made]

    def examine(self, steps: int = 6) -> RanksReport:
        return ranks_check.examine(["python", "train.py"], 4, steps)


def test_a_script_of_which_all_runs_have_the_same_bits_qualifies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")  # of a launcher around this command
    runs = Runs(monkeypatch)
    report = runs.examine()
    assert runs.names == ["once", "backwards", "joins", "resumed"]
    assert runs.environment[RANKS] == "4" and "WORLD_SIZE" not in runs.environment
    examined = dict(runs.made)
    assert (examined["once"].at, examined["joins"].joins, examined["backwards"].backwards) == (4, True, True)
    assert report.qualifies and set(report.rules().values()) == {"ok"}
    text = list(report.text())
    assert text[0] == "4 ranks, 6 steps" and text[-1] == "qualifies"
    assert [line.strip() for line in text[-4:-1]] == [
        "same bits  ranks in the opposite order",
        "same bits  a newcomer in step 4",
        "same bits  from a checkpoint before step 4",
    ]
    assert max(map(len, text)) <= 100


def test_a_refusal_is_shown_at_its_rule_and_ends_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, once=ended(lines(steps=2), raised()))
    report = runs.examine()
    assert runs.names == ["once"]
    assert not report.qualifies
    assert report.rules()["NotInPlace"] == "refused" and set(report.rules().values()) == {"refused", "open"}
    text = "\n".join(report.text())
    assert "train.py:31, one worker with all ranks:" in text and str(Path.cwd()) not in text
    assert "  open       13 other rules: a run that is refused ends there" in text
    assert "NotInPlace: write train.py otherwise" in text and text.endswith("does not qualify")
    assert report.document()["refusals"] == [
        {
            "rule": "NotInPlace",
            "place": "train.py:31",
            "message": "NotInPlace: write train.py otherwise",
            "run": "one worker with all ranks",
        }
    ]


def test_an_error_that_is_in_no_table_is_a_refusal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Runs(monkeypatch, once=ended([], raised("Unregistered", place=""))).examine()
    assert report.rules()["Unregistered"] == "refused"
    assert "at the end of the script, one worker" in "\n".join(report.text())


def test_what_only_a_newcomer_does_is_refused_and_the_checkpoint_is_still_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = Runs(monkeypatch, joins=ended([], raised("JoinMissed")))
    report = runs.examine()
    assert runs.names == ["once", "backwards", "joins", "resumed"]
    assert [(refusal.rule, refusal.run) for refusal in report.refusals] == [("JoinMissed", "a newcomer in step 4")]


@pytest.mark.parametrize("failure", [ended([], raised("KeyError", ours=False)), ended([], exit_code=-9)])
def test_a_script_that_fails_by_itself_is_bad_input_in_the_first_run_only(
    failure: EndedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="the script failed with exit code"):
        Runs(monkeypatch, once=failure).examine()
    report = Runs(monkeypatch, joins=failure).examine()
    assert not report.qualifies and not report.refusals
    difference = next(check.difference for check in report.checks if check.difference)
    assert difference is not None and difference.step is None
    assert ("it raised KeyError" in difference.what) == (failure.raised is not None)
    assert ("exit code -9" in difference.what) == (failure.raised is None)


def test_a_script_that_ends_without_a_step_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="without a step"):
        Runs(monkeypatch, once=ended([])).examine()


def test_a_script_of_one_epoch_is_run_again_with_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch, once=[ended(lines(steps=3)), ended(lines())])
    assert runs.examine().qualifies
    assert runs.names == ["once", "once", "backwards", "joins", "resumed"]
    assert [examination.whole_epochs for _, examination in runs.made] == [False, True, True, True, True]


def test_what_has_too_few_steps_is_entered_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    few = ended(lines(steps=4))
    runs = Runs(monkeypatch, once=[few, few], backwards=few)
    report = runs.examine()
    assert runs.names == ["once", "once", "backwards"]
    assert [check.tried for check in report.checks] == [True, False, False]
    assert "  too short  a newcomer in step 4" in list(report.text())


@pytest.mark.parametrize(
    ("runs", "checks", "step", "because"),
    [
        (
            {"backwards": lines({2: OTHER}), "again": lines({1: OTHER})},
            {"two runs, alike": "state"},
            0,
            "decided by no seed",
        ),
        ({"backwards": lines({2: OTHER})}, {}, 1, "a turn finds what the turn before has left"),
        ({"joins": lines({5: OTHER}, first=4)}, {}, 4, "something goes on in a process and is not copied"),
        ({"joins": lines({5: OTHER | {"variables": {"count": "?", "loss": "?"}}}, first=4)}, {}, 4, "`count` is"),
        ({"resumed": lines({5: OTHER}, first=4)}, {}, 4, "something goes on in a process"),
        ({"once": lines({3: CENTER}), "joins": lines({5: OTHER}, first=4)}, {}, 4, "does not get center in main"),
    ],
)
def test_the_first_difference_is_named_with_its_likely_reason(
    monkeypatch: pytest.MonkeyPatch, runs: dict[str, list[Line]], checks: dict[str, str], step: int, because: str
) -> None:
    report = Runs(monkeypatch, **{name: ended(noted) for name, noted in runs.items()}).examine()
    assert not report.qualifies
    (found,) = (check for check in report.checks if check.difference is not None)
    assert found.difference is not None
    assert (found.difference.step, found.difference.what) == (step, "model.weight, and 1 more")
    assert because in found.difference.because
    assert not checks or [check.name for check in report.checks] == list(checks)


def test_what_a_newcomer_has_in_the_step_that_it_enters_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Runs(monkeypatch, joins=ended(lines({4: OTHER}, first=4))).examine().qualifies


def test_limits_are_told_by_the_largest_size_and_the_growth() -> None:
    noted = lines({step: {"sizes": [["seen in main", "list", 2 * step, 4096]]} for step in range(1, 7)})
    (limit,) = rank_findings.limits_of(noted)
    assert limit == Limit("seen in main", "list", 12, 4096, 2.0)
    assert (
        "seen in main: a list of 12 entries that grows by 2 a step: newcomers get lists of at most 4,096" in limit.text
    )
    assert not limit.beyond


def test_a_list_that_stays_short_is_near_to_no_limit() -> None:
    assert rank_findings.limits_of(lines({step: {"sizes": [["a", "list", 3, 4096]]} for step in range(7)})) == ()


@pytest.mark.parametrize("kind", rank_findings._SIZES)
def test_each_kind_of_size_has_a_text(kind: str) -> None:
    (limit,) = rank_findings.limits_of(lines({1: {"sizes": [["x in main", kind, 50_000, 40_000]]}}))
    assert limit.beyond and limit.text.startswith("x in main: ") and "50" in limit.text


def test_what_is_beyond_its_limit_is_no_reason_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    report = Runs(monkeypatch, once=ended(lines({3: CENTER}))).examine()
    assert report.qualifies
    assert any(line.startswith("  beyond     center in main: a tensor of 128 elements") for line in report.text())


def test_each_error_of_a_guard_of_logical_ranks_has_a_rule() -> None:
    """No rule is written down twice: those are the names of the errors that the guards raise."""
    made = [
        kind for _, kind in inspect.getmembers(mistakes, inspect.isfunction) if kind.__module__ == mistakes.__name__
    ]
    named = {inspect.signature(kind).return_annotation.rpartition(".")[2] for kind in made}
    assert named <= RULES.keys() and len(named) > 5
    from elastic import errors

    assert all(issubclass(getattr(errors, name), ElasticError) for name in RULES)


# The command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--ranks", "0", "train.py"], "--ranks 0 must be at least 1"),
        (["--ranks", "4", "--steps", "0", "train.py"], "--steps 0 must be at least 1"),
        (["--ranks", "4"], "write `elastic doctor --ranks 4 train.py`"),
        (["--ranks", "4", "missing.py"], "the script missing.py does not exist"),
    ],
)
def test_what_cannot_be_examined_is_bad_input(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert cli.main(["doctor", *words]) == ExitCode.BAD_INPUT
    assert said in " ".join(capsys.readouterr().err.split())


def test_ranks_and_exact_are_two_examinations(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--ranks", "4", "--exact", "train.py"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_run_that_is_repeated_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    """Nobody may go on from a checkpoint of the first one."""
    runs = ScriptRuns(("sh", "-c", "echo no >&2; exit 3"), 6, tmp_path)
    (tmp_path / "once-checkpoints").mkdir()
    (tmp_path / "once.jsonl").write_text('{"step": 1}\n')
    found = runs.run("once", runs.examination("once"))
    assert found == EndedRun(3, [], None, "no\n")
    assert not (tmp_path / "once-checkpoints").exists()


def test_a_line_that_is_not_whole_yet_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    assert examined_runs._lines(path) == []
    path.write_text('{"step": 0}\n{"step": 1')
    assert examined_runs._lines(path) == [{"step": 0}]


def test_the_page_has_the_rules_that_are_printed() -> None:
    page = (Path(__file__).parents[4] / "docs" / "ddp.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^  ok +(\w+) +(.*)$", page, re.MULTILINE)) == RULES
