"""Links between the hosts of a cluster that are cut, or made worse, and mended."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TypeAlias

from chaos_tests.cluster import OUTSIDE, Network, Roughness
from chaos_tests.cluster.cluster_job import NodesJob
from chaos_tests.nemesis.membership_view import node_of
from chaos_tests.nemesis.nodes import leading, some_node
from chaos_tests.nemesis.scene import NotNow, Scene
from chaos_tests.nemesis.signals import End, Impossible
from chaos_tests.scenario.faults import Between, Cut, Narrow, Roughen, parts
from chaos_tests.scenario.schedule import Planned

OnLinks: TypeAlias = Cut | Roughen | Narrow


def cut(scene: Scene, planned: Planned, fault: Cut, healthy: Sequence[str]) -> None:
    job, network = _network(scene)
    some, others, text = _sides(scene, planned, fault, job, network, healthy)
    nodes = frozenset({*some, *others}.intersection(job.nodes)) if fault.between is Between.PAIR else frozenset(some)

    def blow() -> End:
        network.cut(some, others, one_way=fault.one_way)
        return lambda: network.mend(some, others)

    direction = "what they send is lost" if fault.one_way else "both ways"
    _done(scene, planned, fault, nodes.intersection(job.nodes), blow, text, f"{text}, {direction}")


def worsen(scene: Scene, planned: Planned, fault: Roughen | Narrow, healthy: Sequence[str]) -> None:
    _, network = _network(scene)
    if any(isinstance(running.fault, Roughen | Narrow) for running in scene.running):
        raise NotNow("another cable is a bad one just now")
    node = some_node(scene, planned, healthy)

    def blow() -> End:
        try:
            match fault:
                case Roughen():
                    network.roughen(
                        node,
                        Roughness(fault.delay_s, fault.jitter_s, fault.lost, fault.doubled, fault.damaged),
                    )
                    return lambda: network.smooth(node)
                case Narrow(kbit_s, lost=lost):
                    with ExitStack() as undo:
                        network.narrow(node, kbit_s)
                        undo.callback(network.widen, node)
                        if lost:
                            network.roughen(node, Roughness(lost=lost))
                            undo.callback(network.smooth, node)
                        return undo.pop_all().close
        except subprocess.CalledProcessError as error:
            raise Impossible(f"cables cannot be made worse here: {error.stderr.strip()}") from error

    text = f"the cable of node {node}"
    _done(scene, planned, fault, frozenset([node]), blow, text, text)


def _done(
    scene: Scene,
    planned: Planned,
    fault: OnLinks,
    nodes: frozenset[str],
    blow: Callable[[], End],
    target: str,
    text: str,
) -> None:
    """nodes: whose workers nobody else is to hit meanwhile; they may be taken for dead if the fault is such a one."""
    workers = tuple(worker for node in sorted(nodes) for worker in scene.world.there(node))
    begun_ns = time.monotonic_ns()
    end = blow()
    scene.teller.injected(planned, scene.victims.pids(workers) if parts(fault) else {}, begun_ns, target=target)
    scene.victims.frozen.update(workers)

    def mend() -> None:
        end()
        scene.victims.frozen.difference_update(workers)

    running = scene.lasts(planned, fault.for_s, mend, f"{text}, for {fault.for_s:g} s")
    running.reach = nodes if parts(fault) else frozenset()


def _network(scene: Scene) -> tuple[NodesJob, Network]:
    job = scene.on_nodes()
    if job.network is None:
        raise Impossible("links between the nodes of this job cannot be cut; the preset partition has others")
    return job, job.network


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
