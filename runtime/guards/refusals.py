"""What a script does is told to loop_state; what a script is told when that refuses it."""

from __future__ import annotations

from elastic import errors
from elastic.protocol.loop_state import LoopState, Mistake, Move, Refuse, ScriptEvent
from runtime.session import ScriptLoop


def post(script: ScriptLoop, event: ScriptEvent, call: str = "") -> Move:
    """What follows from what has happened. call: what the script has called, without `job.`. Raises UsageError for a
    mistake of the script, JoinMissed."""
    move = script.post(event)
    if isinstance(move, Refuse):
        raise refusal(move.mistake, script.at, call)
    return move


def place_of(at: LoopState) -> str:
    """The pass in progress, or the next one, in words: "pass 0 of step 7"."""
    return f"pass {at.pass_no} of step {at.step}"


def refusal(mistake: Mistake, at: LoopState, call: str = "") -> errors.UsageError:
    """The error for a mistake of a script that is there. call: what it has called, without `job.`."""
    match mistake:
        case Mistake.SECOND_LOOP:
            return _second_loop(f"job.{call}")
        case Mistake.SECOND_STEPS:
            return _second_loop(f"a second job.steps() in epoch {at.epoch}")
        case Mistake.BEFORE_LOOP:
            return errors.UsageError(
                f"job.{call} came before the loop, where a replacement that joins later would be alone with it. Call "
                "it inside `for epoch in job.epochs(n):`, or after the loop."
            )
        case Mistake.IN_PASS:
            return errors.UsageError(f"job.{call} was called in {place_of(at)}; call it behind the inner loop")
        case Mistake.IN_LOOP:
            return errors.UsageError(
                f"job.{call} came after the loop had begun, where a newcomer would not know its value. Move it before "
                "the loop, or use job.once(fn), whose value is of its moment."
            )
        case Mistake.PASS_OPEN:
            return errors.NoGradient(
                f"{place_of(at)} was left before its gradients were reduced: `break`, `return` or next() instead of a "
                "whole `for batch in step`. The other shards would be missing. Let the inner loop run to its end; "
                "step.skip() leaves one shard out, job.stop() ends the training after this step."
            )
        case Mistake.NO_PASS:
            return errors.NoGradient(
                f"step {at.step} ended without a pass over its shards. Write `for batch in step:` inside `for step in "
                "job.steps(...)`, also in steps that only accumulate."
            )
        case Mistake.STEP_OVER:
            return errors.UsageError(
                f"a pass of an earlier step was begun, and the job is at step {at.step}. A step is over when the next "
                "one is asked for: iterate over each step inside `for step in job.steps(...)`"
            )
        case Mistake.STEPS_OVER:
            return errors.UsageError(
                f"a step was asked of an earlier job.steps(), and the script is in epoch {at.epoch} {at.stage}. Call "
                "job.steps(...) in each epoch, and iterate over what it returns there"
            )


def _second_loop(what: str) -> errors.SecondLoop:
    return errors.SecondLoop(
        f"{what} came after the script's first loop: a replacement that joins later could not tell which one to enter. "
        "Write one `for epoch in job.epochs(n)` loop, with one `for step in job.steps(...)` loop in it."
    )
