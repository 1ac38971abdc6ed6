"""Histories made by hand: a good one, and what has to be changed in it to violate each invariant."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

from chaos_tests.checkers.history import Event, History, HistoryStep, Run

A, B, C, D = "n.0.0", "n.1.0", "n.2.0", "n.2.1"
S = 1_000_000_000


def event(at_s: float, name: str, who: str = "leader", generation: int = 0, worker: str = "", **fields: Any) -> Event:
    worker = worker or (who if who.startswith("n.") else "")
    line = {
        "t_mono_ns": int(at_s * S),
        "event": name,
        "who": who,
        "generation": generation,
        "worker_id": worker,
        "pid": sum(map(ord, who)),
        **fields,
    }
    return Event(line, f"{name}:{int(at_s * 1000)}")


def record(at_s: float, number: int, kind: str, members: list[str]) -> tuple[Event, ...]:
    """Committed to etcd, told by the leader, and entered by all."""
    written = event(at_s, "etcd_put", "harness", revision=number * 10, number=number, members=members)
    told = event(at_s, "committed", generation=number, kind=kind, members=members)
    entered = [
        event(
            at_s + 0.01 + rank / 1000, "entered", worker, number, kind=kind, members=members, rank=rank, reduced=number
        )
        for rank, worker in enumerate(members)
    ]
    up = [event(at_s + 0.02 + rank / 1000, "ring_up", worker, number) for rank, worker in enumerate(members)]
    done = [
        event(at_s + 0.03 + rank / 1000, "op_complete", worker, number, op=number)
        for rank, worker in enumerate(members)
    ]
    return (written, told, *entered, *up, *done)


def checkpoint(at_s: float, worker: str, entry: str, place: str) -> tuple[Event, ...]:
    """Completed, pointed to, and read by the harness; on disk at the end from 9 s on."""
    complete = {"disk": "checkpoint_complete", "memory": "snapshot_complete"}[place]
    read: dict[str, Any] = {
        "place": place,
        "entry": entry,
        "at": "the end" if at_s > 9 else "completion",
        "problem": "",
    }
    return (
        event(at_s, complete, worker, 2, entry=entry),
        *((event(at_s + 0.01, "pointer_moved", entry=entry),) if place == "disk" else ()),
        event(at_s + 0.02, "checkpoint_read", "harness", **read),
    )


def steps(*of: tuple[int, int]) -> tuple[HistoryStep, ...]:
    """(generation, world size) of each step; two samples in each."""
    numbers = count()
    return tuple(
        HistoryStep(
            {
                "step": (number := next(numbers)),
                "epoch": 0,
                "generation": generation,
                "world_size": world,
                "lr": [0.1],
                "scalars": {"loss": 1.0 / (number + 1)},
                "samples": [[2 * number], [2 * number + 1]],
            },
            f"steps.jsonl:{number}",
        )
        for generation, world in of
    )


RESULT = {"exit_code": 0, "because": "all members have finished", "digest": "d" * 64, "generation": 3}


def good() -> History:
    """Three workers; C is killed at 2 s, its replacement D joins at 5 s, and all end at 9 s."""
    events = (
        *record(1.0, 1, "form", [A, B, C]),
        event(1.5, "steps_seen", "harness", applied=1),
        event(2.0, "fault_injected", "harness", worker=C, number=1, fault="kill", lethal=True),
        event(2.01, "worker_dying", "agent", worker=C, because="killed by SIGKILL"),
        event(2.02, "fault_seen", "harness", number=1, because="killed by SIGKILL"),
        event(2.02, "fault_ended", "harness", number=1),
        event(2.03, "member_lost", worker=C, because="killed by SIGKILL"),
        event(2.05, "reported", A, 1, reduced=2),
        event(2.06, "reported", B, 1, reduced=2),
        *record(2.1, 2, "loss", [A, B]),
        event(2.5, "worker_exited", "agent", worker=C, because="killed by SIGKILL"),
        event(3.0, "steps_seen", "harness", applied=2),
        *checkpoint(4.0, A, "step-000000000002.0.g2-c105d2d3", "disk"),
        *record(5.0, 3, "planned", [A, B, D]),
        event(6.0, "steps_seen", "harness", applied=3),
        *(event(9.0 + rank / 10, "finished", worker=worker, digest="d" * 64) for rank, worker in enumerate([A, B, D])),
        *(event(9.5, "worker_exited", "agent", worker=worker, because="exited with 0") for worker in (A, B, D)),
        checkpoint(9.8, A, "step-000000000002.0.g2-c105d2d3", "disk")[-1],
        event(10.0, "left_behind", "harness", left=[]),
    )
    faulty = Run(events, steps((1, 3), (2, 2), (3, 3)), RESULT)
    quiet = Run((), steps((1, 3), (1, 3), (1, 3)), RESULT)
    return History(faulty, quiet)


def with_events(history: History, *added: Event) -> History:
    events = tuple(sorted((*history.faulty.events, *added), key=lambda one: one.t_ns))
    return replace(history, faulty=replace(history.faulty, events=events))


def without(history: History, *names: str, worker: str | None = None) -> History:
    kept = tuple(
        one for one in history.faulty.events if one.name not in names or (worker is not None and one.worker != worker)
    )
    return replace(history, faulty=replace(history.faulty, events=kept))


def changed(history: History, name: str, generation: int = 0, worker: str = "", **fields: Any) -> History:
    """The first such event with other fields."""
    events = list(history.faulty.events)
    place = next(
        i
        for i, one in enumerate(events)
        if one.name == name and one.generation == generation and (not worker or one.worker == worker)
    )
    events[place] = Event({**events[place].line, **fields}, events[place].at)
    return replace(history, faulty=replace(history.faulty, events=tuple(events)))


def with_step(history: History, number: int, **fields: Any) -> History:
    lines = list(history.faulty.steps)
    lines[number] = HistoryStep({**lines[number].line, **fields}, lines[number].at)
    return replace(history, faulty=replace(history.faulty, steps=tuple(lines)))


def with_steps(history: History, lines: tuple[HistoryStep, ...]) -> History:
    return replace(history, faulty=replace(history.faulty, steps=lines))


def with_result(history: History, **fields: Any) -> History:
    return replace(history, faulty=replace(history.faulty, result={**RESULT, **fields}))
