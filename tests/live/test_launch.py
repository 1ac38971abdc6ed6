"""elastic.launch(): a function of a program is trained by workers that die, and its value, error or end comes back."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.support.processes import Command, living
from tests.live.jobs import DEADLINE_S, ROOT, SCRIPTS, SLACK_S, Job

pytestmark = pytest.mark.long

PROGRAM = SCRIPTS / "launching.py"


class Launched(Job):
    """The program that launches, as a job. words: options of elastic.launch() as JSON, what the function does last."""

    def _program(self, words: Sequence[str]) -> Sequence[str]:
        return str(PROGRAM), str(self.dir), *(words or ("{}", ""))

    @property
    def value(self) -> dict[str, Any]:
        return next(found for line in self.output.splitlines() if line.startswith("{") for found in [json.loads(line)])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the function returns from one worker."""
    with Launched(tmp_path_factory.mktemp("undisturbed"), json.dumps({"workers": 1}), "") as job:
        assert job.wait() == 0, job.output
        return job.value


def leftovers() -> set[Path]:
    return set(Path(os.environ.get("TMPDIR", "/tmp")).glob("elastic-launch-*"))


def test_a_worker_is_killed_and_the_value_is_that_of_the_quiet_run(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    before = leftovers()
    with Launched(tmp_path) as job:
        job.pace(0.02)
        job.await_steps(10)
        (made,) = leftovers() - before
        assert made.stat().st_mode & 0o777 == 0o700 and (made / "function").stat().st_mode & 0o777 == 0o600
        job.send(job.members()[0])
        job.await_world(2)
        job.pace(0.0)
        assert job.wait() == 0, job.output
        assert job.value == undisturbed
        assert "\ntrained\n" in f"\n{job.output}" and job.events("member_lost")
        assert job.left_behind() == {} and not leftovers() & {made}


def test_an_exception_of_the_function_comes_back_with_its_place(tmp_path: Path) -> None:
    with Launched(tmp_path, "{}", "raise") as job:
        assert job.wait() == 1
        told = job.output.partition("elastic.errors.LaunchFailed: ")[2]
        assert "launching.py" in told and 'raise ArithmeticError("five is too much")' in told, job.output
        assert f"see {job.dir}" in told.splitlines()[0]
        assert job.left_behind() == {}


def test_a_value_that_cannot_come_back_is_said(tmp_path: Path) -> None:
    with Launched(tmp_path, "{}", "generator") as job:
        assert job.wait() == 1
        assert "the value of the function cannot be pickled" in job.output
        assert job.left_behind() == {}


def test_an_interrupt_ends_everything_and_the_same_directory_goes_on(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    options = json.dumps({"checkpoint_every": "5 steps"})
    with Launched(tmp_path, options, "") as job:
        job.pace(0.02)
        job.await_steps(20)
        job.command.process.send_signal(signal.SIGINT)
        assert job.wait() == -signal.SIGINT
        assert "KeyboardInterrupt" in job.output and f"elastic.launch(..., job_dir='{job.dir}') goes on" in job.output
        assert job.left_behind() == {}
    with Launched(tmp_path, options, "") as job:
        job.pace(0.0)
        assert job.wait() == 0, job.output
        assert "this job was interrupted; it goes on from step" in job.output
        assert job.value == undisturbed


def test_a_second_interrupt_ends_workers_that_do_not_hear_the_first(tmp_path: Path) -> None:
    with Launched(tmp_path) as job:
        job.pace(0.02)
        job.await_steps(5)
        for worker_id in job.members():
            job.send(worker_id, signal.SIGSTOP)
        job.command.process.send_signal(signal.SIGINT)
        job.await_event("agent_signalled")
        job.command.process.send_signal(signal.SIGINT)
        assert job.wait() == -signal.SIGINT
        assert job.left_behind() == {}


def test_a_program_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    before = leftovers()
    with Launched(tmp_path) as job:
        job.pace(0.02)
        job.await_steps(5)
        job.command.process.kill()
        assert job.wait() == -signal.SIGKILL
        assert job.left_behind() == {}, f"after {SLACK_S} s"
        assert living(job.command.mark) == set()
        (left,) = leftovers() - before
    with Launched(tmp_path, "{}", "", name="next") as job:
        assert job.wait() == 0, job.output
        assert left not in leftovers(), "the next one removes what it could not"


def test_the_program_of_the_page_does_what_the_page_says(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "notebook.md").read_text(), re.DOTALL)
    (tmp_path / "program.py").write_text(f"{program}\nprint('weights', *weights)\n")
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "program.py"]
    with Command(command, tmp_path / "out", environment=variables, cwd=tmp_path) as running:
        assert running.process.wait(DEADLINE_S) == 0, running.output
        assert "weights layer.weight layer.bias" in running.output
        result = json.loads((tmp_path / "elastic-jobs" / "train-1" / "result.json").read_text())
        assert result["exit_code"] == 0 and len(result["digest"]) == 64


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers=0"),
        ({"wrokers": 2}, "there is no option --wrokers; did you mean --workers?"),
        ({"ranks": 4}, "ranks= is for scripts"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_their_own_words(
    options: dict[str, int], said: str, tmp_path: Path
) -> None:
    with Launched(tmp_path, json.dumps(options), "") as job:
        assert job.wait() == 1
        assert said in job.output.partition("elastic.errors.ConfigError: ")[2], "the error itself says it"
        assert not job.dir.exists() and job.left_behind() == {}
