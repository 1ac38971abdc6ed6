"""`elastic k8s`: the manifest of a job on Kubernetes, and what its pods run."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError, ExitCode
from elastic.rendezvous.endpoint import parse

GRACE_S = 60

RESOURCE = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""The name of a resource in Kubernetes."""

QUANTITY = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([mkMGTPE]|[KMGTPE]i|[eE][0-9]+)?")
"""How much of it, as Kubernetes writes it."""

DESCRIPTION = "Print the manifest of a job on Kubernetes: etcd and the rendezvous, and agents that come and go."

EXAMPLES = """\
examples:
  elastic certs init ca
  kubectl create secret generic train-ca --from-file=ca
  elastic k8s manifest job.toml --image registry.example/train:1 --nodes 2:8 > train.yaml
  kubectl apply -f train.yaml
  kubectl patch job train-agents --type merge -p '{"spec": {"parallelism": 4}}'       fewer pods, or more

`train` is the name in job.toml. The job trains with as many workers as there are pods, from the first number of --nodes
times --slots to the second one.

exit codes:
  0 done    2 bad input
"""


def add(verbs: Any) -> None:
    """The verb."""
    k8s = verbs.add_parser("k8s", help="the manifest of a job on Kubernetes", description=DESCRIPTION, epilog=EXAMPLES)
    what = k8s.add_subparsers(dest="k8s", required=True, metavar="WHAT", parser_class=type(k8s))
    manifest = what.add_parser(
        "manifest", help="print it as YAML, for `kubectl apply`", description=DESCRIPTION, epilog=EXAMPLES
    )
    manifest.add_argument("file", type=Path, metavar="JOB.TOML", help="as of `elastic submit`")
    manifest.add_argument(
        "--image", required=True, metavar="I", help="image of all containers, with elastic and etcd in PATH"
    )
    manifest.add_argument(
        "--nodes", required=True, metavar="MIN:MAX", help="fewest and most pods that train, or one number"
    )
    flavor = manifest.add_mutually_exclusive_group()
    for name, about in (
        ("plain", "the agents are a Job (default)"),
        ("jobset", "a JobSet"),
        ("trainjob", "a TrainJob of Kubeflow Trainer, which is told of the progress"),
    ):
        flavor.add_argument(f"--{name}", dest="flavor", action="store_const", const=name, default="plain", help=about)
    manifest.add_argument("--namespace", default="default", metavar="N", help="(default %(default)s)")
    manifest.add_argument("--slots", type=int, default=1, metavar="N", help="workers of each pod (default %(default)s)")
    manifest.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="replicas of etcd and of the rendezvous, 1 or 3 (default %(default)s)",
    )
    manifest.add_argument(
        "--claim", default="", metavar="PVC", help="PersistentVolumeClaim to mount at the job's checkpoint_dir"
    )
    manifest.add_argument(
        "--resource",
        action="append",
        default=[],
        metavar="K=V",
        help="request of a pod of agents, such as cpu=4, memory=16Gi or nvidia.com/gpu=1; may be repeated",
    )
    manifest.add_argument(
        "--grace",
        type=int,
        default=GRACE_S,
        metavar="S",
        help="seconds a pod has to leave, its terminationGracePeriodSeconds (default %(default)s)",
    )
    manifest.set_defaults(verb=_manifest)
    enter = what.add_parser("enter", help="(in a pod) make its certificates, and give the fleet the job")
    enter.add_argument("file", type=Path, metavar="JOB.TOML")
    enter.add_argument("--ca", type=Path, required=True, metavar="DIR", help="of `elastic certs init`")
    enter.add_argument("--workers", required=True, metavar="MIN:MAX", help="of the job")
    _add_place(enter)
    enter.set_defaults(verb=_enter)
    agent = what.add_parser("agent", help="(in a pod) an agent, until the job is over or has left the node")
    _add_place(agent)
    agent.add_argument(
        "--jobs-dir", type=Path, required=True, metavar="DIR", help="as of `elastic agent`, like the others"
    )
    for option in ("address", "slots", "metrics"):
        agent.add_argument(f"--{option}", required=True, metavar="X")
    agent.add_argument("--grace", type=float, required=True, metavar="S")
    agent.add_argument("--notices", default="k8s", metavar="WHO", help="(default %(default)s)")
    agent.set_defaults(verb=_agent)
    probe = what.add_parser("probe", help="(in a pod) ask the page of an agent or a replica, as a kubelet's probe")
    probe.add_argument("page", choices=("healthz", "readyz"))
    probe.add_argument("--certs", type=Path, required=True, metavar="DIR", help="with a viewer's certificate")
    probe.add_argument("--of", choices=("agent", "rendezvous"), required=True, help="whose")
    probe.add_argument("--port", type=int, required=True, metavar="P", help="of its --metrics, on 127.0.0.1")
    probe.set_defaults(verb=_probe)


def _add_place(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--rendezvous", required=True, metavar="HOST:PORT,...")
    verb.add_argument(
        "--own", type=Path, required=True, metavar="DIR", help="of this pod: certificates, the job's name"
    )


def _manifest(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from elastic.cli.fleet.submit import read_job_file
    from elastic.platforms.k8s.entrance import with_workers
    from elastic.platforms.k8s.manifest import manifest_text
    from elastic.platforms.k8s.pod_parts import Flavor, ManifestOptions

    spec = read_job_file(options.file)
    fewest, most = _range("--nodes", options.nodes)
    found = ManifestOptions(
        name=spec.name,
        job=options.file.read_text(encoding="utf-8"),
        image=options.image,
        nodes=(fewest, most),
        checkpoint_dir=spec.checkpoint_dir,
        claim=options.claim,
        flavor=Flavor(options.flavor),
        namespace=options.namespace,
        slots=options.slots,
        replicas=options.replicas,
        grace_s=options.grace,
        resources=_resources(options.resource),
    )
    with_workers(replace(spec), fewest * options.slots, most * options.slots)
    print(manifest_text(found), end="")
    return ExitCode.DONE


def _enter(options: argparse.Namespace) -> int:
    from elastic.cli.fleet.submit import read_job_file
    from elastic.platforms.k8s import entrance
    from elastic.platforms.k8s.pod_parts import OWNER
    from elastic.preemption.kubernetes_notices import POD

    spec = entrance.with_workers(read_job_file(options.file), *_range("--workers", options.workers))
    node = _of_pod(os.environ, POD)
    entrance.issue_own(options.ca, options.own, node)
    replicas = parse("--rendezvous", options.rendezvous)
    job = entrance.enter(spec, replicas, options.ca, node, _of_pod(os.environ, OWNER), _say)
    entrance.remember(options.own, job)
    _say(f"this pod is for {job}")
    return ExitCode.DONE


def _agent(options: argparse.Namespace) -> int:
    from elastic.platforms.common.agent_child import AgentPlace
    from elastic.platforms.k8s.agent_pod import job_of, serve
    from elastic.preemption.kubernetes_notices import POD

    words = [
        word for name in ("address", "slots", "metrics", "notices") for word in (f"--{name}", getattr(options, name))
    ]
    place = AgentPlace(
        replicas=parse("--rendezvous", options.rendezvous),
        certs=options.own,
        node=_of_pod(os.environ, POD),
        job=job_of(options.own),
        jobs_dir=options.jobs_dir,
        grace_s=options.grace,
        words=words,
    )
    return serve(place)


def _probe(options: argparse.Namespace) -> int:
    from elastic.platforms.k8s.probe import Probed, ask

    print(ask(options.page, options.port, options.certs, Probed(options.of)))
    return ExitCode.DONE


def _range(option: str, text: str) -> tuple[int, int]:
    """ "2:8", or "4" for as many at least as at most. Raises ConfigError."""
    fewest, _, most = text.partition(":")
    try:
        return int(fewest), int(most or fewest)
    except ValueError:
        raise ConfigError(f"{option} {text:.40} must be MIN:MAX, such as 2:8, or N") from None


def _resources(pairs: Sequence[str]) -> dict[str, str]:
    """ "cpu=4" as name and quantity. Names are those of Kubernetes: a device has the domain of its vendor. Raises
    ConfigError."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, _, quantity = pair.partition("=")
        if not RESOURCE.fullmatch(name) or not QUANTITY.fullmatch(quantity):
            raise ConfigError(f"--resource {pair!r:.100} must be K=V, such as cpu=4, memory=16Gi or nvidia.com/gpu=1")
        if name in found:
            raise ConfigError(f"--resource: {name} is given twice; leave one out")
        found[name] = quantity
    return found


def _of_pod(environment: Mapping[str, str], variable: str) -> str:
    if not (value := environment.get(variable)):
        raise ConfigError(f"${variable} is not set: this is for a pod, as `elastic k8s manifest` writes it")
    return value


def _say(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)
