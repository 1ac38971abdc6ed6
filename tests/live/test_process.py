"""One worker process and everything it starts: read without blocking, told exactly how it ended, gone as a group."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.agent.process import worker_process
from elastic.agent.process.process_start import KEEP_MEMORY, Outlets, start_cold, worker_environment
from elastic.agent.process.worker_process import WorkerProcess
from elastic.errors import ConfigError

PATIENCE_S = 100.0


class Watched:
    """A worker, the lines it printed, and how it ended."""

    def __init__(self, log: Path, script: str) -> None:
        self.lines: list[bytes] = []
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.first_line = asyncio.Event()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        outlets = Outlets(log)
        pid = start_cold((sys.executable, "-c", script), environment, outlets)
        self.worker = WorkerProcess(pid, outlets, self.on_line, self.status.set_result)

    def on_line(self, line: bytes) -> None:
        self.lines.append(line)
        self.first_line.set()

    async def end(self) -> int:
        return await asyncio.wait_for(self.status, PATIENCE_S)


def run(log: Path, script: str, number: signal.Signals | None = None) -> Watched:
    """Let a script run to its end, or until its first line and this signal."""

    async def watch() -> Watched:
        watched = Watched(log, script)
        if number is not None:
            await asyncio.wait_for(watched.first_line.wait(), PATIENCE_S)
            watched.worker.signal(number)
        await watched.end()
        return watched

    return asyncio.run(watch())


def test_lines_come_whole_and_the_log_holds_stdout_and_stderr(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "log"
    script = "import os; print('one'); print('two', end=''); os.write(2, b'three\\n'); print('', end='four')"
    watched = run(log, script)
    assert watched.lines == [b"one\n", b"twofour\n"]
    assert sorted(log.read_text().splitlines()) == ["one", "three", "twofour"]


def test_more_output_than_a_pipe_holds_arrives_complete(tmp_path: Path) -> None:
    watched = run(tmp_path / "log", "for n in range(200_000): print(n)")
    assert b"".join(watched.lines) == b"".join(b"%d\n" % n for n in range(200_000))
    assert (tmp_path / "log").read_bytes() == b"".join(watched.lines)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_is_reported_as_such(tmp_path: Path, number: signal.Signals) -> None:
    watched = run(tmp_path / "log", "import time; print('up'); time.sleep(1000)", number)
    assert watched.status.result() == -number


HOLDS = """
import asyncio, os, signal, subprocess, sys, threading, time
from multiprocessing import get_context
from elastic.agent.worker import held_signals

def outsider(number):
    subprocess.run(["kill", f"-{int(number)}", str(os.getpid())])

held_signals.hold()
"""


def test_a_worker_that_holds_signals_back_ends_by_its_agents_order_only(tmp_path: Path) -> None:
    others = "for n in (15, 2, 1) * 3: outsider(n)\nprint('up', flush=True)\nwhile True: pass"
    watched = run(tmp_path / "log", HOLDS + others, signal.SIGTERM)
    assert watched.status.result() == -signal.SIGTERM
    assert watched.lines == [b"up\n"]


def test_a_handler_of_the_script_is_called_by_the_agents_order_only(tmp_path: Path) -> None:
    script = """
def handler(number, frame):
    print("asked", number)
    sys.exit(7)

assert signal.signal(signal.SIGTERM, handler) is signal.SIG_DFL
held_signals.hold()
assert signal.getsignal(signal.SIGTERM) is handler
outsider(signal.SIGTERM)
outsider(signal.SIGINT)
print("up")
while True:
    time.sleep(10)
"""
    watched = run(tmp_path / "log", HOLDS + script, signal.SIGTERM)
    assert watched.lines == [b"up\n", b"asked 15\n"]
    assert watched.status.result() == 7


def test_a_handler_of_asyncio_is_called_by_the_agents_order_only(tmp_path: Path) -> None:
    script = """
async def main():
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    outsider(signal.SIGTERM)
    await asyncio.sleep(0.2)
    print("up", asked.is_set())
    await asked.wait()
    print("asked")

asyncio.run(main())
"""
    watched = run(tmp_path / "log", HOLDS + script, signal.SIGTERM)
    assert watched.lines == [b"up False\n", b"asked\n"]
    assert watched.status.result() == 0


def test_a_worker_that_ignores_sigterm_ignores_the_order(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up")
signal.sigtimedwait([signal.SIGUSR1], 1.0)
print("still here")
"""
    watched = run(tmp_path / "log", HOLDS + script, signal.SIGTERM)
    assert watched.lines == [b"up\n", b"still here\n"]
    assert watched.status.result() == 0


def test_a_script_that_waits_for_sigterm_in_a_thread_of_its_own_has_its_time(tmp_path: Path) -> None:
    script = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("up")
signal.sigwait([signal.SIGTERM])
time.sleep(0.5)
print("cleaned up")
"""
    watched = run(tmp_path / "log", HOLDS + script, signal.SIGTERM)
    assert watched.lines == [b"up\n", b"cleaned up\n"]
    assert watched.status.result() == 0


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGTERM)", "signal.raise_signal(signal.SIGTERM)"])
def test_what_a_script_sends_to_itself_is_not_held_back(how: str, tmp_path: Path) -> None:
    script = f"threading.Thread(target=lambda: {how}).start()\ntime.sleep(100)"
    assert run(tmp_path / "log", HOLDS + script).status.result() == -signal.SIGTERM
    script = f"signal.signal(signal.SIGTERM, lambda *_: print('called'))\n{how}\n{how}"
    watched = run(tmp_path / "log", HOLDS + script)
    assert (watched.lines, watched.status.result()) == ([b"called\n", b"called\n"], 0)


def test_a_handler_that_is_called_behind_a_drain_is_not_called_again(tmp_path: Path) -> None:
    script = """
def handler(number, frame):
    print("called")
    os.kill(os.getppid(), 0)
    signal.sigtimedwait([signal.SIGUSR1], 1.0)
    print("done")
    sys.exit(3)

signal.signal(signal.SIGTERM, handler)
held_signals.call_handler()
"""
    watched = run(tmp_path / "log", HOLDS + script, signal.SIGTERM)
    assert (watched.lines, watched.status.result()) == ([b"called\n", b"done\n"], 0)


def test_what_a_script_ignores_its_programs_ignore(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
with subprocess.Popen(["sleep", "1000"]) as program:
    program.send_signal(signal.SIGINT)
    print(program.poll())
    program.kill()
"""
    assert run(tmp_path / "log", HOLDS + script).lines == [b"None\n"]


def test_a_worker_that_does_not_hold_signals_back_has_its_time(tmp_path: Path) -> None:
    """It may be a shell with a trap."""
    script = """
import signal, sys, time

def handler(number, frame):
    time.sleep(0.5)
    print("asked")
    sys.exit(0)

signal.signal(signal.SIGTERM, handler)
print("up")
time.sleep(1000)
"""
    watched = run(tmp_path / "log", script, signal.SIGTERM)
    assert watched.lines == [b"up\n", b"asked\n"]
    assert watched.status.result() == 0


def test_what_a_worker_starts_is_stopped_as_ever(tmp_path: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: print("called"))
programs = [subprocess.Popen(["sleep", "1000"]), get_context("spawn").Process(target=time.sleep, args=(1000,))]
programs[1].start()
forked = get_context("fork").Process(target=time.sleep, args=(1000,))
signal.signal(signal.SIGTERM, signal.SIG_DFL)
forked.start()
for one in (*programs, forked):
    one.terminate()
programs[0].wait()
programs[1].join()
forked.join()
print(programs[0].returncode, programs[1].exitcode, forked.exitcode)
"""
    # multiprocessing's children import the main module, which a -c has not
    file = tmp_path / "script.py"
    file.write_text(
        HOLDS.replace("held_signals.hold()", "")
        + "if __name__ == '__main__':\n    held_signals.hold()\n"
        + "".join(f"    {line}\n" for line in script.strip().splitlines())
    )
    watched = run(tmp_path / "log", f"import runpy; runpy.run_path({str(file)!r}, run_name='__main__')")
    assert watched.lines == [b"-15 -15 -15\n"], (tmp_path / "log").read_text()


def test_a_stopped_worker_can_be_killed(tmp_path: Path) -> None:
    script = "import os, signal; print('up'); os.kill(os.getpid(), signal.SIGSTOP)"
    assert run(tmp_path / "log", script, signal.SIGKILL).status.result() == -signal.SIGKILL


def test_children_die_with_the_worker_and_do_not_hold_up_its_end(tmp_path: Path) -> None:
    """The child inherits stdout, so waiting for its end of file would wait for the child."""
    watched = run(tmp_path / "log", "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid)")
    child = int(watched.lines[0])

    async def gone() -> None:
        while (seen := worker_process.facts(child)) is not None and seen.state not in "ZX":
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(gone(), PATIENCE_S))


def test_last_words_are_whole_lines_of_the_end(tmp_path: Path) -> None:
    watched = run(tmp_path / "log", "for n in range(10_000): print('line', n)")
    words = watched.worker.last_words()
    assert words.startswith("line ")
    assert words.endswith("line 9999\n")
    assert len(words) <= worker_process.LAST_WORDS_BYTES


def test_no_descriptor_is_left_after_many_workers(tmp_path: Path) -> None:
    run(tmp_path / "log", "pass")
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(10):
        run(tmp_path / "log", "pass")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_program_that_is_not_there_starts_nothing(tmp_path: Path) -> None:
    outlets = Outlets(tmp_path / "log")
    with pytest.raises(ConfigError, match="no-such-program"):
        start_cold(("no-such-program",), {"PATH": "/usr/bin"}, outlets)
    outlets.close()


def test_ranks_of_other_launchers_do_not_reach_the_worker() -> None:
    outer = {"PATH": "/bin", "RANK": "3", "WORLD_SIZE": "8", "OMPI_COMM_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}
    assert worker_environment(outer, {"ELASTIC_JOB": "j"}) == {
        **KEEP_MEMORY,
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "1",
        "ELASTIC_JOB": "j",
    }


def test_what_the_user_says_about_the_allocator_stays() -> None:
    assert worker_environment({"MALLOC_TRIM_THRESHOLD_": "0"}, {})["MALLOC_TRIM_THRESHOLD_"] == "0"


def test_facts_are_read_though_the_program_has_a_strange_name(tmp_path: Path) -> None:
    """The name in /proc/pid/stat may hold spaces and parentheses."""
    strange = tmp_path / "a) R 1 (b"
    strange.symlink_to("/bin/sleep")

    with subprocess.Popen([strange, "1000"]) as child:
        try:
            seen = worker_process.facts(child.pid)
        finally:
            child.kill()
    assert seen is not None
    assert seen.state in "RSD"
    assert worker_process.facts(2**22 + 1) is None
