"""Links between the hosts of a cluster that are cut, and mended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from chaos_tests.harness.blows import Impossible
from chaos_tests.harness.cluster import OUTSIDE, Network
from chaos_tests.harness.deeds.nodes import leading, some_node
from chaos_tests.harness.faults import Between, Cut, parts
from chaos_tests.harness.onnodes import NodesJob
from chaos_tests.harness.scene import NotNow, Scene
from chaos_tests.harness.schedule import Planned
from chaos_tests.harness.world import node_of


def cut(scene: Scene, planned: Planned, fault: Cut, healthy: Sequence[str]) -> None:
    job = scene.on_nodes()
    if (network := job.network) is None:
        raise Impossible("links between the nodes of this job cannot be cut; the preset partition has others")
    some, others, text = _sides(scene, planned, fault, job, network, healthy)
    nodes = frozenset({*some, *others}.intersection(job.nodes)) if fault.between is Between.PAIR else frozenset(some)
    cut_off = tuple(worker for node in sorted(nodes.intersection(job.nodes)) for worker in scene.world.there(node))
    begun_ns = time.monotonic_ns()
    network.cut(some, others, one_way=fault.one_way)
    hit = scene.victims.pids(cut_off) if parts(fault) else {}
    scene.teller.injected(planned, hit, begun_ns, target=text)
    scene.victims.frozen.update(cut_off)

    def mend() -> None:
        network.mend(some, others)
        scene.victims.frozen.difference_update(cut_off)

    direction = "what they send is lost" if fault.one_way else "both ways"
    running = scene.lasts(planned, fault.for_s, mend, f"{text}, {direction}, for {fault.for_s:g} s")
    running.reach = nodes if parts(fault) else frozenset()


def _sides(
    scene: Scene, planned: Planned, fault: Cut, job: NodesJob, network: Network, healthy: Sequence[str]
) -> tuple[list[str], list[str], str]:
    """Some and others, between whom links are cut, and that in words. Raises NotNow."""
    control = [name for name in network.names if name not in (*job.nodes, OUTSIDE)]
    match fault.between:
        case Between.NODE:
            node = some_node(scene, planned, healthy)
            return [node], [name for name in network.names if name != node], f"node {node} from everybody"
        case Between.CONTROL:
            node = some_node(scene, planned, healthy)
            return [node], control, f"node {node} from replicas and etcd"
        case Between.PAIR:
            nodes = sorted({node_of(worker) for worker in healthy})
            if len(nodes) < 2:
                raise NotNow("two nodes with healthy members are needed")
            one, other = scene.victims.dice(planned).sample(nodes, 2)
            return [one], [other], f"node {one} from node {other}"
        case Between.STORE:
            leader = leading(scene)
            return [leader], list(job.cluster.etcd.names), f"the leader {leader} from etcd"
