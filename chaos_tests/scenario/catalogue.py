"""All faults, one row each: to add another one takes a row here, or of rounds in rounds_catalogue.py, and the function
of nemesis/ that it names.

A row says in which presets its fault comes; plans, `elastic chaos list` and the checkers follow from it. A test asks
for its line in docs/chaos.md.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from functools import partial

from chaos_tests.scenario import failpoints
from chaos_tests.scenario.failpoints import Act
from chaos_tests.scenario.faults import (
    AGENT,
    ETCD,
    JOINING,
    RECOVERY,
    RENDEZVOUS,
    Aim,
    Damage,
    Effect,
    Fault,
    Ground,
    Needs,
    When,
)
from chaos_tests.scenario.rounds_catalogue import ROUNDS_ROWS

STUCK_S = 90.0
"""timing.progress_s, and as much again until the next beat is looked at on a loaded machine."""

RAISED_S = 20.0
"""From an exception until the process has ended: an interpreter with torch in it takes a second of processor time to
end in order, and on a machine with thirty others that want one it was seen to take 7.4 s."""

_strike = partial(Fault, by="workers.strike", effect=Effect.ENDS, aim=Aim.ANY)
_freeze = partial(Fault, by="workers.freeze", effect=Effect.FREEZES, aim=Aim.ANY, presets={"freeze": 1})
_at_point = partial(Fault, by="failpoints.arm", effect=Effect.ENDS, aim=Aim.ANY)
_kill_at = partial(_at_point, given={"act": Act.KILL}, presets={"places": 1})
_get_stuck = partial(_at_point, presets={"stuck": 1})
_in_exchange = partial(_kill_at, usual=False)
_flip = partial(_at_point, places=(failpoints.BEFORE_REDUCTION,), noted_s=RAISED_S, usual=False)
_disk = partial(_at_point, effect=Effect.NONE, places=failpoints.DISK, stalls=False, presets={"storage": 1})
_freeze_service = partial(
    Fault,
    by="machine.freeze_service",
    effect=Effect.FREEZES,
    ground=Ground.MACHINE,
    for_s=4.0,
    stops_service=True,
    presets={"control": 1},
)
_ask_etcd = partial(Fault, by="machine.ask_etcd", ground=Ground.MACHINE, presets={"etcd": 1})
_on_links = partial(Fault, ground=Ground.NETWORK)
_cut_control_plane = partial(_on_links, for_s=8.0, stops_service=True)
_end_node = partial(Fault, by="nodes.end_node", effect=Effect.ENDS, ground=Ground.CLUSTER, presets={"spot": 1})
_leave = partial(Fault, effect=Effect.LEAVES, ground=Ground.CLUSTER, stalls=False)
_notice = partial(_leave, by="nodes.notice_node", for_s=20.0, presets={"spot": 1})
_strike_etcd = partial(Fault, by="etcd_members.strike", ground=Ground.CLUSTER, for_s=5.0, stops_service=True)
_lose_all = partial(Fault, by="nodes.lose_all", effect=Effect.ENDS, ground=Ground.CLUSTER)
_damage = partial(_lose_all, usual=False, presets={"storage": 1})

ROWS = (
    _strike(
        "kill",
        "SIGKILL of any member",
        presets={
            "kill": 4,
            "replicas": 2,
            "unwaiting": 2,
            **dict.fromkeys(("flap", "etcd", "control", "partition", "cluster"), 1),
            **dict.fromkeys(("rounds", "rounds-kept", "rounds-kept-nodes"), 1),
        },
    ),
    _strike(
        "kill-rank-0",
        "SIGKILL of the oldest member, which prints, saves and gives copies",
        aim=Aim.LEADER,
        presets={"kill": 2, "rounds": 1, "replicas": 1, "unwaiting": 1},
    ),
    _strike(
        "kill-youngest", "SIGKILL of the member that came last: a flapping slot", aim=Aim.YOUNGEST, presets={"flap": 3}
    ),
    _strike(
        "kill-two",
        "SIGKILL of two members at one instant",
        count=2,
        presets={"kill": 2, "batch": 1, "rounds": 1, "rounds-kept": 1, "unwaiting": 1},
    ),
    _strike(
        "kill-all-but-one", "SIGKILL of all members but one at one instant", aim=Aim.ALL_BUT_ONE, presets={"batch": 1}
    ),
    _strike(
        "kill-in-recovery",
        "a second SIGKILL at a point of the recovery from a first",
        places=RECOVERY,
        spark=True,
        presets={"kill": 3},
    ),
    _strike(
        "kill-newcomer",
        "SIGKILL of a replacement at a point of its way into the ring",
        aim=Aim.NEWCOMER,
        places=JOINING,
        spark=True,
        presets={"kill": 1, "replicas": 1, "unwaiting": 1},
    ),
    _strike(
        "kill-donor",
        "SIGKILL of rank 0 at a point of a replacement's way into the ring",
        aim=Aim.LEADER,
        places=JOINING,
        spark=True,
    ),
    _strike("segfault", "a member ends by a segmentation fault", given={"number": signal.SIGSEGV}),
    _strike("abort", "a member ends by abort()", given={"number": signal.SIGABRT}),
    _strike(
        "terminate",
        "a member is asked to end by SIGTERM, and gets SIGKILL 5 s later",
        noted_s=10.0,  # its grace, and the limit after SIGKILL
        given={"number": signal.SIGTERM, "grace_s": 5.0},
    ),
    _freeze("freeze-short", "a member stands still for 0.3 s, too short to be expelled", for_s=0.3),
    _freeze(
        "freeze-long",
        "a member stands still until it is expelled, and thaws into a world without it",
        for_s=4.0,
        presets={"freeze": 1, "rounds": 1, "unwaiting": 1},
    ),
    _freeze("freeze-for-good", "a member stands still until it is expelled and killed", for_s=40.0),
    _freeze("freeze-rank-0", "the same as freeze-long, of rank 0", for_s=4.0, aim=Aim.LEADER),
    _freeze("freeze-all", "all workers stand still for 0.3 s", for_s=0.3, aim=Aim.ALL),
    _kill_at("kill-in-step", "SIGKILL at a point of a step", places=failpoints.STEP),
    _kill_at(
        "kill-in-first-step",
        "SIGKILL in the first step of all, before anything was applied",
        places=failpoints.STEP,
        step=When.FIRST,
    ),
    _kill_at("kill-in-last-step", "SIGKILL in the last step of all", places=failpoints.STEP, step=When.LAST),
    _kill_at(
        "kill-in-overlap",
        "SIGKILL while gradients are sent before backward has ended (needs --overlap)",
        places=(failpoints.EARLY_SENT,),
    ),
    _kill_at(
        "kill-in-repetition",
        "SIGKILL while a pass is computed again, as a gradient did not fit its integers (needs --reduction fixed)",
        places=(failpoints.IN_REPETITION,),
    ),
    _in_exchange(
        "kill-in-update",
        "SIGKILL while an update is exchanged (needs elastic.Asynchronous)",
        places=failpoints.UPDATE,
        presets={"unwaiting": 3},
    ),
    _in_exchange(
        "kill-in-pair",
        "SIGKILL within an exchange in pairs (needs elastic.Gossip)",
        places=(failpoints.PAIR_MIXED,),
        presets={"unwaiting": 1},
    ),
    _kill_at("kill-in-evaluation", "SIGKILL within job.evaluate", places=(failpoints.IN_EVALUATION,)),
    _kill_at(
        "kill-in-checkpoint",
        "SIGKILL between the data of a checkpoint or snapshot and its mark",
        places=failpoints.CHECKPOINT,
        presets={"places": 1, "storage": 1},
    ),
    _kill_at(
        "kill-in-rebuild",
        "SIGKILL of the worker that connects first after a first SIGKILL",
        places=(failpoints.IN_REBUILD,),
        spark=True,
    ),
    _kill_at(
        "kill-in-copy", "SIGKILL of a donor or a newcomer while the state is copied", places=failpoints.COPY, spark=True
    ),
    _at_point(
        "freeze-in-step",
        "a member stands still at a point of a step",
        effect=Effect.FREEZES,
        for_s=6.0,
        places=failpoints.STEP,
        given={"act": Act.STOP},
    ),
    _get_stuck(
        "hang",
        "a script waits for ever in a shard; its process lives",
        places=(failpoints.IN_SHARD,),
        noted_s=STUCK_S,
        given={"act": Act.HANG},
    ),
    _get_stuck(
        "hang-gil",
        "the same with Python's lock held: no thread runs",
        places=failpoints.STEP,
        noted_s=STUCK_S,
        given={"act": Act.HANG_GIL},
    ),
    _get_stuck(
        "raise", "a script raises in a shard", places=(failpoints.IN_SHARD,), noted_s=RAISED_S, given={"act": Act.RAISE}
    ),
    _at_point(
        "raise-newcomer",
        "a replacement raises while it copies the state: members with the same script prove that it trains",
        places=(failpoints.COPY_RECEIVED,),
        spark=True,
        noted_s=RAISED_S,
        given={"act": Act.RAISE},
    ),
    _get_stuck(
        "interrupt",
        "a script is given an exception by another thread",
        places=(failpoints.IN_SHARD, failpoints.RESULT_HELD),
        noted_s=RAISED_S,
        given={"act": Act.INTERRUPT},
    ),
    _get_stuck(
        "no-memory",
        "a script asks for more memory than it may have",
        places=(failpoints.IN_SHARD,),
        noted_s=RAISED_S,
        given={"act": Act.NO_MEMORY},
    ),
    _flip(
        "bit-flip-gradient",
        "one bit of a gradient changes in a member, which is named and replaced (needs --verify every=N)",
        places=(failpoints.GRADIENT_READY,),
        given={"act": Act.FLIP_GRADIENT},
    ),
    _flip("bit-flip-parameter", "the same in a parameter", given={"act": Act.FLIP_PARAMETER}),
    _flip("bit-flip-moment", "the same in the state of the optimizer", given={"act": Act.FLIP_MOMENT}),
    Fault(
        "out-of-memory",
        "the kernel kills a member for which there is no memory (needs root, and cgroups)",
        "workers.starve",
        Effect.ENDS,
        aim=Aim.ANY,
        needs=Needs.CGROUPS,
    ),
    _disk(
        "disk-error",
        "a member's disk answers with errors to what is written of a checkpoint",
        for_s=8.0,
        given={"act": Act.DISK_FAILS},
    ),
    _disk(
        "disk-slow",
        "a member's disk needs a second more for each thing it keeps",
        for_s=12.0,
        given={"act": Act.DISK_SLOW},
    ),
    *ROUNDS_ROWS,
    Fault(
        "slow",
        "a member gets a fifth of its processor time for 8 s",
        "workers.slow",
        for_s=8.0,
        aim=Aim.ANY,
        presets={"stuck": 1, "replicas": 1, "unwaiting": 1},
    ),
    Fault(
        "reclaim",
        "the machine of a member is taken away, and another one comes after a while",
        "capacity.reclaim",
        Effect.ENDS,
        ground=Ground.MACHINE,
        for_s=5.0,
        usual=False,
    ),
    Fault(
        "kill-rendezvous",
        "SIGKILL of the rendezvous service, which is started again",
        "machine.kill_service",
        ground=Ground.MACHINE,
        stops_service=True,
        presets={"control": 1},
        given={"service": RENDEZVOUS},
    ),
    _freeze_service(
        "freeze-rendezvous", "the rendezvous service stands still beyond its lease", given={"service": RENDEZVOUS}
    ),
    _freeze_service("freeze-agent", "the agent stands still for 4 s", given={"service": AGENT}),
    _freeze_service(
        "freeze-etcd", "etcd stands still for 4 s", given={"service": ETCD}, presets={"control": 1, "etcd": 1}
    ),
    Fault(
        "signal-all",
        "SIGTERM, SIGINT and SIGHUP to every process of the job but its command: nobody may notice",
        "machine.signal_all",
        ground=Ground.MACHINE,
        for_s=3.0,
        presets={"control": 1},
    ),
    _ask_etcd("compact-etcd", "etcd forgets its history", given={"to": "compact"}),
    _ask_etcd(
        "defragment-etcd", "etcd rewrites its database, and answers nobody meanwhile", given={"to": "defragment"}
    ),
    _ask_etcd("revoke-leases", "all leases are revoked, the leader's too", given={"to": "revoke_leases"}),
    _on_links(
        "cut-node",
        "a node is cut off from everybody, and expelled",
        by="links.cut_node",
        effect=Effect.ISOLATES,
        for_s=12.0,
    ),
    _on_links(
        "cut-node-one-way",
        "nothing that a node sends reaches anybody",
        by="links.cut_node",
        effect=Effect.ISOLATES,
        for_s=12.0,
        given={"one_way": True},
    ),
    _on_links(
        "cut-pair",
        "two nodes do not reach each other, and all others reach both",
        by="links.cut_pair",
        effect=Effect.SUSPECTS,
        for_s=8.0,
    ),
    _on_links(
        "cut-pair-one-way",
        "the same in one direction",
        by="links.cut_pair",
        effect=Effect.SUSPECTS,
        for_s=8.0,
        given={"one_way": True},
    ),
    _cut_control_plane(
        "cut-control",
        "a node reaches its peers, and nobody who decides: nobody is lost",
        by="links.cut_control",
    ),
    _cut_control_plane(
        "cut-etcd",
        "the replica that leads does not reach etcd, and another one leads",
        by="links.cut_leader",
    ),
    _cut_control_plane(
        "cut-etcd-peers",
        "the member of etcd that leads does not reach the other members, and all others reach it",
        by="links.cut_etcd_peers",
    ),
    _on_links(
        "delay-node",
        "each packet of a node is 50 to 70 ms late, in each direction and in any order",
        by="links.worsen",
        for_s=10.0,
        given={"delay_s": 0.06, "jitter_s": 0.01},
    ),
    _on_links(
        "lossy-node",
        "of the packets of a node 3 % are lost, 2 % come twice, and a bit of 1 % is flipped",
        by="links.worsen",
        for_s=10.0,
        given={"lost": 0.03, "doubled": 0.02, "damaged": 0.01},
    ),
    _on_links(
        "narrow-node",
        "no more than 20 Mbit/s go to a node, and no more from it",
        by="links.worsen",
        effect=Effect.SUSPECTS,
        for_s=10.0,
        given={"kbit_s": 20_000},
    ),
    _on_links(
        "congest-node",
        "no more than 2 Mbit/s go to a node and from it, and of that 5 % are lost",
        by="links.worsen",
        effect=Effect.SUSPECTS,
        for_s=15.0,
        given={"kbit_s": 2_000, "lost": 0.05},
    ),
    Fault(
        "reset-connections",
        "all TCP connections of a member are reset; it lives, and so do its peers",
        "workers.reset",
        ground=Ground.NETWORK,
        aim=Aim.ANY,
        stalls=False,
    ),
    Fault(
        "kill-agent",
        "SIGKILL of the agent on one node, with which its worker must die",
        "nodes.end_agent",
        Effect.ENDS,
        ground=Ground.CLUSTER,
    ),
    _end_node("kill-node-0s", "SIGKILL of a whole node, which comes back at once"),
    _end_node("kill-node-1s", "SIGKILL of a whole node, which comes back after 1 s", for_s=1.0),
    _end_node("kill-node-10s", "SIGKILL of a whole node, which comes back after 10 s", for_s=10.0),
    _leave(
        "signal-node",
        "SIGTERM to every process of a node, whose workers leave; it comes back after 8 s",
        "nodes.stop_node",
        for_s=8.0,
        presets={"spot": 1},
    ),
    Fault(
        "freeze-node",
        "all that runs on a node stands still until the others have expelled it",
        "nodes.freeze_node",
        Effect.FREEZES,
        ground=Ground.CLUSTER,
        for_s=12.0,
    ),
    _leave(
        "drain-node",
        "an operator wants a node empty for 8 s; its workers leave between two steps",
        "nodes.drain_node",
        for_s=8.0,
    ),
    _leave(
        "preempt-node",
        "a job of a higher priority takes a node for 8 s; its workers leave between two steps",
        "nodes.preempt_node",
        for_s=8.0,
    ),
    _notice(
        "notice-node",
        "a cloud says that it takes a machine in 20 s, and does; its workers have left by then, and another one comes",
        given={"true": True},
    ),
    _notice("false-notice", "the same, and after 20 s it is taken back", given={"true": False}),
    Fault(
        "intrude",
        "somebody attends as the agent of a node, without the token of the job's place there: he is refused",
        "nodes.intrude",
        ground=Ground.CLUSTER,
        stalls=False,
    ),
    Fault(
        "kill-leader",
        "SIGKILL of the replica that leads; it comes back after 3 s",
        "nodes.end_leader",
        ground=Ground.CLUSTER,
        for_s=3.0,
        stops_service=True,
    ),
    _strike_etcd(
        "kill-etcd", "SIGKILL of one of three members of etcd; it comes back after 5 s", needs=Needs.STURDY_ETCD
    ),
    _strike_etcd(
        "kill-etcd-leader", "the same, of the one that leads", needs=Needs.STURDY_ETCD, given={"leader": True}
    ),
    _strike_etcd(
        "freeze-etcd-leader",
        "the one that leads stands still for 5 s",
        effect=Effect.FREEZES,
        given={"leader": True, "freeze": True},
    ),
    _lose_all("kill-all", "SIGKILL of all workers at one instant: the job goes on from what is kept"),
    Fault(
        "fresh-quorum",
        "SIGKILL of a member, and of all that hold the state while its replacement has none yet: the job goes on from "
        "what is kept, and never from the fresh worker",
        "nodes.lose_holders",
        Effect.ENDS,
        ground=Ground.CLUSTER,
        aim=Aim.HOLDERS,
        places=JOINING[:1],
        spark=True,
        presets={"replicas": 2},
    ),
    _damage(
        "corrupt-checkpoint",
        "one bit of the newest checkpoint is flipped, and all workers and copies in memory are lost",
        given={"damage": Damage.FLIPPED},
    ),
    _damage(
        "truncate-checkpoint", "the same, and half of a file of it is gone instead", given={"damage": Damage.TRUNCATED}
    ),
    _damage(
        "swap-checkpoint",
        "the same, and a file of it is that of the checkpoint before",
        given={"damage": Damage.SWAPPED},
    ),
    _damage("unlist-checkpoint", "the same, and it has no manifest any more", given={"damage": Damage.UNLISTED}),
    Fault("cpu-hog", "other processes want all cores, twice, for 5 s", "machine.hog", for_s=5.0),
    Fault(
        "disk-full",
        "the job directory's disk is full for 3 s (needs a small file system)",
        "machine.fill_disk",
        ground=Ground.MACHINE,
        for_s=3.0,
        usual=False,
    ),
)

CATALOGUE: Mapping[str, Fault] = {fault.name: fault for fault in ROWS}

UNKNOWN = Fault("", "of another release", "")
"""In place of a row, for what a journal names and this release has not."""
