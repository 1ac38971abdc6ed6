"""I5 to I10: every step once, on every replica the same, with the same samples and bits as if nothing had happened."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from chaos_tests.checkers.history import History, HistoryStep, Line, Run, every_kind_came, injected
from chaos_tests.checkers.verdict import CheckerVerdict, broken, first_broken, holds, not_applicable, unknown
from elastic.protocol import local_phase, outer_round

IDENTITY = ("step", "epoch", "lr", "scalars", "samples")
"""What is the same in every run of a job, whatever died or joined."""

WAITS_FOR_NOBODY = "no step waits for slow and dead workers, so its result depends on who was late and who died"

DISAGREED = 5
"""Exit code of a job whose workers differ."""


def total_order(history: History) -> CheckerVerdict:
    """I5: the ledger holds 0, 1, 2, ... without gap or repeat, as far as the quiet run went."""
    run = history.faulty
    if (differ := _parts_differ(run)) is not None:
        return differ
    if not run.steps:
        return unknown("no step was applied")
    ends = _ends_early(history)
    return first_broken((*_disorder(run), *ends), holds(f"{len(run.steps)} steps, each once, in order"))


def _parts_differ(run: Run) -> CheckerVerdict | None:
    """That the ledgers of two nodes contradict each other; None: they do not."""
    told = next(run.of("ledgers_differ"), None)
    return None if told is None else broken(f"the ledgers of nodes differ: {told.line['because']}", told.at)


def _disorder(run: Run) -> Iterator[CheckerVerdict]:
    for place, step in enumerate(run.steps):
        if step.number != place:
            yield broken(f"line {place + 1} of the ledger is that of step {step.number}", step.at)


def _ends_early(history: History) -> Iterator[CheckerVerdict]:
    here, there = len(history.faulty.steps), len(history.quiet.steps)
    if here == there or _has_phases(history):  # each of which ends when somebody comes or goes
        return
    first = [run.steps[0].line.get("epoch") if run.steps else None for run in (history.faulty, history.quiet)]
    hint = ""
    if None not in first and first[0] != first[1]:
        hint = (
            f". The script began in epoch {first[0]}, and in the quiet run in epoch {first[1]}: it has found what the "
            "quiet run left, such as a snapshot of its own; let it begin anew, or write elsewhere, in each run"
        )
    yield broken(f"{here} steps were applied, {there} in the quiet run{hint}", history.faulty.steps[-1].at)


def replicas(history: History) -> CheckerVerdict:
    """I6: no two members ever differed, and all that came to the end have the same state."""
    run = history.faulty
    if (differ := _parts_differ(run)) is not None:
        return differ
    if run.result is None:
        return unknown("the job did not end by itself")
    if run.result["exit_code"] == DISAGREED:
        said = [event.at for event in run.of("ledger_broken")]
        return broken(f"the job ended because workers differ: {_sentence(run.result['because'])}", "result.json", *said)
    finished = list(run.of("finished"))
    if not finished:
        return unknown("no member came to the end")
    first = finished[0]
    for event in finished:
        if event.line["digest"] != first.line["digest"]:
            return broken(f"{first.worker} and {event.worker} end with other states", first.at, event.at)
    return holds(f"{len(finished)} members end with {str(first.line['digest'])[:16]}, and no step differed")


def continuity(history: History) -> CheckerVerdict:
    """I7: the first step of each generation is that of the quiet run."""
    run = history.faulty
    firsts = [
        step
        for before, step in zip((None, *run.steps), run.steps, strict=False)
        if before is None or step.generation != before.generation
    ]
    if not history.quiet.steps:
        return unknown("there is no quiet run to compare with")
    if _waits_for_nobody(history):
        return not_applicable(WAITS_FOR_NOBODY)
    if len(firsts) < 2:
        never = "the generation never changed while steps were applied"
        return unknown(never) if _had_to_change(run) else not_applicable(f"{never}, and no fault was to change it")
    return first_broken(_differences(history, firsts), holds(f"{len(firsts)} generations go on where the last ended"))


def _had_to_change(run: Run) -> bool:
    begun_ns = next((event.t_ns for event in run.of("steps_seen")), 0)
    changes = (event for event in run.of("committed") if event.t_ns > begun_ns)
    return not every_kind_came(run) or any(fault.lethal for fault in injected(run.events)) or any(changes)


def _differences(history: History, steps: list[HistoryStep]) -> Iterator[CheckerVerdict]:
    quiet = {step.number: step for step in history.quiet.steps}
    for step in steps:
        expected = quiet.get(step.number)
        if expected is None:
            yield broken(f"step {step.number} is not in the quiet run", step.at)
        elif (field := first_difference(step.line, expected.line)) is not None:
            because = f"step {step.number}, generation {step.generation}: {field} differs from the quiet run's"
            yield broken(because, step.at, f"quiet/{expected.at}")


def first_difference(one: Line, other: Line) -> str | None:
    """The first field in which two lines of a step are not the same, bit for bit."""
    # As text, because 0.0 == -0.0 and 1 == 1.0 while their bits differ.
    return next((field for field in IDENTITY if _text(one.get(field)) != _text(other.get(field))), None)


def exactly_once(history: History) -> CheckerVerdict:
    """I8: an epoch's applied steps hold each sample as often as the quiet run's: once, but for a padded tail."""
    if not history.faulty.steps or not history.quiet.steps:
        return unknown("there are no steps to compare")
    if _has_phases(history):
        return _updates_lost(history.faulty)
    if _draws_itself(history):
        return not_applicable("the script draws its samples itself, so the ledger does not know them")
    return first_broken(_miscounted(history), holds("every epoch holds each sample as often as planned"))


def _updates_lost(run: Run) -> CheckerVerdict:
    """A worker that does not wait has one update in flight. What others have acknowledged is lost with two of them, or
    with one if who has left takes its place again."""
    back = _taken_back(run)
    gone = {event.worker for event in run.of("member_lost", "worker_lost", "expelled")}
    lost = sum(local_phase.told_of(step.line).get("lost_updates", 0.0) for step in run.steps)
    for event in run.of("pieces_fell_back"):
        if len(gone) < (1 if event.worker in back else 2):
            return broken(f"pieces fell back, and {len(gone)} workers were lost", event.at)
    if lost > len(gone) and not list(run.of("pieces_fell_back")):
        return broken(f"{lost:g} updates were lost with {len(gone)} workers", run.steps[-1].at)
    return holds(f"{lost:g} updates were lost with {len(gone)} workers, and their inner steps made again")


def _taken_back(run: Run) -> set[str]:
    """Workers that were no members any more, as they had left as planned, and are members again: all that were to go on
    without them have died."""
    left, back = set[str](), set[str]()
    for before, after in pairwise(sorted(run.of("committed"), key=lambda event: event.generation)):
        left |= set(before.line["members"]).difference(after.line["members"])
        if not set(before.line["members"]).intersection(after.line["members"]):  # else a plan that was given up
            back |= left.intersection(after.line["members"])
    return back


def _miscounted(history: History) -> Iterator[CheckerVerdict]:
    found, planned = _samples(history.faulty), _samples(history.quiet)
    for epoch in sorted({*found, *planned}):
        here, there = found.get(epoch, Counter()), planned.get(epoch, Counter())
        if here != there:
            sample = next(iter({**(here - there), **(there - here)}))
            yield broken(f"epoch {epoch}: sample {sample} {here[sample]} times, planned {there[sample]} times")


def _samples(run: Run) -> dict[int, Counter[str]]:
    """epoch -> how often each sample was in an applied step; a shard known by its hash counts as one sample."""
    counted: dict[int, Counter[str]] = {}
    for step in run.steps:
        counts = counted.setdefault(int(step.line["epoch"]), Counter())
        for shard in step.line["samples"]:
            counts.update(map(str, shard) if isinstance(shard, list) else [_text(shard)])
    return counted


def global_batch(history: History) -> CheckerVerdict:
    """I9: samples in a step and learning rate are functions of the step alone, not of the world."""
    if not history.faulty.steps or not history.quiet.steps:
        return unknown("there are no steps to compare")
    otherwise = holds("batch and learning rate are those of the quiet run in every step")
    if _has_phases(history):
        return not_applicable(WAITS_FOR_NOBODY)
    if _draws_itself(history):
        otherwise = not_applicable(
            "the script draws its samples itself, so the ledger does not know how many; the learning rate is that of "
            "the quiet run in every step"
        )
    return first_broken(_resized(history), otherwise)


def _waits_for_nobody(history: History) -> bool:
    rounds = any(outer_round.has_quorum(step.line) for run in (history.faulty, history.quiet) for step in run.steps)
    return rounds or _has_phases(history)


def _has_phases(history: History) -> bool:
    """Whether workers trained without waiting for each other at all."""
    return any(local_phase.told_of(step.line) for run in (history.faulty, history.quiet) for step in run.steps)


def _draws_itself(history: History) -> bool:
    """Whether neither run knows its samples. If one of the two does, they are compared."""
    return not any(step.line["samples"] for run in (history.faulty, history.quiet) for step in run.steps)


def _resized(history: History) -> Iterator[CheckerVerdict]:
    quiet = {step.number: step for step in history.quiet.steps}
    for step in history.faulty.steps:
        expected = quiet.get(step.number)
        if expected is None:
            yield broken(f"step {step.number} is not in the quiet run", step.at)
        elif _batch(step) != _batch(expected):
            because = f"step {step.number} has {_batch(step)} samples, {_batch(expected)} in the quiet run"
            yield broken(because, step.at, f"quiet/{expected.at}")
        elif _text(step.line["lr"]) != _text(expected.line["lr"]):
            yield broken(f"step {step.number} has another learning rate", step.at, f"quiet/{expected.at}")


def _batch(step: HistoryStep) -> int:
    return sum(len(shard) if isinstance(shard, list) else int(shard.get("n", 1)) for shard in step.line["samples"])


def same_maths(history: History) -> CheckerVerdict:
    """I10: the final state and every logged scalar are those of the quiet run, bit for bit."""
    found, expected = history.faulty.result, history.quiet.result
    if found is None or expected is None or not expected["digest"]:
        return unknown("a run has no final digest")
    if _waits_for_nobody(history):
        return not_applicable(WAITS_FOR_NOBODY)
    if found["digest"] != expected["digest"]:
        where = next(_differences(history, list(history.faulty.steps)), None)
        first = f"; first: {where.because}" if where is not None else "; no logged value differs"
        because = f"digest {str(found['digest'])[:16]}, quiet run {str(expected['digest'])[:16]}{first}"
        return broken(because, "result.json", *(where.at if where is not None else ()))
    otherwise = holds(f"digest {str(found['digest'])[:16]} and all logged values are those of the quiet run")
    return first_broken(_differences(history, list(history.faulty.steps)), otherwise)


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def _sentence(text: object) -> str:
    return str(text).partition("\n")[0]
