"""The verb `elastic adopt`: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from elastic import cli
from elastic.adopt.adoption import adopt
from elastic.errors import ExitCode
from tests.unit.elastic.adopt.test_adoption import ADOPTED, SCRIPT

ROOT = Path(__file__).resolve().parents[4]
REFUSED = SCRIPT.replace("    tell(epoch)\n", "    dist.barrier()\n")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    path.chmod(0o750)
    return path


def test_the_diff_is_one_for_patch(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["adopt", "--ranks", "4", "train.py"]) == ExitCode.DONE
    assert script.read_text() == SCRIPT
    (script.parent / "out.diff").write_text(capsys.readouterr().out)
    subprocess.run(["patch", "-p1", "-i", "out.diff"], cwd=script.parent, check=True, capture_output=True)
    assert script.read_text() == ADOPTED


def test_the_diff_of_the_page_is_that_of_the_example(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["adopt", "--ranks", "4", "docs/examples/train_ddp.py"]) == ExitCode.DONE
    (shown,) = re.findall(r"```diff\n(.*?)```", (ROOT / "docs" / "ddp.md").read_text(), re.DOTALL)
    assert len(shown.splitlines()) > 40 and shown in capsys.readouterr().out


def test_write_changes_the_file_and_nothing_but_its_text(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (link := script.parent / "link.py").symlink_to(script)
    assert cli.main(["adopt", "--ranks", "4", "--write", str(link)]) == ExitCode.DONE
    assert script.read_text() == ADOPTED
    assert link.is_symlink() and script.stat().st_mode & 0o777 == 0o750
    assert sorted(os.listdir(script.parent)) == ["link.py", "train.py"]
    assert "+job = elastic.join(seed=0)\n" in capsys.readouterr().out
    assert cli.main(["adopt", "--ranks", "4", "--write", "train.py"]) == ExitCode.DONE
    assert capsys.readouterr().out == "train.py: nothing to do, it uses elastic already\n"
    assert script.read_text() == ADOPTED


@pytest.mark.parametrize(
    ("encoding", "head"), [("latin-1", "# -*- coding: latin-1 -*-\n"), ("utf-8-sig", ""), ("utf-8", "")]
)
def test_the_file_keeps_its_encoding_and_line_ends(script: Path, encoding: str, head: str) -> None:
    before, after = (f"{head}# Größe\n{text}".replace("\n", "\r\n").encode(encoding) for text in (SCRIPT, ADOPTED))
    script.write_bytes(before)
    assert cli.main(["adopt", "--ranks", "4", "--write", "train.py"]) == ExitCode.DONE
    assert script.read_bytes() == after


@pytest.mark.parametrize("write", [[], ["--write"]])
def test_what_is_refused_is_said_by_line(write: list[str], script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(REFUSED)
    assert cli.main(["adopt", "--ranks", "4", *write, "train.py"]) == ExitCode.SCRIPT_FAILED
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "train.py:20: torch.distributed.barrier is not known"
    assert said[1].startswith("    leave it out") and len(said) == 2
    assert script.read_text() == REFUSED


def test_json(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["adopt", "--ranks", "4", "--json", "train.py"]
    assert cli.main(words) == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    assert found["diff"].startswith("--- a/train.py\n+++ b/train.py\n@@")
    assert (found["script"], found["refused"], found["written"]) == ("train.py", [], False)
    script.write_text(REFUSED)
    assert cli.main([*words, "--write"]) == ExitCode.SCRIPT_FAILED
    found = json.loads(capsys.readouterr().out)
    assert (found["diff"], found["written"], [one["line"] for one in found["refused"]]) == ("", False, [20])
    assert set(found["refused"][0]) == {"line", "reason", "write"}


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        (["--ranks", "0", "train.py"], "", "--ranks 0 must be at least 1"),
        (["--ranks", "4", "absent.py"], "", "absent.py: No such file"),
        (["--ranks", "4", "."], "", ".: Is a directory"),
        (["--ranks", "4", "train.py"], "for x in", "train.py is no script that Python takes: invalid syntax"),
        (["--ranks", "4", "train.py"], "# coding: klingon\n", "unknown encoding"),
        (["--ranks", "4", "train.py"], "x = '\0'\n", "null bytes"),
    ],
)
def test_bad_input(words: list[str], text: str, said: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(text)
    assert cli.main(["adopt", *words]) == ExitCode.BAD_INPUT
    assert said in " ".join(capsys.readouterr().err.split())


def test_it_imports_no_torch(script: Path) -> None:
    code = "import sys; from elastic import cli; cli.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    words = [sys.executable, "-c", code, "adopt", "--ranks", "4", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=script.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("plain", []),
        ("functions", []),
        ("top_level", []),
        ("accumulation", ["accumulated under no_sync()"]),
        ("endless", ["no loop over a DataLoader"]),
        ("evaluated", ["meter.update() is called before backward()", "a second DistributedSampler"]),
        ("spawned", ["gradients are accumulated", "starts its ranks itself"]),
        ("trainer", ["backward() is in _run_batch()"]),
    ],
)
def test_each_script_as_people_write_it_is_adopted_or_refused(name: str, reasons: list[str]) -> None:
    text = (ROOT / "tests" / "ddp_scripts" / f"{name}.py").read_text()
    said = [refusal.reason for refusal in adopt(text, 4).refusals]
    assert len(said) == len(reasons), said
    assert all(reason in one for reason, one in zip(reasons, said, strict=True)), said
