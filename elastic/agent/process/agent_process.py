"""An agent and the subreaper above it, for the daemon of a node: first started, later begun.

    start ... seconds of imports, the fork server's too ... begin: a byte on its standard input ... attends the job

When a job begins, both follow at once. A standby is an agent that is started beforehand and waits: for a job whose
agent runs on this node, or ran here when this machine's daemon was killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from elastic.process import children, file_modes, stop_signals
from elastic.records.files import write_atomically
from elastic.records.journal import Journal
from elastic.security.job_user import JobUser, acting

LOGS = ("stdout.log", "agent.log")
"""Files in logs/ of the job directory, for standard output and standard error."""

COMMAND = ("-P", "-m", "elastic.agent.process.subreaper", "--wait")
"""Arguments of this interpreter; the agent's options follow."""

STANDBY_END_S = 6.0
"""Seconds for a subreaper to end everything below it; then it is killed itself."""


@dataclass(frozen=True, slots=True)
class AgentStart:
    """What an agent inherits, besides the environment of this process. job_dir: the job's directory. words: its
    options. variables: added to its environment. directory: the working directory; "": this process's. job: a digest of
    job.json, which says what its workers import and in which environment. user: the user it runs as; "": this
    process's."""

    job_dir: str
    words: tuple[str, ...]
    variables: Mapping[str, str]
    directory: str
    job: str
    user: str

    def record(self, path: Path) -> None:
        """Write this to a file, for the program that starts if this one is killed. Raises OSError."""
        write_atomically(path, json.dumps(asdict(self)).encode(), file_modes.SETTINGS)

    @classmethod
    def recorded(cls, path: Path) -> Self:
        """Read what `record` has written. Raises OSError, and ValueError for another file."""
        try:
            row = json.loads(path.read_bytes())
            words, variables = tuple(row["words"]), dict(row["variables"])
            texts = [row[name] for name in ("job_dir", "directory", "job", "user")]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is no record of an agent: {error!r}") from error
        if not all(isinstance(text, str) for text in (*words, *variables, *variables.values(), *texts)):
            raise ValueError(f"{path} is no record of an agent: it holds what is no text")
        return cls(texts[0], words, variables, *texts[1:])

    @property
    def environment(self) -> dict[str, str]:
        environment = stop_signals.environment(children.own_environment())
        # So that `python` in a job's command is the interpreter of this package.
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
        return {**environment, **self.variables}


class WaitingAgent:
    """An agent that has been started and waits. user: the user in `how`; None: it names none. Main thread only. Raises
    OSError if the agent cannot be started."""

    def __init__(self, how: AgentStart, user: JobUser | None) -> None:
        self.how = how
        self._user = user
        with ExitStack() as stack:
            with acting(user):
                paths = (Path(how.job_dir) / "logs" / name for name in LOGS)
                out, log = (stack.enter_context(open(path, "ab", opener=file_modes.regular)) for path in paths)
            self._log = os.fstat(log.fileno())
            self._directory = os.stat(how.directory or ".")
            self.process = children.start(
                [sys.executable, *COMMAND, *how.words],
                env=how.environment,
                cwd=how.directory or None,
                bufsize=0,  # a byte that could not be written must not be tried again
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=log,
                **(user.start() if user is not None else {}),
            )

    def fits(self, how: AgentStart) -> bool:
        """Whether the agent lives, and would be started in the same way now, in the same directories."""
        if self.process.poll() is not None or how != self.how:
            return False
        try:
            directory = os.stat(how.directory or ".")
            with acting(self._user):
                log = os.stat(Path(how.job_dir) / "logs" / LOGS[1])
        except OSError:
            return False
        return os.path.samestat(log, self._log) and os.path.samestat(directory, self._directory)

    def begin(self) -> subprocess.Popen[bytes]:
        """Let the agent begin. Returns the subreaper, which runs until the agent has ended."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died just now; its status says so
            self.process.stdin.write(b"\n")
        return self.process


def end(waiting: Sequence[WaitingAgent]) -> None:
    """End waiting agents that are not needed. To be called in a thread, because it may take seconds."""
    for one in waiting:
        assert one.process.stdin is not None
        one.process.stdin.close()
    ends_s = time.monotonic() + STANDBY_END_S
    for one in waiting:
        children.wait_or_kill(one.process, max(0.0, ends_s - time.monotonic()))


def record_of(jobs_dir: Path, node: str, job: str) -> Path:
    """The file that says how the job's agent was started on this node; it is removed when the agent leaves in order."""
    return jobs_dir / f"{job}.{node}.agent.json"


def forget(jobs_dir: Path, node: str, job: str) -> None:
    """Remove the record: no agent of the job is to be expected here."""
    with suppress(OSError):  # on a broken disk, at worst an agent is started that is not needed
        record_of(jobs_dir, node, job).unlink()


def standbys(jobs_dir: Path, node: str, user: JobUser | None, journal: Journal) -> dict[str, WaitingAgent]:
    """Start a standby for each job that ran here when the previous daemon was killed or the machine stopped. They have
    most imports done when the leader says that the job runs here. Returns job -> standby."""
    found: dict[str, WaitingAgent] = {}
    name = user.name if user is not None else ""
    for path in jobs_dir.glob(record_of(jobs_dir, node, "*").name):
        job = path.name.partition(".")[0]
        try:
            how = AgentStart.recorded(path)
            if how.user != name:
                raise ValueError(f"it ran as {how.user or 'the agent'}, and jobs run as {name or 'the agent'} now")
            found[job] = WaitingAgent(how, user)
            journal.write("standby_started", job=job, pid=found[job].process.pid)
        except (OSError, ValueError) as error:
            journal.write("standby_refused", job=job, because=str(error))
            forget(jobs_dir, node, job)
    return found
