"""The job's state machine: ``step(group, event, now_s) -> (group, actions)``.

The leader of the rendezvous service owns one `Group`. This package decides who is a member; it knows no clock, socket
or store. Only the `become_*` functions (transitions.py) change the state, and each says why. A loss runs QUIESCING (all
members leave the ring and report) -> a committed record -> REBUILDING -> RUNNING. A planned change is a record that
members carry in their headers until it takes effect; it never aborts a ring.

    FORMING --enough workers--> REBUILDING --every ring up--> RUNNING or PAUSED (a step waits for workers)
       RUNNING, PAUSED, REBUILDING --a loss--> QUIESCING --committed--> REBUILDING
          QUIESCING --every copy is lost--> FORMING, with processes that go on from what nodes have kept, or CLOSED
       any --a member has finished--> CLOSING --all have--> CLOSED

Each worker has a stage (`Stage` in roster.py), and only these may follow each other; `named` to `ready` are newcomers:

    from                     to                     because
    named                    announced to ready     its agent says how far it is
    announced                invited                there is a place for it
    invited                  announced              its agent came back and knows of no invitation
    announced, invited       ready                  it asks to be admitted; the leader that invited it may be gone
    ready                    invited                a loss generation was formed without it, so it has to ask again
    newcomer                 refused                its numerics differ, its set-up hangs, or it gets no copy
    newcomer, refused        member                 it says that it has entered a generation
    newcomer                 member                 a durable form or loss generation lists it
    member                   announced to ready     its agent came back and says that it has entered none
    member                   finished               it has left the training loop
    member                   left                   it drained, and those that stay have its last result
    newcomer, refused        expelled               every copy of the state is lost: new processes take over
    member                   expelled               a generation was formed without it
    expelled                 killed                 fence_grace_s is over, and a later generation has completed a step
    killed                   expelled               it came back all the same

    state_machine.py    each event to the function that knows what it means; deadlines; what follows a durable record
    events.py           what happens, and what a step asks the leader to do
    group.py            what the leader knows: the chain of records, workers, nodes, rings
    roster.py           every worker, as its latest words describe it, and its stage
    transitions.py      every change of state; how a generation is written down and told
    formation.py        the leader's start, workers that announce themselves, the first generation
    loss.py             who is gone, what survivors report, the generation that follows
    planned_changes.py  joins and drains; more members than are wanted
    newcomers.py        newcomers whose set-up or copy gets nowhere
    ring_reports.py     rings that are up, broken, or not to be built
    partitions.py       nodes of which nothing is heard
    hangs.py            members that live and get nowhere
    stragglers.py       shards follow speed; a straggler gives its place to a spare
    verdicts.py         what repeated failures prove: the job ends, or a node is left
    restore.py          every copy is lost: what was kept becomes the state
    closing.py          all have finished, or the job has failed
    status.py           what `elastic status` shows
"""

from elastic.protocol.membership.events import (
    Action,
    AgentDown,
    AgentUp,
    Commit,
    CommitRefused,
    Committed,
    Elected,
    End,
    Event,
    GroupTick,
    Note,
    Point,
    PointerAt,
    Resized,
    Stopped,
    Tell,
)
from elastic.protocol.membership.group import Group, State
from elastic.protocol.membership.state_machine import advance, deadline_s
from elastic.protocol.membership.status import status

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
    "GroupTick",
    "Note",
    "Point",
    "PointerAt",
    "Resized",
    "State",
    "Stopped",
    "Tell",
    "advance",
    "deadline_s",
    "status",
]
