"""What `elastic upgrade` does next: which agents it replaces, whether it may begin, and each step of one node. Pure.

A node is drained, its agent ends and another one starts, the drain is taken back, and the jobs have their workers
again; then comes the next node. All of it follows from what is seen of the fleet and of the node's agent at each look.
So the command may be ended at any moment, and the same command goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from elastic.errors import ConfigError
from elastic.protocol.worker_id import node_of

BECAUSE = "`elastic upgrade` replaces its agent"
"""The reason of a drain by which the command knows its own drains."""

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What a node's agent says of itself. process: another text for each process; "": a version that does not say so.
    command: how it was started. is_service: its service manager starts it again when it has ended."""

    version: str
    process: str = ""
    command: str = ""
    is_service: bool = False

    @classmethod
    def of(cls, examined: Document) -> Self:
        """examined: what `elastic doctor` hears of a node."""
        own = examined.get("agent", {})
        known = {name: own[name] for name in ("process", "command", "is_service") if name in own}
        return cls(str(examined.get("version", "unknown")), **known)


@dataclass(frozen=True, slots=True)
class FleetNode:
    """free: slots that no job has. drained: why the node gets no job, or "". holds: the jobs whose agents are there,
    also of jobs that are over; None: its daemon has not said so yet."""

    name: str
    is_up: bool
    free: int
    drained: str
    holds: tuple[str, ...] | None = ()

    @property
    def takes(self) -> bool:
        return self.is_up and not self.drained


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """A job that has a place. wanted: how many workers it is to have. slots: node -> its slots there. runs: whether its
    world steps. members: the workers of its world. present: all its workers, those that leave or come included; None:
    nobody leads the job at the moment."""

    name: str
    wanted: int
    least: int
    slots: Mapping[str, int]
    runs: bool
    members: int
    present: tuple[str, ...] | None

    @property
    def total(self) -> int:
        return sum(self.slots.values())


@dataclass(frozen=True, slots=True)
class FleetView:
    """What is seen of a fleet at one moment. stopping: jobs that are about to end and of which workers are left."""

    nodes: Mapping[str, FleetNode]
    jobs: tuple[PlacedJob, ...]
    stopping: tuple[PlacedJob, ...] = ()

    @classmethod
    def of(cls, overview: Document, statuses: Mapping[str, Document]) -> Self:
        """overview, statuses: as `elastic jobs` and `elastic status` of each job that has begun have them."""
        jobs = {
            state: tuple(_job(job, statuses[job["job"]]) for job in overview["jobs"] if job["state"] == state)
            for state in ("placed", "stopping")
        }
        nodes = (
            FleetNode(
                node["node"],
                node["up"],
                max(0, node["slots"] - sum(node["jobs"].values())),
                str(node["because"]),
                None if (holds := node.get("holds", ())) is None else tuple(holds),
            )
            for node in overview["nodes"]
        )
        return cls({node.name: node for node in nodes}, jobs["placed"], jobs["stopping"])

    def left_on(self, node: str) -> list[str]:
        """What is still there of jobs: their names while they have slots or an agent there, and their workers."""
        left = []
        for job in (*self.jobs, *self.stopping):
            left += [job.name] if node in job.slots else []
            if job.present is None:
                left.append(f"perhaps some of {job.name}, which nobody leads")
            else:
                left += [worker for worker in job.present if node_of(worker) == node]
        holds = self.nodes[node].holds if node in self.nodes else ()
        return left + (["perhaps a job"] if holds is None else [job for job in holds if job not in left])

    def free_beside(self, node: str) -> int:
        """Free slots of nodes that take jobs, without this one."""
        return sum(other.free for other in self.nodes.values() if other.takes and other.name != node)

    def totals(self) -> dict[str, int]:
        """Job -> its slots."""
        return {job.name: job.total for job in self.jobs}


def _job(entry: Document, status: Document) -> PlacedJob:
    return PlacedJob(
        entry["job"],
        entry["workers"],
        entry["min_workers"],
        entry["slots"],
        status["state"] == "running",
        len(status["members"]),
        None if status["state"] == "unknown" else workers_of(status),
    )


def workers_of(status: Document) -> tuple[str, ...]:
    """All workers of a job, those that leave or come included."""
    members = [member["worker_id"] for member in status["members"]]
    others = (worker for kind in ("draining", "waiting", "spares") for worker in status.get(kind, ()))
    return tuple(dict.fromkeys([*members, *others]))


def chosen(fleet: FleetView, agents: Mapping[str, AgentFacts], target: str, named: Sequence[str]) -> tuple[str, ...]:
    """The nodes whose agents are to be replaced, in this order: those that an earlier command has drained come first.
    agents: of the nodes that answer. target: the version wanted. named: by the operator; empty: all nodes with another
    version. Raises ConfigError for names that are no nodes."""
    if unknown := [node for node in named if node not in fleet.nodes]:
        known = ", ".join(sorted(fleet.nodes)) or "none"
        raise ConfigError(f"no node {', '.join(unknown)} in the fleet; there are {known}")
    wanted = [
        node
        for node in sorted(fleet.nodes)
        if node in named
        or (not named and (fleet.nodes[node].drained == BECAUSE or _version(agents.get(node)) != target))
    ]
    return tuple(sorted(wanted, key=lambda node: fleet.nodes[node].drained != BECAUSE))


def _version(agent: AgentFacts | None) -> str:
    return agent.version if agent is not None else ""


def objections(fleet: FleetView, agents: Mapping[str, AgentFacts], nodes: Iterable[str]) -> list[str]:
    """Why not to begin with these nodes: sentences, none if all is well."""
    away = [
        f"node {node} does not answer" if fleet.nodes[node].is_up else f"node {node} is away"
        for node in sorted(fleet.nodes)
        if node not in agents
    ]
    lacking = [] if (because := not_whole(fleet, {})) is None else [because]
    return [*away, *lacking, *(sentence for node in nodes for sentence in _needing(fleet, node))]


def _needing(fleet: FleetView, node: str) -> list[str]:
    """Which jobs cannot train while this node is away."""
    told = []
    for job in fleet.jobs:
        beside = job.total - job.slots.get(node, 0) + fleet.free_beside(node)
        if node in job.slots and beside == 0:
            told.append(
                f"{job.name} runs on node {node} alone: it stops after a step, with a checkpoint, and `elastic submit "
                f"--resume {job.name}` goes on from there"
            )
        elif node in job.slots and beside < job.least:
            told.append(
                f"{job.name} needs {job.least} workers, and there are slots for {beside} without node {node}: it waits "
                "until the node is back"
            )
    return told


def not_whole(fleet: FleetView, before: Mapping[str, int]) -> str | None:
    """What the world of a job lacks, in a sentence. before: job -> the slots that it had, and is to have again unless
    other jobs have taken them."""
    for job in fleet.jobs:
        had = before.get(job.name, 0)
        if job.total < had and any(node.free for node in fleet.nodes.values() if node.takes):
            return f"{job.name} has {job.total} slots, and had {had}"
        if job.present is None:
            return f"nobody leads {job.name} at the moment"
        if job.members < min(job.total, job.wanted):
            return f"{job.name} has {job.members} of {min(job.total, job.wanted)} workers"
        if not job.runs:
            return f"{job.name} does not run at the moment"
    return None


class UpgradeAction(StrEnum):
    """What is next for one node."""

    DRAIN = "drain"
    AWAIT_EMPTY = "await_empty"
    END_AGENT = "end_agent"
    AWAIT_OPERATOR = "await_operator"
    """The agent has no service manager: a person ends it, and starts the new one."""
    AWAIT_RETURN = "await_return"
    UNDRAIN = "undrain"
    AWAIT_WORKERS = "await_workers"
    DONE = "done"
    OTHER_VERSION = "other_version"
    """The agent that came back has not the version wanted: the end."""


@dataclass(frozen=True, slots=True)
class NodeUpgrade:
    """What is seen of the node in hand. before: its agent before it was replaced. agent: its agent now, None while none
    answers. keeps_drain: somebody else has drained the node, which stays so. is_whole: all jobs have their workers.
    target: the version wanted."""

    before: AgentFacts
    agent: AgentFacts | None
    is_drained: bool
    keeps_drain: bool
    is_empty: bool
    is_whole: bool
    target: str


def next_action(seen: NodeUpgrade) -> UpgradeAction:
    agent, before = seen.agent, seen.before
    if agent is not None and (agent.process, agent.version) != (before.process, before.version):
        if seen.is_drained and not seen.keeps_drain:
            return UpgradeAction.UNDRAIN
        if agent.version != seen.target:
            return UpgradeAction.OTHER_VERSION
        return UpgradeAction.DONE if seen.is_whole else UpgradeAction.AWAIT_WORKERS
    if not seen.is_drained:
        return UpgradeAction.DRAIN
    if not seen.is_empty:
        return UpgradeAction.AWAIT_EMPTY
    if agent is None:
        return UpgradeAction.AWAIT_RETURN
    return UpgradeAction.END_AGENT if before.is_service else UpgradeAction.AWAIT_OPERATOR
