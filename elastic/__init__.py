"""Elastic, fault-tolerant training for PyTorch. `job = elastic.join()` is where a script starts.

What lives in `runtime`, which imports torch, is resolved at first use, so that agents and the command line, which
import this package too, stay light. Below, each package imports only those above it:

    errors.py       every error, named by what the caller does next
    version.py      of this program
    file_modes.py   who may read what a job writes
    stop_signals.py signals that ask processes to stop, and whose are obeyed
    checkpoints/    durable checkpoints, without torch
    config.py       what a job is, and how long things may take
    daemon/         log lines, systemd and options from a file, of processes that run for ever
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
    adopt/          training scripts rewritten for job.steps()
    cli/            the command line
    dashboard/      a page that shows a job or a fleet, and its buttons
    timeline/       a job on a time axis
    notebook/       elastic.launch(): functions of a notebook or a program
    engines/        jobs on nodes that another system has: what Ray and Spark have in common
    ray/            jobs on a Ray cluster
    spark/          jobs on the executors of Spark
    search/         hyperparameter search, each trial a job
    slurm/          batch scripts for Slurm
    k8s/            the manifest of a job on Kubernetes, and what its pods run
    trackers/       the process that sends steps to MLflow or W&B
    ddp.py          logical ranks asked for in a script; at the top, as it names what is in `runtime`

`runtime` is the other half, inside the training process; `chaos_tests` breaks both on purpose.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from elastic import errors
from elastic.version import __version__

if TYPE_CHECKING:
    from elastic.notebook.launcher import launch
    from runtime.data.parquet import ParquetStream
    from runtime.job.job import Job, join
    from runtime.job.sinks import JsonLines, MLflow, TensorBoard, WandB

__all__ = [
    "Job",
    "JsonLines",
    "MLflow",
    "ParquetStream",
    "TensorBoard",
    "WandB",
    "__version__",
    "errors",
    "join",
    "launch",
]
_LAZY = {
    "Job": "runtime.job.job",
    "join": "runtime.job.job",
    "launch": "elastic.notebook.launcher",
    "JsonLines": "runtime.job.sinks",
    "MLflow": "runtime.job.sinks",
    "ParquetStream": "runtime.data.parquet",
    "TensorBoard": "runtime.job.sinks",
    "WandB": "runtime.job.sinks",
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
