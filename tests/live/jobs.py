"""A whole job under `elastic run`, as a test sees it: start, watch its files, break it, and see what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from chaos_tests.support.json_lines import Journals, Tail
from chaos_tests.support.processes import Command, await_exits, command_line, living
from elastic.errors import ElasticError
from elastic.rendezvous.job_status import job_status

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
TRAINER = SCRIPTS / "trainer.py"
DEADLINE_S = 200.0
"""For whatever takes seconds on a quiet machine; below the bound of a test, so that it says what it waited for."""

SLACK_S = 30.0
"""What a loaded machine may take beyond a promise made for a quiet one; what breaks the promise takes minutes."""

POLL_S = 0.03
"""Each look reads files or asks the leader: at a hundred a second that is work that the job beside it lacks."""

ASK_S = 2.0
"""Of one question to the leader. Whoever asks a frozen one, or one that has just died, asks again."""

ANSWER_S = 120.0
"""After this long somebody leads a job again, and answers."""

T = TypeVar("T")
Line = dict[str, Any]


class Job:
    """`elastic run` of one script. A context manager; whatever it started is gone afterwards."""

    def __init__(
        self,
        home: Path,
        *words: str,
        name: str = "job",
        site: Path | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        """words: options of `elastic run`, the script, and the script's arguments. site: the directory of a
        sitecustomize for all its processes. environment: variables for them, besides. python: the interpreter."""
        self.dir = home / name
        self.gates = home / f"{name}.gates"
        self.gates.mkdir(exist_ok=True)
        self._journals = Journals(lambda: (self.dir / "journal").glob("*.jsonl"))
        self._ledger = Tail(self.dir / "steps.jsonl", json.loads)
        self._steps: list[Line] = []
        command = [python, *self._program(words)]
        path = f"{site}:{ROOT}" if site is not None else str(ROOT)
        variables = {
            "PYTHONPATH": path, "LIVE_GATES": str(self.gates), "OMP_NUM_THREADS": "1", **(environment or {})
        }  # fmt: skip
        self.command = Command(command, home / f"{name}.out", environment=variables, cwd=home)

    def _program(self, words: Sequence[str]) -> Sequence[str]:
        """What Python is to run."""
        return "-m", "elastic.cli", "run", "--job-dir", str(self.dir), *words

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self.story())
        self.command.stop()

    # ---------------------------------------------------------------------------------------------- waiting

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit code of the command."""
        try:
            return self.command.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline_s} s") from None

    def until(self, what: str, reached: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
        """The first true value of `reached`; a job that ends before is a failure."""
        deadline = time.monotonic() + deadline_s
        while True:
            running = self.command.process.poll() is None
            if value := reached():
                return value
            assert running, f"the job ended with {self.command.process.returncode} before: {what}"
            assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
            time.sleep(POLL_S)  # files and other processes: there is nothing to wait on

    def await_steps(self, count: int) -> None:
        self.until(f"{count} applied steps", lambda: len(self.steps()) >= count)

    def await_event(self, event: str, **fields: object) -> Line:
        """The first such line of the journals, also one that is there already."""
        return self.until(f"{event} {fields}", lambda: next(iter(self.events(event, **fields)), None))

    # -------------------------------------------------------------------------------------------- what is

    @property
    def output(self) -> str:
        return self.command.output

    def steps(self) -> list[Line]:
        """The ledger so far."""
        self._steps += self._ledger.lines()
        return self._steps

    def events(self, event: str, **fields: object) -> list[Line]:
        """Journal lines of that event with these fields, by time."""
        wanted = fields.items()
        return [line for line in self._journals.all() if line["event"] == event and wanted <= line.items()]

    def workers(self) -> dict[str, int]:
        """worker_id -> pid of all that were started and have not ended."""
        ended = {line["worker_id"] for line in self.events("worker_exited")}
        started = self.events("worker_started")
        return {line["worker_id"]: line["pid"] for line in started if line["worker_id"] not in ended}

    def status(self) -> Line:
        """As `elastic status --json` says it, once somebody can say it; state "" if the command has ended before."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            running = self.command.process.poll() is None
            try:
                return dict(job_status(self.dir, wait_s=ASK_S))
            except ElasticError:
                if not running:
                    return {"state": "", "generation": 0, "members": []}
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)  # there may be no job yet, which is answered at once

    def members(self) -> list[str]:
        """Worker ids in rank order."""
        return [member["worker_id"] for member in self.status()["members"]]

    def await_world(self, size: int) -> list[str]:
        """Members in rank order, once there are so many and all of them have applied a step."""

        def complete() -> list[str] | None:
            status = self.status()
            members = status["members"]
            settled = status["state"] == "running" and len(members) == size and all(m["applied"] for m in members)
            return [member["worker_id"] for member in members] if settled else None

        return self.until(f"a running world of {size}", complete)

    @property
    def result(self) -> Line:
        document: Line = json.loads((self.dir / "result.json").read_bytes())
        return document

    def pid_of(self, module: str) -> int:
        """The process of a service of this run."""
        for pid in living(self.command.mark):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if module.encode() in words:
                return pid
        raise AssertionError(f"no process of {module}")

    def left_behind(self) -> dict[int, str]:
        """Processes of this run that are still there: pid -> command line."""
        left = await_exits(living(self.command.mark), within_s=SLACK_S)
        return {pid: command_line(pid) for pid in left}

    def story(self) -> str:
        """For a failure: output, logs, and what the journals say."""
        logs = sorted((self.dir / "logs").glob("*.log"))
        tails = [f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]) for log in logs]
        lines = self._journals.all()
        told = [_told(line, lines[0]["t_mono_ns"]) for line in lines[-150:]]
        return "\n".join([str(self.dir), self.output[-4000:], *tails, *told])

    # ------------------------------------------------------------------------------------------- breaking

    def shut(self, gate: str) -> None:
        """See scripts/gates.py."""
        (self.gates / gate).touch()

    def open(self, gate: str) -> None:
        (self.gates / gate).unlink()

    def held_at(self, gate: str) -> set[str]:
        """Worker ids that wait, or waited, at that gate."""
        return {path.name.removeprefix(f"{gate}.") for path in self.gates.glob(f"{gate}.*")}

    def await_held(self, gate: str) -> set[str]:
        return self.until(f"somebody at gate {gate!r}", lambda: self.held_at(gate))

    def pace(self, seconds: float) -> None:
        """How long the script takes over a shard from now on."""
        temporary = self.gates / "pace.tmp"
        temporary.write_text(str(seconds))
        temporary.rename(self.gates / "pace")

    def finish(self) -> None:
        """Let the script come to its end, which waits at the gate "end"."""
        self.pace(0)
        self.open("end")
        assert self.wait() == 0, self.story()

    def send(self, worker_id: str, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal to a worker that was started and has not ended."""
        os.kill(self.workers()[worker_id], number)


def _told(line: Line, began_ns: int) -> str:
    head = f"{(line['t_mono_ns'] - began_ns) / 1e9:8.3f} {line['who']} {line['event']} {line['generation']}"
    rest = {k: v for k, v in line.items() if k not in _HEAD and v != ""}
    return f"{head} {str(rest)[:200]}"


_HEAD = ("t_mono_ns", "t_wall", "job", "node", "pid", "who", "event", "generation")


def run_alone(home: Path, script: Path, *arguments: str) -> str:
    """What the script prints without an agent."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * DEADLINE_S,  # one process computes what a job's workers share
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
