"""`elastic run`: a whole job on this machine. Starts etcd, the rendezvous service and an agent, shows what happens,
and leaves nothing behind.

Every child is tied to this process by the kernel (PR_SET_PDEATHSIG) or by a pipe (subreaper.py), so that a SIGKILL of
it ends the job as surely as an orderly stop. The main thread owns the children and waits, in one selector, on their
pidfds, the agent's output, signals, and the watcher that gathers what is displayed.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from elastic.config import JobSpec
from elastic.errors import ConfigError, ExitCode, StoreUnavailable
from elastic.platforms.local.interrupts import Interrupted, Signals
from elastic.platforms.local.live import PLAIN_S, TABLE_S, Display, JobWatcher, LiveView, PlainDisplay, TableDisplay
from elastic.preemption import selection
from elastic.process import children, file_modes, log_line, stop_signals
from elastic.records.events.alerts import Alerts
from elastic.records.job_directory import is_removed, read_json, removal
from elastic.records.ledger_tail import StepsTail
from elastic.store.embedded import EmbeddedEtcd

NODE = "local"
"""The one node's name; its workers are local.0.0, local.1.0, ..."""

LEAVE_S = 5.0
"""What SIGTERM leaves a job that trains for stopping after a step, with a checkpoint, where no --grace says more: half
of what Docker gives."""

STOP_S = 4.0
"""From a signal until the agent is killed. It gives its workers timing.stop_grace_s; all must be gone in 5 s."""

RENDEZVOUS_END_S = 5.0
"""How long the rendezvous service may outlive a job that it has ended."""

RENDEZVOUS_STOP_S = 0.5

KEEPER_END_S = 2.0
"""From closing the keeper's input until it is killed itself; it has only to kill."""

SHORT_LIFE_S = 10.0
SHORT_LIVES = 5
"""A rendezvous service, or an etcd, that ends this often in a row within SHORT_LIFE_S of its start is not started
again."""

NOTICES_S = 1.0
"""How late a person may hear of what has just happened."""

LOG_TAIL_LINES = 15
CHUNK = 65_536


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a job ended. because: a sentence; or a sentence, a line break, and a traceback. told: the traceback was on
    the console when it happened."""

    exit_code: int
    because: str
    digest: str = ""
    told: bool = False


class ShortLives:
    """How often in a row a service has ended soon after its start."""

    def __init__(self) -> None:
        self.number = 0
        self._since_s = time.monotonic()

    def started(self) -> None:
        self._since_s = time.monotonic()

    def ended(self) -> None:
        self.number = self.number + 1 if time.monotonic() - self._since_s < SHORT_LIFE_S else 1

    @property
    def too_many(self) -> bool:
        return self.number >= SHORT_LIVES


def attempt(
    spec: JobSpec, job_dir: Path, signals: Signals, *, notices: str, grace_s: float | None, quiet: bool, as_json: bool
) -> RunOutcome:
    """Run the job of a claimed and prepared directory until it ends, or a signal asks to stop.

    notices: who tells that this machine is about to go, as preemption/selection.py has checked it. grace_s: SIGTERM
    tells it too, and the machine goes so many seconds later; None: LEAVE_S later everything is stopped, as by Ctrl-C.
    """
    try:
        for number in _notice_signals(notices):
            signal.signal(number, lambda number, _: signals.notices.append(number))
        with signals.raising():
            etcd = EmbeddedEtcd()
        with (
            etcd,
            _display(quiet, as_json, signals) as display,
            _Children(spec, job_dir, notices, grace_s, etcd, signals, display, quiet=quiet) as children,
        ):
            return children.wait()
    except (ConfigError, StoreUnavailable) as error:
        return RunOutcome(ExitCode.BELOW_QUORUM, f"no etcd: {error}")
    except Interrupted:
        return interrupted(signals)


class _Children:
    """The rendezvous service and the agent, from start to end."""

    def __init__(
        self,
        spec: JobSpec,
        job_dir: Path,
        notices: str,
        grace_s: float | None,
        etcd: EmbeddedEtcd,
        signals: Signals,
        display: Display,
        *,
        quiet: bool,
    ) -> None:
        self._spec = spec
        self._dir = job_dir
        self._notices_from = notices
        self._grace_s = grace_s
        self._leaving = False
        self._leave_ends_s = math.inf
        """When a job that was asked to end in order is stopped."""
        self._etcd = etcd
        self._signals = signals
        self._display = display
        self._selector = selectors.DefaultSelector()
        self._facts: dict[str, Any] | None = None
        self._notices = Alerts(job_dir, members=not quiet)
        self._notices_s = 0.0
        """When they are to be looked for again."""
        self._restart_s = math.inf
        self._rendezvous_lives = ShortLives()
        self._etcd_lives = ShortLives()

    def __enter__(self) -> Self:
        self._selector.register(self._signals.reader, selectors.EVENT_READ, self._signals.drain)
        self._watch_exit(self._etcd.process, self._etcd_ended)
        self._start_rendezvous()
        slots = ("--job-dir", str(self._dir), "--node", NODE, "--slots", str(self._spec.workers))
        grace_s = LEAVE_S if self._grace_s is None else self._grace_s
        self._agent = self._spawn_keeper(*slots, "--notices", self._notices_from, "--grace", str(grace_s))
        for number in _notice_signals(self._notices_from):
            signal.signal(number, self._on_notice)
        for came in set(self._signals.notices):  # before this agent
            self._agent.send_signal(came)
        assert self._agent.stdout is not None
        self._output = self._agent.stdout
        os.set_blocking(self._output.fileno(), False)
        self._selector.register(self._output, selectors.EVENT_READ, self._forward)
        interval_s = TABLE_S if isinstance(self._display, TableDisplay) else PLAIN_S
        self._watcher = JobWatcher(LiveView(self._dir), interval_s, self._gathered)
        self._watch_exit(self._agent, lambda: None)
        return self

    def __exit__(self, *_: object) -> None:
        self._watcher.close()
        self._end_agent()
        children.wait_or_kill(self._rendezvous, 0.0)
        self._output.close()
        for key in list(self._selector.get_map().values()):
            self._unwatch(key.fd)
        self._selector.close()

    def wait(self) -> RunOutcome:
        """Until the agent has ended or a signal asks to stop."""
        while self._agent.poll() is None:
            due_s = min(self._restart_s, self._leave_ends_s, self._notices_s)
            self._turn(max(0.0, due_s - time.monotonic()))
            if time.monotonic() >= self._notices_s:
                self._notices_s = time.monotonic() + NOTICES_S
                self._notify()
            if time.monotonic() >= self._leave_ends_s:
                self._signals.received.append(signal.SIGTERM)
            if self._signals.received and not self._leave():
                return self._stop()
            if time.monotonic() >= self._restart_s:
                self._restart_s = math.inf
                self._start_rendezvous()
        self._forward_rest()
        self._end_rendezvous()
        outcome = self._outcome()
        if outcome.exit_code == ExitCode.STATE_LOST and (self._leaving or self._signals.received):
            # A job that was asked to stop must not go on from a snapshot, whatever became of its workers.
            self._signals.received = self._signals.received or [signal.SIGTERM]
            return interrupted(self._signals)
        # Otherwise the error itself is what has to be heard; with every copy lost, nobody is left to say why.
        if outcome.exit_code in (ExitCode.DONE, ExitCode.DRAINED, ExitCode.STATE_LOST):
            self._notify()
        return replace(outcome, told=self._notices.has_told(outcome.because.partition("\n")[2]))

    def _turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            act: Callable[[], object] = key.data
            act()
        facts, self._facts = self._facts, None
        if facts is not None:
            self._display.show(facts)

    def _notify(self) -> None:
        for text in self._notices.poll():
            self._display.notice(text)

    # Starting and watching

    def _spawn(self, log_of: str, command: Sequence[str], pipes: int) -> subprocess.Popen[bytes]:
        """pipes: what its input and its output are."""
        file_modes.make_directory(self._dir / "logs")  # somebody may have removed the directory
        return children.start(command, self._log_of(log_of), stdin=pipes, stdout=pipes)

    def _spawn_keeper(self, *arguments: str) -> subprocess.Popen[bytes]:
        """The agent, in the care of a process that lives until everything below it is gone, and ends as it did."""
        command = children.python("elastic.agent.process.subreaper", *arguments)
        return self._spawn("elastic.agent", command, subprocess.PIPE)

    def _end_agent(self) -> None:
        """Kill it with everything it started."""
        assert self._agent.stdin is not None
        self._agent.stdin.close()
        children.wait_or_kill(self._agent, KEEPER_END_S)

    def _start_rendezvous(self) -> None:
        module, where = "elastic.rendezvous", ("--job-dir", str(self._dir), "--etcd", self._etcd.endpoint)
        command = children.dying_with_this(*children.python(module, *where))
        self._rendezvous = self._spawn(module, command, subprocess.DEVNULL)
        self._rendezvous_lives.started()
        self._watch_exit(self._rendezvous, self._rendezvous_ended)

    def _watch_exit(self, process: subprocess.Popen[bytes], act: Callable[[], None]) -> None:
        pidfd = os.pidfd_open(process.pid)

        def ended() -> None:
            process.wait()
            self._unwatch(pidfd)
            act()

        self._selector.register(pidfd, selectors.EVENT_READ, ended)

    def _unwatch(self, fd: int) -> None:
        key = self._selector.unregister(fd)
        if isinstance(key.fileobj, int):
            os.close(key.fileobj)

    # What happens meanwhile

    def _on_notice(self, number: int, _: object) -> None:
        self._signals.notices.append(number)
        self._agent.send_signal(number)

    def _gathered(self, facts: dict[str, Any]) -> None:
        self._facts = facts
        self._signals.wake()

    def _forward(self) -> bool:
        """Pass on some of what the agent has written; a signal is seen before the next. Whether there was any. At its
        end, stop looking."""
        try:
            data = os.read(self._output.fileno(), CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._display.output(data)
        elif self._output in (key.fileobj for key in self._selector.get_map().values()):
            self._selector.unregister(self._output)
        return bool(data)

    def _forward_rest(self) -> None:
        """When the agent has ended."""
        while self._forward():
            continue

    def _etcd_ended(self) -> None:
        """It goes on with its data. If it has lost some, as 3.5.0 to 3.5.2 may when they are killed, leader and agents
        notice it, as after a restore from a backup; without etcd the job would never end."""
        how = _how(self._etcd.process.returncode)
        asked = -self._etcd.process.returncode in stop_signals.HELD  # somebody has signalled every process
        if not asked:
            self._etcd_lives.ended()
        if not self._etcd_lives.too_many:
            with contextlib.suppress(OSError):  # its directory was removed: then it is not there any more
                self._etcd.restart()
                self._etcd_lives.started()
                self._watch_exit(self._etcd.process, self._etcd_ended)
                if not asked:
                    self._display.notice(f"etcd ended ({how}); training goes on, and it is started again")
                return
        self._display.notice(
            f"etcd ended ({how}): training goes on, but a lost worker cannot be replaced any more, and the job cannot "
            "be closed in order; Ctrl-C stops it"
        )

    def _rendezvous_ended(self) -> None:
        if self._signals.received or (self._dir / "result.json").exists() or self._agent.poll() is not None:
            return
        self._rendezvous_lives.ended()
        how = _how(self._rendezvous.returncode)
        if self._rendezvous_lives.too_many:
            self._display.notice(
                f"the rendezvous service ended {SHORT_LIVES} times, the last time with {how}; giving up"
            )
            children.ask(self._agent, signal.SIGINT)
            return
        timing = self._spec.timing
        wait_s = min(timing.backoff_max_s, timing.backoff_min_s * (2**self._rendezvous_lives.number - 2))
        self._restart_s = time.monotonic() + wait_s
        self._display.notice(f"the rendezvous service ended ({how}); training goes on, and it is started again")

    # The end

    def _leave(self) -> bool:
        """Whether the signal leaves time to end in order: the agent uses it, and the job ends by itself."""
        if self._leaving or self._signals.received != [signal.SIGTERM]:
            return False
        ledger = self._dir / "steps.jsonl"
        trains = ledger.exists() and ledger.stat().st_size and not self._spec.restart
        if self._grace_s is None and not trains:
            return False  # there is nothing to keep that is not gone with this command
        self._leaving = True
        if self._grace_s is None:
            self._leave_ends_s = time.monotonic() + LEAVE_S
        self._signals.received.clear()
        children.ask(self._agent, signal.SIGTERM)
        return True

    def _stop(self) -> RunOutcome:
        deadline_s = time.monotonic() + STOP_S
        before = self._result()
        children.ask(self._rendezvous, signal.SIGTERM)
        children.ask(self._agent, signal.SIGINT)  # SIGTERM asks it to leave in order
        while self._agent.poll() is None and (left_s := deadline_s - time.monotonic()) > 0:
            self._turn(left_s)
            if len(self._signals.received) > 1:
                break
        self._end_agent()
        self._forward_rest()
        children.wait_or_kill(self._rendezvous, RENDEZVOUS_STOP_S)  # it writes no result any more
        return how_stopped(self._signals.received[0], before, self._result(), self._agent.returncode)

    def _end_rendezvous(self) -> None:
        if not (self._dir / "result.json").exists():
            children.ask(self._rendezvous, signal.SIGTERM)
        children.wait_or_kill(self._rendezvous, RENDEZVOUS_END_S)

    def _outcome(self) -> RunOutcome:
        outcome = self._how_it_ended()
        if is_removed(self._dir):
            sentence, line_break, more = outcome.because.partition("\n")
            return replace(outcome, because=f"{sentence}; {removal(self._dir)}{line_break}{more}")
        return outcome

    def _result(self) -> RunOutcome | None:
        """The end that is kept, if there is one yet."""
        result = read_json(self._dir / "result.json")
        return None if result is None else RunOutcome(result["exit_code"], result["because"], result["digest"])

    def _how_it_ended(self) -> RunOutcome:
        result, status = self._result(), self._agent.returncode
        if result is not None:
            return result
        if status == 0 and is_removed(self._dir):
            return RunOutcome(ExitCode.DONE, "all members have finished")
        if self._rendezvous_lives.too_many:
            tail = _tail(self._log_of("elastic.rendezvous"))
            return RunOutcome(ExitCode.BELOW_QUORUM, f"the rendezvous service cannot run here\n{tail}")
        if status < 0:
            tail_of = StepsTail(self._dir / "steps.jsonl")
            tail_of.poll(0.0)
            because = (
                f"the agent was ended by {_how(status)}, and its workers with it: every copy of the state is lost "
                f"after {tail_of.steps} steps"
            )
            return RunOutcome(ExitCode.STATE_LOST, because)
        return RunOutcome(status or 1, f"the agent gave up\n{_tail(self._log_of('elastic.agent'))}")

    def _log_of(self, module: str) -> Path:
        return self._dir / "logs" / f"{module.removeprefix('elastic.')}.log"


def _notice_signals(notices: str) -> list[signal.Signals]:
    """The signals by which these sources speak."""
    return [number for source in selection.sources(notices, os.environ) for number in source.signals]


@contextmanager
def _display(quiet: bool, as_json: bool, signals: Signals) -> Iterator[Display]:
    display: Display
    if quiet or as_json or not sys.stderr.isatty():
        display = PlainDisplay(quiet=quiet, as_json=as_json, stopping=lambda: signals.asked)
    else:
        display = TableDisplay()
    try:
        yield display
    finally:
        display.close()


def interrupted(signals: Signals) -> RunOutcome:
    """How a command ends that was asked to stop."""
    return how_stopped(signals.received[0], None, None, 1)


def how_stopped(
    number: signal.Signals, before: RunOutcome | None, result: RunOutcome | None, agent_status: int | None
) -> RunOutcome:
    """What is told of a stop is what is kept. before, result: what was kept of the job's end when the stop began, and
    when nobody was left who could write it; what became of workers that were stopped is no end of the job."""
    code = ExitCode.INTERRUPTED if number is signal.SIGINT else ExitCode.TERMINATED
    if result is not None and result.exit_code == ExitCode.DONE:
        if agent_status == 0:
            return result
        because = (
            f"stopped by {number.name} when the job was complete: nothing is left to go on with, but what the script "
            "does after its loop may not have been done"
        )
        return replace(result, exit_code=code, because=because)
    if before is not None and before.exit_code != ExitCode.STATE_LOST:
        return before
    return RunOutcome(code, f"stopped by {number.name}; the same command again goes on from the newest checkpoint")


def _how(status: int | None) -> str:
    if status is None:
        return "still running"
    status = stop_signals.plain(status)
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"


def _tail(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    return "\n".join(map(log_line.message, text.splitlines()[-LOG_TAIL_LINES:]))
