"""All objects of a job on Kubernetes. Pure."""

from __future__ import annotations

from typing import Any

from elastic.platforms.k8s.agent_pods import agent_objects
from elastic.platforms.k8s.pod_parts import ManifestOptions, metadata, rights
from elastic.platforms.k8s.rendezvous_pods import rendezvous_objects
from elastic.platforms.k8s.yaml_text import documents_text


def manifest(options: ManifestOptions) -> list[dict[str, Any]]:
    """In the order in which they may be made. The Secret with the authority is missing on purpose: a key does not stand
    in a file that people keep and pass on."""
    about = metadata(options, f"{options.name}-job", "agent")
    job = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"job.toml": options.job}}
    return [job, *rights(options, f"{options.name}-agent"), *rendezvous_objects(options), *agent_objects(options)]


def manifest_text(options: ManifestOptions) -> str:
    """For `kubectl apply -f -`."""
    return documents_text(manifest(options))
