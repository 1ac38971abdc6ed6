"""Whoever is given up says where its threads are, and whoever cannot is not ended by the question."""

from __future__ import annotations

import subprocess
import sys

import pytest

from chaos_tests.nemesis import signals
from elastic.agent.worker import stack_dump

BUSY = """
import sys, threading
{register}
def lost_in_thought():
    print("ready", flush=True)
    sys.stdin.read()
lost_in_thought()
"""


REGISTER = "from elastic.agent.worker import stack_dump; stack_dump.show_when_asked()"


def busy(register: str) -> subprocess.Popen[str]:
    """One that waits for its input, and has done so much before."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY.format(register=register)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("answers", [True, False])
def test_stacks_are_shown_by_whoever_can(answers: bool) -> None:
    process = busy(REGISTER if answers else "")
    assert stack_dump.ask(process.pid) is answers
    _, said = process.communicate("go on")
    assert process.returncode == 0
    assert ("lost_in_thought" in said) is answers


def test_one_that_is_stopped_is_not_asked() -> None:
    process = busy(REGISTER)
    thaw = signals.freeze([process.pid])
    assert not stack_dump.ask(process.pid)
    thaw()
    _, said = process.communicate("go on")
    assert (process.returncode, said) == (0, "")


def test_nobody_is_asked_who_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert not stack_dump.ask(process.pid)
