"""The demo's verdict, from files alone: it must be able to say no."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.demo import judge, restarted_survivors


def step(number: int, loss: float = 1.0) -> dict[str, Any]:
    fixed = {"epoch": 0, "generation": 1, "world_size": 3, "lr": [0.1], "samples": [[number]]}
    return {"step": number, "scalars": {"loss": loss}, **fixed}


def line(t_ms: int, event: str, worker: str = "", generation: int = 0, **fields: object) -> dict[str, Any]:
    who = {"who": worker if event in ("ring_up", "op_complete") else "agent", "pid": 1}
    at = {"t_mono_ns": t_ms * 10**6, "t_wall": t_ms / 1e3}
    return {**at, "event": event, "worker_id": worker, "generation": generation, **who, **fields}


KILL = [
    line(0, "committed", generation=1, kind="form", members=["a", "b", "c"]),
    line(10, "fault_injected", "c"),
    line(12, "worker_exited", "c"),
    line(13, "member_lost", "c"),
    line(13, "quiesce_started", generation=1),
    line(14, "quiesce_complete"),
    line(15, "committed", generation=2, kind="loss", members=["a", "b"]),
    line(16, "published", generation=2, kind="loss"),
    line(17, "ring_up", "a", 2, pid=7),
    line(18, "ring_up", "b", 2, pid=8),
    line(19, "op_complete", "a", 2, pid=7),
    line(20, "op_complete", "b", 2, pid=8),
    line(50, "finished", "a"),
    line(60, "worker_exited", "a"),
    line(60, "worker_exited", "b"),
]


def verdict(
    home: Path, faulty: list[dict[str, Any]], events: list[dict[str, Any]], digest: str = "d"
) -> tuple[str, bool]:
    """Of a quiet run of three steps and a faulty one with these steps and events."""
    for name, steps in (("quiet", [step(0), step(1), step(2)]), ("faulty", faulty)):
        (home / name / "journal").mkdir(parents=True)
        (home / name / "steps.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    (home / "faulty" / "journal" / "all.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    return judge(home, {"digest": "d"}, {"digest": digest}, ["c"])


def test_equal_runs_are_ok_with_the_measured_recovery(tmp_path: Path) -> None:
    said = "demo: OK digest=d quiet=d lost_steps=0 restarted_survivors=0 recovery_ms=8"
    assert verdict(tmp_path, [step(0), step(1), step(2)], KILL) == (said, True)


@pytest.mark.parametrize(
    ("faulty", "events", "digest", "said"),
    [
        ([step(0), step(1, 1.5), step(2)], KILL, "d", 'step 1 differs in scalars: {"loss": 1.0} and {"loss": 1.5}'),
        ([step(0), step(1)], KILL, "d", "step 2 is only in the first run"),
        ([step(0), step(1), step(2)], KILL, "e", "demo: FAILED digest=e quiet=d"),
        ([step(0), step(1), step(2)], [], "d", "demo: FAILED"),
        ([step(0), step(1), step(2)], [*KILL, line(30, "worker_exited", "b")], "d", "restarted_survivors=1"),
    ],
)
def test_a_difference_is_named_and_fails(
    tmp_path: Path, faulty: list[dict[str, Any]], events: list[dict[str, Any]], digest: str, said: str
) -> None:
    text, fine = verdict(tmp_path, faulty, events, digest)
    assert not fine
    assert said in text


def test_a_survivor_with_two_processes_was_restarted() -> None:
    assert restarted_survivors(KILL, ["c"]) == []
    assert restarted_survivors([*KILL, line(40, "op_complete", "a", 3, pid=9)], ["c"]) == ["a"]
    assert restarted_survivors(KILL, []) == ["c"]
