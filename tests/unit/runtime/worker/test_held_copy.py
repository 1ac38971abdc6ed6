"""A donor's copy of the state in its own memory: one at a time, for all newcomers that want one."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from elastic.records.journal import Journal
from runtime.allreduce.reduction.partial_sum import Json
from runtime.recovery.state.host_bytes import HostBytes
from runtime.recovery.transfer.connection import CopyConnection
from runtime.recovery.transfer.result_log import ResultLog
from runtime.session import Op, OpKind
from runtime.worker import held_copy
from runtime.worker.copy_window import CopyWindow
from runtime.worker.held_copy import CopyHolder
from runtime.worker.state_owner import SharedWorkerState
from tests.unit.rings import GENEROUS_S


def test_a_state_without_tensors_is_held_like_any_other() -> None:
    """A job that keeps numbers alone may have steps that are too short for a copy."""
    position = SimpleNamespace(donor=True, reduced=3, record=None)
    shared = cast(SharedWorkerState, SimpleNamespace(changed=threading.Condition(threading.RLock()), position=position))
    window = CopyWindow(shared)
    window.open(Op(OpKind.PASS, 2), GENEROUS_S)
    journal = cast(Journal, SimpleNamespace(write=lambda event, **fields: None))
    holder, described = CopyHolder(shared, window, ResultLog(), journal), list[int]()

    def describe() -> tuple[dict[str, Json], dict[str, Json], HostBytes]:
        described.append(len(described))
        assert len(described) <= 2
        return {}, {"state": {"n": 1}}, HostBytes([])

    with holder.copy(cast(CopyConnection, "reader"), lambda: True, describe) as held:
        assert held is not None and (held.number, held.header, held.blobs) == (3, {"state": {"n": 1}}, [])


def test_newcomers_that_have_waited_in_vain_for_a_copy_in_the_making_do_not_have_another_one_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of a copy is as large as the state. To make it takes a while: two windows, and new pages."""
    monkeypatch.setattr(held_copy, "LATER_S", 0.05)
    position = SimpleNamespace(donor=True, reduced=0, record=None)
    shared = cast(SharedWorkerState, SimpleNamespace(changed=threading.Condition(threading.RLock()), position=position))
    window = CopyWindow(shared)
    window.open(Op(OpKind.PASS, 2), GENEROUS_S)
    journal = cast(Journal, SimpleNamespace(write=lambda event, **fields: None))
    holder = CopyHolder(shared, window, ResultLog(), journal)
    begun, goes_on = threading.Event(), threading.Event()
    described: list[str] = []

    def describe() -> tuple[dict[str, Json], dict[str, Json], HostBytes]:
        described.append(threading.current_thread().name)
        begun.set()
        assert goes_on.wait(GENEROUS_S)
        return {}, {}, HostBytes([torch.zeros(8, dtype=torch.uint8)])

    def want(reader: str) -> bool:
        with holder.copy(cast(CopyConnection, reader), lambda: True, describe) as held:
            return held is not None

    first = threading.Thread(target=want, args=("first",), name="first", daemon=True)
    first.start()
    assert begun.wait(GENEROUS_S)
    try:
        assert not want("second")
        third = threading.Thread(target=want, args=("third",), name="third", daemon=True)
        third.start()
        third.join(1.0)
        assert described == ["first"]
    finally:
        goes_on.set()
        with shared.changed:
            position.donor = False  # so that nobody waits for another window
            shared.changed.notify_all()
        first.join(GENEROUS_S)
