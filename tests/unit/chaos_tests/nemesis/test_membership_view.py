"""What the harness knows of the members and their scripts, by the journals that it reads."""

from __future__ import annotations

from typing import Any

from chaos_tests.nemesis.membership_view import MembershipView

A, B, C = "a.0.0", "b.0.0", "c.0.1"


def line(event: str, worker: str, generation: int, **more: Any) -> dict[str, Any]:
    return {"event": event, "worker_id": worker, "who": worker, "generation": generation, "pid": 1, **more}


def test_a_round_runs_once_each_member_has_its_script() -> None:
    """The scripts of the round before are as many as that round had, until they are ended."""
    view = MembershipView()
    for number, members in ((2, (A, B)), (3, (A, B, C))):
        view.feed([line("committed", "", number, members=members), *(line("joined", one, number) for one in members)])
        assert view.steady and not view.round_runs
        if number == 3:
            view.feed(line("script_ended", one, number, script=20) for one in (A, B))
        for rank, one in enumerate(members):
            assert not view.round_runs
            view.feed([line("script_started", one, number, script=10 * number, rank=rank, world=len(members))])
        assert view.round_runs
