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


IN_TORCH = """
import atexit, sys, threading
from datetime import timedelta
import runtime.script_end as script_end
from torch._C._distributed_c10d import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
inside = threading.Semaphore(0)
script_end.ENDS_S = 0.5

def wait(for_ever):
    while True:
        inside.release()
        try:
            store.wait(["never"], timedelta(milliseconds=20))
        except Exception:
            pass
        if not for_ever:
            return

threads = [script_end.TorchThread(target=wait, args=[FOR_EVER], name=f"in torch {n}") for n in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    inside.acquire()
class Late:
    def __del__(self):
        print("deleted", flush=True)
late = Late()
unclosed = open("unclosed.txt", "w")
unclosed.write("not lost")
atexit.register(print, "exit handler")
plain = threading.Thread(target=lambda: print("thread"))
plain.start()
"""


def run_cold(script: str, where: Path) -> subprocess.CompletedProcess[str]:
    (where / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-c", COLD, sys.executable, "train.py"],
        cwd=where,
        env={"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_job_whose_close_refuses_the_script_hears_why(tmp_path: Path) -> None:
    script = WATCHED.replace('lambda: print("closed", flush=True)', "refuse")
    done = run_cold(f"def refuse(): raise ValueError('nothing was trained')\n{script}", tmp_path)
    assert done.returncode == 1
    assert done.stdout == "failed ValueError('nothing was trained') train.py:1\n"
    assert "ValueError: nothing was trained" in done.stderr


@pytest.mark.parametrize("cold", [True, False])
def test_what_a_script_has_left_is_done_although_close_refuses_it(cold: bool, tmp_path: Path) -> None:
    script = WATCHED.replace('lambda: print("closed", flush=True)', "refuse") + (
        "import atexit\n"
        "unclosed = open('unclosed.txt', 'w')\n"
        "unclosed.write('not lost')\n"
        "end.ignore()\n"
        "atexit.register(print, 'exit handler')\n"
        "ScriptEnd(refuse, failed)\n"
    )
    script = f"def refuse(): raise ValueError('nothing was trained')\n{script}"
    if cold:
        done = run_cold(script, tmp_path)
    else:
        words = [sys.executable, "-c", script]
        done = subprocess.run(
            words, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
        )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "exit handler")
    assert (tmp_path / "unclosed.txt").read_text() == "not lost"
    assert "ValueError: nothing was trained" in done.stderr


@pytest.mark.parametrize(
    ("end", "status", "words", "for_ever"),
    [
        pytest.param("", 0, "", True, marks=pytest.mark.long),
        ("", 0, "", False),
        pytest.param("sys.exit(7)", 7, "", True, marks=pytest.mark.long),
        pytest.param("sys.exit('no data')", 1, "no data\n", False, marks=pytest.mark.long),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n", True),
        pytest.param("raise KeyboardInterrupt", -2, "KeyboardInterrupt\n", True, marks=pytest.mark.long),
    ],
)
def test_threads_that_are_in_torch_at_the_end_change_neither_exit_code_nor_output(
    end: str, status: int, words: str, for_ever: bool, tmp_path: Path
) -> None:
    done = run_cold(IN_TORCH.replace("FOR_EVER", str(for_ever)) + end + "\n", tmp_path)
    assert (done.returncode, done.stderr[-len(words) :] if words else done.stderr) == (status, words)
    assert done.stdout.splitlines()[:2] == ["thread", "exit handler"]
    assert (tmp_path / "unclosed.txt").read_text() == "not lost"
    if not for_ever and status == 0:
        assert done.stdout.splitlines()[2:] == ["deleted"], "the interpreter ends as it would without the threads"


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("sys.stdout.close()", marks=pytest.mark.long),
        "import os\nprint('lost')\nread, write = os.pipe()\nos.close(read)\nos.dup2(write, 1)",
    ],
)
def test_output_that_cannot_be_written_does_not_keep_a_process_with_threads_in_torch_from_its_end(
    end: str, tmp_path: Path
) -> None:
    silent = IN_TORCH.replace('print, "exit handler"', "int").replace('print("thread")', "None")
    done = run_cold(silent.replace("FOR_EVER", "True") + end + "\n", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit()",
        "sys.exit(True)",
        "sys.exit(258)",
        "sys.exit(['a', 1])",
        "sys.exit('')",
        "raise SystemExit('words')",
        "raise KeyError('x')",
        "raise KeyboardInterrupt",
        "raise GeneratorExit",
        "atexit.register(sys.exit, 5)",
        "atexit.register(lambda: 1 / 0)",
        "os.close(1)",
        "sys.stdout = None",
    ],
)
def test_a_script_ends_as_it_does_under_python_itself(end: str, tmp_path: Path) -> None:
    script = "import atexit, os, sys\natexit.register(print, 'handler')\nprint('script')\n" + end + "\n"
    ours = run_cold(script, tmp_path)
    plain = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env={}, capture_output=True, text=True, timeout=120
    )
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
