"""What the pods of a job have in common: paths, environment, rights. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elastic.config import check_name
from elastic.errors import ConfigError
from elastic.preemption.kubernetes_notices import NODE, POD

CA = "/run/elastic/ca"
"""The authority, which only init containers see."""
OWN = "/run/elastic/own"
"""In the memory of the node: the pod's own certificates, and the name of the job."""
JOB = "/run/elastic/job"
WORK = "/srv/elastic"
"""On the disk of the node, or, for etcd, on a claim."""

OWNER = "OWNER_UID"
"""Environment variable: the uid of the Job whose pod this is."""
ADDRESS = "POD_IP"

USER = 10001
"""The user of the image in docs/k8s, and the group that volumes are given."""

RENDEZVOUS_PORT = 7070
METRICS_PORT = 9400
"""On the pod's loopback: `elastic k8s probe` reads it, with the pod's own certificate."""


class Flavor(StrEnum):
    """What runs the agents."""

    PLAIN = "plain"
    """A Job of batch/v1."""
    JOBSET = "jobset"
    TRAINJOB = "trainjob"
    """A TrainJob of Kubeflow Trainer, with a runtime of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    """name: of the job, which all objects begin with. job: the text of its file. nodes: fewest and most pods of agents.
    slots: workers in each. replicas: of etcd and the rendezvous. checkpoint_dir: of the job; claim: the
    PersistentVolumeClaim that is mounted there; "": it is a URL. resources: of an agent's container. grace_s: from
    SIGTERM to SIGKILL. Raises ConfigError."""

    name: str
    job: str
    image: str
    nodes: tuple[int, int]
    checkpoint_dir: str
    claim: str = ""
    flavor: Flavor = Flavor.PLAIN
    namespace: str = "default"
    slots: int = 1
    replicas: int = 1
    grace_s: int = 60
    resources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fewest, most = self.nodes
        if not 1 <= fewest <= most:
            raise ConfigError(f"--nodes {fewest}:{most} must be MIN:MAX with 1 <= MIN <= MAX")
        if self.slots < 1:
            raise ConfigError(f"--slots {self.slots} must be at least 1")
        if self.replicas not in (1, 3):
            raise ConfigError(f"--replicas {self.replicas} must be 1 or 3")
        if self.grace_s < 10:
            raise ConfigError(f"--grace {self.grace_s} must be at least 10 seconds")
        check_name("--namespace", self.namespace)
        if not self.name[:1].isalpha():
            raise ConfigError(
                f"name = {self.name!r} must begin with a letter: so do the names of Services in Kubernetes"
            )
        if len(self.name) > 40:
            raise ConfigError(
                f"name = {self.name!r} is longer than 40 characters, the most that names of pods have room for"
            )
        if (self.checkpoint_dir.startswith("/")) != bool(self.claim):
            raise ConfigError(
                f"checkpoint_dir={self.checkpoint_dir!r}: a directory needs --claim, a PersistentVolumeClaim that "
                "all nodes can mount (ReadWriteMany); a URL such as s3://bucket/runs needs none"
            )
        if self.claim and (taken := _hidden(self.checkpoint_dir)):
            raise ConfigError(
                f"checkpoint_dir={self.checkpoint_dir!r}: pods have {taken} for something else, and a claim there "
                "would hide it; give another directory"
            )

    @property
    def rendezvous(self) -> str:
        return f"{self.name}-rendezvous"

    @property
    def replicas_text(self) -> str:
        """As --rendezvous has it."""
        return ",".join(f"{host}:{RENDEZVOUS_PORT}" for host in hosts(self))


def _hidden(directory: str) -> str:
    """Which place of a pod a volume in that directory would take, or hide, or ""."""
    words = _words(directory)
    places = (CA, OWN, JOB, WORK, "/dev/shm", "/proc")
    return next((place for place in places if _words(place)[: len(words)] == words), "")


def _words(path: str) -> list[str]:
    return [word for word in path.split("/") if word not in ("", ".")]


def hosts(options: ManifestOptions) -> list[str]:
    """The names of the pods of the rendezvous in the cluster's DNS."""
    return [f"{options.rendezvous}-{number}.{options.rendezvous}" for number in range(options.replicas)]


def labels(options: ManifestOptions, part: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": options.name, "app.kubernetes.io/component": part}


def metadata(options: ManifestOptions, name: str, part: str) -> dict[str, Any]:
    return {"name": name, "namespace": options.namespace, "labels": labels(options, part)}


def from_pod(variable: str, path: str) -> dict[str, Any]:
    """A variable by the downward API."""
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


ABOUT_POD = [from_pod(POD, "metadata.name"), from_pod(ADDRESS, "status.podIP")]
ABOUT_AGENT = [*ABOUT_POD, from_pod(NODE, "spec.nodeName"), from_pod(OWNER, "metadata.labels['controller-uid']")]

CONFINED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""What the process of a container may not do."""

POD_SECURITY = {"runAsNonRoot": True, "fsGroup": USER, "seccompProfile": {"type": "RuntimeDefault"}}


def mounted(**volumes: str) -> list[dict[str, Any]]:
    """Volume -> where."""
    return [
        {"name": name, "mountPath": path, **({"readOnly": True} if name == "ca" else {})}
        for name, path in volumes.items()
    ]


def authority(options: ManifestOptions) -> dict[str, Any]:
    return {"name": "ca", "secret": {"secretName": f"{options.name}-ca", "defaultMode": 0o440}}


OWN_VOLUME = {"name": "own", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}


def probe(page: str, role: str, **times: int) -> dict[str, Any]:
    """By a command in the container, because the page asks for a certificate, which a kubelet has not."""
    words = ["elastic", "k8s", "probe", page, "--certs", OWN, "--of", role, "--port", str(METRICS_PORT)]
    return {"exec": {"command": words}, "periodSeconds": 20, "timeoutSeconds": 10, **times}


def manifest_object(api: str, kind: str, about: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"apiVersion": api, "kind": kind, "metadata": about, **more}


def rights(options: ManifestOptions, agent: str) -> Sequence[dict[str, Any]]:
    """To read, one by one, the pods of the namespace and the nodes, for notices; nothing else."""
    cluster = f"{options.namespace}:{agent}"  # a hyphen could be of either name, and two jobs would share the object
    group = "rbac.authorization.k8s.io"
    subjects = [{"kind": "ServiceAccount", "name": agent, "namespace": options.namespace}]
    of_namespace = metadata(options, agent, "agent")
    of_cluster = {"name": cluster, "labels": labels(options, "agent")}

    def rules(what: str) -> list[dict[str, Any]]:
        return [{"apiGroups": [""], "resources": [what], "verbs": ["get", "watch"]}]

    def role(kind: str, name: str) -> dict[str, str]:
        return {"apiGroup": group, "kind": kind, "name": name}

    api = f"{group}/v1"
    bound, bound_in_cluster = role("Role", agent), role("ClusterRole", cluster)
    return [
        manifest_object("v1", "ServiceAccount", of_namespace),
        manifest_object(api, "Role", of_namespace, rules=rules("pods")),
        manifest_object(api, "RoleBinding", of_namespace, roleRef=bound, subjects=subjects),
        manifest_object(api, "ClusterRole", of_cluster, rules=rules("nodes")),
        manifest_object(api, "ClusterRoleBinding", of_cluster, roleRef=bound_in_cluster, subjects=subjects),
    ]
