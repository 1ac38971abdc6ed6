"""Elastic, fault-tolerant training for PyTorch. `job = elastic.join()` is where a script starts.

What lives in `runtime`, which imports torch, is resolved at first use, so that agents and the command line, which
import this package too, stay light. Below, each package imports only those above it:

    errors.py       every error, named by what the caller does next
    version.py      of this program
    process/        what processes have in common: signals, log lines, systemd, modes of files, options
    checkpoints/    durable checkpoints, without torch
    config/         what a job is, and how long things may take
    protocol/       what is said and what is decided, pure: the job's state machine, a worker's, plans, assignments
    wire/           how messages are serialised
    records/        a job's directory: ledger, journals, what is told from them
    store/          durable truth: etcd, leases, elections
    preemption/     notices that a machine is about to go
    security/       certificates, roles, who may call what
    rendezvous/     who leads a job, and how its leader is found
    metrics/        what --metrics shows to Prometheus
    agent/          the agent of a node: its workers, their lives and deaths
    fleet/          several machines, several jobs
    platforms/      where jobs run: this machine, Ray, Spark, Slurm, Kubernetes
    observability/  the dashboard, traces, trackers
    cli/            the command line; no other package imports it
    ray.py          the public name of platforms/ray, and Ray Train's question about notices
    spark.py        the public name of platforms/spark
    torchft.py      torchft's names for scripts of logical ranks; at the top, too
    horovod/        Horovod's names; at the top, too
    ddp.py          logical ranks asked for in a script; at the top, as it names what is in `runtime`

Up to fleet/ this is the core, without which no job runs; platforms/, observability/ and cli/ stand on it.

`runtime` is the other half, inside the training process; `chaos_tests` breaks both on purpose.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from elastic import errors
from elastic.version import __version__

if TYPE_CHECKING:
    from elastic.agent.worker.node_notice import NodeNotice
    from elastic.platforms.local.launcher import launch
    from runtime.asynchronous import Asynchronous, Gossip, asynchronous
    from runtime.data.parquet import ParquetStream
    from runtime.loop.job import Job, join, notice
    from runtime.loop.sinks import JsonLines, MLflow, TensorBoard, WandB
    from runtime.outer import DiLoCo, LocalSGD
    from runtime.recovery.kept.keep import keep

__all__ = [
    "Asynchronous",
    "DiLoCo",
    "Gossip",
    "Job",
    "JsonLines",
    "LocalSGD",
    "MLflow",
    "NodeNotice",
    "ParquetStream",
    "TensorBoard",
    "WandB",
    "__version__",
    "asynchronous",
    "errors",
    "join",
    "keep",
    "launch",
    "notice",
]
_LAZY = {
    "Asynchronous": "runtime.asynchronous",
    "Gossip": "runtime.asynchronous",
    "asynchronous": "runtime.asynchronous",
    "DiLoCo": "runtime.outer",
    "LocalSGD": "runtime.outer",
    "Job": "runtime.loop.job",
    "join": "runtime.loop.job",
    "keep": "runtime.recovery.kept.keep",
    "launch": "elastic.platforms.local.launcher",
    "notice": "runtime.loop.job",
    "JsonLines": "runtime.loop.sinks",
    "MLflow": "runtime.loop.sinks",
    "NodeNotice": "elastic.agent.worker.node_notice",
    "ParquetStream": "runtime.data.parquet",
    "TensorBoard": "runtime.loop.sinks",
    "WandB": "runtime.loop.sinks",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LAZY[name].startswith("runtime."):  # which cannot be imported with every torch
        from runtime import torch_names

        torch_names.check(torch_names.OF_WORKERS)
    value: object = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
