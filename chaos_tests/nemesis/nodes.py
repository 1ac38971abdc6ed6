"""What is done to the nodes of a cluster, to the replica that leads, and to all workers at once.

A stranger who attends a job as the agent of a node is a fault of a node too.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from chaos_tests.nemesis import checkpoint_damage, signals
from chaos_tests.nemesis.scene import NotNow, RunningFault, Scene
from chaos_tests.nemesis.signals import End, Impossible
from chaos_tests.nemesis.workers import strike
from chaos_tests.scenario.faults import Damage
from chaos_tests.scenario.schedule import Planned
from chaos_tests.support import processes
from elastic.errors import ElasticError
from elastic.protocol.worker_id import node_of
from elastic.security.channels import PLAIN
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import RendezvousStub


def some_node(scene: Scene, planned: Planned) -> str:
    """The node of a healthy member; another member is spared. Raises NotNow."""
    healthy = sorted({node_of(worker) for worker in scene.victims.healthy()})
    if len(healthy) < 2:
        raise NotNow(f"{len(healthy)} nodes have healthy members, 2 are needed")
    return scene.victims.dice(planned).choice(healthy)


def leading(scene: Scene) -> str:
    """The replica that leads the job. Raises NotNow."""
    replicas = scene.on_nodes().cluster.replicas
    name = next((name for name, process in replicas.items() if process.pid == scene.world.leader), None)
    if name is None:
        raise NotNow("no replica leads")
    return name


def agents_on(scene: Scene, node: str) -> list[int]:
    """The pid of the job's agent on that node, if it runs."""
    return [pid for pid in (scene.world.agents.get(node, 0),) if signals.state(pid)]


def end_agent(scene: Scene, planned: Planned) -> None:
    node = some_node(scene, planned)
    if not (agents := agents_on(scene, node)):
        raise NotNow(f"there is no agent on node {node}")
    begun_ns = time.monotonic_ns()
    signals.send(agents, signal.SIGKILL)
    note(scene, planned, begun_ns, (node,), agents, None, f"SIGKILL to the agent of node {node}")


def end_node(scene: Scene, planned: Planned) -> None:
    job = scene.on_nodes()
    node = some_node(scene, planned)
    begun_ns, agents = time.monotonic_ns(), agents_on(scene, node)
    job.cluster.end(node)
    text = f"SIGKILL to node {node}, for {planned.lasts_s:g} s"
    note(scene, planned, begun_ns, (node,), agents, lambda: job.cluster.node(node), text)


def stop_node(scene: Scene, planned: Planned) -> None:
    cluster = scene.on_nodes().cluster
    node = some_node(scene, planned)
    daemon = cluster.nodes[node].pid
    pids = [daemon, *processes.descendants(daemon)]

    def end() -> None:
        cluster.end(node)
        cluster.node(node)

    text = f"SIGTERM to all {len(pids)} processes of node {node}"
    _leave(scene, planned, node, lambda: signals.send_to_living(pids, signal.SIGTERM), end, text)


def freeze_node(scene: Scene, planned: Planned) -> None:
    job = scene.on_nodes()
    node = some_node(scene, planned)
    begun_ns, pids = time.monotonic_ns(), scene.victims.pids(scene.world.there(node))
    thaw = signals.freeze((job.cluster.nodes[node].pid, *agents_on(scene, node), *pids.values()))
    scene.teller.injected(planned, pids, begun_ns, target=f"node {node}")
    scene.spares(planned, pids, thaw, f"SIGSTOP to all on node {node} for {planned.lasts_s:g} s")


def drain_node(scene: Scene, planned: Planned) -> None:
    client = scene.on_nodes().cluster.client
    node = some_node(scene, planned)

    def wish(*, over: bool) -> None:
        try:
            client.cordon(node, "" if over else "chaos", over=over)
        except ElasticError as error:
            raise NotNow(f"nobody hears that node {node} is to be empty, or no longer: {error}") from error

    text = f"node {node} is to be empty, for {planned.lasts_s:g} s"
    _leave(scene, planned, node, lambda: wish(over=False), lambda: wish(over=True), text)


def preempt_node(scene: Scene, planned: Planned) -> None:
    """Another job takes a node, and gives it back. Raises Impossible if this job could not go on without that."""
    job, spec = scene.on_nodes(), scene.spec
    if spec.min_workers > (left := spec.workers - job.slots):
        raise Impossible(f"min_workers={spec.min_workers}, and {left} are left: it would be preempted as a whole")
    node, urgent = some_node(scene, planned), ""

    def take() -> None:
        nonlocal urgent
        try:
            urgent = job.preempt(node, planned.number)
        except ElasticError as error:
            raise NotNow(f"nobody hears that another job needs node {node}: {error}") from error

    def give_back() -> None:
        try:
            job.end_preemption(urgent)
        except ElasticError as error:
            raise NotNow(f"{urgent} does not end: {error}") from error

    text = f"a job of a higher priority needs node {node}, for {planned.lasts_s:g} s"
    _leave(scene, planned, node, take, give_back, text)


def notice_node(scene: Scene, planned: Planned, *, true: bool) -> None:
    """true: the machine goes at the end, and another one comes; else the notice is taken back."""
    cluster = scene.on_nodes().cluster
    node = some_node(scene, planned)
    cloud = cluster.clouds[node]

    def end() -> None:
        if true:
            cluster.end(node)
        cloud.withdraw()
        if true:
            cluster.node(node)

    text = f"{cloud.choice} says that it takes the machine of node {node} in {planned.lasts_s:g} s"
    _leave(scene, planned, node, lambda: cloud.reclaim(planned.lasts_s), end, text)


def intrude(scene: Scene, planned: Planned) -> None:
    """If he is admitted, the stream of that node's own agent ends, and the fault is never seen."""
    job = scene.on_nodes()
    node, token = some_node(scene, planned), scene.victims.dice(planned).randbytes(32).hex()
    begun_ns = time.monotonic_ns()
    answers = attend(job.cluster.client.replicas, job.name, node, token)
    if not {ADMITTED, REFUSED} & set(answers.values()):
        raise NotNow(f"nobody who leads answers: {answers}")
    scene.hits(planned, {}, begun_ns, f"attends as node {node}: {answers}", target=f"node {node}")
    if ADMITTED not in answers.values():
        scene.teller.seen(planned, "he was refused")


def end_leader(scene: Scene, planned: Planned) -> None:
    job, leader = scene.on_nodes(), leading(scene)

    def end() -> End:
        job.cluster.end(leader)
        return lambda: job.cluster.replica(leader)

    scene.lasting(planned, f"replica {leader}", end)


def lose_all(scene: Scene, planned: Planned, *, damage: Damage | None = None) -> None:
    """damage: first the memory of all machines is emptied, and this is done to the newest checkpoint.

    Raises NotNow unless there is something to go on from that is newer than where the job began, and all nodes are
    there: a job that has lost everything waits for those that are away."""
    job, world = scene.on_nodes(), scene.world
    _may_lose_all(scene, kept=damage is None)
    workers = tuple(worker for node in job.nodes for worker in world.there(node))
    begun_ns, pids = time.monotonic_ns(), scene.victims.pids(workers)
    thaw = signals.freeze(pids.values())  # what stands still writes no checkpoint after the one that is spoiled
    try:
        spoiled = checkpoint_damage.spoil(scene, job, damage) if damage is not None else ""
        signals.send(pids.values(), signal.SIGKILL)
    except BaseException:
        thaw()
        raise
    world.lose_all()
    text = f"SIGKILL to {', '.join(workers)}"
    if not spoiled:
        scene.hits(planned, pids, begun_ns, text)
        return
    text = f"{text}; of {spoiled} {damage}, and memory is empty"
    running = scene.hits(planned, pids, begun_ns, text, spoiled=spoiled)
    # Who begins from what is damaged gives way to the next one, until all are at work again.
    running.reach, running.until_steady = frozenset(job.nodes), True


def lose_holders(scene: Scene, planned: Planned) -> None:
    """SIGKILL of one member; and of all others when its replacement has come and has no state yet: it must not begin
    the job anew with what it has. Raises NotNow as lose_all."""
    _may_lose_all(scene, kept=True)
    strike(scene, planned)


def _may_lose_all(scene: Scene, *, kept: bool) -> None:
    """kept: whether something newer than where the job began must be kept."""
    job, world = scene.on_nodes(), scene.world
    if not world.steady or set(scene.victims.healthy()) != set(world.members):
        raise NotNow("not all members are healthy")
    if {node_of(worker) for worker in world.members} != set(job.nodes):
        raise NotNow("not all nodes have a member")
    if kept and world.kept_step <= world.began_step:
        raise NotNow("nothing is kept yet from which the job could go on")


def reach(scene: Scene, running: RunningFault, lines: Sequence[dict[str, Any]]) -> None:
    """A worker that begins on a node while a fault lasts there is hit too. lines: new ones of the journals."""
    for line in lines:
        if line["event"] == "worker_started" and node_of(line["worker_id"]) in running.reach:
            scene.teller.held(running.planned, line["worker_id"], int(line["t_mono_ns"]))


def _leave(scene: Scene, planned: Planned, node: str, ask: Callable[[], object], end: End, text: str) -> None:
    """Ask a node to be without workers: those must leave by themselves, which is no loss."""
    begun_ns, pids = time.monotonic_ns(), scene.victims.pids(scene.world.there(node))
    ask()
    scene.hits(planned, pids, begun_ns, text, target=f"node {node}").end = end


def note(
    scene: Scene,
    planned: Planned,
    begun_ns: int,
    lost: Iterable[str],
    agents: Iterable[int],
    end: End | None,
    text: str,
) -> None:
    """The agents of these nodes were killed: workers must die with them, and nobody is left there to say so. Among
    them may be some that were lost before, and were about to be ended."""
    workers = tuple(worker for node in lost for worker in scene.world.there(node))
    with_lost = tuple(worker for node in lost for worker in scene.world.on(node))
    scene.teller.injected(planned, scene.victims.pids(workers), begun_ns)
    scene.victims.targeted.update(workers)
    left = processes.await_exits((*agents, *scene.victims.pids(with_lost).values()), signals.SEEN_S)
    scene.running.append(RunningFault(planned, end=end, injected=True))
    if left:
        scene.teller.told(planned, f"{text}; processes {sorted(left)} live on")
        return
    scene.world.ended.update(with_lost)
    scene.world.newcomers.difference_update(workers)
    scene.teller.seen(planned, f"its workers died with it: {', '.join(workers) or 'there were none'}")
    scene.teller.told(planned, text)


ANSWER_S = 6.0
"""Seconds to wait for the answer of one replica; longer than REREAD_S of elastic/fleet/replica/admission.py."""

ADMITTED, REFUSED = "welcome", grpc.StatusCode.UNAUTHENTICATED.name


def attend(replicas: Iterable[str], job: str, node: str, token: str) -> dict[str, str]:
    """What each replica, "host:port", of a cluster without TLS says first, or the code with which it ends the stream;
    "ended" if it says nothing."""
    answers: dict[str, str] = {}
    for replica in replicas:
        hello = pb.AgentHello(job=job, node=node, slots=1, token=token)
        with PLAIN.channel(replica, ()) as channel:
            call = RendezvousStub(channel).Attend(iter([pb.AgentWord(hello=hello)]), timeout=ANSWER_S)
            try:
                first = next(call, None)
                answers[replica] = str(first.WhichOneof("content")) if first is not None else "ended"
            except grpc.RpcError as error:
                answers[replica] = error.code().name
    return answers
