"""I14: a job that needs a checkpoint finds one that is whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from chaos_tests.checkers.history import Event, History, Run
from chaos_tests.checkers.verdict import CheckerVerdict, broken, first_broken, holds, not_applicable, unknown

Spoiled: TypeAlias = Mapping[str, Event]
"""Entry -> the fault that has damaged it on disk."""

GONE = "gone"
"""The problem of a checkpoint that was removed before the harness could read it."""


def durability(history: History) -> CheckerVerdict:
    """I14: what is called complete is whole, the newest durable one is not lost, and only such is gone on from."""
    run = history.faulty
    spoiled = {str(entry): event for event in run.of("fault_injected") if (entry := event.line.get("spoiled"))}
    read = [event for event in run.of("checkpoint_read") if not _by_our_hand(event, spoiled)]
    return first_broken(
        (*_torn(read), *_lost(run, read, spoiled), *_never_usable(run, spoiled)), _otherwise(history, read)
    )


def _by_our_hand(event: Event, spoiled: Spoiled) -> bool:
    """Whether it was found to be damaged, on disk, after a fault had damaged it."""
    blow = spoiled.get(str(event.line["entry"]))
    return blow is not None and event.line["place"] == "disk" and blow.t_ns < event.t_ns


def _otherwise(history: History, read: list[Event]) -> CheckerVerdict:
    fine = [event for event in read if not event.line["problem"]]
    whole = sum(bool(event.line.get("read", True)) for event in fine)
    large = len(fine) - whole
    if whole:
        but = f"; {large} times one was too large to be read" if large else ""
        return holds(f"{whole} times one that was called complete was read, and each was whole, byte by byte{but}")
    if large:
        return unknown(f"{large} times one was completed, and each was too large to be read")
    if not history.keeps:
        return not_applicable("the job takes no checkpoints and no snapshots")
    return unknown("no checkpoint and no snapshot was completed; a longer run has some")


def _torn(read: list[Event]) -> Iterator[CheckerVerdict]:
    for event in read:
        if (problem := str(event.line["problem"])) and problem != GONE:
            name = f"{event.line['entry']} ({event.line['place']})"
            yield broken(f"{name} is called complete, and at {event.line['at']} {problem}", event.at)


def _lost(run: Run, read: list[Event], spoiled: Spoiled) -> Iterator[CheckerVerdict]:
    """The newest complete one that is there at the end is at least as new as the pointer said."""
    durable = (event for event in run.of("pointer_moved") if str(event.line["entry"]) not in spoiled)
    moved = max(durable, key=_step, default=None)
    if moved is None or run.result is None or not read:  # nobody looked
        return
    left = [event for event in read if event.line["at"] == "the end" and not event.line["problem"]]
    if max(map(_step, left), default=-1) < _step(moved):
        yield broken(f"{moved.line['entry']} was durable, and nothing as new is there at the end", moved.at)


def _never_usable(run: Run, spoiled: Spoiled) -> Iterator[CheckerVerdict]:
    complete = {event.line["entry"] for event in run.of("checkpoint_complete", "snapshot_complete")}
    for event in run.of("state_restored"):
        if event.line["entry"] not in complete:
            yield broken(f"{event.worker} went on from {event.line['entry']}, which was never completed", event.at)
        blow = spoiled.get(str(event.line["entry"]))
        if blow is not None and blow.t_ns < event.t_ns:
            yield broken(f"{event.worker} went on from {event.line['entry']}, which was damaged", blow.at, event.at)


def _step(event: Event) -> int:
    """The step in the entry's name, step-<number>.<...>."""
    return int(str(event.line["entry"]).partition("-")[2].partition(".")[0])
