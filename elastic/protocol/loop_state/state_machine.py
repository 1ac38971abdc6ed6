"""`step` passes every event to the one function that handles it, and asserts the arcs."""

from __future__ import annotations

from elastic.protocol.loop_state import events, loops, newcomer
from elastic.protocol.loop_state.state import ARCS, STANDINGS, LoopState, ScriptStage, Standing


def step(s: LoopState, event: events.ScriptEvent) -> events.Answer:
    """Apply one event. A mistake of the script is answered with Refuse and changes nothing; an event that cannot come
    here is a mistake of the caller.

    Raises AssertionError for a change that ARCS or STANDINGS does not allow.
    """
    if s.stage is ScriptStage.MISSED:
        return s, events.Miss(s.because)
    after, move = _handled(s, event)
    if after.stage is not s.stage and after.stage not in ARCS[s.stage]:
        assert after.stage is ScriptStage.MISSED and s.standing is not Standing.MEMBER, _told(s, event, after)
    if after.standing is not s.standing:
        assert after.standing in STANDINGS[s.standing], _told(s, event, after)
        assert s.stage is _where(s, after), _told(s, event, after)
    return after, move


def _where(s: LoopState, after: LoopState) -> ScriptStage:
    """The stage in which its standing may change so."""
    if s.standing is Standing.ASTRAY:
        return ScriptStage.BETWEEN
    begins = s.stage is ScriptStage.SETUP and after.standing is Standing.MEMBER
    return ScriptStage.SETUP if begins else ScriptStage.COPYING


def _told(s: LoopState, event: events.ScriptEvent, after: LoopState) -> str:
    return f"{event} in {s} leads to {after.stage}, {after.standing}"


def _handled(s: LoopState, event: events.ScriptEvent) -> events.Answer:
    match event:  # those of each step first
        case events.NextStep(over):
            return loops.next_step(s, over)
        case events.HandedOut():
            return loops.handed_out(s, event)
        case events.PassBegun():
            return loops.pass_begun(s, event)
        case events.RehearsalOver():
            return loops.rehearsal_over(s)
        case events.Reduced():
            return s._replace(stage=ScriptStage.REDUCED, pass_no=s.pass_no + 1), events.PROCEED
        case events.StepLeft():
            return loops.step_left(s)
        case events.StepWithdrawn():
            assert s.early, f"a step is withdrawn in {s}"
            return s._replace(stage=ScriptStage.BETWEEN, early_calls=0), events.PROCEED
        case events.Called():
            return loops.called(s)
        case events.CalledEarly():
            assert s.early, f"an early call in {s}"
            return s._replace(early_calls=s.early_calls + 1), events.PROCEED
        case events.SharedCalled():
            return loops.shared(s)
        case events.ResultHeld():
            return s._replace(stage=ScriptStage.TRYING), events.PROCEED
        case events.PassRepeated():
            return s._replace(stage=ScriptStage.COLLECTING), events.PROCEED
        case events.LoopBegun(loop):
            return loops.loop_begun(s, loop)
        case events.LoopEntered():
            return loops.loop_entered(s, event)
        case events.EpochBegun(epoch):
            return s._replace(stage=ScriptStage.BEFORE_STEPS, epoch=epoch), events.PROCEED
        case events.StepsBegun():
            return loops.steps_begun(s)
        case events.StepsOver():
            return s._replace(stage=ScriptStage.AFTER_STEPS), events.PROCEED
        case events.EpochOver():
            return loops.epoch_over(s)
        case events.LoopOver():
            return s._replace(stage=ScriptStage.OVER), events.PROCEED
        case _:
            return newcomer.joins(s, event)
