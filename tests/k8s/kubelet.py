"""A kubelet whose containers are processes of this machine: `python -m tests.k8s.kubelet SETTINGS.JSON`, one a node.

It registers a Node and renews its Lease, runs the pods that are bound to the node, and tells how they are. A pod has a
network of its own, and a container is a process with file systems of its own, in which its volumes are mounted; image,
user and limits are not looked at.
Ended are a pod's containers as by a kubelet: SIGTERM to the first process of each, SIGKILL after the grace. When this
process is killed, all of its containers are.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.k8s.api_client import Api, Object, Refused

TURN_S = 0.25
LEASE_S = 1.0
TOKENS = "/var/run/secrets/kubernetes.io/serviceaccount"
HIDDEN = ("/run", "/srv", "/mnt")
"""Directories of this machine in whose place a container has empty ones, for its mounts."""


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Container:
    """One, and its probes. It is started again where its pod says so."""

    def __init__(self, pod: Pod, spec: Object) -> None:
        self.pod = pod
        self.spec = spec
        self.name = str(spec["name"])
        self.process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.restarts = -1
        self.ready = "readinessProbe" not in spec
        self._probes = {what: Probe(self, spec[what]) for what in ("readinessProbe", "livenessProbe") if what in spec}

    def start(self) -> None:
        self.restarts += 1
        self.code = None
        log = (self.pod.home / f"{self.name}.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                self.pod.command(self.spec, self.spec["command"]),
                env=self.pod.environment(self.spec),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for probe in self._probes.values():
            probe.begin()

    def turn(self) -> None:
        if self.process is None:
            return
        if (status := self.process.poll()) is not None:
            self.code = status if status >= 0 else 128 - status
            self.process = None
            self.ready = "readinessProbe" not in self.spec
            return
        for what, probe in self._probes.items():
            well = probe.turn()
            if what == "readinessProbe":
                self.ready = well
            elif probe.gives_up:
                self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def status(self) -> Object:
        state: Object = {"waiting": {"reason": "PodInitializing"}}
        if self.process is not None:
            state = {"running": {"startedAt": self.pod.started}}
        elif self.code is not None:
            state = {"terminated": {"exitCode": self.code, "finishedAt": stamp(), "startedAt": self.pod.started}}
        told = {"name": self.name, "image": self.spec["image"], "imageID": "", "restartCount": max(0, self.restarts)}
        return {**told, "ready": self.ready and self.process is not None, "state": state}


class Probe:
    """By a command. Ones by TCP and HTTP are not made, and count as passed."""

    def __init__(self, container: Container, spec: Object) -> None:
        self._container = container
        self._spec = spec
        self.begin()

    def begin(self) -> None:
        self._asks_s = time.monotonic() + self._spec.get("initialDelaySeconds", 0)
        self._asked: subprocess.Popen[bytes] | None = None
        self._well = "exec" not in self._spec
        self._failures = 0

    @property
    def gives_up(self) -> bool:
        return self._failures >= int(self._spec.get("failureThreshold", 3))

    def turn(self) -> bool:
        process = self._container.process
        if "exec" not in self._spec or process is None:
            return self._well
        if self._asked is not None and (code := self._asked.poll()) is not None:
            self._asked = None
            self._well = code == 0
            self._failures = 0 if self._well else self._failures + 1
            self._asks_s = time.monotonic() + (self._spec["periodSeconds"] if self._well else 1.0)
        elif self._asked is None and time.monotonic() >= self._asks_s:
            self._asked = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL", "nsenter", "-t", str(process.pid), "-m", "-n"),
                    *self._spec["exec"]["command"],
                ],
                env=self._container.pod.environment(self._container.spec),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        return self._well


class Pod:
    def __init__(self, kubelet: Kubelet, told: Object, address: str) -> None:
        self._kubelet = kubelet
        self.told = told
        self.uid = str(told["metadata"]["uid"])
        self.name = str(told["metadata"]["name"])
        self.path = f"/api/v1/namespaces/{told['metadata']['namespace']}/pods/{self.name}"
        self.address = address
        self.started = stamp()
        self.home = kubelet.home / self.name / self.uid[:8]
        self.home.mkdir(parents=True)
        self._network = f"{kubelet.settings['prefix']}{address.rpartition('.')[2]}"
        self._connect()
        spec = told["spec"]
        self._volumes: dict[str, Path] = {}
        self.inits = [Container(self, one) for one in spec.get("initContainers", [])]
        self.containers = [Container(self, one) for one in spec["containers"]]
        self._stays = spec.get("restartPolicy", "Always") == "Always"
        self._kill_s: float | None = None
        self.phase = "Pending"
        self._said: Object = {}

    def _connect(self) -> None:
        settings, link = self._kubelet.settings, f"k{'.'.join(self.address.split('.')[2:])}"
        for words in (
            f"netns add {self._network}",
            f"link add {link} type veth peer name eth0 netns {self._network}",
            f"link set {link} master {settings['bridge']} up",
            f"-n {self._network} address add {self.address}/16 dev eth0",
            f"-n {self._network} link set eth0 up",
            f"-n {self._network} link set lo up",
        ):
            subprocess.run(["ip", *words.split()], check=True)

    # ------------------------------------------------------------------------------------------------ its processes

    def environment(self, container: Object) -> dict[str, str]:
        settings = self._kubelet.settings
        base = {
            **settings["environment"],
            "HOSTNAME": self.name,
            "TMPDIR": str(self.home),
            "KUBERNETES_SERVICE_HOST": settings["server"],
            "KUBERNETES_SERVICE_PORT": str(settings["port"]),
        }
        return base | {one["name"]: self._value(one) for one in container.get("env", [])}

    def _value(self, variable: Object) -> str:
        if "value" in variable:
            return str(variable["value"])
        path = variable["valueFrom"]["fieldRef"]["fieldPath"]
        if label := re.fullmatch(r"metadata\.labels\['(.*)'\]", path):
            return str(self.told["metadata"]["labels"][label[1]])
        known = {"metadata.name": self.name, "status.podIP": self.address, "spec.nodeName": self._kubelet.node}
        return known[path]

    def command(self, container: Object, words: list[str]) -> list[str]:
        variables = self.environment(container)
        words = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in words]
        lines = ["set -e", *(f"mount -t tmpfs none {directory}" for directory in HIDDEN)]
        lines.append(f"mount --bind {self._kubelet.hosts} /etc/hosts")
        for mount in container.get("volumeMounts", []):
            source = self._volume(mount["name"])
            lines.append(f"mkdir -p {mount['mountPath']} && mount --bind {source} {mount['mountPath']}")
        lines.append('exec "$@"')
        start = ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{self._network}"]
        return [
            *start,
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            "\n".join(lines),
            "container",
            *words,
        ]

    def _volume(self, name: str) -> Path:
        if name not in self._volumes:
            (spec,) = [one for one in self.told["spec"]["volumes"] if one["name"] == name]
            self._volumes[name] = self._made(name, spec)
        return self._volumes[name]

    def _made(self, name: str, spec: Object) -> Path:
        api, space = self._kubelet.api, f"/api/v1/namespaces/{self.told['metadata']['namespace']}"
        if "persistentVolumeClaim" in spec:
            claim = api.get(f"{space}/persistentvolumeclaims/{spec['persistentVolumeClaim']['claimName']}")
            volume = api.get(f"/api/v1/persistentvolumes/{claim['spec']['volumeName']}")
            return Path(volume["spec"]["hostPath"]["path"])
        directory = self.home / "volumes" / name
        directory.mkdir(parents=True)
        content: Mapping[str, bytes] = {}
        if "secret" in spec:
            data = api.get(f"{space}/secrets/{spec['secret']['secretName']}")["data"]
            content = {key: base64.b64decode(value) for key, value in data.items()}
        elif "configMap" in spec:
            data = api.get(f"{space}/configmaps/{spec['configMap']['name']}")["data"]
            content = {key: value.encode() for key, value in data.items()}
        for key, value in content.items():
            (directory / key).write_bytes(value)
        return directory

    # ------------------------------------------------------------------------------------------------ its life

    def turn(self) -> None:
        for container in (*self.inits, *self.containers):
            container.turn()
        if "deletionTimestamp" in self.told["metadata"]:
            self._end(float(self.told["metadata"]["deletionGracePeriodSeconds"]))
        elif self.phase in ("Pending", "Running"):
            self._go_on()
        self._tell()

    def _go_on(self) -> None:
        for init in self.inits:
            if init.code == 0:
                continue
            if init.process is None and init.code is not None and not self._stays:
                self.phase = "Failed"
            elif init.process is None:
                init.start()
            return
        self.phase = "Running"
        for container in self.containers:
            if container.process is None and (container.code is None or self._stays):
                container.start()
        codes = [container.code for container in self.containers]
        if None not in codes:
            self.phase = "Failed" if any(codes) else "Succeeded"

    def _end(self, grace_s: float) -> None:
        left = [one for one in (*self.inits, *self.containers) if one.process is not None]
        if self._kill_s is None:
            for container in left:
                container.signal(signal.SIGTERM)
            self._kill_s = time.monotonic() + grace_s
        if time.monotonic() > self._kill_s:
            self.kill()
        if not left:
            if self.phase in ("Pending", "Running"):
                self.phase = "Failed" if any(one.code for one in self.containers) else "Succeeded"
            self._tell()
            with contextlib.suppress(Refused):
                self._kubelet.api.delete(self.path, gracePeriodSeconds=0, preconditions={"uid": self.uid})

    def kill(self) -> None:
        for container in (*self.inits, *self.containers):
            container.signal(signal.SIGKILL)

    def _tell(self) -> None:
        ready = self.phase == "Running" and all(one.ready and one.process is not None for one in self.containers)
        conditions = [
            {"type": kind, "status": str(value)}
            for kind, value in (
                ("PodScheduled", True),
                ("Initialized", all(one.code == 0 for one in self.inits)),
                ("ContainersReady", ready),
                ("Ready", ready),
            )
        ]
        status = {
            "phase": self.phase,
            "podIP": self.address,
            "hostIP": "127.0.0.1",
            "startTime": self.started,
            "conditions": conditions,
            "initContainerStatuses": [one.status() for one in self.inits],
            "containerStatuses": [one.status() for one in self.containers],
        }
        seen = json.loads(re.sub(r'"finishedAt": "[^"]*"', '"finishedAt": ""', json.dumps(status)))
        if seen != self._said:
            with contextlib.suppress(Refused):  # it has been deleted
                self._kubelet.api.patch(f"{self.path}/status", {"status": status})
            self._said = seen


class Kubelet:
    def __init__(self, settings: Object) -> None:
        self.settings = settings
        self.node = str(settings["node"])
        self.home = Path(settings["home"])
        self.hosts = Path(settings["hosts"])
        self.api = Api(settings["server"], settings["port"], settings["token"], Path(settings["ca"]))
        self._pods: dict[str, Pod] = {}
        self._made = 0
        self._renews_s = 0.0

    def run(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the API server is away: containers run on
                self._turn()
            time.sleep(TURN_S)  # an API server, and processes: there is nothing to wait on

    def _turn(self) -> None:
        if time.monotonic() >= self._renews_s:
            self._register()
            self._renews_s = time.monotonic() + LEASE_S
        told = {
            one["metadata"]["uid"]: one
            for one in self.api.items(f"/api/v1/pods?fieldSelector=spec.nodeName={self.node}")
        }
        for uid, one in told.items():
            if uid not in self._pods and one["status"].get("phase", "Pending") == "Pending":
                self._made += 1
                self._pods[uid] = Pod(self, one, f"{self.settings['network']}.{self._made}")
                self._name(self._pods[uid])
            elif uid in self._pods:
                self._pods[uid].told = one
        for uid, pod in list(self._pods.items()):
            if uid not in told:
                pod.kill()
                del self._pods[uid]
            else:
                pod.turn()

    def _name(self, pod: Pod) -> None:
        """In the place of the cluster's DNS."""
        spec = pod.told["spec"]
        if "subdomain" not in spec:
            return
        name = f"{spec['hostname']}.{spec['subdomain']}"
        with self.hosts.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            lines = [line for line in file.read().splitlines() if not line.endswith(f" {name}")]
            file.seek(0)
            file.write("\n".join([*lines, f"{pod.address} {name}", ""]))
            file.truncate()

    def _register(self) -> None:
        node, lease = f"/api/v1/nodes/{self.node}", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        conditions = [{"type": "Ready", "status": "True", "lastHeartbeatTime": stamp(), "reason": "KubeletReady"}]
        sizes = {"cpu": "8", "memory": "32Gi", "pods": "20"}
        status = {"conditions": conditions, "capacity": sizes, "allocatable": sizes}
        try:
            self.api.patch(f"{lease}/{self.node}", {"spec": {"renewTime": micro()}})
            self.api.patch(f"{node}/status", {"status": status})
        except Refused as error:
            if error.code != 404:
                raise
            labels = {"kubernetes.io/hostname": self.node}
            about: dict[str, Any] = {"metadata": {"name": self.node, "labels": labels}, "status": status}
            with contextlib.suppress(Refused):
                self.api.post("/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", **about})
            self.api.post(
                lease,
                {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": self.node},
                    "spec": {"holderIdentity": self.node, "leaseDurationSeconds": 5, "renewTime": micro()},
                },
            )


if __name__ == "__main__":
    os.environ.pop("KUBERNETES_SERVICE_HOST", None)
    Kubelet(json.loads(Path(sys.argv[1]).read_text())).run()
