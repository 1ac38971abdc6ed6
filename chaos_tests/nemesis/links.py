"""Links between the hosts of a cluster that are cut, or made worse, and mended."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from chaos_tests.cluster import OUTSIDE, Network, Roughness
from chaos_tests.cluster.cluster_job import NodesJob
from chaos_tests.nemesis.etcd_members import chosen
from chaos_tests.nemesis.nodes import leading, some_node
from chaos_tests.nemesis.scene import NotNow, Scene
from chaos_tests.nemesis.signals import End, Impossible
from chaos_tests.scenario.faults import Effect
from chaos_tests.scenario.schedule import Planned
from elastic.protocol.worker_id import node_of


def cut_node(scene: Scene, planned: Planned, *, one_way: bool = False) -> None:
    _, network = _network(scene)
    node = some_node(scene, planned)
    others = [name for name in network.names if name != node]
    _cut(scene, planned, [node], others, [node], f"node {node} from everybody", one_way)


def cut_control(scene: Scene, planned: Planned) -> None:
    """A node, from what decides; its peers hear it."""
    job, network = _network(scene)
    node = some_node(scene, planned)
    control = [name for name in network.names if name not in (*job.nodes, OUTSIDE)]
    _cut(scene, planned, [node], control, [node], f"node {node} from replicas and etcd")


def cut_pair(scene: Scene, planned: Planned, *, one_way: bool = False) -> None:
    _network(scene)
    nodes = sorted({node_of(worker) for worker in scene.victims.healthy()})
    if len(nodes) < 2:
        raise NotNow("two nodes with healthy members are needed")
    one, other = scene.victims.dice(planned).sample(nodes, 2)
    _cut(scene, planned, [one], [other], [one, other], f"node {one} from node {other}", one_way)


def cut_leader(scene: Scene, planned: Planned) -> None:
    """The replica that leads, from etcd."""
    job, _ = _network(scene)
    leader = leading(scene)
    _cut(scene, planned, [leader], list(job.cluster.etcd.names), [], f"the leader {leader} from etcd")


def cut_etcd_peers(scene: Scene, planned: Planned) -> None:
    """The member of etcd that leads, from the other members; all others reach it, and get no answer from it."""
    job, _ = _network(scene)
    if scene.lasts_already(planned):
        raise NotNow("another member of etcd is cut off")
    etcd = job.cluster.etcd
    member = etcd.names[chosen(scene, planned, etcd, leader=True)]
    others = [name for name in etcd.names if name != member]
    _cut(scene, planned, [member], others, [], f"{member}, which led, from the other members of etcd")


def _cut(
    scene: Scene,
    planned: Planned,
    some: list[str],
    others: list[str],
    nodes: list[str],
    text: str,
    one_way: bool = False,
) -> None:
    """Nothing that `some` send reaches `others`; nor the other way, unless one_way. nodes: see _done."""
    _, network = _network(scene)

    def blow() -> End:
        network.cut(some, others, one_way=one_way)
        return lambda: network.mend(some, others)

    direction = "what they send is lost" if one_way else "both ways"
    _done(scene, planned, nodes, blow, text, f"{text}, {direction}")


def worsen(scene: Scene, planned: Planned, *, kbit_s: int = 0, **rough: float) -> None:
    """kbit_s: kilobits a second that go through the cable of a node in each direction; 0: as many as ever. Beats share
    the cable with gradients. rough: fields of Roughness."""
    _, network = _network(scene)
    if scene.lasts_already(planned):
        raise NotNow("another cable is a bad one just now")
    node = some_node(scene, planned)

    def blow() -> End:
        try:
            with ExitStack() as undo:
                if kbit_s:
                    network.narrow(node, kbit_s)
                    undo.callback(network.widen, node)
                if rough:
                    network.roughen(node, Roughness(**rough))
                    undo.callback(network.smooth, node)
                return undo.pop_all().close
        except subprocess.CalledProcessError as error:
            raise Impossible(f"cables cannot be made worse here: {error.stderr.strip()}") from error

    text = f"the cable of node {node}"
    _done(scene, planned, [node], blow, text, text)


def _done(
    scene: Scene, planned: Planned, nodes: Sequence[str], blow: Callable[[], End], target: str, text: str
) -> None:
    """nodes: whose workers nobody else is to hit meanwhile; they may be taken for dead if the fault is such a one."""
    workers = tuple(worker for node in sorted(nodes) for worker in scene.world.there(node))
    parts = planned.fault.effect is not Effect.NONE
    begun_ns = time.monotonic_ns()
    end = blow()
    scene.teller.injected(planned, scene.victims.pids(workers) if parts else {}, begun_ns, target=target)
    running = scene.spares(planned, workers, end, f"{text}, for {planned.lasts_s:g} s")
    running.reach = frozenset(nodes) if parts else frozenset()


def _network(scene: Scene) -> tuple[NodesJob, Network]:
    job = scene.on_nodes()
    if job.network is None:
        raise Impossible("links between the nodes of this job cannot be cut; the preset partition has others")
    return job, job.network
