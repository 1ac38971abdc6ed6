"""The agent's end of a lifeline, with a real process at the other."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from elastic.agent.process import worker_process
from elastic.agent.worker.death_watch import DeathWatch, hold

DEADLINE_S = 30.0
HOLDER = """
import sys
from elastic.agent.worker import death_watch
death_watch.hold(sys.argv[1])
print('held', flush=True)
{then}
"""


@pytest.fixture
def line() -> Iterator[DeathWatch]:
    made = DeathWatch()
    yield made
    made.close()


def holder(line: DeathWatch, then: str) -> subprocess.Popen[bytes]:
    """A process that holds the line, and does `then`."""
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", HOLDER.format(then=then), line.path]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert started.stdout is not None
    assert started.stdout.readline() == b"held\n"
    return started


def release(started: subprocess.Popen[bytes]) -> None:
    for pipe in (started.stdin, started.stdout):
        assert pipe is not None
        pipe.close()


def test_a_kill_is_told_with_the_signal_while_nobody_has_reaped_the_process(line: DeathWatch) -> None:
    told = threading.Event()
    worker = holder(line, "sys.stdin.read()")
    assert line.watch(told.set)
    assert not told.is_set()
    assert worker_process.ending_status(worker.pid) == 0
    worker.send_signal(signal.SIGKILL)
    assert told.wait(DEADLINE_S)
    assert worker_process.ending_status(worker.pid) == -signal.SIGKILL
    assert worker.wait(DEADLINE_S) == -signal.SIGKILL
    assert worker_process.ending_status(worker.pid) == 0, "it is gone"
    release(worker)


def test_an_exit_is_told_with_its_code(line: DeathWatch) -> None:
    told = threading.Event()
    worker = holder(line, "sys.exit(len(sys.stdin.read()) + 3)")
    assert line.watch(told.set)
    release(worker)
    assert told.wait(DEADLINE_S)
    assert worker_process.ending_status(worker.pid) in (3, 0), "0 if nothing was left to read from"
    assert worker.wait(DEADLINE_S) == 3


def test_what_the_holder_has_forked_does_not_matter(line: DeathWatch) -> None:
    """Neither its end nor its life does."""
    told = threading.Event()
    fork = "import os, time; pid = os.fork() or (sys.stdin.read(), os._exit(0))"
    worker = holder(
        line, f"{fork}; print(pid, flush=True); os.waitpid(pid, 0); print('waited', flush=True); time.sleep(999)"
    )
    assert line.watch(told.set)
    assert worker.stdout is not None
    worker.stdout.readline()
    assert worker.stdin is not None
    worker.stdin.close()
    assert worker.stdout.readline() == b"waited\n"
    assert not told.is_set()
    worker.kill()
    assert told.wait(DEADLINE_S)
    worker.wait(DEADLINE_S)
    release(worker)


def test_a_line_that_nobody_holds_is_not_watched(line: DeathWatch) -> None:
    assert not line.watch(lambda: pytest.fail("nobody can have ended"))


def test_a_second_holder_is_refused(line: DeathWatch) -> None:
    worker = holder(line, "sys.stdin.read()")
    with pytest.raises(OSError, match="busy"):
        hold(line.path)
    release(worker)
    worker.wait(DEADLINE_S)


def test_a_thread_beside_the_main_one_holds_nothing(line: DeathWatch) -> None:
    aside = threading.Thread(target=hold, args=(line.path,))
    aside.start()
    aside.join(DEADLINE_S)
    assert not line.watch(lambda: pytest.fail("the process lives"))
