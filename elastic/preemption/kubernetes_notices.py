"""What a Node and a Pod of Kubernetes say about their near future. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from elastic.preemption.notice import Notice, NoticeKind, seconds_until, utc

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
"""Other taints of that handler: maintenance that was announced, and the end of an instance by its scaling group."""


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
