"""All kinds of faults by their names."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from chaos_tests.scenario import failpoints
from chaos_tests.scenario.failpoints import Act
from chaos_tests.scenario.faults import (
    AGENT,
    ETCD,
    JOINING,
    RECOVERY,
    RENDEZVOUS,
    Aim,
    Ask,
    AskStore,
    AtFailpoint,
    Between,
    Cut,
    Damage,
    DrainNode,
    EndAgent,
    EndLeader,
    EndNode,
    Fault,
    FillDisk,
    Freeze,
    FreezeNode,
    FreezeService,
    Hog,
    Intrude,
    KillService,
    LoseAll,
    Narrow,
    NoticeNode,
    Reclaim,
    Reset,
    Roughen,
    SignalAll,
    Slow,
    Starve,
    StopNode,
    Strike,
    StrikeStore,
    When,
)


@dataclass(frozen=True, slots=True)
class FaultKind:
    """about: for people."""

    fault: Fault
    about: str


STUCK_S = 90.0
"""timing.progress_s, and as much again until the next beat is looked at on a loaded machine."""

RAISED_S = 20.0
"""From an exception until the process has ended: an interpreter with torch in it takes a second of processor time to
end in order, and on a machine with thirty others that want one it was seen to take 7.4 s."""

CATALOGUE: Mapping[str, FaultKind] = {
    "kill": FaultKind(Strike(), "SIGKILL of any member"),
    "kill-rank-0": FaultKind(
        Strike(aim=Aim.LEADER), "SIGKILL of the oldest member, which prints, saves and gives copies"
    ),
    "kill-youngest": FaultKind(Strike(aim=Aim.YOUNGEST), "SIGKILL of the member that came last: a flapping slot"),
    "kill-two": FaultKind(Strike(count=2), "SIGKILL of two members at one instant"),
    "kill-all-but-one": FaultKind(Strike(aim=Aim.ALL), "SIGKILL of all members but one at one instant"),
    "kill-in-recovery": FaultKind(Strike(places=RECOVERY), "a second SIGKILL at a point of the recovery from a first"),
    "kill-newcomer": FaultKind(
        Strike(aim=Aim.NEWCOMER, places=JOINING), "SIGKILL of a replacement at a point of its way into the ring"
    ),
    "kill-donor": FaultKind(
        Strike(aim=Aim.LEADER, places=JOINING), "SIGKILL of rank 0 at a point of a replacement's way into the ring"
    ),
    "segfault": FaultKind(Strike(signal.SIGSEGV), "a member ends by a segmentation fault"),
    "abort": FaultKind(Strike(signal.SIGABRT), "a member ends by abort()"),
    "terminate": FaultKind(
        Strike(signal.SIGTERM, grace_s=5.0), "a member is asked to end by SIGTERM, and gets SIGKILL 5 s later"
    ),
    "freeze-short": FaultKind(Freeze(0.3), "a member stands still for 0.3 s, too short to be expelled"),
    "freeze-long": FaultKind(
        Freeze(4.0), "a member stands still until it is expelled, and thaws into a world without it"
    ),
    "freeze-for-good": FaultKind(Freeze(40.0), "a member stands still until it is expelled and killed"),
    "freeze-rank-0": FaultKind(Freeze(4.0, aim=Aim.LEADER), "the same as freeze-long, of rank 0"),
    "freeze-all": FaultKind(Freeze(0.3, aim=Aim.ALL), "all workers stand still for 0.3 s"),
    "kill-in-step": FaultKind(AtFailpoint(Act.KILL, failpoints.STEP), "SIGKILL at a point of a step"),
    "kill-in-first-step": FaultKind(
        AtFailpoint(Act.KILL, failpoints.STEP, step=When.FIRST),
        "SIGKILL in the first step of all, before anything was applied",
    ),
    "kill-in-last-step": FaultKind(
        AtFailpoint(Act.KILL, failpoints.STEP, step=When.LAST), "SIGKILL in the last step of all"
    ),
    "kill-in-evaluation": FaultKind(AtFailpoint(Act.KILL, (failpoints.IN_EVALUATION,)), "SIGKILL within job.evaluate"),
    "kill-in-checkpoint": FaultKind(
        AtFailpoint(Act.KILL, failpoints.CHECKPOINT),
        "SIGKILL between the data of a checkpoint or snapshot and its mark",
    ),
    "kill-in-rebuild": FaultKind(
        AtFailpoint(Act.KILL, (failpoints.IN_REBUILD,), spark=True),
        "SIGKILL of whoever connects first after a first SIGKILL",
    ),
    "kill-in-copy": FaultKind(
        AtFailpoint(Act.KILL, failpoints.COPY, spark=True), "SIGKILL of a donor or a newcomer while the state is copied"
    ),
    "freeze-in-step": FaultKind(
        AtFailpoint(Act.STOP, failpoints.STEP, for_s=6.0), "a member stands still at a point of a step"
    ),
    "hang": FaultKind(
        AtFailpoint(Act.HANG, (failpoints.IN_SHARD,), noted_s=STUCK_S),
        "a script waits for ever in a shard; its process lives",
    ),
    "hang-gil": FaultKind(
        AtFailpoint(Act.HANG_GIL, failpoints.STEP, noted_s=STUCK_S), "the same with Python's lock held: no thread runs"
    ),
    "raise": FaultKind(AtFailpoint(Act.RAISE, (failpoints.IN_SHARD,), noted_s=RAISED_S), "a script raises in a shard"),
    "interrupt": FaultKind(
        AtFailpoint(Act.INTERRUPT, (failpoints.IN_SHARD, failpoints.RESULT_HELD), noted_s=RAISED_S),
        "a script is given an exception by another thread",
    ),
    "no-memory": FaultKind(
        AtFailpoint(Act.NO_MEMORY, (failpoints.IN_SHARD,), noted_s=RAISED_S),
        "a script asks for more memory than it may have",
    ),
    "out-of-memory": FaultKind(
        Starve(), "the kernel kills a member for which there is no memory (needs root, and cgroups)"
    ),
    "disk-error": FaultKind(
        AtFailpoint(Act.DISK_FAILS, failpoints.DISK, for_s=8.0),
        "a member's disk answers with errors to what is written of a checkpoint",
    ),
    "disk-slow": FaultKind(
        AtFailpoint(Act.DISK_SLOW, failpoints.DISK, for_s=12.0),
        "a member's disk needs a second more for each thing it keeps",
    ),
    "slow": FaultKind(Slow(8.0), "a member gets a fifth of its processor time for 8 s"),
    "reclaim": FaultKind(Reclaim(5.0), "the machine of a member is taken away, and another one comes after a while"),
    "kill-rendezvous": FaultKind(KillService(RENDEZVOUS), "SIGKILL of the rendezvous service, which is started again"),
    "freeze-rendezvous": FaultKind(
        FreezeService(RENDEZVOUS, 4.0), "the rendezvous service stands still beyond its lease"
    ),
    "freeze-agent": FaultKind(FreezeService(AGENT, 4.0), "the agent stands still for 4 s"),
    "freeze-etcd": FaultKind(FreezeService(ETCD, 4.0), "etcd stands still for 4 s"),
    "signal-all": FaultKind(
        SignalAll(3.0), "SIGTERM, SIGINT and SIGHUP to every process of the job but its command: nobody may notice"
    ),
    "compact-etcd": FaultKind(AskStore(Ask.COMPACT), "etcd forgets its history"),
    "defragment-etcd": FaultKind(AskStore(Ask.DEFRAGMENT), "etcd rewrites its database, and answers nobody meanwhile"),
    "revoke-leases": FaultKind(AskStore(Ask.REVOKE), "all leases are revoked, the leader's too"),
    "cut-node": FaultKind(Cut(Between.NODE, 12.0), "a node is cut off from everybody, and expelled"),
    "cut-node-one-way": FaultKind(Cut(Between.NODE, 12.0, one_way=True), "nothing that a node sends reaches anybody"),
    "cut-pair": FaultKind(Cut(Between.PAIR, 8.0), "two nodes do not reach each other, and all others reach both"),
    "cut-pair-one-way": FaultKind(Cut(Between.PAIR, 8.0, one_way=True), "the same in one direction"),
    "cut-control": FaultKind(
        Cut(Between.CONTROL, 8.0), "a node reaches its peers, and nobody who decides: nobody is lost"
    ),
    "cut-etcd": FaultKind(Cut(Between.STORE, 8.0), "the replica that leads does not reach etcd, and another one leads"),
    "delay-node": FaultKind(
        Roughen(10.0, delay_s=0.06, jitter_s=0.01),
        "each packet of a node is 50 to 70 ms late, in each direction and in any order",
    ),
    "lossy-node": FaultKind(
        Roughen(10.0, lost=0.03, doubled=0.02, damaged=0.01),
        "of the packets of a node 3 % are lost, 2 % come twice, and a bit of 1 % is flipped",
    ),
    "narrow-node": FaultKind(Narrow(20_000, 10.0), "no more than 20 Mbit/s go to a node, and no more from it"),
    "congest-node": FaultKind(
        Narrow(2_000, 15.0, lost=0.05), "no more than 2 Mbit/s go to a node and from it, and of that 5 % are lost"
    ),
    "reset-connections": FaultKind(Reset(), "all TCP connections of a member are reset; it lives, and so do its peers"),
    "kill-agent": FaultKind(EndAgent(), "SIGKILL of the agent on one node, with which its worker must die"),
    "kill-node-0s": FaultKind(EndNode(0.0), "SIGKILL of a whole node, which comes back at once"),
    "kill-node-1s": FaultKind(EndNode(1.0), "SIGKILL of a whole node, which comes back after 1 s"),
    "kill-node-10s": FaultKind(EndNode(10.0), "SIGKILL of a whole node, which comes back after 10 s"),
    "signal-node": FaultKind(
        StopNode(8.0), "SIGTERM to every process of a node, whose workers leave; it comes back after 8 s"
    ),
    "freeze-node": FaultKind(
        FreezeNode(12.0), "all that runs on a node stands still until the others have expelled it"
    ),
    "drain-node": FaultKind(
        DrainNode(8.0), "an operator wants a node empty for 8 s; its workers leave between two steps"
    ),
    "notice-node": FaultKind(
        NoticeNode(20.0, true=True),
        "a cloud says that it takes a machine in 20 s, and does; its workers have left by then, and another one comes",
    ),
    "false-notice": FaultKind(NoticeNode(20.0, true=False), "the same, and after 20 s it is taken back"),
    "intrude": FaultKind(
        Intrude(), "somebody attends as the agent of a node, without the token of the job's place there: he is refused"
    ),
    "kill-leader": FaultKind(EndLeader(3.0), "SIGKILL of the replica that leads; it comes back after 3 s"),
    "kill-etcd": FaultKind(StrikeStore(5.0), "SIGKILL of one of three members of etcd; it comes back after 5 s"),
    "kill-etcd-leader": FaultKind(StrikeStore(5.0, leader=True), "the same, of the one that leads"),
    "freeze-etcd-leader": FaultKind(
        StrikeStore(5.0, leader=True, freeze=True), "the one that leads stands still for 5 s"
    ),
    "kill-all": FaultKind(LoseAll(), "SIGKILL of all workers at one instant: the job goes on from what is kept"),
    "corrupt-checkpoint": FaultKind(
        LoseAll(Damage.FLIPPED),
        "one bit of the newest checkpoint is flipped, and all workers and copies in memory are lost",
    ),
    "truncate-checkpoint": FaultKind(LoseAll(Damage.TRUNCATED), "the same, and half of a file of it is gone instead"),
    "swap-checkpoint": FaultKind(
        LoseAll(Damage.SWAPPED), "the same, and a file of it is that of the checkpoint before"
    ),
    "unlist-checkpoint": FaultKind(LoseAll(Damage.UNLISTED), "the same, and it has no manifest any more"),
    "cpu-hog": FaultKind(Hog(5.0), "other processes want all cores, twice, for 5 s"),
    "disk-full": FaultKind(FillDisk(3.0), "the job directory's disk is full for 3 s (needs a small file system)"),
}
