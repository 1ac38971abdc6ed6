"""From a script's set-up to the end of its loop: epochs, steps, passes, and calls of all workers between passes."""

from __future__ import annotations

from elastic.protocol.loop_state import events
from elastic.protocol.loop_state.events import PROCEED, Mistake
from elastic.protocol.loop_state.newcomer import missed
from elastic.protocol.loop_state.state import LoopKind, LoopState, ScriptStage, Standing


def loop_begun(s: LoopState, loop: LoopKind) -> events.Answer:
    if s.loop is not LoopKind.NONE:
        return s, events.Refuse(Mistake.SECOND_LOOP)
    if s.joining:
        return s._replace(loop=loop, stage=ScriptStage.SPARE), events.AwaitInvitation()
    return s._replace(loop=loop), events.StartTogether()


def loop_entered(s: LoopState, event: events.LoopEntered) -> events.Answer:
    stage = ScriptStage.BEFORE_STEPS if s.loop is LoopKind.EPOCHS else ScriptStage.BETWEEN
    return s._replace(
        stage=stage, epoch=event.epoch, step=event.step, epoch_start=event.epoch_start, resumed=event.resumed
    ), PROCEED


def steps_begun(s: LoopState) -> events.Answer:
    """The place of the first step: others, or an earlier run, know it if they have begun these steps."""
    begins = ScriptStage.BEFORE_STEPS if s.loop is LoopKind.EPOCHS else ScriptStage.BETWEEN
    if s.stage is not begins:
        return s, events.Refuse(Mistake.SECOND_STEPS)
    epoch_start = s.epoch_start if s.elsewhere else s.step
    return s._replace(stage=ScriptStage.BETWEEN, epoch_start=epoch_start, resumed=False), PROCEED


def next_step(s: LoopState, over: bool) -> events.Answer:
    if s.stage is not ScriptStage.BETWEEN:
        return s, events.Refuse(Mistake.STEPS_OVER)
    if s.standing is not Standing.ASTRAY:
        return s, events.EndSteps() if over else events.HandOut()
    if over:
        return missed(s, "the steps ended before this newcomer had copied the state of one that it was at")
    return s, events.CopyAnew()


def handed_out(s: LoopState, event: events.HandedOut) -> events.Answer:
    return s._replace(stage=ScriptStage.HANDED_OUT, step=event.step, epoch=s.epoch_of(event.epoch)), PROCEED


def pass_begun(s: LoopState, event: events.PassBegun) -> events.Answer:
    """A newcomer that has used its step before the first pass is bound to it."""
    if s.in_pass:
        return s, events.Refuse(Mistake.PASS_OPEN)
    if not s.in_step or (event.step, event.pass_no) != (s.step, s.pass_no):
        return s, events.Refuse(Mistake.STEP_OVER)
    if s.pass_no > 0 or s.standing is Standing.MEMBER:
        return s._replace(stage=ScriptStage.REHEARSING), PROCEED
    bound = event.read or event.drew or s.early_calls > 0
    begun = s._replace(stage=ScriptStage.REHEARSING, bound=bound, loads_again=False)
    return begun, events.LoadAgain() if s.loads_again else PROCEED


def rehearsal_over(s: LoopState) -> events.Answer:
    """Newcomers enter in the first pass of a step. One that is behind takes over the results of the other passes as
    those of all operations."""
    if s.standing is Standing.MEMBER or s.pass_no > 0:
        return s._replace(stage=ScriptStage.COLLECTING), events.Collect()
    return s._replace(stage=ScriptStage.COPYING), events.Join()


def step_left(s: LoopState) -> events.Answer:
    if s.in_pass:
        return s, events.Refuse(Mistake.PASS_OPEN)
    if s.stage is ScriptStage.HANDED_OUT:
        return s, events.Refuse(Mistake.NO_PASS)
    return s._replace(stage=ScriptStage.BETWEEN, step=s.step + 1, pass_no=0, early_calls=0, bound=False), PROCEED


def epoch_over(s: LoopState) -> events.Answer:
    if s.joining:
        return missed(s, f"epoch {s.epoch} ended before this newcomer had copied the state")
    return s._replace(stage=ScriptStage.AFTER_STEPS), PROCEED


def called(s: LoopState) -> events.Answer:
    """A call between passes. Calls before an epoch's steps, and early ones, are such that a newcomer can be told."""
    if s.in_pass:
        return s, events.Refuse(Mistake.IN_PASS)
    if not s.entered:
        return s, events.Refuse(Mistake.BEFORE_LOOP)
    before_steps = s.loop is LoopKind.EPOCHS and s.stage is ScriptStage.BEFORE_STEPS
    if s.joining and not (before_steps or s.early):
        return missed(s, "the loop ended before this newcomer had copied the state")
    if s.early and s.joining:
        return s, events.AskEarly()
    if s.early and s.loads_again:
        return s, events.RecallEarly()
    if s.elsewhere:
        return s, events.RecallReply()
    return s, events.RunTogether(keep=before_steps, early=s.early)


def shared(s: LoopState) -> events.Answer:
    if s.in_pass:
        return s, events.Refuse(Mistake.IN_PASS)
    if s.entered:
        return s, events.Refuse(Mistake.IN_LOOP)
    return s, events.AskShared() if s.joining else events.RunTogether()
