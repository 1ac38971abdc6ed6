"""A job on a real control plane of Kubernetes, by the manifest as it is printed: pods are evicted, nodes are lost, the
API server is away."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from elastic.checkpoints.storage import storage_at
from elastic.errors import ElasticError, ExitCode
from elastic.records.resume import own
from tests.k8s.api_client import Refused
from tests.k8s.cluster import BIN, Kubernetes
from tests.k8s.training import Line, Training
from tests.live.conftest import Quiet

pytestmark = pytest.mark.skipif(not (BIN / "kube-apiserver").exists(), reason="tests/k8s/build.sh makes it")

AWAY_S = 60.0


def test_an_evicted_pod_leaves_between_two_steps_and_another_takes_its_place(home: Path, quiet: Quiet) -> None:
    with Kubernetes(home, 2) as cluster:
        begun_s = time.monotonic()
        training = Training(cluster, "1:2")
        training.await_workers(2)
        training.said("the manifest is applied, and two workers train", begun_s)
        evicted, other = training.await_workers(2)
        begun_s = time.monotonic()
        cluster.evict(evicted)
        cluster.until("it has left", lambda: [one["node"] for one in training.status()["members"]] == [other])
        training.said("a pod is evicted, and has left the job", begun_s)
        training.await_workers(2, without=evicted)
        training.said("a pod is evicted, and another one trains", begun_s)
        assert training.events("member_lost") == []
        training.finish(quiet)


def test_a_node_that_an_autoscaler_gives_back_is_left_for_another_one_before_its_pod_is_evicted(
    home: Path, quiet: Quiet
) -> None:
    with Kubernetes(home, 2) as cluster:
        training = Training(cluster, "1:2")
        pods = training.await_workers(2)
        told = cluster.pods("agent")
        left = told[pods[0]]["spec"]["nodeName"]
        gone = {name for name, pod in told.items() if pod["spec"]["nodeName"] == left}
        cluster.kubectl("taint", "node", left, "ToBeDeletedByClusterAutoscaler=1700000000:NoSchedule")

        def elsewhere() -> bool:
            there = training.status()["members"]
            return len(there) == 2 and not gone & {member["node"] for member in there}

        cluster.until("both workers are on the other node", elsewhere)
        assert training.events("member_lost") == []
        heard = [line for line in training.events("notice") if line["source"] == "Kubernetes node"]
        assert {line["node"] for line in heard} == gone
        training.finish(quiet)


def test_more_pods_come_and_fewer_leave_and_the_bits_are_the_same(home: Path, quiet: Quiet) -> None:
    with Kubernetes(home, 2) as cluster:
        training = Training(cluster, "1:4")
        cluster.kubectl("patch", "job", "train-agents", "--type=merge", "-p", '{"spec": {"parallelism": 2}}')
        training.await_workers(2)
        cluster.kubectl("patch", "job", "train-agents", "--type=merge", "-p", '{"spec": {"parallelism": 4}}')
        training.await_workers(4)
        cluster.kubectl("patch", "job", "train-agents", "--type=merge", "-p", '{"spec": {"parallelism": 1}}')
        training.await_workers(1)
        assert training.events("member_lost") == []
        training.finish(quiet)


def test_a_node_that_is_lost_stops_nobody_and_its_pod_is_made_again_elsewhere(home: Path, quiet: Quiet) -> None:
    with Kubernetes(home, 3) as cluster:
        training = Training(cluster, "1:2")
        pods = training.await_workers(2)
        keeper = next(iter(cluster.pods("rendezvous").values()))["spec"]["nodeName"]
        places = {name: pod["spec"]["nodeName"] for name, pod in cluster.pods("agent").items() if name in pods}
        lost = next(name for name, node in places.items() if node != keeper)
        begun_s = time.monotonic()
        cluster.kill(places[lost])
        training.await_more_steps(2)
        training.said("a node is lost, and the second step after that is done", begun_s)
        training.await_workers(2, without=lost)
        training.said("a node is lost, and another pod trains", begun_s)
        training.finish(quiet)


def test_the_budget_lets_one_of_three_replicas_go_at_a_time_and_training_goes_on(home: Path, quiet: Quiet) -> None:
    with Kubernetes(home, 3) as cluster:
        training = Training(cluster, "1:1", replicas=3)
        training.await_workers(1)
        path = "/apis/policy/v1beta1/namespaces/default/poddisruptionbudgets/train-rendezvous"
        cluster.until("all are ready", lambda: cluster.api.get(path)["status"]["currentHealthy"] == 3)
        first, second, _ = sorted(cluster.pods("rendezvous"))
        cluster.evict(first)
        with pytest.raises(Refused) as refusal:
            cluster.evict(second)
        assert refusal.value.code == 429 and "disruption budget" in str(refusal.value)
        training.await_more_steps(3)
        cluster.until("all are ready", lambda: cluster.api.get(path)["status"]["currentHealthy"] == 3)
        cluster.evict(second)
        training.finish(quiet)


def test_an_api_server_that_is_away_for_a_minute_disturbs_nothing_and_notices_come_when_it_is_back(
    home: Path, quiet: Quiet
) -> None:
    with Kubernetes(home, 1) as cluster:
        training = Training(cluster, "1:2")
        pods = training.await_workers(2)
        generation = training.status()["generation"]
        cluster.kill("kube-apiserver")
        until_s = time.monotonic() + AWAY_S
        while time.monotonic() < until_s:
            training.await_more_steps(1)
        cluster.start_api_server()
        assert training.status()["generation"] == generation
        cluster.until("the node is taken for ready", lambda: cluster.ready_nodes() == cluster.nodes)
        assert training.events("member_lost") == []
        cluster.evict(pods[0])
        cluster.until("it has left", lambda: [one["node"] for one in training.status()["members"]] == pods[1:])
        assert training.events("member_lost") == []
        training.await_workers(2, without=pods[0])
        training.finish(quiet)


def test_all_pods_are_ended_at_once_and_those_in_their_place_go_on_from_the_very_step(home: Path, quiet: Quiet) -> None:
    with Kubernetes(home, 1) as cluster:
        training = Training(cluster, "1:2")
        pods = training.await_workers(2)
        cluster.kubectl("delete", "pod", "--wait=false", *pods)
        training.await_workers(2, without=pods[0])
        names = sorted(job["job"] for job in training.client().overview()["jobs"])
        assert names in (["train-1"], ["train-1", "train-2"]), "the last one waits in its grace for those that come"
        training.finish(quiet)


def test_an_agent_may_read_pods_and_nodes_and_nothing_else(home: Path) -> None:
    with Kubernetes(home, 1) as cluster:
        Training(cluster, "1:1")
        agent = "--as=system:serviceaccount:default:train-agent"
        told = cluster.kubectl("auth", "can-i", "--list", agent, "--no-headers")
        allowed = [line.split() for line in told.splitlines() if "self" not in line and not line.startswith(" ")]
        assert {(words[0], words[-2] + " " + words[-1]) for words in allowed} == {
            ("nodes", "[get watch]"),
            ("pods", "[get watch]"),
        }
        with pytest.raises(AssertionError, match="forbidden"):
            cluster.kubectl("get", "secret", "train-ca", agent)


def test_a_job_whose_checkpoint_directory_is_anothers_ends_and_its_pods_say_so(home: Path) -> None:
    """As where etcd's claim was lost, and the job is applied again."""
    with Kubernetes(home, 1) as cluster:
        training = Training(cluster, "1:1")
        own(storage_at(str(home / "volumes" / "runs" / "train-1")), "train-1", "of another fleet")

        def ended() -> Line | None:
            try:
                entries = [job for job in training.client().overview()["jobs"] if job["state"] == "ended"]
            except (ElasticError, OSError):  # nobody leads yet
                return None
            return entries[0] if entries else None

        def exit_codes() -> list[int]:
            of_agents = "/api/v1/namespaces/default/pods?labelSelector=app.kubernetes.io/component=agent"
            ends = [one for pod in cluster.api.items(of_agents) for one in pod["status"].get("containerStatuses", [])]
            return [one["state"]["terminated"]["exitCode"] for one in ends if "terminated" in one["state"]]

        entry = cluster.until("the end of the job", ended)
        assert entry["exit_code"] == ExitCode.BAD_INPUT
        assert "/mnt/runs/train-1 holds the checkpoints of another job, train-1 (of another fleet)" in entry["because"]
        cluster.until("a pod has ended with that", lambda: ExitCode.BAD_INPUT in exit_codes())
