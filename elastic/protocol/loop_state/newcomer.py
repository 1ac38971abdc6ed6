"""A newcomer, from its copy to its place among the members."""

from __future__ import annotations

from elastic.protocol.loop_state import events
from elastic.protocol.loop_state.events import PROCEED
from elastic.protocol.loop_state.state import LoopState, ScriptStage, Standing


def missed(s: LoopState, because: str) -> events.Answer:
    """This process cannot become a member; another one takes its place."""
    return s._replace(stage=ScriptStage.MISSED, because=because), events.Miss(because)


def joins(s: LoopState, event: events.ScriptEvent) -> events.Answer:
    """What comes while this worker is no member."""
    match event:
        case events.CopyOffered(epoch):
            if epoch != s.shared_epoch:
                return missed(s, f"epoch {s.shared_epoch} ended before this newcomer had copied the state")
            return s, PROCEED
        case events.CopyArrived():
            return _copy_arrived(s, event)
        case events.WentAstray():
            return s._replace(standing=Standing.ASTRAY), PROCEED
        case events.ResultTaken():
            assert s.standing is not Standing.MEMBER, f"a member takes over a result in {s}"
            taken = s._replace(standing=Standing.BEHIND) if s.standing is Standing.NEWCOMER else s
            return taken, PROCEED
        case events.Admitted():
            return s._replace(standing=Standing.MEMBER), PROCEED
        case events.JoinOver(step, epoch, result):
            stage = ScriptStage.TRYING if result else ScriptStage.COLLECTING
            return s._replace(stage=stage, step=step, epoch=s.epoch_of(epoch)), PROCEED
        case events.CopiedAnew(step):
            return s._replace(standing=Standing.BEHIND, step=step, loads_again=True), PROCEED
        case events.MembersLost():
            return missed(s, "all members were lost before this newcomer had copied the state")
    raise AssertionError(f"{event} in {s}")


def _copy_arrived(s: LoopState, event: events.CopyArrived) -> events.Answer:
    """What a copy counts for. If the members have made early calls in the step of the copy, a script that began
    another step lacks their replies. So these calls bind the script to its step like calls of its own."""
    if event.step == s.step or not (s.bound or event.called):
        return s, events.CountAsHolder()
    if event.waited_for:
        return missed(s, f"step {event.step} waits for this newcomer, which is bound to step {s.step}")
    return s, events.GoAstray()
