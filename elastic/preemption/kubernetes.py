"""Kubernetes: taints of the node on which this pod runs, and the end of the pod itself.

    GET /api/v1/nodes/NAME                     spec.taints
    GET /api/v1/namespaces/NAMESPACE/pods/NAME metadata.deletionTimestamp, the condition DisruptionTarget

Both are read once and watched from there. The pod is also sent SIGTERM when it ends; the condition may come before
that, and a taint, set by an autoscaler or by what hears the cloud, long before.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError
from elastic.preemption.kubernetes_api import HOST, MOUNTED, PORT, ApiAccess, WatchedObject
from elastic.preemption.notice import Notice, NoticeKind, seconds_until, utc
from elastic.preemption.provider import NoticeSource, Unanswered

NODE = "NODE_NAME"
POD = "POD_NAME"
"""Environment variables, by the downward API: spec.nodeName, metadata.name."""

DEFAULT_GRACE_S = 30.0
"""A pod's terminationGracePeriodSeconds where it says none."""

TERMINATION_HANDLER = "aws-node-termination-handler/"

TAINTS: Mapping[str, tuple[NoticeKind, float]] = {
    # Pods are evicted next, with their grace, before the machine is given back.
    "ToBeDeletedByClusterAutoscaler": (NoticeKind.RECLAIM, 60.0),
    "cloud.google.com/impending-node-termination": (NoticeKind.RECLAIM, 25.0),
    "node.kubernetes.io/out-of-service": (NoticeKind.MAINTENANCE, 30.0),
    f"{TERMINATION_HANDLER}spot-itn": (NoticeKind.RECLAIM, 120.0),
    f"{TERMINATION_HANDLER}rebalance-recommendation": (NoticeKind.ADVICE, math.inf),
    # `kubectl cordon`: pods that are there stay. `kubectl drain` evicts them too, which they hear of by themselves.
    "node.kubernetes.io/unschedulable": (NoticeKind.ADVICE, math.inf),
}
"""What a taint of a node says: its kind, and seconds left."""

OTHERS_OF_HANDLER = (NoticeKind.MAINTENANCE, 120.0)
"""Of the termination handler: maintenance that was announced, and the end of an instance by its scaling group."""


def of_node(node: Mapping[str, Any]) -> Notice | None:
    """The notice in a Node; of several the one that leaves least time. Raises ValueError."""
    found = []
    match node.get("spec", {}):
        case {"taints": list(taints)}:
            found = [notice for taint in taints if (notice := _of_taint(taint)) is not None]
        case {"taints": other}:
            raise ValueError(f"taints is no list: {other!r:.80}")
    return min(found, key=lambda notice: notice.seconds_left, default=None)


def _of_taint(taint: object) -> Notice | None:
    match taint:
        case {"key": str(key)}:
            default = OTHERS_OF_HANDLER if key.startswith(TERMINATION_HANDLER) else None
            meant = TAINTS.get(key, default)
            return None if meant is None else Notice(*meant, f"Kubernetes: its node has the taint {key}")
    raise ValueError(f"a taint has no key: {taint!r:.80}")


def of_pod(pod: Mapping[str, Any], now: datetime) -> Notice | None:
    """The notice in a Pod. now: as the server says. Raises ValueError."""
    match pod:
        case {"metadata": {"deletionTimestamp": str(end), "deletionGracePeriodSeconds": int(grace_s)}}:
            return Notice(
                NoticeKind.MAINTENANCE,
                seconds_until(utc(end), now, float(grace_s)),
                f"Kubernetes ends this pod at {end}",
            )
        case {"status": {"conditions": list(conditions)}}:
            for condition in conditions:
                match condition:
                    case {"type": "DisruptionTarget", "status": "True"}:
                        return Notice(
                            NoticeKind.MAINTENANCE,
                            float(pod.get("spec", {}).get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)),
                            f"Kubernetes is about to end this pod: {condition.get('reason', 'no reason given')}",
                        )
    return None


class _Kubernetes(NoticeSource):
    pause_s = 0.2
    """A change is told by a call that waits for it; so no flood of changes keeps a processor busy."""

    def __init__(self, watched: WatchedObject) -> None:
        self._watched = watched

    def look(self) -> Notice | None:
        seen = self._watched.next()
        try:
            return self._notice(seen)
        except ValueError as error:
            raise Unanswered(f"{self.name}: {error}") from error

    def close(self) -> None:
        self._watched.close()

    @abstractmethod
    def _notice(self, seen: Mapping[str, Any]) -> Notice | None: ...


class KubernetesNode(_Kubernetes):
    name = "Kubernetes node"

    def _notice(self, seen: Mapping[str, Any]) -> Notice | None:
        return of_node(seen)


class KubernetesPod(_Kubernetes):
    name = "Kubernetes pod"

    def _notice(self, seen: Mapping[str, Any]) -> Notice | None:
        return of_pod(seen, self._watched.now)


def kubernetes(environment: Mapping[str, str], mounted: Path = MOUNTED) -> list[NoticeSource]:
    """Of this pod and its node. Raises ConfigError outside of a pod."""
    missing = [name for name in (HOST, PORT, NODE, POD) if not environment.get(name)]
    if missing or not environment[PORT].isdecimal():
        raise ConfigError(
            f"--notices k8s needs ${', $'.join(missing or [PORT])}: it is for a pod, whose manifest gives it {NODE} "
            f"and {POD} by the downward API, as `elastic k8s manifest` writes it"
        )
    access = ApiAccess(environment[HOST], int(environment[PORT]), mounted)
    try:
        pods = f"/api/v1/namespaces/{access.namespace}/pods"
    except Unanswered as error:
        raise ConfigError(f"--notices k8s: {error}") from error
    return [
        KubernetesNode(WatchedObject(access, "/api/v1/nodes", environment[NODE])),
        KubernetesPod(WatchedObject(access, pods, environment[POD])),
    ]
