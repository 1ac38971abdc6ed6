"""Where a script is in its loop, and by whose results it goes on."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class ScriptStage(StrEnum):
    """Where a script is; ARCS says which stage may follow which."""

    SETUP = "setup"
    """Before its loop: it makes its models, and may ask for shared values."""
    SPARE = "spare"
    """The newcomer is at its loop, and waits until there is a place for it, and until it knows where the others are."""
    BEFORE_STEPS = "before the steps"
    """In an epoch, before its steps: replies to calls are kept for newcomers of this epoch."""
    BETWEEN = "between steps"
    """Its loop over steps has begun, and no step is in progress."""
    HANDED_OUT = "handed out"
    """It has a step whose first pass has not begun: calls are early, and may bind a newcomer."""
    REHEARSING = "rehearsing"
    """In a pass: what it computes is thrown away."""
    COPYING = "copying"
    """The newcomer waits in a pass for the state, and for the result of its operation."""
    COLLECTING = "collecting"
    """In a pass: its shards count, and those of the others come."""
    TRYING = "trying"
    """In a pass whose result is here: before it is used, the script computes one shard that is thrown away."""
    REDUCED = "reduced"
    """The gradients of all shards are in place; the script steps its optimizer, or begins another pass."""
    AFTER_STEPS = "after the steps"
    """The steps of its epoch are over."""
    OVER = "over"
    """Its loop is over: it may still evaluate and save."""
    MISSED = "missed"
    """The newcomer cannot become a member any more."""


class Standing(StrEnum):
    """Whether the state of the job is here; STANDINGS says which may follow which."""

    MEMBER = "member"
    NEWCOMER = "newcomer"
    """It has not got the state yet."""
    BEHIND = "behind"
    """It has an older state than the members, and takes over their results until it has caught up."""
    ASTRAY = "astray"
    """It takes over results as well, but did something for another step: nothing of what it computes will stay."""


class LoopKind(StrEnum):
    """Which loop the script has entered; a newcomer enters the only one there is."""

    NONE = "none"
    EPOCHS = "epochs"
    BARE = "steps"


ARCS: dict[ScriptStage, frozenset[ScriptStage]] = {
    ScriptStage.SETUP: frozenset({ScriptStage.SPARE, ScriptStage.BEFORE_STEPS, ScriptStage.BETWEEN}),
    ScriptStage.SPARE: frozenset({ScriptStage.BEFORE_STEPS, ScriptStage.BETWEEN}),
    ScriptStage.BEFORE_STEPS: frozenset({ScriptStage.BETWEEN, ScriptStage.AFTER_STEPS, ScriptStage.OVER}),
    ScriptStage.BETWEEN: frozenset({ScriptStage.HANDED_OUT, ScriptStage.AFTER_STEPS, ScriptStage.OVER}),
    ScriptStage.HANDED_OUT: frozenset({ScriptStage.REHEARSING, ScriptStage.BETWEEN}),
    ScriptStage.REHEARSING: frozenset({ScriptStage.COPYING, ScriptStage.COLLECTING}),
    ScriptStage.COPYING: frozenset({ScriptStage.COLLECTING, ScriptStage.TRYING}),
    ScriptStage.COLLECTING: frozenset({ScriptStage.TRYING, ScriptStage.REDUCED}),
    ScriptStage.TRYING: frozenset({ScriptStage.COLLECTING, ScriptStage.REDUCED}),
    ScriptStage.REDUCED: frozenset({ScriptStage.REHEARSING, ScriptStage.BETWEEN}),
    ScriptStage.AFTER_STEPS: frozenset({ScriptStage.BEFORE_STEPS, ScriptStage.OVER}),
    ScriptStage.OVER: frozenset(),
    ScriptStage.MISSED: frozenset(),
}
"""Stage -> the stages that may follow. Besides, every stage of a script that is no member may become MISSED."""

STANDINGS: dict[Standing, frozenset[Standing]] = {
    Standing.MEMBER: frozenset(),
    Standing.NEWCOMER: frozenset({Standing.BEHIND, Standing.ASTRAY, Standing.MEMBER}),
    Standing.BEHIND: frozenset({Standing.ASTRAY, Standing.MEMBER}),
    Standing.ASTRAY: frozenset({Standing.BEHIND}),
}
"""Standing -> the standings that may follow, while the script is COPYING. Besides, a worker that begins with the job
becomes a MEMBER in its SETUP, and one that is ASTRAY is BEHIND again between two steps."""

_IN_PASS = frozenset({ScriptStage.REHEARSING, ScriptStage.COPYING, ScriptStage.COLLECTING, ScriptStage.TRYING})
_IN_STEP = _IN_PASS | {ScriptStage.HANDED_OUT, ScriptStage.REDUCED}
_BEFORE_LOOP = frozenset({ScriptStage.SETUP, ScriptStage.SPARE})


class LoopState(NamedTuple):
    """A tuple, because a changed copy of it costs a third of a dataclass's, and each step makes several."""

    stage: ScriptStage = ScriptStage.SETUP
    standing: Standing = Standing.MEMBER
    loop: LoopKind = LoopKind.NONE
    epoch: int = 0
    step: int = 0
    """The job's number of the step in progress, or of the next one."""
    pass_no: int = 0
    """The number in its step of the pass in progress, or of the next one."""
    epoch_start: int = 0
    """The first step of this epoch, or of a loop without epochs."""
    resumed: bool = False
    """Whether an earlier run of the job has done what precedes the steps of this epoch."""
    early_calls: int = 0
    """Calls in this step before its first pass."""
    bound: bool = False
    """Whether what a newcomer did before the first pass of this step holds for this step only."""
    loads_again: bool = False
    """Whether the copy that was made anew between two steps is to be loaded once more in the first pass."""
    because: str = ""
    """Why the newcomer is MISSED."""

    @property
    def joining(self) -> bool:
        """Whether this is a newcomer without the state."""
        return self.standing is Standing.NEWCOMER

    @property
    def behind(self) -> bool:
        """Whether this script gets all results from the members, which have had them before."""
        return self.standing in (Standing.BEHIND, Standing.ASTRAY)

    @property
    def elsewhere(self) -> bool:
        """Whether others, or an earlier run, have done what precedes this epoch's steps."""
        return self.standing is Standing.NEWCOMER or self.resumed

    @property
    def entered(self) -> bool:
        """Whether the script is in its loop, or behind it."""
        return self.stage not in _BEFORE_LOOP

    @property
    def early(self) -> bool:
        """Whether a step is handed out whose first pass has not begun."""
        return self.stage is ScriptStage.HANDED_OUT

    @property
    def in_step(self) -> bool:
        return self.stage in _IN_STEP

    @property
    def in_pass(self) -> bool:
        return self.stage in _IN_PASS

    @property
    def is_over(self) -> bool:
        return self.stage is ScriptStage.OVER

    @property
    def in_epochs(self) -> bool:
        """Whether the script is in a loop over epochs."""
        return self.loop is LoopKind.EPOCHS and self.stage is not ScriptStage.OVER

    def epoch_of(self, step_epoch: int) -> int:
        """The epoch of a step whose data are of `step_epoch`. In a loop over epochs only EpochBegun changes the epoch:
        a framework's training loop is one epoch of the job, and goes over its data in epochs of its own."""
        return self.epoch if self.loop is LoopKind.EPOCHS else step_epoch

    @property
    def shared_epoch(self) -> int:
        """The epoch as far as newcomers are bound to it. A loop without epochs is one epoch, number 0: newcomers may
        join across its passes over the data."""
        return self.epoch if self.in_epochs else 0
