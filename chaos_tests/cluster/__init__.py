"""Jobs and clusters to break: a job on this machine, or a whole cluster on it: etcd, replicas of the rendezvous, nodes.

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

    job_handle.py      a job wherever it runs: follow it, wait for its end
    local_job.py       a job on this machine
    cluster_job.py     a job on a cluster
    cluster.py         the cluster and its certificates
    etcd.py            real members of etcd
    hosts.py           where processes of a cluster run
    network.py         hosts as network namespaces on one switch
    lossy_link.py      a bad cable
    cloud_metadata.py  metadata services as the clouds have them
"""

from chaos_tests.cluster.cluster import Cluster
from chaos_tests.cluster.etcd import EtcdMembers, sturdy_binary
from chaos_tests.cluster.hosts import Hosts, Loopback
from chaos_tests.cluster.lossy_link import Roughness
from chaos_tests.cluster.network import OUTSIDE, Network, why_not

__all__ = ["OUTSIDE", "Cluster", "EtcdMembers", "Hosts", "Loopback", "Network", "Roughness", "sturdy_binary", "why_not"]
