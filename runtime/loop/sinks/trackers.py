"""Experiment trackers: MLflow, and Weights & Biases. A process beside the leader sends the steps; this writes them into
its pipe and never waits for it, so a tracker that cannot be reached costs training nothing and ends no job.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError
from runtime.loop.hooks.leader_hooks import JobView
from runtime.session import StepRecord

CLOSE_S = 60.0
"""Seconds that the end of a job waits for steps to be sent, at most."""
UNWRITTEN_MAX = 1 << 20
"""Bytes that are kept for a process that does not read."""
RESTART_S = 30.0
"""Seconds from the loss of the process to a new one."""
SUPERSEDED = 3
"""Its exit status, when another leader's process has taken over."""


class TrackerSink:
    """A sink whose process sends what it is given."""

    def __init__(self, package: str, said: str, options: dict[str, Any]) -> None:
        """package: of the tracker's library. said: what messages call this sink. Raises ConfigError if the package is
        not installed."""
        if importlib.util.find_spec(package) is None:
            name = type(self).__name__
            raise ConfigError(f"job.log_to({name}(...)) needs the package {package}: pip install {package}")
        self._package, self._said, self._options = package, said, options
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = b""
        self._unwritten = b""
        """Lines that have not fitted into the pipe."""
        self._next: int | None = None
        """The step to give to the process; None: it has not reached the tracker yet."""
        self._start_s = 0.0
        """When the process may be started."""
        self._superseded = False
        """Another leader's process has taken over from the last one."""

    def __str__(self) -> str:
        return self._said

    def open(self, job: JobView) -> int | None:
        """None while the tracker is not reached, or the process has not taken what it was given."""
        if self._process is None:
            # Whoever has led before is asked here too, as the job ends, and must not take over from the leader.
            if time.monotonic() >= self._start_s and (job.rank == 0 or not self._superseded):
                self._start()
            return None
        self._listen(self._process)
        if self._process is None or not self._write_rest(self._process):
            return None
        return self._next

    def write(self, record: StepRecord) -> bool:
        if self._process is None or len(self._unwritten) > UNWRITTEN_MAX:
            return False
        self._unwritten += _line({"step": record.step, "points": points(record)})
        self._next = record.step + 1
        return self._write_rest(self._process) or self._process is not None

    def close(self) -> None:
        """Wait up to CLOSE_S until all steps are sent. Says so if they are not."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._next is None:  # it has not reached the tracker, and has got nothing
            process.kill()
            process.communicate()
            return
        try:
            process.communicate(self._unwritten + _line({"end": True}), timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        if process.returncode not in (0, SUPERSEDED):
            self._say("its last steps were not sent; the ledger of the job has them")

    def _start(self) -> None:
        options = json.dumps({**self._options, "token": secrets.token_hex(8)})
        command = [sys.executable, "-m", "elastic.observability.trackers", self._package, options]
        # In a session of its own, Ctrl-C does not end it before the worker has closed it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        self._next, self._answers, self._unwritten = None, b"", b""

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Read the answers that have come."""
        assert process.stdout is not None
        while found := process.stdout.read(1 << 16):
            self._answers += found
        *lines, self._answers = self._answers.split(b"\n")
        for line in map(json.loads, lines):
            if "said" in line:
                self._say(line["said"])
            else:
                self._next = line["next"]
        if found == b"":
            self._lost(process)

    def _write_rest(self, process: subprocess.Popen[bytes]) -> bool:
        """Whether the process has taken everything."""
        assert process.stdin is not None
        try:
            while self._unwritten:
                written = process.stdin.write(self._unwritten)
                if written is None:
                    return False
                self._unwritten = self._unwritten[written:]
        except BrokenPipeError:
            self._lost(process)
            return False
        return True

    def _lost(self, process: subprocess.Popen[bytes]) -> None:
        """The process has ended, and its pipes with it."""
        status = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        self._process, self._next = None, None
        # If another has taken over, this worker does not lead any more, which it may not know yet. It may lead again.
        self._superseded = status == SUPERSEDED
        if not self._superseded:
            self._say(f"the process that sends the steps has ended ({status}); a new one starts in {RESTART_S:.0f} s")
        self._start_s = time.monotonic() + RESTART_S

    def _say(self, text: str) -> None:
        print(f"elastic: {self}: {text}", file=sys.stderr, flush=True)


class MLflow(TrackerSink):
    """A run of MLflow, with every scalar and learning rate of every step. Needs the package mlflow.

    experiment: made if there is none of that name. run: its name, which no other job of the experiment has; a job that
    is resumed goes on with its run. uri: of a server ("http://host:5000") or of a database that every worker sees
    ("sqlite:////shared/mlflow.db"); None: as MLFLOW_TRACKING_URI says. Secrets come from the environment, as MLflow
    reads it. Raises ConfigError if MLflow is not installed, or a name has quotes.
    """

    def __init__(self, experiment: str, run: str, *, uri: str | None = None) -> None:
        for name in (experiment, run):
            if not re.fullmatch(r"[\w\-./: ]+", name):
                raise ConfigError(f"MLflow(...) got {name!r}: use letters, digits, spaces and any of _-./:")
        super().__init__("mlflow", f"run {run} of MLflow", {"experiment": experiment, "run": run, "uri": uri})


class WandB(TrackerSink):
    """A run of Weights & Biases, with every scalar and learning rate of every step. Needs the package wandb.

    run: the id of the run, unique within the project; a job that is resumed goes on with its run. directory: for the
    package's files; every worker sees it. offline: nothing is sent; each leader writes a file of its own, for `wandb
    sync --append`. The key comes from WANDB_API_KEY, as the package reads it. Raises ConfigError if the package is not
    installed, or the id has other characters than W&B allows.
    """

    def __init__(self, project: str, run: str, *, directory: str | os.PathLike[str], offline: bool = False) -> None:
        if not re.fullmatch(r"[\w\-]{1,64}", run):
            raise ConfigError(f"WandB(...) got the run {run!r}: use up to 64 letters, digits, _ and -")
        options = {"project": project, "run": run, "directory": str(Path(directory).absolute()), "offline": offline}
        super().__init__("wandb", f"run {run} of W&B", options)


def points(record: StepRecord) -> dict[str, float]:
    """All that is shown of a step: what the script has logged, learning rates, and the job's members and generation,
    which is one higher after each recovery."""
    rates = {f"lr/{group}": rate for group, rate in enumerate(record.lr)}
    job = {"elastic/members": float(record.world_size), "elastic/generation": float(record.generation)}
    return {**job, **rates, **record.scalars}


def _line(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"
