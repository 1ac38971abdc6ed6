"""A whole cluster on one machine, to break: etcd, replicas of the rendezvous, and nodes.

    with Network() as network, Cluster(home, network, etcd=3, replicas=2, nodes=("a", "b", "c")) as cluster:
        job = cluster.submit(name="train", command=["python", "train.py"], workers=3)
        network.cut(["a"], ["b"], one_way=True)      what a sends to b is lost
        network.isolate("r0")                        from everybody
        network.roughen("c", Roughness(lost=0.05))   of its packets one in twenty, in each direction
        network.heal()
        cluster.etcd.kill(cluster.etcd.leader())
        cluster.end("b")                             SIGKILL for the daemon of that node

Hosts are called as the nodes are, the replicas r0, r1 ..., and the members of etcd etcd0, etcd1 ...; `Network` needs
root, see `why_not`. Without it, on `Loopback`, everything works but cutting.
"""

from chaos_tests.harness.cluster.etcd import EtcdMembers, sturdy_binary
from chaos_tests.harness.cluster.fleet import Cluster
from chaos_tests.harness.cluster.hosts import Hosts, Loopback
from chaos_tests.harness.cluster.network import OUTSIDE, Network, why_not
from chaos_tests.harness.cluster.rough import Roughness

__all__ = [
    "OUTSIDE",
    "Cluster",
    "EtcdMembers",
    "Hosts",
    "Loopback",
    "Network",
    "Roughness",
    "sturdy_binary",
    "why_not",
]
