"""The messages between workers, agents and the leader, as frozen values.

A *word* goes up (worker -> agent -> leader) and carries the generation it speaks of; an old word is ignored.
An *order* comes down and carries the term of the leader that gave it; an order of an older term is refused.
codec.py is the only translator between these and the wire.

    generation.py  the record of a generation: its members and its plan
    words.py       what workers and agents say
    orders.py      what the leader says
"""

from elastic.protocol.messages.generation import ANEW, Generation, Kind, Laggard, Member, Plan, Share
from elastic.protocol.messages.orders import (
    Close,
    Drain,
    EndRound,
    Fence,
    Home,
    Invite,
    Kill,
    Order,
    Pointed,
    Publish,
    Quiesce,
    Release,
)
from elastic.protocol.messages.words import (
    Announce,
    BuildFailedReport,
    CheckpointComplete,
    Corrupted,
    Doing,
    DrainOver,
    DrainWish,
    Failed,
    Finished,
    Left,
    Progress,
    Ready,
    Report,
    RingBrokenReport,
    RingState,
    RingUp,
    SlotGivenUp,
    Unreadable,
    Word,
    WorkerDead,
    WorkerFrozen,
)

__all__ = [
    "ANEW",
    "Announce",
    "BuildFailedReport",
    "CheckpointComplete",
    "Close",
    "Corrupted",
    "Doing",
    "Drain",
    "DrainOver",
    "DrainWish",
    "EndRound",
    "Failed",
    "Fence",
    "Finished",
    "Generation",
    "Home",
    "Invite",
    "Kill",
    "Kind",
    "Laggard",
    "Left",
    "Member",
    "Order",
    "Plan",
    "Pointed",
    "Progress",
    "Publish",
    "Quiesce",
    "Ready",
    "Release",
    "Report",
    "RingBrokenReport",
    "RingState",
    "RingUp",
    "Share",
    "SlotGivenUp",
    "Unreadable",
    "Word",
    "WorkerDead",
    "WorkerFrozen",
]
