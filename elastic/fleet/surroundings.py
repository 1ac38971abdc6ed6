"""What a machine of the fleet finds around itself when somebody asks: the facts that `elastic doctor` judges.

Documents go over the wire as JSON; findings.py reads them and treats whatever is missing as not known, because the two
sides may be of different versions.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import elastic
from elastic.errors import ElasticError
from elastic.etcd import EtcdStore
from elastic.fleet import devices
from elastic.fleet.addresses import split

REACH_S = 2.0
"""For a connection, or an answer of etcd, which takes milliseconds where all is well."""

Document = dict[str, object]


def of_replica(directory: Path, endpoints: Sequence[str], open_etcd: Callable[[str], EtcdStore]) -> Document:
    """open_etcd: a store on one member of the cluster."""
    with ThreadPoolExecutor(len(endpoints)) as threads:
        etcd = list(threads.map(lambda endpoint: of_etcd(endpoint, open_etcd), endpoints))
    return {**_anywhere(directory), "etcd": etcd}


def of_node(directory: Path, replicas: Sequence[str], address: str, slots: int) -> Document:
    with ThreadPoolExecutor(len(replicas)) as threads:
        reached = list(threads.map(_reach, replicas))
    return {
        **_anywhere(directory),
        "torch": _version("torch"),
        "address": address,
        "slots": slots,
        "gpus": list(devices.of_node(os.environ)),
        "gpu_driver": Path("/proc/driver/nvidia/version").exists(),
        "replicas": dict(zip(replicas, reached, strict=True)),
    }


def _anywhere(directory: Path) -> Document:
    disk = shutil.disk_usage(directory)
    return {
        "version": elastic.__version__,
        "disk": {"path": str(directory), "free": disk.free, "total": disk.total},
        "wall_s": time.time(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _reach(replica: str) -> str:
    """Why no connection comes about, or nothing."""
    try:
        with socket.create_connection(split(replica), timeout=REACH_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def of_etcd(endpoint: str, open_etcd: Callable[[str], EtcdStore]) -> Document:
    """What that member says of itself, or `because`: why it does not."""
    try:
        with open_etcd(endpoint) as etcd:
            etcd.health(timeout_s=REACH_S)  # the first call connects
            began_s = time.monotonic()
            health = etcd.health(timeout_s=REACH_S)
            told_ms = 1000 * (time.monotonic() - began_s)
    except ElasticError as error:
        return {"endpoint": endpoint, "because": str(error)}
    return {
        "endpoint": endpoint,
        "because": "",
        "version": health.version,
        "bytes": health.size,
        "alarms": list(health.alarms),
        "ms": round(told_ms, 2),
    }
