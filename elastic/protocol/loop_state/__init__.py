"""The life of a script in one worker: ``step(state, event) -> (state, move)``.

A worker runs one script, on one thread. This package decides where the script is in its loop, by whose results it goes
on, and what follows from a call that it makes. It knows neither tensors nor sockets nor other workers: whoever drives
the script posts what happens, and does what the answer, a *move*, says. All of a state is here; what the events carry
(a copy, a result, a reply) stays with who posts them.

Two things change, each by its own arcs (`ARCS`, `STANDINGS` in state.py), which every step asserts.

**Where the script is** (`ScriptStage`). The script decides that, by the calls that it makes:

    SETUP -> [SPARE] -> BEFORE_STEPS -> BETWEEN -> HANDED_OUT -> REHEARSING -> COLLECTING -> REDUCED -> BETWEEN ...
                             ^                                    |    ^   |        |   ^       |
                             |                                    |    |   v        v   |       |  another pass
                             +------- AFTER_STEPS <- BETWEEN      |    | COPYING -> TRYING      |
                                          |            |          |    +------------------------+
                                          +-> OVER  <--+

SPARE and COPYING are a newcomer's only. BEFORE_STEPS and AFTER_STEPS are in a loop over epochs only.

**Whether the script has the state of the job** (`Standing`). The members decide that, by what they answer:

    NEWCOMER --its copy is that of the pass in progress, and it is in the next list--> MEMBER
    NEWCOMER --its copy is older: it has got one result--> BEHIND --it has caught up, and is in the next list--> MEMBER
    NEWCOMER, BEHIND --its copy is of a step that it is not bound to--> ASTRAY --it has copied anew--> BEHIND

A script that begins with the job, or goes on from a checkpoint, is a MEMBER before its loop.

A newcomer's life. It runs the script as every worker does. Before its loop it asks for shared values only. At its loop
it waits for a place (SPARE), and then learns from any member in which epoch and step the members are. Its script gets
this step. The script's calls before the steps of the epoch, and its *early calls* between the hand-out of the step and
the first pass, get the replies that the members got. The first pass begins with a rehearsal: shards whose gradients are
thrown away. Then the newcomer copies the state (COPYING), and the copy replaces all that the script has done so far.
The members have gone on meanwhile, so the copy is mostly of a later step, which becomes the script's step.

This change of the step is wrong for a script that has used its step before the first pass. Such a script is *bound* to
its step: it has drawn random numbers, has read its place or `job.state`, or has made an early call. If the copy is of
another step, the script is ASTRAY. It goes through its own step to the end, with the results of the members, and
nothing that it does there counts. Between two steps it *copies anew*, before it does anything for the step of the new
copy. It then begins that step with the step's number, values and replies. In the first pass it loads the same copy once
more, because the copy already has the changes that the members' scripts have made before the pass.

A newcomer is MISSED if it cannot become a member any more: the epoch that it has learned of is over. The process ends,
and another one takes its place.

Who decides what:

    the script     when it comes to its loop, begins an epoch, a pass, or calls for all workers
    this package   whether it may; whether a call is run by all, or its reply is told; whether it is bound; what a copy
                   counts for; whether it is missed
    the members    whether the copy is in time (elastic/protocol/worker_state, elastic/protocol/membership)
    its driver     how: messages, tensors, random numbers

    state.py          where a script is, and which arcs there are
    events.py         what happens to it, and the moves that may follow
    state_machine.py  passes each event to the function that handles it; asserts the arcs
    loops.py          from its set-up to the end of its loop: epochs, steps, passes; who is told the reply of a call
    newcomer.py       from its copy to its place among the members
"""

from elastic.protocol.loop_state.events import (
    Admitted,
    AskEarly,
    AskShared,
    AwaitInvitation,
    Called,
    CalledEarly,
    Collect,
    CopiedAnew,
    CopyAnew,
    CopyArrived,
    CopyOffered,
    CountAsHolder,
    EndSteps,
    EpochBegun,
    EpochOver,
    GoAstray,
    HandedOut,
    HandOut,
    Join,
    JoinOver,
    LoadAgain,
    LoopBegun,
    LoopEntered,
    LoopOver,
    MembersLost,
    Miss,
    Mistake,
    Move,
    NextStep,
    PassBegun,
    PassRepeated,
    Proceed,
    RecallEarly,
    RecallReply,
    Reduced,
    Refuse,
    RehearsalOver,
    ResultHeld,
    ResultTaken,
    RunTogether,
    ScriptEvent,
    SharedCalled,
    StartTogether,
    StepLeft,
    StepsBegun,
    StepsOver,
    StepWithdrawn,
    WentAstray,
)
from elastic.protocol.loop_state.state import LoopKind, LoopState, ScriptStage, Standing
from elastic.protocol.loop_state.state_machine import step

__all__ = [
    "Admitted",
    "AskEarly",
    "AskShared",
    "AwaitInvitation",
    "Called",
    "CalledEarly",
    "Collect",
    "CopiedAnew",
    "CopyAnew",
    "CopyArrived",
    "CopyOffered",
    "CountAsHolder",
    "EndSteps",
    "EpochBegun",
    "EpochOver",
    "GoAstray",
    "HandOut",
    "HandedOut",
    "Join",
    "JoinOver",
    "LoadAgain",
    "LoopBegun",
    "LoopEntered",
    "LoopKind",
    "LoopOver",
    "LoopState",
    "MembersLost",
    "Miss",
    "Mistake",
    "Move",
    "NextStep",
    "PassBegun",
    "PassRepeated",
    "Proceed",
    "RecallEarly",
    "RecallReply",
    "Reduced",
    "Refuse",
    "RehearsalOver",
    "ResultHeld",
    "ResultTaken",
    "RunTogether",
    "ScriptEvent",
    "ScriptStage",
    "SharedCalled",
    "Standing",
    "StartTogether",
    "StepLeft",
    "StepWithdrawn",
    "StepsBegun",
    "StepsOver",
    "WentAstray",
    "step",
]
