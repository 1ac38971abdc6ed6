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
    Ambush,
    Ask,
    AskStore,
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
    Slow,
    Starve,
    Strike,
    StrikeStore,
    When,
)


@dataclass(frozen=True, slots=True)
class Kind:
    """about: for people."""

    fault: Fault
    about: str


STUCK_S = 90.0
"""timing.progress_s, and as much again until the next beat is looked at on a loaded machine."""

RAISED_S = 20.0
"""From an exception until the process has ended: an interpreter with torch in it takes a second of processor time to
end in order, and on a machine with thirty others that want one it was seen to take 7.4 s."""

CATALOGUE: Mapping[str, Kind] = {
    "kill": Kind(Strike(), "SIGKILL of any member"),
    "kill-rank-0": Kind(Strike(aim=Aim.LEADER), "SIGKILL of the oldest member, which prints, saves and gives copies"),
    "kill-youngest": Kind(Strike(aim=Aim.YOUNGEST), "SIGKILL of the member that came last: a flapping slot"),
    "kill-two": Kind(Strike(count=2), "SIGKILL of two members at one instant"),
    "kill-all-but-one": Kind(Strike(aim=Aim.ALL), "SIGKILL of all members but one at one instant"),
    "kill-in-recovery": Kind(Strike(places=RECOVERY), "a second SIGKILL at a point of the recovery from a first"),
    "kill-newcomer": Kind(
        Strike(aim=Aim.NEWCOMER, places=JOINING), "SIGKILL of a replacement at a point of its way into the ring"
    ),
    "kill-donor": Kind(
        Strike(aim=Aim.LEADER, places=JOINING), "SIGKILL of rank 0 at a point of a replacement's way into the ring"
    ),
    "segfault": Kind(Strike(signal.SIGSEGV), "a member ends by a segmentation fault"),
    "abort": Kind(Strike(signal.SIGABRT), "a member ends by abort()"),
    "terminate": Kind(
        Strike(signal.SIGTERM, grace_s=5.0), "a member is asked to end by SIGTERM, and gets SIGKILL 5 s later"
    ),
    "freeze-short": Kind(Freeze(1.2), "a member stands still for 1.2 s, too short to be expelled"),
    "freeze-long": Kind(Freeze(6.0), "a member stands still until it is expelled, and thaws into a world without it"),
    "freeze-for-good": Kind(Freeze(40.0), "a member stands still until it is expelled and killed"),
    "freeze-rank-0": Kind(Freeze(6.0, aim=Aim.LEADER), "the same as freeze-long, of rank 0"),
    "freeze-all": Kind(Freeze(1.2, aim=Aim.ALL), "all workers stand still for 1.2 s"),
    "kill-in-step": Kind(Ambush(Act.KILL, failpoints.STEP), "SIGKILL at a point of a step"),
    "kill-in-first-step": Kind(
        Ambush(Act.KILL, failpoints.STEP, step=When.FIRST),
        "SIGKILL in the first step of all, before anything was applied",
    ),
    "kill-in-last-step": Kind(Ambush(Act.KILL, failpoints.STEP, step=When.LAST), "SIGKILL in the last step of all"),
    "kill-in-evaluation": Kind(Ambush(Act.KILL, (failpoints.IN_EVALUATION,)), "SIGKILL within job.evaluate"),
    "kill-in-checkpoint": Kind(
        Ambush(Act.KILL, failpoints.CHECKPOINT), "SIGKILL between the data of a checkpoint or snapshot and its mark"
    ),
    "kill-in-rebuild": Kind(
        Ambush(Act.KILL, (failpoints.IN_REBUILD,), spark=True),
        "SIGKILL of whoever connects first after a first SIGKILL",
    ),
    "kill-in-copy": Kind(
        Ambush(Act.KILL, failpoints.COPY, spark=True), "SIGKILL of a donor or a newcomer while the state is copied"
    ),
    "freeze-in-step": Kind(Ambush(Act.STOP, failpoints.STEP, for_s=6.0), "a member stands still at a point of a step"),
    "hang": Kind(
        Ambush(Act.HANG, (failpoints.IN_SHARD,), noted_s=STUCK_S),
        "a script waits for ever in a shard; its process lives",
    ),
    "hang-gil": Kind(
        Ambush(Act.HANG_GIL, failpoints.STEP, noted_s=STUCK_S), "the same with Python's lock held: no thread runs"
    ),
    "raise": Kind(Ambush(Act.RAISE, (failpoints.IN_SHARD,), noted_s=RAISED_S), "a script raises in a shard"),
    "interrupt": Kind(
        Ambush(Act.INTERRUPT, (failpoints.IN_SHARD, failpoints.RESULT_HELD), noted_s=RAISED_S),
        "a script is given an exception by another thread",
    ),
    "no-memory": Kind(
        Ambush(Act.NO_MEMORY, (failpoints.IN_SHARD,), noted_s=RAISED_S),
        "a script asks for more memory than it may have",
    ),
    "out-of-memory": Kind(Starve(), "the kernel kills a member for which there is no memory (needs root, and cgroups)"),
    "disk-error": Kind(
        Ambush(Act.DISK_FAILS, failpoints.DISK, for_s=8.0),
        "a member's disk answers with errors to what is written of a checkpoint",
    ),
    "disk-slow": Kind(
        Ambush(Act.DISK_SLOW, failpoints.DISK, for_s=12.0),
        "a member's disk needs a second more for each thing it keeps",
    ),
    "slow": Kind(Slow(8.0), "a member gets a fifth of its processor time for 8 s"),
    "reclaim": Kind(Reclaim(5.0), "the machine of a member is taken away, and another one comes after a while"),
    "kill-rendezvous": Kind(KillService(RENDEZVOUS), "SIGKILL of the rendezvous service, which is started again"),
    "freeze-rendezvous": Kind(FreezeService(RENDEZVOUS, 4.0), "the rendezvous service stands still beyond its lease"),
    "freeze-agent": Kind(FreezeService(AGENT, 4.0), "the agent stands still for 4 s"),
    "freeze-etcd": Kind(FreezeService(ETCD, 4.0), "etcd stands still for 4 s"),
    "compact-etcd": Kind(AskStore(Ask.COMPACT), "etcd forgets its history"),
    "defragment-etcd": Kind(AskStore(Ask.DEFRAGMENT), "etcd rewrites its database, and answers nobody meanwhile"),
    "revoke-leases": Kind(AskStore(Ask.REVOKE), "all leases are revoked, the leader's too"),
    "cut-node": Kind(Cut(Between.NODE, 12.0), "a node is cut off from everybody, and expelled"),
    "cut-node-one-way": Kind(Cut(Between.NODE, 12.0, one_way=True), "nothing that a node sends reaches anybody"),
    "cut-pair": Kind(Cut(Between.PAIR, 8.0), "two nodes do not reach each other, and all others reach both"),
    "cut-pair-one-way": Kind(Cut(Between.PAIR, 8.0, one_way=True), "the same in one direction"),
    "cut-control": Kind(Cut(Between.CONTROL, 8.0), "a node reaches its peers, and nobody who decides: nobody is lost"),
    "cut-etcd": Kind(Cut(Between.STORE, 8.0), "the replica that leads does not reach etcd, and another one leads"),
    "delay-node": Kind(
        Roughen(10.0, delay_s=0.06, jitter_s=0.01),
        "each packet of a node is 50 to 70 ms late, in each direction and in any order",
    ),
    "lossy-node": Kind(
        Roughen(10.0, lost=0.03, doubled=0.02, damaged=0.01),
        "of the packets of a node 3 % are lost, 2 % come twice, and a bit of 1 % is flipped",
    ),
    "narrow-node": Kind(Narrow(20_000, 10.0), "no more than 20 Mbit/s go to a node, and no more from it"),
    "congest-node": Kind(
        Narrow(2_000, 15.0, lost=0.05), "no more than 2 Mbit/s go to a node and from it, and of that 5 % are lost"
    ),
    "reset-connections": Kind(Reset(), "all TCP connections of a member are reset; it lives, and so do its peers"),
    "kill-agent": Kind(EndAgent(), "SIGKILL of the agent on one node, with which its worker must die"),
    "kill-node": Kind(EndNode(5.0), "SIGKILL of a whole node, which comes back after 5 s"),
    "freeze-node": Kind(FreezeNode(12.0), "all that runs on a node stands still until the others have expelled it"),
    "drain-node": Kind(DrainNode(8.0), "an operator wants a node empty for 8 s; its workers leave between two steps"),
    "notice-node": Kind(
        NoticeNode(20.0, true=True),
        "a cloud says that it takes a machine in 20 s, and does; its workers have left by then, and another one comes",
    ),
    "false-notice": Kind(NoticeNode(20.0, true=False), "the same, and after 20 s it is taken back"),
    "intrude": Kind(
        Intrude(), "somebody attends as the agent of a node, without the token of the job's place there: he is refused"
    ),
    "kill-leader": Kind(EndLeader(3.0), "SIGKILL of the replica that leads; it comes back after 3 s"),
    "kill-etcd": Kind(StrikeStore(5.0), "SIGKILL of one of three members of etcd; it comes back after 5 s"),
    "kill-etcd-leader": Kind(StrikeStore(5.0, leader=True), "the same, of the one that leads"),
    "freeze-etcd-leader": Kind(StrikeStore(5.0, leader=True, freeze=True), "the one that leads stands still for 5 s"),
    "kill-all": Kind(LoseAll(), "SIGKILL of all workers at one instant: the job goes on from what is kept"),
    "corrupt-checkpoint": Kind(
        LoseAll(Damage.FLIPPED),
        "one bit of the newest checkpoint is flipped, and all workers and copies in memory are lost",
    ),
    "truncate-checkpoint": Kind(LoseAll(Damage.TRUNCATED), "the same, and half of a file of it is gone instead"),
    "swap-checkpoint": Kind(LoseAll(Damage.SWAPPED), "the same, and a file of it is that of the checkpoint before"),
    "unlist-checkpoint": Kind(LoseAll(Damage.UNLISTED), "the same, and it has no manifest any more"),
    "cpu-hog": Kind(Hog(5.0), "other processes want all cores, twice, for 5 s"),
    "disk-full": Kind(FillDisk(3.0), "the job directory's disk is full for 3 s (needs a small file system)"),
}
