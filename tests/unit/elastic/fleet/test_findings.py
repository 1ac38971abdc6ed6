"""What `elastic doctor` makes of what a fleet has found: each fault is named once, with what to do, nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.fleet.findings import Finding, ProbeAnswer, ProbeAnswers, findings

GB = 2**30
ETCD = {"endpoint": "10.0.0.9:2379", "because": "", "version": "3.5.9", "bytes": 20480, "alarms": [], "ms": 0.9}
REPLICA = {"version": "1.2", "disk": {"path": "/r", "free": 9 * GB, "total": 10 * GB}, "etcd": [ETCD]}
NODE = {
    "version": "1.2",
    "torch": "2.9",
    "disk": {"path": "/n", "free": 9 * GB, "total": 10 * GB},
    "address": "10.0.0.3",
    "slots": 2,
    "gpus": ["0", "1"],
    "gpu_driver": True,
    "replicas": {"10.0.0.1:7070": "", "10.0.0.2:7070": ""},
}

TROUBLE = {"about": "certificate", "where": "b", "because": "that of agent b ends", "advice": "issue another one"}


LARGE = {"job": "a-1", "state": "waits", "larger": True, "because": "larger than the fleet: needs 9 slots at once"}
WAITING = [{**LARGE, "larger": False}, {"job": "b-2", "state": "ended"}]
OPENED = {"port": 40000, "ports": [32768, 60999]}
CROSSED = {
    "a": {"host": "10.0.0.3", **OPENED, "reached": {"b": "", "c": ""}},
    "b": {"host": "10.0.0.4", **OPENED, "reached": {"c": "", "a": ""}},
    "c": {"host": "10.0.0.5", **OPENED, "reached": {"a": "", "b": ""}},
}


def crossed(**fields: Any) -> ProbeAnswers:
    """A healthy fleet of three, but for these fields of what two of its nodes have found at the others' ports."""
    documents = {name: document | fields.get(name, {}) for name, document in CROSSED.items()}
    return survey(crossings=ProbeAnswer(documents))


def survey(replica: Any = (), node: Any = (), **fields: Any) -> ProbeAnswers:
    """A healthy fleet, but for those fields of its second replica's and its second node's documents."""
    replicas = {
        "10.0.0.1:7070": ProbeAnswer(REPLICA, took_ms=1.2),
        "10.0.0.2:7070": ProbeAnswer(REPLICA | dict(replica)),
    }
    nodes = {"a": ProbeAnswer(NODE), "b": ProbeAnswer(NODE | dict(node))}
    return replace(ProbeAnswers("1.2", "10.0.0.1:7070", replicas, nodes), **fields)


def to_do(of: ProbeAnswers) -> list[Finding]:
    return [finding for finding in findings(of) if finding.advice]


def test_a_healthy_fleet_has_a_line_for_everything_and_nothing_to_do() -> None:
    found = findings(survey())
    assert not to_do(survey())
    about = [finding.about for finding in found]
    assert list(dict.fromkeys(about)) == ["rendezvous", "etcd", "node", "version", "torch", "clock", "disk", "gpu"]
    assert found[0].said == "answers in 1.2 ms, and leads the fleet"


def member(**fields: Any) -> dict[str, Any]:
    return {"etcd": [ETCD | fields]}


FAULTS = [
    (survey(replica={"version": "1.1"}), "version", "1.1: replica 10.0.0.2:7070", "install the same version"),
    (survey(version="2.0"), "version", "2.0: this command", "install the same version"),
    (survey(node={"torch": "2.8"}), "torch", "2.8: node b", "exact jobs refuse"),
    (survey(node={"torch": ""}), "torch", "none: node b", "install the same"),
    (
        survey(replica=member(because="no answer in time")),
        "etcd",
        "does not answer 10.0.0.2:7070: no answer",
        "start it",
    ),
    (survey(replica=member(ms=250.0)), "etcd", "answers in 250.0 ms", "a quieter machine"),
    (survey(replica={"etcd": [ETCD | {"endpoint": "10.0.0.8:2379"}]}), "etcd", "has two members", "three members"),
    (survey(leader="", nodes={}), "rendezvous", "nobody leads it", "look at etcd"),
    (
        survey(node={"replicas": {"r:1": "Name or service not known"}}),
        "node",
        "not reach the rendezvous at r:1",
        "name",
    ),
    (survey(node={"address": "127.0.0.1"}), "node", "offers itself at 127.0.0.1", "--address"),
    (survey(node={"disk": {"path": "/n", "free": GB - 1}}), "disk", "1.0 GB are free at /n", "make room"),
    (survey(node={"slots": 3}), "gpu", "2 for 3 slots", "--slots 2"),
    (survey(node={"gpu_driver": False}), "gpu", "no driver", "load NVIDIA's driver"),
    (survey(troubles=[TROUBLE]), "certificate", "that of agent b ends", "issue another"),
    (survey(jobs=[*WAITING, LARGE]), "job", "larger than the fleet", "smaller min_workers"),
    (survey(nodes={}), "node", "has no nodes", "start `elastic agent`"),
    (survey(nodes={"a": ProbeAnswer(because="is away")}), "node", "is away", "start `elastic agent` there"),
    (survey(nodes={"a": ProbeAnswer(NODE, offset_s=-2.5, within_s=0.1)}), "clock", "is 2.5 s behind", "NTP"),
]


@pytest.mark.parametrize(("of", "about", "said", "advice"), FAULTS)
def test_one_fault_is_one_line_that_names_it_and_says_what_to_do(
    of: ProbeAnswers, about: str, said: str, advice: str
) -> None:
    (finding,) = to_do(of)
    assert (finding.about, said in finding.said, advice in finding.advice) == (about, True, True), finding


def test_a_torch_that_was_not_tested_is_told_if_it_is_the_same_everywhere() -> None:
    newer = {name: ProbeAnswer(NODE | {"torch": "9.1.0+cu140"}) for name in ("a", "b")}
    (finding,) = to_do(survey(nodes=newer))
    assert (finding.about, finding.where) == ("torch", "fleet")
    assert finding.said.startswith("torch 9.1.0+cu140 is newer than all that elastic-ring ")
    assert "elastic doctor --exact" in finding.advice


@pytest.mark.parametrize(
    ("fields", "advice"),
    [({"alarms": ["NOSPACE"]}, "defragment"), ({"version": "3.5.1"}, "3.5.3"), ({"bytes": 1.9e9}, "2 GB")],
)
def test_what_is_wrong_with_a_member_of_etcd_is_said_once_whoever_sees_it(fields: dict[str, Any], advice: str) -> None:
    both = {address: ProbeAnswer(REPLICA | member(**fields)) for address in ("10.0.0.1:7070", "10.0.0.2:7070")}
    (finding,) = to_do(survey(replicas=both))
    assert advice in finding.advice


def test_a_replica_that_is_gone_is_told_and_the_others_are_examined() -> None:
    replicas = {"10.0.0.1:7070": ProbeAnswer(REPLICA), "10.0.0.2:7070": ProbeAnswer(because="Connection refused")}
    (finding,) = to_do(survey(replicas=replicas))
    assert (finding.where, finding.said) == ("10.0.0.2:7070", "Connection refused")


def test_a_clock_is_not_blamed_for_a_slow_answer() -> None:
    assert not to_do(survey(nodes={"a": ProbeAnswer(NODE, offset_s=2.5, within_s=2.0)}))


def test_what_an_older_version_does_not_tell_is_no_fault() -> None:
    """But for its version."""
    replicas = {"r:1": ProbeAnswer({"version": "1.2"})}
    of = ProbeAnswers("1.2", "r:1", replicas, {"a": ProbeAnswer({"version": "1.2"})})
    assert [finding.about for finding in to_do(of)] == []


def test_ports_that_are_reached_are_one_line_and_a_fleet_of_one_node_has_none() -> None:
    assert Finding("ports", "fleet", "each node reaches all others where workers listen") in findings(crossed())
    assert "ports" not in [finding.about for finding in findings(survey())]


def test_nodes_that_have_left_before_their_ports_were_tried_are_no_finding() -> None:
    assert to_do(survey(crossings=ProbeAnswer({}))) == []


def test_a_port_that_is_not_reached_is_named_with_whom_it_does_not_let_through() -> None:
    cut = {"reached": {"c": "no answer within 2 s", "a": ""}}
    [finding] = to_do(crossed(a={"reached": {"b": "", "c": "no answer within 2 s"}}, b=cut))
    assert (finding.about, finding.where) == ("ports", "node c")
    assert finding.said == "workers at 10.0.0.5 are not reached from a, b; port 40000 was tried: no answer within 2 s"
    assert finding.advice.startswith("let a, b through to TCP ports 32768 to 60999 of 10.0.0.5")


def test_a_node_that_has_tried_nobody_is_no_node_that_is_well() -> None:
    [finding] = to_do(survey(crossings=ProbeAnswer({**CROSSED, "c": {"because": "no answer within 2 s"}})))
    assert finding.said == "has not tried others: no answer within 2 s"
    [finding] = to_do(survey(crossings=ProbeAnswer(because="refuses: an empty question")))
    assert finding.said == "were not tried: refuses: an empty question"
