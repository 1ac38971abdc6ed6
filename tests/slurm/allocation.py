"""One allocation of `elastic slurm fleet` that trains the script of the live tests, as a test sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic.errors import ElasticError
from elastic.fleet.client import FleetClient
from elastic.records import ledger
from elastic.security.channels import ChannelFactory
from elastic.security.keyring import of_role
from elastic.security.roles import Role
from tests.live.conftest import Quiet
from tests.live.jobs import ROOT, TRAINER
from tests.slurm.cluster import Slurm
from tests.slurm.training import ENVIRONMENT

Line = dict[str, Any]


class Allocation:
    """workers: of the job, one on each of as many nodes. timing: of the job. What is kept of it is in `dir`."""

    def __init__(self, slurm: Slurm, workers: int, timing: Mapping[str, float]) -> None:
        settings = "\n".join(f"{name} = {value}" for name, value in timing.items())
        self._slurm = slurm
        self.home = slurm.home
        self.dir = slurm.home / "run"
        self._gates = slurm.home / "gates"
        self._gates.mkdir()
        (self._gates / "end").touch()
        self.pace(0.1)
        self._workers = workers
        (slurm.home / "job.toml").write_text(
            f"""
name = "train"
command = ["python", {json.dumps(str(TRAINER))}]
workers = {workers}
min_workers = 1
checkpoint_every = "5 steps"
checkpoint_dir = {json.dumps(str(slurm.home / "checkpoints"))}

[timing]
{settings}

[env]
OMP_NUM_THREADS = "1"
LIVE_GATES = {json.dumps(str(self._gates))}
"""
        )
        self.job = ""
        """Slurm's id."""

    def submit(self, *options: str) -> None:
        """options: of sbatch."""
        words = ("fleet", "job.toml", "--nodes", str(self._workers), "--slots", "1", "--grace", "15", "--dir", "run")
        self.job = self._slurm.run("elastic", "slurm", *words, "--submit", "--", *options, environment=ENVIRONMENT)

    def submit_as_on_the_page(self) -> None:
        """The commands of docs/slurm.md, one after the other: the script that is printed is the one that is submitted
        but for sbatch's own options."""
        text = (ROOT / "docs" / "slurm.md").read_text()
        printing, submitting = re.findall(r"^elastic slurm fleet .*", text, re.MULTILINE)
        script = self._slurm.run("bash", "-c", printing, environment=ENVIRONMENT)
        assert script.startswith("#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH --nodes=3\n")
        self.job = self._slurm.run("bash", "-c", submitting, environment=ENVIRONMENT)
        self.dir = self.home / "elastic-slurm" / self.job

    @property
    def output(self) -> str:
        path = self.home / f"slurm-{self.job}.out"
        return path.read_text() if path.exists() else ""

    def pace(self, seconds: float) -> None:
        """How long the script takes over a shard from now on; 0: to its end."""
        temporary = self._gates / "pace.tmp"
        temporary.write_text(str(seconds))
        temporary.rename(self._gates / "pace")
        if not seconds:
            (self._gates / "end").unlink(missing_ok=True)

    def status(self) -> Line:
        """state "" while nobody can say."""
        try:
            (address,) = re.findall(r"^export ELASTIC_RENDEZVOUS=(\S+)", self.output, re.MULTILINE)[-1:]
            keyring = of_role(self.dir / "certs" / "operator", Role.OPERATOR)
            return FleetClient([address], channels=ChannelFactory(keyring)).status(
                (self.dir / "job").read_text().strip()
            )
        except (ElasticError, OSError, ValueError):
            return {"state": "", "generation": 0, "members": []}

    def await_nodes(self, *nodes: str) -> None:
        """Until a worker of each, and nobody else, is a member that has applied a step."""

        def there() -> bool:
            status = self.status()
            applied = {member["worker_id"].partition(".")[0]: member["applied"] for member in status["members"]}
            return status["state"] == "running" and sorted(applied) == sorted(nodes) and all(applied.values())

        self._until(f"members on {nodes}", there)

    def kill(self, what: str) -> None:
        """etcd, the rendezvous, or a worker."""
        words = {"etcd": "--name=embedded", "rendezvous": "elastic.platforms.common.fleet_host", "worker": str(TRAINER)}
        self._slurm.kill_program(words[what])

    def await_more_steps(self, count: int) -> None:
        wanted = len(self.steps()) + count
        self._until(f"{count} more steps", lambda: len(self.steps()) >= wanted)

    def steps(self) -> list[Line]:
        """The ledgers of all nodes and of all jobs of the fleet, merged by step."""
        return ledger.merged(self.dir.glob("*/train-*/steps.jsonl"))

    def events(self, event: str) -> list[Line]:
        """Of the nodes' daemons, in order."""
        logs = self.dir.glob("*/journal/*.jsonl")
        lines = [json.loads(text) for path in logs for text in path.read_text().splitlines()]
        return sorted((line for line in lines if line["event"] == event), key=lambda line: line["t_wall"])

    def check(self, quiet: Quiet) -> None:
        """Slurm's job ends, and it was the quiet run, with every step once."""
        self.pace(0.0)
        assert self._slurm.end(self.job) == "COMPLETED", self.output
        assert f"exit 0: all members have finished, digest {quiet.digest}" in self.output
        assert ledger.compare(self.steps(), quiet.steps) is None

    def _until(self, what: str, reached: Callable[[], bool]) -> None:
        self._slurm.until(what, lambda: reached() or None)

    def story(self) -> str:
        logs: list[Path] = [*self.dir.glob("*.log"), *self.dir.glob("*/*/logs/*.log")]
        tails = [f"--- {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join([self.output, json.dumps(self.status()), *tails])
