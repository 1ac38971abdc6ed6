"""When a script counts as stopped, and for how long it stands still, from what /proc says at each look."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from runtime.frontends.restart.script_watch import NOISE, WINDOW_S, ScriptWatch, where

STOPPED_S = 0.75
EVERY_S = 0.25


class Watched:
    """A script that a test moves: its state letter, clock ticks, and the processor time of all below it."""

    def __init__(self) -> None:
        self.facts: tuple[str, int] | None = ("S", 10)
        self.used_s = 5.0
        self.now_s = 100.0
        self.watch = ScriptWatch(1, STOPPED_S, self.now_s, lambda pid: self.facts, lambda pid: self.used_s)

    def looks(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """Whether it was found stopped."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += EVERY_S
            meanwhile()
            if self.watch.look(self.now_s):
                return True
        return False


def test_a_script_that_a_signal_has_stopped_is_found() -> None:
    seen = Watched()
    assert not seen.looks(3.0)
    seen.facts = ("T", 10)
    assert not seen.looks(0.5), "two looks, and less than 0.75 s"
    assert seen.looks(1.0)


@pytest.mark.parametrize("state", ["t", "S", "D", "R", "Z"])
def test_only_a_signal_stops_a_script(state: str) -> None:
    """A tracer stops it too (t): py-spy does so for a moment, and gdb while somebody looks."""
    seen = Watched()
    seen.facts = (state, 10)
    assert not seen.looks(20.0)


def test_a_script_that_uses_a_processor_between_two_looks_is_not_stopped() -> None:
    seen = Watched()
    ticks = iter(range(1000))

    def move() -> None:
        seen.facts = ("T", next(ticks))

    assert not seen.looks(20.0, move)


def test_a_worker_that_stood_still_itself_looks_again() -> None:
    seen = Watched()
    seen.facts = ("T", 10)
    seen.looks(0.5)
    seen.now_s += 60.0  # both were stopped, and the worker goes on first
    assert not seen.looks(0.5)
    seen.facts = ("S", 10)
    assert not seen.looks(5.0)
    assert seen.watch.idle_s <= 6.0


def test_the_time_without_a_processor_is_counted() -> None:
    seen = Watched()
    seen.looks(60.0)
    assert 54.0 <= seen.watch.idle_s <= 60.0

    def works() -> None:
        seen.used_s += 2 * NOISE * EVERY_S

    seen.looks(10.0, works)
    assert seen.watch.idle_s <= WINDOW_S + EVERY_S
    seen.used_s -= 3.0  # a child that has ended is not below it any more
    seen.looks(WINDOW_S)
    assert seen.watch.idle_s <= WINDOW_S + EVERY_S


def test_noise_is_no_work() -> None:
    seen = Watched()

    def polls() -> None:
        seen.used_s += 0.5 * NOISE * EVERY_S

    seen.looks(60.0, polls)
    assert seen.watch.idle_s >= 54.0


def test_a_script_that_is_gone_is_not_stopped() -> None:
    seen = Watched()
    seen.facts = None
    assert not seen.looks(5.0)


SLEEPS = """
import faulthandler, signal, subprocess, sys, time
faulthandler.register(signal.SIGQUIT)
child = subprocess.Popen(["sleep", "600"])
def waits_here():
    print("there", flush=True)
    time.sleep(600)
waits_here()
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[str]]:
    program = subprocess.Popen(
        [sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert program.stdout is not None and program.stdout.readline() == "there\n"
    yield program
    os.killpg(program.pid, signal.SIGKILL)
    program.communicate()


def test_a_real_script_is_told_by_its_threads_and_its_stacks(sleeper: subprocess.Popen[str]) -> None:
    lines = where(sleeper.pid)
    assert sum(line.startswith("process ") for line in lines) == 2, lines
    assert any("sleep 600" in line for line in lines)
    assert any("  thread " in line and "state S" in line for line in lines)
    os.killpg(sleeper.pid, signal.SIGKILL)
    assert "waits_here" in sleeper.communicate()[1]


def test_a_real_script_that_is_stopped_is_found(sleeper: subprocess.Popen[str]) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    watch = ScriptWatch(sleeper.pid, 0.1, time.monotonic())
    deadline_s = time.monotonic() + 30.0
    while not watch.look(time.monotonic()):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert where(2**22 + 1) == [], "nobody has this number"
