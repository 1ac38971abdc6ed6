"""etcd and the rendezvous: one or three pods, each with a member of etcd and a replica that speaks to it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.platforms.k8s.pod_parts import (
    ABOUT_POD,
    ADDRESS,
    CA,
    CONFINED,
    METRICS_PORT,
    OWN,
    OWN_VOLUME,
    POD_SECURITY,
    RENDEZVOUS_PORT,
    WORK,
    ManifestOptions,
    authority,
    hosts,
    labels,
    manifest_object,
    metadata,
    mounted,
    probe,
)
from elastic.preemption.kubernetes_notices import POD

CLIENTS, PEERS = 2379, 2380
ETCD_STORAGE = "2Gi"
"""What etcd takes at most by default, which is more than a fleet of one job ever has."""

STOP_S = 30


def rendezvous_objects(options: ManifestOptions) -> Sequence[dict[str, Any]]:
    name = options.rendezvous
    about = metadata(options, name, "rendezvous")
    selected = labels(options, "rendezvous")
    service = {
        "clusterIP": "None",
        # A member of etcd is ready when it has found the others by these names.
        "publishNotReadyAddresses": True,
        "selector": selected,
        "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT}, {"name": "etcd-peer", "port": PEERS}],
    }
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": ETCD_STORAGE}}}
    replicas = {
        "replicas": options.replicas,
        "serviceName": name,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": selected},
        "template": {"metadata": {"labels": selected}, "spec": _pod(options)},
        "volumeClaimTemplates": [{"metadata": {"name": "etcd"}, "spec": claim}],
    }
    budget = {"maxUnavailable": 1, "selector": {"matchLabels": selected}}
    return [
        manifest_object("v1", "Service", about, spec=service),
        manifest_object("apps/v1", "StatefulSet", about, spec=replicas),
        manifest_object("policy/v1", "PodDisruptionBudget", about, spec=budget),
    ]


def _pod(options: ManifestOptions) -> dict[str, Any]:
    common = {"image": options.image, "env": ABOUT_POD, "securityContext": CONFINED}
    pod_host = f"$({POD}).{options.rendezvous}"
    issue = ["elastic", "certs", "node", f"$({POD})", "--ca", CA, "--out", OWN]
    issue += [word for role in ("rendezvous", "etcd", "viewer") for word in ("--role", role)]
    issue += [word for host in ("127.0.0.1", f"$({ADDRESS})", pod_host) for word in ("--address", host)]
    etcd = [
        *("etcd", "--name", f"$({POD})", "--data-dir", f"{WORK}/etcd"),
        *(
            "--listen-client-urls",
            f"https://127.0.0.1:{CLIENTS}",
            "--advertise-client-urls",
            f"https://127.0.0.1:{CLIENTS}",
        ),
        *("--listen-peer-urls", f"https://$({ADDRESS}):{PEERS}"),
        *("--initial-advertise-peer-urls", f"https://{pod_host}:{PEERS}"),
        *("--initial-cluster", ",".join(f"{host.partition('.')[0]}=https://{host}:{PEERS}" for host in hosts(options))),
        *("--client-cert-auth", "--trusted-ca-file", f"{OWN}/etcd-ca.pem"),
        *("--cert-file", f"{OWN}/etcd.pem", "--key-file", f"{OWN}/etcd.pem"),
        *("--peer-client-cert-auth", "--peer-trusted-ca-file", f"{OWN}/etcd-ca.pem"),
        *("--peer-cert-file", f"{OWN}/etcd.pem", "--peer-key-file", f"{OWN}/etcd.pem"),
        *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),  # a long history fills it
    ]
    replica = [
        *("elastic", "rendezvous", "--etcd", f"127.0.0.1:{CLIENTS}", "--listen", f"$({ADDRESS}):{RENDEZVOUS_PORT}"),
        *("--certs", OWN, "--dir", f"{WORK}/rendezvous", "--metrics", str(METRICS_PORT), "--log-format", "json"),
    ]
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": STOP_S,
        "securityContext": POD_SECURITY,
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [_apart(options)]}},
        "initContainers": [
            {"name": "certificates", **common, "command": issue, "volumeMounts": mounted(ca=CA, own=OWN)}
        ],
        "containers": [
            {
                "name": "etcd",
                **common,
                "command": etcd,
                "volumeMounts": mounted(own=OWN, etcd=WORK),
                "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
            },
            {
                "name": "rendezvous",
                **common,
                "command": replica,
                "volumeMounts": mounted(own=OWN, etcd=WORK),
                "ports": [{"name": "rendezvous", "containerPort": RENDEZVOUS_PORT}],
                "livenessProbe": probe("healthz", "rendezvous", initialDelaySeconds=30, failureThreshold=6),
                "readinessProbe": probe("readyz", "rendezvous"),
                "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
            },
        ],
        "volumes": [authority(options), OWN_VOLUME],
    }


def _apart(options: ManifestOptions) -> dict[str, Any]:
    """From the other replicas, on other nodes where there are some."""
    where = {"labelSelector": {"matchLabels": labels(options, "rendezvous")}, "topologyKey": "kubernetes.io/hostname"}
    return {"weight": 100, "podAffinityTerm": where}
