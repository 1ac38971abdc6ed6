"""The job's state machine: ``step(group, event, now_s) -> (group, actions)``.

The leader of the rendezvous service owns one `Group`. Everything that decides who is a member lives in this package;
it knows no clock, socket or store. `become_*` functions (transitions.py) are the only places which change the state,
and each says why. A loss runs QUIESCING (everybody leaves the ring and reports) -> a committed record -> REBUILDING
-> RUNNING; a planned change is a record that members carry in their headers until it takes effect, and never aborts
anything.

    FORMING --enough workers--> REBUILDING --every ring up--> RUNNING or PAUSED (a step waits for workers)
       RUNNING, PAUSED, REBUILDING --a loss--> QUIESCING --committed--> REBUILDING
       QUIESCING --every copy is lost--> FORMING, of processes that go on from what nodes have kept, or CLOSED
       any --a member has finished--> CLOSING --all have--> CLOSED

    machine.py    each event to the function that knows what it means
    arrivals.py   announcements, formation      changes.py    joins and drains
    rings.py      up, broken, not built         losses.py     deaths, reports, what follows
    commits.py    a record is durable           ending.py     finished, failed
    checkpoints.py  who may move the pointer        invitations.py  set-ups that hang
    speed.py      shards follow it, stragglers
    fencing.py    those left out                deadlines.py  time is over
    surplus.py    more than are wanted
    stuck.py      those who get nowhere         revival.py    every copy is lost, and what was kept is the state
"""

from elastic.membership.actions import Action, Commit, End, Note, Point, Tell
from elastic.membership.deadlines import deadline_s
from elastic.membership.events import (
    AgentDown,
    AgentUp,
    CommitRefused,
    Committed,
    Elected,
    Event,
    PointerAt,
    Resized,
    Stopped,
    Tick,
)
from elastic.membership.group import Group, State, new
from elastic.membership.machine import advance, step
from elastic.membership.seen import Seen
from elastic.membership.status import status

__all__ = [
    "Action",
    "AgentDown",
    "AgentUp",
    "Commit",
    "CommitRefused",
    "Committed",
    "Elected",
    "End",
    "Event",
    "Group",
    "Note",
    "Point",
    "PointerAt",
    "Resized",
    "Seen",
    "State",
    "Stopped",
    "Tell",
    "Tick",
    "advance",
    "deadline_s",
    "new",
    "status",
    "step",
]
