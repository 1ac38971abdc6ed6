"""A job on the Kubernetes of a test, by the manifest that `elastic k8s manifest` prints."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from elastic.errors import ElasticError
from elastic.fleet.client import FleetClient
from elastic.platforms.k8s.pod_parts import RENDEZVOUS_PORT
from elastic.records import ledger
from elastic.records.journal import parse
from elastic.security.channels import ChannelFactory
from elastic.security.keyring import of_role
from elastic.security.roles import Role
from tests.k8s.api_client import Refused
from tests.k8s.cluster import Kubernetes, of_this_version
from tests.live.conftest import Quiet
from tests.live.jobs import TRAINER

Line = dict[str, Any]


class Training:
    """nodes: as of `elastic k8s manifest`."""

    def __init__(self, cluster: Kubernetes, nodes: str, replicas: int = 1, **timing: float) -> None:
        self._cluster = cluster
        home = cluster.home
        self._gates = home / "gates"
        self._gates.mkdir()
        (self._gates / "end").touch()
        self.pace(0.1)
        lines = "\n".join(f"{name} = {value}" for name, value in timing.items())
        (home / "job.toml").write_text(
            f"""
name = "train"
command = ["python", {json.dumps(str(TRAINER))}]
workers = 1
checkpoint_every = "5 steps"
checkpoint_dir = "/mnt/runs"

[timing]
join_window_s = 45.0
{lines}

[env]
OMP_NUM_THREADS = "1"
LIVE_GATES = {json.dumps(str(self._gates))}
"""
        )
        cluster.elastic("certs", "init", "ca")
        cluster.elastic("certs", "node", "ann", "--ca", "ca", "--out", "ann", "--role", "operator")
        cluster.kubectl("create", "secret", "generic", "train-ca", "--from-file=ca")
        words = ("--image", "none", "--nodes", nodes, "--replicas", str(replicas), "--claim", "runs", "--grace", "30")
        self.manifest = cluster.elastic("k8s", "manifest", "job.toml", *words)
        for number in range(replicas):
            self._volume(f"etcd-{number}", "ReadWriteOnce")
        self._volume("runs", "ReadWriteMany")
        claim = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "3Gi"}}}
        about = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}}
        documents = [{**about, "spec": {**claim, "volumeName": "runs"}}, *yaml.safe_load_all(self.manifest)]
        listed = {"apiVersion": "v1", "kind": "List", "items": [of_this_version(one) for one in documents]}
        # Fields that this version does not know are left out.
        cluster.kubectl("apply", "--validate=false", "-f", "-", given=json.dumps(listed))

    def _volume(self, name: str, mode: str) -> None:
        directory = self._cluster.home / "volumes" / name
        directory.mkdir(parents=True)
        spec = {"capacity": {"storage": "3Gi"}, "accessModes": [mode], "hostPath": {"path": str(directory)}}
        if name == "runs":
            spec["claimRef"] = {"namespace": "default", "name": "runs"}
        about = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}}
        self._cluster.api.post("/api/v1/persistentvolumes", {**about, "spec": spec})

    def pace(self, seconds: float) -> None:
        """How long the script takes over a shard from now on; 0: to its end."""
        temporary = self._gates / "pace.tmp"
        temporary.write_text(str(seconds))
        temporary.rename(self._gates / "pace")
        if not seconds:
            (self._gates / "end").unlink(missing_ok=True)

    def client(self) -> FleetClient:
        """Raises ElasticError."""
        pods = self._cluster.pods("rendezvous").values()
        addresses = [f"{pod['status']['podIP']}:{RENDEZVOUS_PORT}" for pod in pods if "podIP" in pod["status"]]
        if not addresses:
            raise ElasticError("there is no rendezvous")
        keyring = of_role(self._cluster.home / "ann", Role.OPERATOR)
        return FleetClient(addresses, channels=ChannelFactory(keyring))

    def status(self) -> Line:
        """state "" while nobody can say."""
        try:
            return self.client().status("train")
        except (ElasticError, OSError, Refused):
            return {"state": "", "generation": 0, "members": []}

    def await_workers(self, count: int, *, without: str = "") -> list[str]:
        """Until so many, each in a pod of its own, are members that have applied a step; returns their pods. without: a
        pod that is none of them."""

        def there() -> list[str] | None:
            status = self.status()
            applied = {member["node"]: member["applied"] for member in status["members"]}
            settled = len(applied) == len(status["members"]) == count and all(applied.values())
            return sorted(applied) if status["state"] == "running" and settled and without not in applied else None

        return self._cluster.until(f"{count} workers", there)

    def await_more_steps(self, count: int) -> None:
        wanted = len(self.steps()) + count
        self._cluster.until(f"{count} more steps", lambda: len(self.steps()) >= wanted)

    def steps(self) -> list[Line]:
        """The ledgers of all pods, also of those that are gone, merged by step."""
        return ledger.merged(self._cluster.home.glob("n*/*/*/volumes/work/train-*/steps.jsonl"))

    def events(self, event: str) -> list[Line]:
        """Of all pods and replicas."""
        home = self._cluster.home
        paths: list[Path] = [
            *home.glob("n*/*/*/volumes/work/**/*.jsonl"),
            *home.glob("volumes/etcd-*/rendezvous/**/*.jsonl"),
        ]
        lines = [parse(line) for path in paths for line in path.read_bytes().splitlines()]
        return [line for line in lines if line is not None and line.get("event") == event]

    def said(self, what: str, since_s: float) -> None:
        """For docs/kubernetes.md."""
        print(f"measured: {what}: {time.monotonic() - since_s:.1f} s", flush=True)

    def finish(self, quiet: Quiet) -> None:
        """The Job is complete, and it was the quiet run, with every step once."""
        self.pace(0.0)
        path = "/apis/batch/v1/namespaces/default/jobs/train-agents"

        def complete() -> bool:
            conditions = self._cluster.api.get(path)["status"].get("conditions", [])
            assert not [one for one in conditions if one["type"] == "Failed"], conditions
            return bool([one for one in conditions if one["type"] == "Complete"])

        self._cluster.until("the Job is complete", complete)
        entry = self.client().job("train")
        assert (entry["exit_code"], entry["digest"]) == (0, quiet.digest), entry["because"]
        assert ledger.compare(self.steps(), quiet.steps) is None
