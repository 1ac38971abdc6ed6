"""What happens to a script, and the moves of which a step of the machine asks one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from elastic.protocol.loop_state.state import LoopKind, LoopState

# -------------------------------------------------------------------------------------- the script, in its loop


@dataclass(frozen=True, slots=True)
class LoopBegun:
    """The script begins a loop over epochs, or over steps without epochs."""

    loop: LoopKind


@dataclass(frozen=True, slots=True)
class LoopEntered:
    """The script enters its loop in this step. resumed: as in LoopState."""

    epoch: int = 0
    step: int = 0
    epoch_start: int = 0
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class EpochBegun:
    epoch: int


@dataclass(frozen=True, slots=True)
class StepsBegun:
    """The script begins the loop over the steps of this epoch, or its loop without epochs."""


@dataclass(frozen=True, slots=True)
class NextStep:
    """The script asks for the next step. over: there is none in this loop over steps."""

    over: bool


@dataclass(frozen=True, slots=True)
class HandedOut:
    """The script gets a step."""

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PassBegun:
    """The script begins this pass of this step. read: since the hand-out it has read its place, or job.state. drew: it
    has drawn random numbers."""

    step: int
    pass_no: int
    read: bool = False
    drew: bool = False


@dataclass(frozen=True, slots=True)
class RehearsalOver:
    """No shard of this pass is left to rehearse."""


@dataclass(frozen=True, slots=True)
class PassRepeated:
    """The result does not hold, for all workers alike: the same pass is computed again."""


@dataclass(frozen=True, slots=True)
class ResultHeld:
    """The result of the pass is here, and a shard is tried before it is used."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """The result of the pass is in place."""


@dataclass(frozen=True, slots=True)
class StepLeft:
    """The script is done with its step."""


@dataclass(frozen=True, slots=True)
class StepWithdrawn:
    """The script gives its step back before the first pass. The next one that it gets has the same number."""


@dataclass(frozen=True, slots=True)
class StepsOver:
    """The loop over the steps of this epoch ends."""


@dataclass(frozen=True, slots=True)
class EpochOver:
    """The script asks for the next epoch, behind an epoch."""


@dataclass(frozen=True, slots=True)
class LoopOver:
    """The script's loop ends."""


# ------------------------------------------------------------------------------- calls of all workers


@dataclass(frozen=True, slots=True)
class SharedCalled:
    """The script asks for a value that all workers share from before the loop, and that this worker does not have."""


@dataclass(frozen=True, slots=True)
class Called:
    """The script makes a call that all workers make."""


@dataclass(frozen=True, slots=True)
class CalledEarly:
    """An early call, or a log() in its place, is done."""


# -------------------------------------------------------------------------------------------- a newcomer's copy


@dataclass(frozen=True, slots=True)
class CopyOffered:
    """A member is about to send the state of a pass in this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CopyArrived:
    """The state of the first pass of a step is complete here. It is asked what it counts for. called: the members have
    made early calls in that step. waited_for: they wait in that step until this newcomer is a member."""

    step: int
    called: bool = False
    waited_for: bool = False


@dataclass(frozen=True, slots=True)
class WentAstray:
    """The donor knows that the copy does not count, and keeps the results from there on."""


@dataclass(frozen=True, slots=True)
class ResultTaken:
    """A result that the members had before has come, for the script to go on with."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """This worker is a member: a generation with it took effect, or every member was lost and its copy is the state.
    Before its loop: it begins with the job."""


@dataclass(frozen=True, slots=True)
class JoinOver:
    """The newcomer goes on in the pass of this step, which may be another one than that it was handed out. result: the
    pass is over, and its result is here; False: it begins."""

    step: int
    epoch: int
    result: bool


@dataclass(frozen=True, slots=True)
class CopiedAnew:
    """Between two steps the state of this step, which is now the next one here, has come and is loaded."""

    step: int


@dataclass(frozen=True, slots=True)
class MembersLost:
    """Every member was lost while this worker copied anew."""


ScriptEvent: TypeAlias = (
    LoopBegun
    | LoopEntered
    | EpochBegun
    | StepsBegun
    | NextStep
    | HandedOut
    | PassBegun
    | RehearsalOver
    | PassRepeated
    | ResultHeld
    | Reduced
    | StepLeft
    | StepWithdrawn
    | StepsOver
    | EpochOver
    | LoopOver
    | SharedCalled
    | Called
    | CalledEarly
    | CopyOffered
    | CopyArrived
    | WentAstray
    | ResultTaken
    | Admitted
    | JoinOver
    | CopiedAnew
    | MembersLost
)


# ---------------------------------------------------------------------------------------------------- moves


@dataclass(frozen=True, slots=True)
class Proceed:
    """Nothing is to be done."""


@dataclass(frozen=True, slots=True)
class AwaitInvitation:
    """Wait until there is a place, and ask a member where the others are."""


@dataclass(frozen=True, slots=True)
class StartTogether:
    """Load the checkpoint from which the job goes on, if there is one, and compare the states of all members."""


@dataclass(frozen=True, slots=True)
class HandOut:
    """Hand out the next step."""


@dataclass(frozen=True, slots=True)
class CopyAnew:
    """Copy the state of the pass in progress, before a step is handed out."""


@dataclass(frozen=True, slots=True)
class EndSteps:
    """End the loop over steps."""


@dataclass(frozen=True, slots=True)
class LoadAgain:
    """Load the copy that was made anew once more: the members had made the changes that the script has made since."""


@dataclass(frozen=True, slots=True)
class Join:
    """Hold the state of a pass, and get its result."""


@dataclass(frozen=True, slots=True)
class Collect:
    """Begin the pass's operation with all members."""


@dataclass(frozen=True, slots=True)
class CountAsHolder:
    """The copy counts: the script goes on from that pass."""


@dataclass(frozen=True, slots=True)
class GoAstray:
    """The copy does not count: the script goes through that step without effect, and then copies anew."""


@dataclass(frozen=True, slots=True)
class RunTogether:
    """Run the call with all workers. keep: newcomers of this epoch need its reply. early: those of this step do."""

    keep: bool = False
    early: bool = False


@dataclass(frozen=True, slots=True)
class RecallReply:
    """The reply is that of the call which others, or an earlier run, have made before this epoch's steps."""


@dataclass(frozen=True, slots=True)
class AskEarly:
    """Ask a member for its reply to the early call, in this step or, if that is over, a later one."""


@dataclass(frozen=True, slots=True)
class RecallEarly:
    """The reply to the early call came with the copy."""


@dataclass(frozen=True, slots=True)
class AskShared:
    """Ask a member for its shared values."""


@dataclass(frozen=True, slots=True)
class Miss:
    """End this process: the newcomer cannot become a member. because: a sentence for the journal."""

    because: str


class Mistake(StrEnum):
    """What a script must not do."""

    SECOND_LOOP = "a second loop"
    SECOND_STEPS = "a second loop over the steps of an epoch"
    BEFORE_LOOP = "a call of all workers before the loop"
    IN_PASS = "a call of all workers inside a pass"
    IN_LOOP = "a new shared value inside the loop"
    PASS_OPEN = "a pass, or the end of a step, inside a pass"
    NO_PASS = "the end of a step without a pass"
    STEP_OVER = "a pass of a step that is over"
    STEPS_OVER = "a step of a loop that is over"


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the script that it must not do that; nothing has changed."""

    mistake: Mistake


Move: TypeAlias = (
    Proceed
    | AwaitInvitation
    | StartTogether
    | HandOut
    | CopyAnew
    | EndSteps
    | LoadAgain
    | Join
    | Collect
    | CountAsHolder
    | GoAstray
    | RunTogether
    | RecallReply
    | AskEarly
    | RecallEarly
    | AskShared
    | Miss
    | Refuse
)

Answer: TypeAlias = tuple[LoopState, Move]

PROCEED = Proceed()
