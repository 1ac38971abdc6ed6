"""A member that has missed the result of a round with a quorum trains nothing in its place, as the others' weights
would be other ones. tests/sim/test_quorum.py has it in whole jobs."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.config import Timing
from elastic.protocol.messages import Generation, Kind, Member, Plan, RingState
from elastic.protocol.outer_round import Quorum
from elastic.protocol.worker_state import FetchFailed, Phase, WorkerState
from runtime.recovery.transfer.connection import CopyFailed
from runtime.session import Op, OpKind
from runtime.worker import operations
from runtime.worker.operations import OperationLoop
from runtime.worker.progress_report import ProgressReporter

A, B = (Member(name, "node", "host", 1, seniority) for seniority, name in enumerate(("a.0.0", "b.0.0")))
ROUND = Op(OpKind.PASS, 2)


class GaveWay(Exception):
    pass


class Behind(OperationLoop):
    """A member with a result to be copied from B, or none to be had, in a round with a quorum or a plain pass."""

    def __init__(self, laggard: str, *, in_round: bool) -> None:
        record = Generation(2, Kind.LOSS, 2, (A, B), Plan(1), "a loss")
        position = WorkerState(A.worker_id, Phase.COLLECTING, record=record, entered=2, ring=RingState.LIVE, units=2)
        self.posted: list[Any] = []
        shared: Any = SimpleNamespace(changed=threading.Condition(), post=self.posted.append)
        shared.position = replace(position, laggard=laggard, todo=() if laggard else (0, 1))
        reporter = ProgressReporter(on_host=True, note=lambda *about: None)
        reporter.begin(ROUND)
        if in_round:
            reporter.seek(Quorum(1))
        parts: dict[str, Any] = {
            "_shared": shared,
            "_reporter": reporter,
            "_task": SimpleNamespace(op=ROUND),
            "_told": SimpleNamespace(timing=Timing(), retain_results=False),
            "_orders": SimpleNamespace(give_way=self._gives_way, leave_if_over=lambda: None),
            "_asker": SimpleNamespace(result=self._cannot),
            "_journal": SimpleNamespace(write=lambda *about, **more: None),
            "script": SimpleNamespace(at=SimpleNamespace(behind=False)),
            "_missed": (0, float("inf")),
        }
        for name, part in parts.items():
            setattr(self, name, part)

    def _gives_way(self, because: str) -> None:
        raise GaveWay(because)

    def _cannot(self, *about: object) -> None:
        raise CopyFailed("no answer")


def test_what_nobody_can_give_is_not_trained_again_in_a_round() -> None:
    assert Behind("", in_round=False).next_unit() == 0
    with pytest.raises(GaveWay, match="no worker can compute again"):
        Behind("", in_round=True).next_unit()


def test_a_result_that_cannot_be_copied_is_asked_for_until_a_generation_says_what_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Behind(B.worker_id, in_round=False)
    assert plain._fetch(B.worker_id, 0) is None and plain.posted == [FetchFailed(0)]
    monkeypatch.setattr(operations, "MISSED_S", 0.0)
    member = Behind(B.worker_id, in_round=True)
    for _ in range(3):
        assert member._fetch(B.worker_id, 0) is None and member.posted == []
    later_s = time.monotonic() + 2 * Timing().progress_s + 1
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    first = member._shared.position
    assert first.record is not None
    member._shared.position = replace(first, record=replace(first.record, number=3))
    assert member._fetch(B.worker_id, 0) is None, "another generation may name another source"
    member._shared.position = first
    member._missed = (2, later_s - 1)
    with pytest.raises(GaveWay, match="cannot be copied: no answer"):
        member._fetch(B.worker_id, 0)


def test_the_result_of_a_round_is_kept_also_without_retained_results() -> None:
    plain, member = Behind("", in_round=False), Behind("", in_round=True)
    plain.used()
    member.used()
    assert len(plain.posted) == 1 and member.posted == []
