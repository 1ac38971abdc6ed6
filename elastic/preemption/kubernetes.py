"""Kubernetes: taints of the node on which this pod runs, and the end of the pod itself.

    GET /api/v1/nodes/NAME                     spec.taints
    GET /api/v1/namespaces/NAMESPACE/pods/NAME metadata.deletionTimestamp, the condition DisruptionTarget

Both are read once and watched from there. The pod is also sent SIGTERM when it ends; the condition may come before
that, and a taint, set by an autoscaler or by what hears the cloud, long before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError
from elastic.preemption.kubernetes_api import HOST, MOUNTED, PORT, ApiAccess, WatchedObject
from elastic.preemption.kubernetes_notices import NODE, POD, of_node, of_pod
from elastic.preemption.notice import Notice
from elastic.preemption.provider import NoticeSource, Unanswered


class Kubernetes(NoticeSource):
    """notice_in: the notice in what is watched, by the API's own clock. Raises ValueError."""

    pause_s = 0.2
    """A change is told by a call that waits for it; so no flood of changes keeps a processor busy."""

    def __init__(
        self, name: str, watched: WatchedObject, notice_in: Callable[[Mapping[str, Any], datetime], Notice | None]
    ) -> None:
        self.name = name
        self._watched = watched
        self._notice_in = notice_in

    def look(self) -> Notice | None:
        seen = self._watched.next()
        try:
            return self._notice_in(seen, self._watched.now)
        except ValueError as error:
            raise Unanswered(f"{self.name}: {error}") from error

    def close(self) -> None:
        self._watched.close()


def kubernetes(environment: Mapping[str, str], mounted: Path = MOUNTED) -> list[NoticeSource]:
    """The notices of this pod and its node. Raises ConfigError outside of a pod."""
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
        Kubernetes(
            "Kubernetes node", WatchedObject(access, "/api/v1/nodes", environment[NODE]), lambda seen, _: of_node(seen)
        ),
        Kubernetes("Kubernetes pod", WatchedObject(access, pods, environment[POD]), of_pod),
    ]
