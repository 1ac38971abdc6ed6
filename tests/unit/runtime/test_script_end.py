"""How a script ends is what its job hears, where we run the script."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic.agent.process.process_start import COLD

WATCHED = """
import sys
from runtime.script_end import ScriptEnd, raised_at
def failed(error): print("failed", repr(error), raised_at(error).rpartition("/")[2], flush=True)
end = ScriptEnd(lambda: print("closed", flush=True), failed)
"""

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("script", "status", "heard", "words"),
    [
        ("sys.exit('no data')", 1, "failed SystemExit('no data') train.py:6", "no data\n"),
        ("exit(3)", 3, "failed SystemExit(3) train.py:6", ""),
        ("raise SystemExit('no data')", 1, "failed SystemExit('no data') train.py:6", "no data\n"),
        ("sys.exit(0)", 0, "closed", ""),
        ("sys.exit()", 0, "closed", ""),
        ("try:\n    sys.exit(3)\nexcept SystemExit:\n    pass", 0, "closed", ""),
        ("import threading\nt = threading.Thread(target=sys.exit, args=[3])\nt.start()\nt.join()", 0, "closed", ""),
        ("end.ignore()\nsys.exit('behind the job')", 1, "", "behind the job\n"),
    ],
)
@pytest.mark.parametrize("module", [False, True])
def test_an_exit_with_a_status_is_an_error_of_the_script_and_one_without_closes_the_job(
    script: str, status: int, heard: str, words: str, module: bool, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(WATCHED + script + "\n")
    program = ("-m", "train") if module else ("train.py",)
    done = subprocess.run(
        [sys.executable, "-c", COLD, sys.executable, *program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (status, words)
    assert (done.stdout.splitlines() or [""])[0] == heard


def test_a_job_whose_close_refuses_the_script_hears_why(tmp_path: Path) -> None:
    script = WATCHED.replace('lambda: print("closed", flush=True)', "refuse")
    (tmp_path / "train.py").write_text(f"def refuse(): raise ValueError('nothing was trained')\n{script}")
    done = subprocess.run(
        [sys.executable, "-c", COLD, sys.executable, "train.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stdout == "failed ValueError('nothing was trained') train.py:1\n"
    assert "ValueError: nothing was trained" in done.stderr
