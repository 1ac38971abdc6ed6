"""elastic.launch() in a real notebook: a Jupyter kernel runs its cells, and shows what a person would see."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.nemesis.out_of_memory import starve, why_not
from chaos_tests.support.processes import await_exits, living
from tests.live.jobs import DEADLINE_S

nbclient = pytest.importorskip("nbclient", reason="`make test-engines` installs it")
nbformat = pytest.importorskip("nbformat", reason="`make test-engines` installs it")
pytest.importorskip("ipykernel", reason="`make test-engines` installs it")

MODEL = """
import torch
import elastic

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)
"""
TRAIN = """
import time

def train(steps, seconds, fails=False):
    job = elastic.join(seed=3)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(shards=4, total=steps):
        for _ in step:
            time.sleep(seconds)
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            step.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if fails and step.index == 3:
            raise ArithmeticError("three is too much")
    job.print("trained by", "train")
    return job.digest(), model
"""
QUIET = "digest, model = elastic.launch(train, 60, 0.0, workers=1)\nprint('quiet', digest, type(model) is Net)"
KILLER = """
import json, os, pathlib, signal, threading

def started(job_dir):
    lines = [line for path in pathlib.Path(job_dir).glob("journal/*.jsonl") for line in path.read_text().splitlines()]
    return [told["pid"] for line in lines if (told := json.loads(line))["event"] == "worker_started"]

def kill_after(job_dir, steps):
    ledger = pathlib.Path(job_dir) / "steps.jsonl"
    while not ledger.exists() or len(ledger.read_text().splitlines()) < steps:
        time.sleep(0.02)
    os.kill(started(job_dir)[0], signal.SIGKILL)

threading.Thread(target=kill_after, args=("killed", 10)).start()
"""
KILLED = "digest, _ = elastic.launch(train, 60, 0.05, workers=2, job_dir='killed')\nprint('killed', digest)"
LONG = "elastic.launch(train, 100000, 0.05, workers=2, job_dir='long')"
STARVED = "digest, _ = elastic.launch(train, 200, 0.05, workers=2, job_dir='starved')\nprint('starved', digest)"
LATE = """
import os, signal

def late(steps):
    found = train(steps, 0.0)
    if os.environ["ELASTIC_WORKER_ID"] == "local.0.0":
        os.kill(os.getpid(), signal.SIGKILL)
    return *found, os.environ["ELASTIC_WORKER_ID"]

digest, model, who = elastic.launch(late, 60, workers=3, job_dir='late')
print('late', digest, who, type(model) is Net)
"""


@pytest.fixture(scope="module", autouse=True)
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernel of this environment, under the name python3."""
    home = tmp_path_factory.mktemp("jupyter")
    install = [sys.executable, "-m", "ipykernel", "install", "--prefix", str(home), "--name", "python3"]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(home / "share" / "jupyter"))
        patch.setenv("IPYTHONDIR", str(home / "ipython"))
        yield


def run(home: Path, *cells: str, **options: Any) -> Any:
    """The notebook after its cells, with what they show."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    client(notebook, home, **options).execute()
    return notebook


def client(notebook: Any, home: Path, **options: Any) -> Any:
    resources = {"metadata": {"path": str(home)}}
    return nbclient.NotebookClient(notebook, timeout=int(DEADLINE_S), resources=resources, **options)


def text(cell: Any, kind: str = "stdout") -> str:
    return "".join(output["text"] for output in cell.outputs if output.get("name") == kind)


def table(cell: Any) -> str:
    """The one that is left, in the form that it had last."""
    (shown,) = (output["data"]["text/plain"] for output in cell.outputs if output.output_type == "display_data")
    return str(shown)


def digest(cell: Any, name: str) -> str:
    (found,) = re.findall(rf"^{name} ([0-9a-f]{{64}})", text(cell), re.MULTILINE)
    return str(found)


def await_steps(job_dir: Path, steps: int) -> None:
    ledger = job_dir / "steps.jsonl"
    while not ledger.exists() or len(ledger.read_text().splitlines()) < steps:
        time.sleep(0.05)


def journal(job_dir: Path) -> list[dict[str, Any]]:
    lines = [line for path in job_dir.glob("journal/*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def started(job_dir: Path) -> list[int]:
    """The pids of the workers."""
    return [line["pid"] for line in journal(job_dir) if line["event"] == "worker_started"]


def killed(job_dir: Path) -> list[str]:
    """The workers that did not end by themselves."""
    exits = [line for line in journal(job_dir) if line["event"] == "worker_exited"]
    return [line["worker_id"] for line in exits if line["because"].startswith("killed")]


def kernel_of(mark: str) -> int:
    return next(pid for pid in living(mark) if "ipykernel_launcher" in Path(f"/proc/{pid}/cmdline").read_text())


def test_a_worker_is_killed_while_a_cell_trains_and_the_value_is_that_of_the_quiet_run(
    tmp_path: Path, mark: str
) -> None:
    *_, quiet, _, killed = run(tmp_path, MODEL, TRAIN, QUIET, KILLER, KILLED).cells
    assert digest(killed, "killed") == digest(quiet, "quiet")
    assert f"quiet {digest(quiet, 'quiet')} True" in text(quiet), "the class is the one of the notebook"
    for cell in (quiet, killed):
        assert "trained by train\n" in text(cell)
        lines = [line.split() for line in table(cell).splitlines()]
        assert ["step", "59", "of", "60", "(epoch", "0)"] in lines and any(line[:1] == ["loss"] for line in lines)
    result = json.loads((tmp_path / "killed" / "result.json").read_text())
    assert result["digest"] == digest(killed, "killed") and result["generation"] >= 3
    assert "last recovery" in table(killed)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_worker_that_the_kernel_ends_for_memory_changes_no_bit(tmp_path: Path, mark: str) -> None:
    starved: list[int] = []

    def starve_one() -> None:
        await_steps(tmp_path / "starved", 10)
        starved.append(starve(started(tmp_path / "starved")[0]))

    thread = threading.Thread(target=starve_one)
    thread.start()
    *_, quiet, cell = run(tmp_path, MODEL, TRAIN, QUIET.replace("60", "200"), STARVED).cells
    thread.join()
    assert starved and digest(cell, "starved") == digest(quiet, "quiet")
    assert len(killed(tmp_path / "starved")) == 1


def test_rank_0_dies_behind_its_last_step_and_the_value_is_that_of_the_next_rank(tmp_path: Path, mark: str) -> None:
    *_, quiet, late = run(tmp_path, MODEL, TRAIN, QUIET, LATE).cells
    assert digest(late, "late") == digest(quiet, "quiet")
    # On a busy machine local.1.0 may have come after the others, and is the last one then.
    assert re.search(r"^late [0-9a-f]{64} local\.[12]\.0 True$", text(late), re.MULTILINE), "the cell's own class, too"
    assert killed(tmp_path / "late") == ["local.0.0"]


def test_the_kernel_of_the_notebook_is_killed_and_everything_ends_with_it(tmp_path: Path, mark: str) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in (MODEL, TRAIN, LONG)])
    left: list[set[int]] = []

    def kill() -> None:
        await_steps(tmp_path / "long", 5)
        os.kill(kernel_of(mark), signal.SIGKILL)
        left.append(await_exits(started(tmp_path / "long"), 10.0))

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(nbclient.exceptions.DeadKernelError):
        client(notebook, tmp_path).execute()
    thread.join()
    assert left == [set()], "no worker outlives it"
    assert not await_exits(living(mark), 10.0), "nor does anything else"


def test_an_exception_of_the_function_is_one_of_the_cell_with_the_line_of_the_other_cell(
    tmp_path: Path, mark: str
) -> None:
    with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
        run(tmp_path, MODEL, TRAIN, "elastic.launch(train, 60, 0.0, True, workers=2, job_dir='fails')")
    told = re.sub(r"\x1b\[[0-9;]*m", "", str(caught.value))
    assert "LaunchFailed" in told and "ArithmeticError: three is too much" in told
    assert told.count('raise ArithmeticError("three is too much")') == 1, "the source of the cell, once"


def test_an_interrupt_of_the_kernel_ends_the_job_and_the_notebook_goes_on(tmp_path: Path, mark: str) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(each) for each in (MODEL, TRAIN, LONG, "print('on', 6 * 7)")]
    )
    running = client(notebook, tmp_path, allow_errors=True)
    interrupted: list[int] = []

    def interrupt() -> None:
        await_steps(tmp_path / "long", 5)
        kernel = kernel_of(mark)
        assert os.getpgid(kernel) == kernel
        interrupted.append(kernel)
        os.killpg(kernel, signal.SIGINT)  # as Jupyter does it

    thread = threading.Thread(target=interrupt)
    thread.start()
    running.execute()
    thread.join()
    *_, long, after = notebook.cells
    (error,) = (output for output in long.outputs if output.output_type == "error")
    assert error["ename"] == "KeyboardInterrupt" and interrupted
    assert "elastic.launch(..., job_dir='" in text(long, "stderr")
    assert text(after) == "on 42\n"
