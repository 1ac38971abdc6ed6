"""A fleet as a test sees it: etcd, replicas of the rendezvous, and a daemon for each node, all on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from elastic import journal, ledger
from elastic.embedded import find_binary
from elastic.errors import ElasticError
from elastic.fleet.client import FleetClient
from tests.live.etcd_cluster import EtcdCluster
from tests.live.jobs import DEADLINE_S, POLL_S, ROOT, SLACK_S, TRAINER
from tests.live.spread import told_from

T = TypeVar("T")
Line = dict[str, Any]
PREFIX = ("setpriv", "--pdeathsig", "KILL")


class Fleet:
    """Context manager; whatever it started is gone afterwards. replicas, nodes: their processes, by name.

    host: where the replicas listen. silent: addresses at which nobody answers, which everybody asks first.
    """

    def __init__(self, home: Path, *, replicas: int = 2, host: str = "127.0.0.1", silent: Sequence[str] = ()) -> None:
        self.home = home
        self._host = host
        self._insecure = () if host == "127.0.0.1" else ("--insecure",)
        self.gates = home / "gates"
        self.gates.mkdir()
        (home / "etcd").mkdir()
        self._etcd = EtcdCluster(find_binary(), home / "etcd", 1)
        self._etcd.wait_healthy()
        self.replicas: dict[str, subprocess.Popen[bytes]] = {}
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        for number in range(replicas):
            self.replica(f"r{number}")
        self.client = FleetClient([*silent, *(self.address(name) for name in self.replicas)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in (*self.nodes.values(), *self.replicas.values()):
            process.kill()
            process.wait()
        self._etcd.close()
        if error is not None:
            error.add_note(self.story())

    # ------------------------------------------------------------------------------------------------ processes

    def replica(self, name: str) -> None:
        (self.home / name / "rendezvous.json").unlink(missing_ok=True)
        where = ("--etcd", ",".join(self._etcd.endpoints), "--listen", f"{self._host}:0", *self._insecure)
        self.replicas[name] = self._start(name, "rendezvous", *where, "--dir", str(self.home / name))
        self.until(f"{name} to listen", (self.home / name / "rendezvous.json").exists)

    def address(self, replica: str) -> str:
        document = json.loads((self.home / replica / "rendezvous.json").read_bytes())
        return str(document["address"])

    def node(self, name: str, *options: str, within: Sequence[str] = ()) -> None:
        """within: a command that runs another one, on another host for example."""
        words = ("--rendezvous", ",".join(self.client.replicas), "--node", name, "--jobs-dir", str(self.home / name))
        self.nodes[name] = self._start(name, "agent", *words, *self._insecure, *options, within=within)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A verb of an operator."""
        where = ("--rendezvous", ",".join(self.client.replicas), *self._insecure)
        command = [sys.executable, "-m", "elastic.cli", *words, *where]
        return subprocess.run(
            command, cwd=self.home, env=self._environment(), capture_output=True, text=True, timeout=DEADLINE_S
        )

    def submit(self, name: str, *options: str, script: Path = TRAINER, **fields: object) -> str:
        """`elastic submit`. Returns the job's name."""
        values = {"workers": 3, "checkpoint_dir": str(self.home / "checkpoints"), **fields}
        lines = [f"name = {json.dumps(name)}", f'command = ["python", {json.dumps(str(script))}]']
        lines += [f"{field} = {json.dumps(value)}" for field, value in values.items()]
        lines += ["[env]", f'LIVE_GATES = "{self.gates}"', 'OMP_NUM_THREADS = "1"']
        path = self.home / f"{name}.toml"
        path.write_text("\n".join(lines))
        done = self.run("submit", str(path), *options)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()

    def _start(self, name: str, *words: str, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        with (self.home / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*PREFIX, *within, sys.executable, "-m", "elastic.cli", *words],
                cwd=self.home,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT)}

    # -------------------------------------------------------------------------------------------------- what is

    def until(self, what: str, reached: Callable[[], T | None]) -> T:
        """The first true value."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not (value := reached()):
            assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {what}"
            time.sleep(POLL_S)  # files and other processes: there is nothing to wait on
        return value

    def status(self, job: str) -> Line:
        """state "" while nobody can say."""
        try:
            return self.client.status(job)
        except ElasticError:
            return {"state": "", "generation": 0, "term": 0, "members": [], "applied": 0}

    def entry(self, job: str) -> Line:
        """Of `elastic jobs`."""
        return self.client.job(job)

    def await_members(self, job: str, *worker_ids: str) -> Line:
        """Those, in any order, as the members of a job that runs, all of whom have applied a step."""

        def there() -> Line | None:
            status = self.status(job)
            members = sorted(member["worker_id"] for member in status["members"] if member["applied"])
            return status if status["state"] == "running" and members == sorted(worker_ids) else None

        return self.until(f"members {worker_ids} of {job}", there)

    def await_end(self, job: str) -> Line:
        return self.until(f"the end of {job}", lambda: e if (e := self.entry(job))["state"] == "ended" else None)

    def await_nodes(self, *names: str) -> None:
        def there() -> bool:
            up = [node["node"] for node in self.client.overview()["nodes"] if node["up"]]
            return set(names) <= set(up)

        self.until(f"nodes {names}", there)

    def leader_of(self, job: str) -> str:
        """The replica that leads it."""
        address = self.status(job)["leader"]
        return next(name for name in self.replicas if self.address(name) == address)

    def steps(self, *jobs: str) -> list[Line]:
        """The ledgers of all nodes, merged by step."""
        return ledger.merged(path for job in jobs for path in sorted(self.home.glob(f"*/{job}/steps.jsonl")))

    def events(self, event: str, **fields: object) -> list[Line]:
        return [line for line in self._lines() if line["event"] == event and fields.items() <= line.items()]

    def pids(self) -> list[int]:
        """Of all agents of jobs and workers that were ever started here."""
        known = ("charge_started", "worker_started")
        return [line["pid"] for line in self._lines() if line["event"] in known]

    def living(self) -> list[int]:
        """Those of `pids` that are still there; waited for a moment."""
        deadline_s = time.monotonic() + SLACK_S
        while (left := [pid for pid in self.pids() if _lives(pid)]) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return left

    def pace(self, seconds: float) -> None:
        """How long the script takes over a shard from now on."""
        temporary = self.gates / "pace.tmp"
        temporary.write_text(str(seconds))
        temporary.rename(self.gates / "pace")

    def story(self) -> str:
        """For a failure."""
        logs = [*self.home.glob("*.log"), *self.home.glob("*/*/logs/*.log")]
        tails = [f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-12:]) for log in logs]
        return "\n".join([*tails, *told_from(self._lines()[-150:])])

    def _lines(self) -> list[Line]:
        journals = [*self.home.glob("*/journal/*.jsonl"), *self.home.glob("*/*/journal/*.jsonl")]
        journals += self.home.glob("*/jobs/*/journal/*.jsonl")
        return sorted((line for path in journals for line in journal.read(path)), key=lambda line: line["t_mono_ns"])


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def interrupt(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGTERM) -> int:
    """Ask it to end; its exit code."""
    process.send_signal(number)
    return process.wait(DEADLINE_S)
