"""The agents: pods of one Job, which come and go one by one, also where a JobSet or a TrainJob has the Job. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastic.errors import ExitCode
from elastic.platforms.k8s.pod_parts import (
    ABOUT_AGENT,
    ADDRESS,
    CA,
    CONFINED,
    JOB,
    METRICS_PORT,
    OWN,
    OWN_VOLUME,
    POD_SECURITY,
    WORK,
    Flavor,
    ManifestOptions,
    authority,
    labels,
    manifest_object,
    metadata,
    mounted,
    probe,
)

KILLED_S = 5
"""Seconds of the pod's grace that are kept for an agent to end in."""

BACKOFF_LIMIT = 1000
"""Agents that died by themselves, in the whole time of the job."""

JOB_STOPPED = 71
"""Exit code of a pod whose job an operator has stopped, by whatever exit code the job ended then."""

GIVE_UP = (ExitCode.SCRIPT_FAILED, ExitCode.BAD_INPUT, ExitCode.STATE_LOST, ExitCode.DISAGREE, JOB_STOPPED)
"""With these the job has ended, and other pods would end alike. Not so where pods were too few for too long: that
counts as a failure of each, so that the pods in their place come later each time."""

LEFT = (ExitCode.DRAINED, ExitCode.TERMINATED)
"""The node had to go, or the pod was asked to end: no failure, and another pod takes its place."""

ENTER = "enter"
"""The init container."""

ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
"""By this label Kubeflow Trainer knows which Job trains; its container has to be named `node`."""


def agent_objects(options: ManifestOptions) -> Sequence[dict[str, Any]]:
    name = f"{options.name}-agents"
    about = metadata(options, name, "agent")
    match options.flavor:
        case Flavor.PLAIN:
            return [manifest_object("batch/v1", "Job", about, spec=_job(options, "agent", elastic=True))]
        case Flavor.JOBSET:
            template = {"spec": _job(options, "agent", elastic=True)}
            spec = _job_set("agent", template) | {"failurePolicy": {"maxRestarts": 0}}
            return [manifest_object("jobset.x-k8s.io/v1alpha2", "JobSet", about, spec=spec)]
        case Flavor.TRAINJOB:
            group = "trainer.kubeflow.org"
            template = {"metadata": {"labels": ANCESTOR}, "spec": _job(options, "node", elastic=False)}
            runtime = {"mlPolicy": {"numNodes": options.nodes[1]}, "template": {"spec": _job_set("node", template)}}
            ref = {"apiGroup": group, "kind": "TrainingRuntime", "name": name}
            spec = {"runtimeRef": ref, "trainer": {"numNodes": options.nodes[1]}}
            api = f"{group}/v1alpha1"
            return [
                manifest_object(api, "TrainingRuntime", about, spec=runtime),
                manifest_object(api, "TrainJob", metadata(options, options.name, "agent"), spec=spec),
            ]


def _job_set(name: str, template: dict[str, Any]) -> dict[str, Any]:
    return {
        "network": {"enableDNSHostnames": False},
        "replicatedJobs": [{"name": name, "replicas": 1, "template": template}],
    }


def _job(options: ManifestOptions, container: str, *, elastic: bool) -> dict[str, Any]:
    """elastic: it says itself how many pods it has; else its TrainJob does."""

    def on_exit(action: str, codes: Sequence[int], of: str = container) -> dict[str, Any]:
        which = {"containerName": of, "operator": "In", "values": sorted(map(int, codes))}
        return {"action": action, "onExitCodes": which}

    disrupted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        **({"parallelism": options.nodes[1]} if elastic else {}),
        "completionMode": "NonIndexed",
        "backoffLimit": BACKOFF_LIMIT,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                disrupted,
                on_exit("Ignore", LEFT),
                on_exit("FailJob", GIVE_UP),
                on_exit("FailJob", [ExitCode.BAD_INPUT], ENTER),  # the fleet refuses the job, or the authority is none
            ]
        },
        "template": {"metadata": {"labels": labels(options, "agent")}, "spec": _pod(options, container)},
    }


def _pod(options: ManifestOptions, container: str) -> dict[str, Any]:
    common = {"image": options.image, "env": ABOUT_AGENT, "securityContext": CONFINED}
    fleet = ["--rendezvous", options.replicas_text, "--own", OWN]
    fewest, most = (nodes * options.slots for nodes in options.nodes)
    enter = ["elastic", "k8s", "enter", f"{JOB}/job.toml", *fleet, "--ca", CA, "--workers", f"{fewest}:{most}"]
    agent = [
        *("elastic", "k8s", "agent", *fleet, "--address", f"$({ADDRESS})", "--jobs-dir", WORK),
        *("--slots", str(options.slots), "--grace", str(options.grace_s - KILLED_S), "--metrics", str(METRICS_PORT)),
    ]
    claimed = {"checkpoints": options.checkpoint_dir} if options.claim else {}
    volumes = [
        authority(options),
        OWN_VOLUME,
        {"name": "job", "configMap": {"name": f"{options.name}-job"}},
        {"name": "work", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        *({"name": name, "persistentVolumeClaim": {"claimName": options.claim}} for name in claimed),
    ]
    return {
        "serviceAccountName": f"{options.name}-agent",
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_s,
        "securityContext": POD_SECURITY,
        "initContainers": [
            {"name": ENTER, **common, "command": enter, "volumeMounts": mounted(ca=CA, own=OWN, job=JOB, **claimed)}
        ],
        "containers": [
            {
                "name": container,
                **common,
                "command": agent,
                "volumeMounts": mounted(own=OWN, work=WORK, shm="/dev/shm", **claimed),
                "livenessProbe": probe("healthz", "agent", initialDelaySeconds=60, failureThreshold=9),
                "resources": {"requests": dict(options.resources), "limits": dict(options.resources)},
            }
        ],
        "volumes": volumes,
    }
