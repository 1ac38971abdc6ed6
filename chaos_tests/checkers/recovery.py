"""I11 to I13, I15 and I16: found in time, back in time, nobody else disturbed, nothing left, and faults there were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TypeAlias

from chaos_tests.checkers.history import Event, History, Injected, Run, every_kind_came, injected
from chaos_tests.checkers.verdict import CheckerVerdict, broken, first_broken, holds, not_applicable, unknown
from chaos_tests.scenario.faults import AGENT, Effect

AGAIN_S = 3.0
"""After a service was killed or thawed, until an agent attends a leader again: a lease of 2 s, and a process begins."""
EXCUSED_S = 15.0
"""How long one loss may take, however many services stood still one after the other."""
AFTER_S = 30.0
"""After a fault that its worker survives has ended: who ends or is lost still later does so for another reason."""
LOSSES = ("member_lost", "worker_lost", "expelled")
LIVE = (Effect.FREEZES, Effect.ISOLATES, Effect.SUSPECTS)
"""Effects of faults whose targets go on living, and may be declared lost. The targets of other faults that leave them
alive may not be declared lost."""


def detection(history: History) -> CheckerVerdict:
    """I11: each lost member is noted in time, and nobody is declared lost to whom nothing happened."""
    run = history.faulty
    faults = injected(run.events)
    found = (*_late(history, faults), *_false_alarms(history, faults), *_not_in_order(history, faults))
    noted = sum(fault.lethal for fault in faults)
    if not noted and not any(_expels(history, fault) or fault.row.effect is Effect.LEAVES for fault in faults):
        nothing = "no fault that has to be detected was injected"
        return first_broken(found, not_applicable(nothing) if every_kind_came(run) else unknown(nothing))
    return first_broken(found, holds(f"{noted} faults that end workers noted in time, nobody else declared lost"))


def _late(history: History, faults: tuple[Injected, ...]) -> Iterator[CheckerVerdict]:
    run = history.faulty
    members = {worker for event in run.of("committed") for worker in event.line["members"]}
    for fault in faults:
        limit_s = fault.noted_s or (history.limits.exit_s if fault.lethal else history.limits.freeze_s)
        if not fault.lethal and not _expels(history, fault):
            continue
        for worker, struck in fault.struck.items():
            sign = _sign(run, worker, struck)
            if worker not in members or (run.over_ns is not None and run.over_ns < struck.t_ns + limit_s * 1e9):
                continue
            if sign is None or _served_s(history, faults, struck, sign) > limit_s:
                when = "never" if sign is None else f"after {(sign.t_ns - struck.t_ns) / 1e9:.1f} s"
                at = struck.at if sign is None else sign.at
                yield broken(f"{worker}: {fault.kind} was noted {when}, must be within {limit_s:.0f} s", at)


def _sign(run: Run, worker: str, struck: Event) -> Event | None:
    """By what the others have noted that strike. A loss of before counts unless the worker was a member again."""
    told = [event for event in run.of(*LOSSES, "finished") if event.worker == worker]
    before = next((event for event in reversed(told) if event.t_ns < struck.t_ns), None)
    if before is not None:
        between = (event for event in run.of("committed") if before.t_ns < event.t_ns < struck.t_ns)
        if not any(worker in event.line["members"] for event in between):
            return before
    signs = [*told, *_ends_with_its_round(run, worker, struck)]
    return min((event for event in signs if event.t_ns >= struck.t_ns), key=lambda event: event.t_ns, default=None)


def _ends_with_its_round(run: Run, worker: str, struck: Event) -> Iterator[Event]:
    """The noted end of a killed script whose round gave way to one with the same worker: it was about to end anyway."""
    script = struck.line.get("script")
    started, ended = (
        [event for event in run.of(name) if event.worker == worker and event.line["script"] == script]
        for name in ("script_started", "script_ended")
    )
    for event in started[-1:]:
        after = next((later for later in run.of("committed") if later.generation > event.generation), None)
        if after is not None and after.line["kind"] == "planned" and worker in after.line["members"]:
            yield from ended


def _served_s(history: History, faults: tuple[Injected, ...], struck: Event, sign: Event) -> float:
    """From a strike to its sign, without the time in which those who have to notice were killed or stood still."""
    away = [_away(history.faulty, other, sign.t_ns) for other in faults if other.row.stops_service]
    excused_s = _covered_ns(away, struck.t_ns, sign.t_ns) / 1e9
    return (sign.t_ns - struck.t_ns) / 1e9 - min(excused_s, EXCUSED_S)


def _away(run: Run, fault: Injected, otherwise_ns: int) -> tuple[int, int]:
    """From when to when a service was away: until the agent attends a leader again, if it has lost that."""
    ended_ns = fault.ended_ns(otherwise_ns)
    latest_ns = ended_ns + int(AGAIN_S * 1e9)
    back_ns = next((event.t_ns for event in run.of("attending") if event.t_ns >= ended_ns), latest_ns)
    return fault.begun_ns, min(back_ns, latest_ns)


def _covered_ns(spans: list[tuple[int, int]], begin_ns: int, end_ns: int) -> int:
    """How much of that time at least one of the spans holds."""
    covered, until = 0, begin_ns
    for begun, ended in sorted(spans):
        begun, ended = max(begun, until), min(ended, end_ns)
        if ended > begun:
            covered, until = covered + ended - begun, ended
    return covered


def _expels(history: History, fault: Injected) -> bool:
    """Whether workers stood still, or were cut off, for so long that they must be expelled; if it was shorter, it may
    go either way."""
    lasted_s = fault.lasted_s(otherwise=history.faulty.events[-1].t_ns)
    silent = fault.row.effect in (Effect.FREEZES, Effect.ISOLATES)
    return silent and lasted_s > history.limits.freeze_s


def _false_alarms(history: History, faults: tuple[Injected, ...]) -> Iterator[CheckerVerdict]:
    run = history.faulty
    reasons = _reasons(run, [fault for fault in faults if fault.lethal or _suspects(history, fault)])
    for event in run.of("worker_dying", "worker_exited"):
        reasons.setdefault(event.worker, []).append((event.t_ns, None))
    mute = [fault for fault in faults if AGENT in fault.targets]
    for event in run.of(*LOSSES):
        if any(_while_mute(history, fault, event) for fault in mute):
            continue
        if not _explained(reasons, event):
            yield broken(f"{event.worker} was declared lost although nothing had happened to it", event.at)


Reasons: TypeAlias = dict[str, list[tuple[int, int | None]]]
"""Worker -> from when to when what was done to it explains its end or its loss; None: from then on."""


def _reasons(run: Run, faults: Iterable[Injected]) -> Reasons:
    """A worker that survives a fault is one like the others again, some time after the end of the fault."""
    reasons: Reasons = {}
    for fault in faults:
        until_ns = None if _ends(fault) else fault.ended_ns(run.events[-1].t_ns) + int(AFTER_S * 1e9)
        for worker, event in {**dict.fromkeys(fault.held, fault.event), **fault.struck}.items():
            reasons.setdefault(worker, []).append((event.t_ns, until_ns))
    return reasons


def _suspects(history: History, fault: Injected) -> bool:
    """Whether those that it hits live, and may be declared lost: who stood still too shortly may not."""
    lasted_s = fault.lasted_s(otherwise=history.faulty.events[-1].t_ns)
    shortly = fault.row.effect is Effect.FREEZES and lasted_s < history.limits.stopped_s
    return fault.row.effect in LIVE and not shortly


def _ends(fault: Injected) -> bool:
    """Whether those that it hits have to end."""
    return fault.lethal or fault.row.effect is Effect.LEAVES


def _explained(reasons: Reasons, event: Event) -> bool:
    spans = reasons.get(event.worker, ())
    return any(begin_ns <= event.t_ns and (end_ns is None or event.t_ns <= end_ns) for begin_ns, end_ns in spans)


def _not_in_order(history: History, faults: tuple[Injected, ...]) -> Iterator[CheckerVerdict]:
    """Who is asked to leave, while nothing else happens to anybody, is not lost: it leaves between two steps."""
    run = history.faulty
    last_ns = run.events[-1].t_ns
    for asked in (fault for fault in faults if fault.row.effect is Effect.LEAVES):
        begun_ns, ended_ns = asked.begun_ns, asked.ended_ns(last_ns)
        others = (other for other in faults if other is not asked)
        settled_ns = int(EXCUSED_S * 1e9)
        if any(o.begun_ns <= ended_ns and begun_ns <= o.ended_ns(last_ns) + settled_ns for o in others):
            continue
        for event in run.of("member_lost", "expelled"):
            if event.worker in asked.targets and begun_ns <= event.t_ns <= ended_ns:
                yield broken(f"{event.worker} was asked to leave by {asked.kind}, and was lost instead", event.at)


def _while_mute(history: History, agent_fault: Injected, event: Event) -> bool:
    """While an agent stands still, and until it has been heard again, its workers are given up; that is in order."""
    ended_ns = agent_fault.ended_ns(history.faulty.events[-1].t_ns)
    return agent_fault.begun_ns <= event.t_ns <= ended_ns + history.limits.exit_s * 1e9 and event.name != "expelled"


def liveness(history: History) -> CheckerVerdict:
    """I12: the job comes to its end, and steps are applied all along, but while a fault stops everybody."""
    run = history.faulty
    if (badly := bad_end(run)) is not None:
        return badly
    seen = list(run.of("steps_seen"))
    if len(seen) < 2:
        return unknown("nobody noted when steps were applied")
    stalls = lasting_stalls(run)
    gaps = [(idle_s(stalls, before.t_ns, after.t_ns), after) for before, after in pairwise(_watched(run, seen))]
    longest_s, after = max(gaps, key=lambda gap: gap[0])
    if longest_s > history.limits.step_s:
        return broken(f"no step for {longest_s:.1f} s while no fault stopped everybody", after.at)
    return holds(f"the job came to its end; the longest time without a step was {longest_s:.1f} s")


def _watched(run: Run, seen: list[Event]) -> Iterator[Event]:
    """Steps that were seen. Before them a strike in the first step, as how long a job starts is its own matter; after
    them the end of the loop, if a fault was there meanwhile, as what a script does behind its steps is its own."""
    faults, last_ns = injected(run.events), seen[-1].t_ns
    yield from (fault.event for fault in faults[:1] if fault.begun_ns < seen[0].t_ns)
    yield from seen
    if (over := run.over) is not None and any(last_ns < fault.ended_ns(over.t_ns) for fault in faults):
        yield over


def bad_end(run: Run) -> CheckerVerdict | None:
    """That the job did not come to its end, or not to a good one; None: it did."""
    if run.result is None:
        return broken("the job did not come to its end")
    if run.result["exit_code"] != 0:
        because = str(run.result["because"]).partition("\n")[0]
        return broken(f"the job ended with exit code {run.result['exit_code']}: {because}", "result.json")
    return None


def lasting_stalls(run: Run) -> list[tuple[int, int]]:
    """From when to when each lasting fault was there that explains that no step is applied, in ns."""
    return [
        (fault.begun_ns, fault.ended_ns(run.events[-1].t_ns))
        for fault in injected(run.events)
        if (not fault.lethal or fault.noted_s is not None) and fault.row.stalls
    ]


def idle_s(stalls: list[tuple[int, int]], begin_ns: int, end_ns: int) -> float:
    """The part of that time that no stall explains."""
    return (end_ns - begin_ns - _covered_ns(stalls, begin_ns, end_ns)) / 1e9


def survivors(history: History) -> CheckerVerdict:
    """I13: a member to which nothing was done keeps its process until the job is over."""
    run = history.faulty
    otherwise = holds("no member ended but those that were hit")
    if not any(fault.lethal or _hits_workers(run, fault) for fault in injected(run.events)):
        nobody = "no worker was hit, so there are no survivors"
        otherwise = not_applicable(nobody) if every_kind_came(run) else unknown(nobody)
    return first_broken(_restarted(history), otherwise)


def _hits_workers(run: Run, fault: Injected) -> bool:
    members = {event.worker for event in run.of("entered")}
    return any(worker in members for worker in fault.targets)


def _restarted(history: History) -> Iterator[CheckerVerdict]:
    run = history.faulty
    members = {event.worker for event in run.of("entered")}
    faults = injected(run.events)
    reasons = _reasons(run, [fault for fault in faults if not _ends(fault) and _suspects(history, fault)])
    hit = {worker for fault in faults if _ends(fault) for worker in (*fault.targets, *fault.held)}
    pids: dict[str, Event] = {}
    for event in run.events:
        if event.by_worker and event.line["pid"] != pids.setdefault(event.worker, event).line["pid"]:
            yield broken(f"{event.worker} has two processes", pids[event.worker].at, event.at)
    over_ns = run.over_ns if run.over_ns is not None else run.events[-1].t_ns + 1
    # Who was lost to a fault ends when the fault lets it: it may be a long time.
    hit |= {event.worker for event in run.of(*LOSSES) if _explained(reasons, event)}
    for event in run.of("worker_exited"):
        if event.worker in members - hit and event.t_ns < over_ns and not _explained(reasons, event):
            yield broken(f"{event.worker} ended although nobody touched it: {event.line['because']}", event.at)


def cleanliness(history: History) -> CheckerVerdict:
    """I15: when the job has ended nothing of it is left on the machine."""
    looked = next(history.faulty.of("left_behind"), None)
    if looked is None:
        return unknown("nobody looked what was left")
    left = list(looked.line["left"])
    return broken("; ".join(left), looked.at) if left else holds("nothing is left of the job")


def really_injected(history: History) -> CheckerVerdict:
    """I16: there were faults, each took hold, each has ended, and each is told once."""
    run = history.faulty
    faults = injected(run.events)
    skipped = {int(event.line["number"]): event for event in run.of("fault_skipped")}
    half = [fault for fault in faults if fault.incomplete is not None]
    if len(faults) == len(half):
        undone = list(run.of("fault_skipped", "fault_incomplete"))
        why = f": {len(undone)} skipped, the first because {undone[0].line['because']}" if undone else ""
        return broken(f"no fault was injected{why}")
    for fault in faults:
        if fault.number in skipped:
            return broken(f"fault {fault.number} was both injected and skipped", fault.event.at)
        if fault.seen is None:
            return broken(f"fault {fault.number}, {fault.kind}, was sent, but nobody saw it", fault.event.at)
        if fault.ended is None:
            return broken(f"fault {fault.number}, {fault.kind}, was not ended", fault.event.at)
    kinds = len({fault.kind for fault in faults if fault.incomplete is None})
    told = f"{len(faults) - len(half)} faults of {kinds} kinds, each of them seen; {len(skipped)} skipped"
    names = ", ".join(f"{fault.number} {fault.kind}" for fault in half)
    return holds(f"{told}; {len(half)} incomplete: {names}" if half else told)
