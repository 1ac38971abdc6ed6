"""Lines of journals, as processes write them."""

from __future__ import annotations

from typing import Any

START_S = 1_700_000_000.0


def line(event: str, at_s: float, worker_id: str = "", generation: int = 1, **fields: object) -> dict[str, Any]:
    """at_s: seconds since the start of the job, of both clocks."""
    head = {"t_mono_ns": round(at_s * 1e9), "t_wall": START_S + at_s, "job": "j", "generation": generation}
    return {**head, "worker_id": worker_id, "node": "n", "pid": 1, "who": "leader", "event": event, **fields}


def a_loss(at_s: float, generation: int, lost: str, members: list[str]) -> list[dict[str, Any]]:
    """A recovery: 0.1 s each for detect, abort, decide and build, and 0.2 s for what is done again."""
    new = generation + 1
    return [
        line("worker_dying", at_s, lost),
        line("member_lost", at_s + 0.1, lost, because="it was ended by SIGKILL", rank=1, hung=False),
        line("quiesce_started", at_s + 0.1, "", generation, because=f"{lost} was lost"),
        line("state", at_s + 0.1, "", generation, state="quiescing", because=""),
        line("quiesce_complete", at_s + 0.2),
        line("committed", at_s + 0.3, "", new, kind="loss", members=members, because=f"{lost} was lost"),
        line("published", at_s + 0.3, "", new, kind="loss"),
        *(line("ring_up", at_s + 0.4, member, new) for member in members),
        *(line("redo_started", at_s + 0.4, member, new, op=7) for member in members),
        line("running", at_s + 0.4, "", new),
        line("state", at_s + 0.4, "", new, state="running", because=""),
        *(line("op_complete", at_s + 0.6, member, new, op=7) for member in members),
    ]
