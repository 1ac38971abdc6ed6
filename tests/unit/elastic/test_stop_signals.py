"""Who obeys which signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic.process import stop_signals

CHILD = """
import signal, sys, time
from elastic.process import stop_signals

if sys.argv[1] == "slow":
    time.sleep(0.5)
got = []
for sent, asked in stop_signals.obeyed().items():
    signal.signal(sent, lambda number, _, asked=asked: got.append(asked.name))
signal.signal(signal.SIGUSR1, lambda *_: got.append("SIGUSR1"))
stop_signals.begin()
print("up", flush=True)
while not got:
    time.sleep(0.01)
print(*got, flush=True)
"""


@contextmanager
def child(*, ours: bool = True, slow: bool = False) -> Iterator[subprocess.Popen[str]]:
    environment = stop_signals.environment(os.environ) if ours else dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with stop_signals.blocked():
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD, "slow" if slow else "quick"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGINT])
def test_a_child_obeys_its_parent_and_nobody_else(asked: signal.Signals) -> None:
    with child() as process:
        assert line(process) == "up"
        for number in (*stop_signals.HELD, *stop_signals.HELD):
            process.send_signal(number)
        process.send_signal(stop_signals.order_to(process.pid, asked))
        assert line(process) == asked.name
        assert process.wait(60) == 0


def test_a_process_without_a_parent_of_ours_obeys_anybody() -> None:
    with child(ours=False) as process:
        assert line(process) == "up"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "SIGTERM"


def test_a_child_that_starts_is_not_stopped_by_others_and_hears_the_order_when_it_can() -> None:
    with child(slow=True) as process:
        for number in stop_signals.HELD:
            process.send_signal(number)
        process.send_signal(stop_signals.order_to(process.pid, signal.SIGINT))
        assert line(process) == "up"
        assert line(process) == "SIGINT"


def test_a_notice_waits_until_a_child_that_starts_can_hear_it() -> None:
    with child(slow=True) as process:
        process.send_signal(signal.SIGUSR1)
        assert line(process) == "up"
        assert line(process) == "SIGUSR1"


def test_a_program_that_does_not_listen_is_asked_by_the_plain_signal() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert stop_signals.order_to(process.pid, signal.SIGTERM) == signal.SIGTERM
        process.kill()
    assert stop_signals.order_to(process.pid, signal.SIGTERM) == signal.SIGTERM, "one that has ended, too"


def test_nothing_stays_blocked_in_the_parent() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with stop_signals.blocked():
        assert set(stop_signals.BLOCKED) <= signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_an_end_by_an_order_reads_as_one_by_the_signal() -> None:
    assert [stop_signals.plain(-number) for number in stop_signals.ORDERS.values()] == [-15, -2]
    assert [stop_signals.plain(status) for status in (0, 43, -9)] == [0, 43, -9]
