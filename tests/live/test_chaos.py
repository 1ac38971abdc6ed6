"""`elastic chaos run` on a real job: the sound product passes, and a product with a planted defect does not."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from chaos_tests.checkers import Truth
from chaos_tests.cluster import why_not
from chaos_tests.run.campaign import differences, read_report
from elastic.cli import main
from tests.chaos.runs import SNAPSHOTS, Undisturbed, command, disturbed, told

SHORT = ("--allow-unknown", "I14")
"""A job of a few seconds may end before its first snapshot."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with kills."""
    path = tmp_path_factory.mktemp("chaos") / "run"
    options = ["--preset", "kill", "--seed", "11", "--duration", "4s", "--job-dir", str(path), *SHORT, "--json"]
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["chaos", "run", *options, "--", *command(epochs=3)]) == 0
    (path / "printed").write_text(printed.getvalue())
    return path


def test_a_run_with_faults_passes_and_leaves_a_report(home: Path) -> None:
    report = json.loads((home / "report.json").read_bytes())
    assert report["digest"] == report["quiet_digest"] != ""
    answers = {invariant["number"]: invariant["answer"] for invariant in report["invariants"]}
    assert answers.pop("I14") != "false"
    assert set(answers.values()) == {"true"}, report["invariants"]
    assert report["faults"]
    assert 'class="lanes"' in (home / "report.html").read_text()
    assert 'failures="0"' in (home / "junit.xml").read_text()


def test_a_run_prints_its_report_as_one_object(home: Path) -> None:
    (line,) = (home / "printed").read_text().splitlines()
    printed = json.loads(line)
    report = json.loads((home / "report.json").read_bytes())
    assert printed == {**report, "passed": True, "report": str(home / "report.html")}


def test_a_report_is_made_again_from_the_files(home: Path) -> None:
    before = json.loads((home / "report.json").read_bytes())
    (home / "report.json").unlink()
    assert main(["chaos", "report", str(home), *SHORT]) == 0
    assert json.loads((home / "report.json").read_bytes()) == before


@pytest.mark.long
def test_a_planted_defect_is_caught(home: Path, tmp_path: Path) -> None:
    quiet = Undisturbed(home, command(epochs=3), seconds=5.0)
    verdicts = disturbed(tmp_path / "mutant", quiet, ("kill", "kill", "kill"), gap_s=1.5, mutant="dropped-shard")
    assert verdicts["I7"].answer is Truth.FALSE, told(verdicts)


@pytest.mark.long
def test_a_run_is_done_again_from_its_report(home: Path, tmp_path: Path) -> None:
    main(["chaos", "replay", str(home / "report.json"), "--job-dir", str(tmp_path / "again")])
    told = differences(read_report(home), read_report(tmp_path / "again"))
    assert [sentence for sentence in told if not sentence.startswith("I14")] == []


@pytest.mark.long
def test_rounds_on_nodes(tmp_path: Path) -> None:
    """A script that is started again goes through faults of scripts, workers, agents and nodes."""
    kinds = "kill,kill-script,stop-script,kill-node-1s,kill-agent"
    options = ["--restart", "--preset", kinds, "--seed", "3", "--duration", "20s", "--job-dir", str(tmp_path / "run")]
    assert main(["chaos", "run", *options, "--", str(SNAPSHOTS), "250", "0.1"]) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_bytes())
    assert [one["number"] for one in report["invariants"]][-4:] == ["I17", "I18", "I19", "I20"]


@pytest.mark.long
@pytest.mark.parametrize("preset", ["places", "etcd", "spot", "cluster", "storage", "partition"])
def test_a_preset_is_survived(preset: str, tmp_path: Path) -> None:
    if preset == "partition" and (why := why_not()):
        pytest.skip(why)
    options = ["--preset", preset, "--seed", "3", "--duration", "40s", "--job-dir", str(tmp_path / "run")]
    assert main(["chaos", "run", *options, "--", *command(epochs=20)]) == 0
