"""What is done to members of a cluster's etcd. One at a time: two of three are no majority."""

from __future__ import annotations

from chaos_tests.cluster import EtcdMembers, sturdy_binary
from chaos_tests.nemesis import signals
from chaos_tests.nemesis.scene import NotNow, Scene
from chaos_tests.nemesis.signals import End
from chaos_tests.scenario.schedule import Planned
from elastic.errors import StoreUnavailable

LEADS_S = 3.0


def why_not() -> str:
    """Why no member can be killed here, or nothing."""
    if sturdy_binary() is not None:
        return ""
    return "no etcd here that stays consistent when it is killed (3.5.0 to 3.5.2 do not); `make etcd`"


def strike(scene: Scene, planned: Planned, *, leader: bool = False, freeze: bool = False) -> None:
    etcd = scene.on_nodes().cluster.etcd
    if scene.lasts_already(planned):
        raise NotNow("another member of etcd is away")
    number = chosen(scene, planned, etcd, leader=leader)

    def blow() -> End:
        if freeze:
            return signals.freeze([etcd.pid(number)])
        etcd.kill(number)
        return lambda: etcd.start(number)

    scene.lasting(planned, etcd.names[number], blow, pid=etcd.pid(number))


def chosen(scene: Scene, planned: Planned, etcd: EtcdMembers, *, leader: bool) -> int:
    """The number of a member: of any, or of the leading one. Raises NotNow if no member leads."""
    if not leader:
        return scene.victims.dice(planned).randrange(len(etcd.names))
    try:
        return etcd.leader(LEADS_S)
    except StoreUnavailable as error:
        raise NotNow(str(error)) from error
