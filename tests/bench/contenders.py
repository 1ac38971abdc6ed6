"""The jobs that are measured: each a command with a turnstile and a directory of stamps."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from chaos_tests.support.processes import Command, living
from tests.bench import sent, stamps
from tests.bench.stamps import Stamp
from tests.bench.turnstile import OPEN, Gate

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
START_S = 120.0
"""Longest time a job may take to start, on a loaded machine."""
POLL_S = 0.02


class Contender:
    """A context manager; leaves no process behind. Its workers stand at the turnstile before their first step."""

    def __init__(
        self,
        name: str,
        directory: Path,
        commands: Sequence[Sequence[str]],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """commands: one, or one for each rank, told by RANK. Output goes to `<directory>/output-<n>`."""
        self.name = name
        self.directory = directory
        self._stamps = directory / "stamps"
        self._stamps.mkdir(parents=True)
        self.gate = Gate(directory / "gate")
        common = {
            **(environment or {}),
            "BENCH_GATE": str(self.gate.path),
            "BENCH_STAMPS": str(self._stamps),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self._commands = [
            Command(command, directory / f"output-{n}", environment={**common, "RANK": str(n)}, cwd=directory)
            for n, command in enumerate(commands)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for command in self._commands:
            command.stop()
        self.gate.close()

    def check(self) -> None:
        """Raises RuntimeError with the end of its output if the job has ended."""
        for command in self._commands:
            if command.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended with {command.process.returncode}:\n{command.output[-4000:]}")

    def stamps(self) -> dict[str, list[Stamp]]:
        return stamps.read(self._stamps)

    def latest(self) -> int:
        """The last step that any worker has applied; -1 before the first."""
        return max((of[-1].step for of in self.stamps().values() if of), default=-1)

    def until(self, what: str, reached: Callable[[], bool], within_s: float = START_S) -> None:
        """Poll; raises RuntimeError if the job ends, TimeoutError if it takes too long."""
        deadline_s = time.monotonic() + within_s
        while not reached():
            self.check()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self.name}: not within {within_s} s: {what}")
            time.sleep(POLL_S)

    def stand(self, workers: int) -> None:
        """Wait until all workers stand at the turnstile."""
        self.gate.await_stop(workers, START_S, self.check)

    @property
    def output(self) -> str:
        """Of all its commands."""
        return "".join(command.output for command in self._commands)

    def cpu_s(self) -> float:
        """Seconds of processors that its living processes, and those that they have waited for, have used so far."""
        return sum(_cpu_s(pid) for command in self._commands for pid in living(command.mark))

    def workers_cpu_s(self) -> float:
        """The part of it that its present workers have used."""
        return sum(map(_cpu_s, self.gate.workers.values()))

    def memory(self) -> dict[int, tuple[int, int]]:
        """(resident now, resident at most so far) in bytes, by pid of a worker."""
        return {pid: (_memory(pid, "VmRSS"), _memory(pid, "VmHWM")) for pid in self.gate.workers.values()}

    def sent(self) -> dict[str, tuple[int, int]]:
        """(steps, bytes) by worker; see sent.py."""
        return sent.read(self._stamps)

    def run(self, steps: int, workers: int) -> int:
        """Let so many steps pass and wait until all workers stand again. Returns the first of these steps."""
        first = self.latest() + 1
        self.gate.allow(first + steps)
        self.stand(workers)
        return first

    def open(self) -> None:
        self.gate.allow(OPEN)

    def rest(self, workers: int) -> None:
        """Stop all workers before the same step, a few steps from now."""
        self.gate.allow(self.latest() + 4)
        self.stand(workers)


def elastic(
    directory: Path,
    workers: int,
    reduction: str = "exact",
    *options: str,
    name: str = "",
    settings: Mapping[str, str] | None = None,
    script: str = "train_elastic.py",
) -> Contender:
    """options: more of `elastic run`. settings: environment variables. script: in scripts/."""
    words = ["--workers", str(workers), "--reduction", reduction, "--job-dir", str(directory / "job"), "--quiet"]
    command = [sys.executable, "-m", "elastic.cli", "run", *words, *options, str(SCRIPTS / script)]
    return Contender(name or f"elastic {reduction}", directory, [command], settings)


def ballast(name: str, directory: Path, workers: int, megabytes: int, shard_s: float, *options: str) -> Contender:
    """A job of this project with much state. shard_s: see scripts/train_ballast.py. options: of `elastic run`."""
    words = ["--workers", str(workers), "--job-dir", str(directory / "job"), "--quiet", *options]
    script = [str(SCRIPTS / "train_ballast.py"), str(directory), str(megabytes), str(shard_s)]
    return Contender(name, directory, [[sys.executable, "-m", "elastic.cli", "run", *words, *script]])


def ddp(name: str, directory: Path, workers: int, settings: Mapping[str, str] | None = None) -> Contender:
    """DistributedDataParallel without any launcher. settings: more environment variables."""
    environment = {"WORLD_SIZE": str(workers), "BENCH_INIT": f"file://{directory}/store", **(settings or {})}
    return Contender(name, directory, [[sys.executable, str(SCRIPTS / "train_ddp.py")]] * workers, environment)


def torchrun(directory: Path, workers: int, script: str = "train_ddp.py") -> Contender:
    """One elastic agent with all workers, as `elastic run` has; whatever it may wait for is set short. script: in
    scripts/.

    By default (torch 2.13) all attempts share one store, and a restarted worker may read an address which an earlier
    attempt has left there and wait for it for ever. So each attempt gets a store of its own.
    """
    options = [
        "--nnodes=1",
        f"--nproc-per-node={workers}",
        "--max-restarts=1000",
        "--monitor-interval=0.05",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--rdzv-id=bench",
        "--rdzv-conf=last_call_timeout=1,join_timeout=60,close_timeout=1,heartbeat_timeout=1",
    ]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPTS / script)]
    environment = {"BENCH_CHECKPOINT": str(directory / "checkpoint"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return Contender("torchrun", directory, [command], environment)


def step_s(of: Mapping[str, Sequence[Stamp]], first: int, end: int) -> float:
    """Mean time of a step over the workers, from the end of step `first` to the end of step `end - 1`."""
    return statistics.fmean(
        (by_step[end - 1] - by_step[first]) / 1e9 / (end - 1 - first)
        for by_step in ({stamp.step: stamp.t_ns for stamp in worker} for worker in of.values())
        if first in by_step and end - 1 in by_step
    )


def _cpu_s(pid: int) -> float:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) << 10
