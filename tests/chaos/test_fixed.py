"""Gradients summed as integers, and sent while backward goes on: workers die at points that no other job has."""

from __future__ import annotations

from pathlib import Path

from chaos_tests.checkers import Truth
from elastic.records.journal import read_all
from tests.chaos.runs import disturbed, told, undisturbed_fixed

FAULTS = ("kill-in-overlap", "kill-in-repetition", "kill-in-repetition", "kill-in-overlap", "kill-in-step")


def test_deaths_while_a_pass_is_computed_again_and_before_backward_has_ended(tmp_path: Path) -> None:
    quiet = undisturbed_fixed(tmp_path / "quiet", epochs=12)
    verdicts = disturbed(tmp_path / "faulty", quiet, FAULTS, gap_s=2.0)
    assert {verdict.answer for verdict in verdicts.values()} == {Truth.TRUE}, told(verdicts)
    lines = read_all(tmp_path / "faulty" / "faulty")
    assert [line["fault"] for line in lines if line["event"] == "fault_injected"] == list(FAULTS)
