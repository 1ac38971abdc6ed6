"""A job on a real control plane of Kubernetes, by the manifest as it is printed: pods are evicted, nodes are lost, the
API server is away."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.k8s.api_client import Refused
from tests.k8s.cluster import BIN, Kubernetes
from tests.k8s.training import Training
from tests.live.conftest import Quiet

pytestmark = pytest.mark.skipif(not (BIN / "kube-apiserver").exists(), reason="tests/k8s/build.sh makes it")

AWAY_S = 60.0


def test_an_evicted_pod_leaves_between_two_steps_and_another_takes_its_place(home: Path, quiet: Quiet) -> None:
    with Kubernetes(home, 2) as cluster:
        training = Training(cluster, "1:2")
        evicted, _ = training.await_workers(2)
        cluster.evict(evicted)
        training.await_workers(2, without=evicted)
        assert training.events("member_lost") == []
        assert [one["source"] for one in training.events("notice") if one["node"] == evicted] == ["Kubernetes pod"]
        training.finish(quiet)
