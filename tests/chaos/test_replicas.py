"""Replicas that train by themselves: workers die while their differences are sent, and others make inner steps."""

from __future__ import annotations

from pathlib import Path

from chaos_tests.checkers import Truth
from elastic.records.journal import read_all
from tests.chaos.runs import disturbed, told, undisturbed_replicas

FAULTS = ("kill-in-overlap", "kill-in-step", "kill-in-overlap", "kill-in-overlap")


def test_deaths_while_differences_are_sent_leave_the_bits_of_the_quiet_run(tmp_path: Path) -> None:
    quiet = undisturbed_replicas(tmp_path / "quiet", steps=2400)
    verdicts = disturbed(tmp_path / "faulty", quiet, FAULTS, gap_s=2.0)
    assert {verdict.answer for verdict in verdicts.values()} == {Truth.TRUE}, told(verdicts)
    lines = read_all(tmp_path / "faulty" / "faulty")
    assert [line["fault"] for line in lines if line["event"] == "fault_injected"] == list(FAULTS)
