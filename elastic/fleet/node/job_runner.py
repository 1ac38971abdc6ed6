"""One job on one node: its directory, and the agent that runs its workers there.

    daemon --pipe--> keeper --parent-death signal--> agent of the job --> workers

The agent is the same program as under `elastic run`, under a subreaper (elastic/agent/process/subreaper.py), so that
every process ends with this daemon, even if the daemon is killed. An agent that ends while the job still needs it is
started again. So that this takes no time, an agent that has lived for a while has a standby: a process that has done
its imports already.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace

from elastic.agent.process import agent_process
from elastic.agent.process.agent_process import LOGS, AgentStart, WaitingAgent, forget, record_of
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import ConfigError
from elastic.fleet.documents import Submission
from elastic.fleet.node.job_environment import DEVICES_VARIABLE, NodeSettings, with_environment
from elastic.fleet.node.notice_board import NoticeBoard
from elastic.preemption.selection import RELAYED
from elastic.process import children, file_modes, log_line
from elastic.protocol.worker_slot import describe
from elastic.records import host_memory
from elastic.records.files import TOKEN, create_atomically, read_regular, write_atomically
from elastic.records.journal import Journal
from elastic.records.temp_dirs import TempDirectory
from elastic.security.job_user import acting
from elastic.security.roles import Role
from elastic.wire import codec

_log = logging.getLogger(__name__)

BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0
LONG_LIFE_S = 10.0
"""An agent that has lived for so many seconds has had workers in the job, and is started again at once."""

SLACK_S = 10.0
"""Seconds beyond its grace for an agent that leaves in order; then it is asked to stop at once."""

STOP_S = 6.0
"""Seconds from then until the agent is killed, with everything below it."""

STANDBY_AFTER_S = 30.0
"""Seconds that an agent lives until it has a standby, and between two looks at the standby. A standby imports torch,
which would slow down the job's first steps."""

LOG_TAIL_LINES = 5
LOG_TAIL_BYTES = 1 << 16

CERTS = "certs"
"""The directory in a job directory that has the node's certificates for a job that runs as another user."""

RENEW_S = 60.0


@dataclass(frozen=True, slots=True)
class JobDuty:
    """What a node has to do for a job. devices: the accelerators of its workers, perhaps none; None: the node has none.
    token: the job's leader admits the agent by it."""

    submission: Submission
    slots: int
    devices: tuple[str, ...] | None
    token: str = field(repr=False)


class JobRunner:
    """Runs one job on this node, on the event loop of the main thread. changed: called when `trouble` has changed or
    the job has ended."""

    def __init__(
        self,
        site: NodeSettings,
        duty: JobDuty,
        board: NoticeBoard,
        journal: Journal,
        changed: Callable[[], None],
        standby: WaitingAgent | None = None,
    ) -> None:
        """standby: a standby of the job, started beforehand; it is only used if it fits."""
        self._site = site
        self._standby = standby
        self._standby_refused = ""
        self._token = duty.token
        self._board = board
        self._submission = duty.submission
        self.slots = duty.slots
        self.devices = duty.devices
        self._journal = journal
        self._changed = changed
        self.directory = site.jobs_dir / self.job
        # This memory outlives each agent of the job: workers that died with an agent have left their state here.
        self._memory: TempDirectory | None = None
        if duty.submission.spec.snapshot_every != "off":
            self._memory = host_memory.claim(complain=_log.warning)
            if self._memory is not None and site.job_user is not None:
                site.job_user.give(self._memory.path)
        self._keeper: subprocess.Popen[bytes] | None = None
        """The keeper of the newest agent."""
        self._finish = asyncio.Event()
        self._leave = asyncio.Event()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self.trouble = ""
        """Why there is no agent that runs as it should, or ""."""

    @property
    def job(self) -> str:
        return self._submission.spec.name

    @property
    def over(self) -> bool:
        return self._task.done()

    @property
    def finishing(self) -> bool:
        """Whether the job is over."""
        return self._finish.is_set()

    @property
    def ending(self) -> bool:
        """Whether the agent is not started again when it ends."""
        return self._finish.is_set() or self._leave.is_set()

    def finish(self, result: str) -> None:
        """The job is over: its agent ends by itself, when the script of its workers has ended. More calls do nothing.

        result: a JSON object. The agent reads it from its file if no replica answers for the job: replicas that were
        started again take no part in an ended job.
        """
        if self._finish.is_set():
            return
        self._finish.set()
        with self._writing("result_unwritten"), acting(self._site.job_user):
            write_atomically(self.directory / "result.json", result.encode())

    def grant(self, token: str) -> None:
        """Let the agent use this token from now on."""
        if token != self._token:
            self._token = token
            with self._writing("token_unwritten"):
                self._write_token()

    def notify(self) -> None:
        """Show the node's active notices to the agent."""
        with self._writing("notices_untold"), acting(self._site.job_user):
            self._board.show(self.directory)

    @contextmanager
    def _writing(self, otherwise: str) -> Iterator[None]:
        """The block may raise OSError, of which the journal tells in the event `otherwise`."""
        try:
            yield
        except OSError as error:
            self._journal.write(otherwise, job=self.job, because=str(error))

    def leave(self) -> None:
        """Have the agent leave the job: between two steps if the job goes on elsewhere, else after a step. More calls
        do nothing."""
        self._leave.set()

    def stop(self) -> None:
        """Have the agent stop at once."""
        self._leave.set()
        self._stop.set()

    async def ended(self) -> None:
        """Wait until no process of the job is left here."""
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        renewing = asyncio.create_task(self._renew())
        try:
            await self._live()
        finally:
            renewing.cancel()
            await self._end_standby()
            if self._memory is not None:
                self._memory.remove()
            with suppress(OSError), acting(self._site.job_user):  # the token admits nobody any more
                (self.directory / TOKEN).unlink()
            forget(self._site.jobs_dir, self._site.node, self.job)
            self._say("")

    async def _live(self) -> None:
        wait_s = 0.0
        while not self.ending:
            began_s = time.monotonic()
            try:
                how = await asyncio.to_thread(self._prepare)
                self._write_token()  # in the same thread as `grant`
                self.notify()
                self._keeper = await self._start(how)
            except Exception as error:
                # Errors of the system, of a storage and of the job are told alike. So are unexpected errors: they are
                # this job's trouble, not the node's, and the start is tried again after a pause.
                because = f"the job cannot be started here: {_told_of(error)}"
                await self._end_standby()
            else:
                self._say("")
                because = await self._end_of(self._keeper)
                self._journal.write("job_agent_ended", job=self.job, because=because)
            if self.ending:
                break
            self._say(because)
            wait_s = pause_s(time.monotonic() - began_s, wait_s)
            await _first(self._leave, self._finish, within_s=wait_s)

    async def _end_of(self, keeper: subprocess.Popen[bytes]) -> str:
        """Wait for the end of one agent. Returns how it has ended."""
        try:
            return f"the agent of the job {describe(await self._one_life(keeper))}{self._last_words()}"
        except Exception as error:  # as at the start: this job's trouble, as without a free descriptor for a pidfd
            assert keeper.stdin is not None
            keeper.stdin.close()
            await asyncio.to_thread(children.wait_or_kill, keeper, STOP_S)
            return f"the agent of the job was ended, because it cannot be watched: {_told_of(error)}"

    async def _one_life(self, keeper: subprocess.Popen[bytes]) -> int:
        """Wait for the end of one agent, and end it if the job leaves. Returns its exit code, or minus the signal."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        pidfd = os.pidfd_open(keeper.pid)
        loop.add_reader(pidfd, ended.set)
        self._journal.write("job_agent_started", job=self.job, slots=self.slots, devices=self.devices, pid=keeper.pid)
        standing_by = asyncio.create_task(self._stand_by())
        assert keeper.stdin is not None
        try:
            if not await _first(ended, self._leave):
                children.ask(keeper)
                if not await _first(ended, self._stop, within_s=self._site.grace_s + SLACK_S):
                    children.ask(keeper, signal.SIGINT)
                    await _first(ended, within_s=STOP_S)
            keeper.stdin.close()  # the keeper kills what is left, and ends
            await ended.wait()
        finally:
            keeper.stdin.close()  # also if this was cancelled
            standing_by.cancel()
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return keeper.wait()

    def _prepare(self) -> AgentStart:
        """Fill the job's directory. Returns how to start an agent in it. Raises ConfigError and OSError."""
        user = self._site.job_user
        if user is not None:
            file_modes.make_directory(self.directory)
            user.give(self.directory)
        certs = self._certs()
        with acting(user):
            document = self._fill(certs)
        how = self._how(document)
        if self._submission.spec.fork:
            how.record(record_of(self._site.jobs_dir, self._site.node, self.job))
        else:
            forget(self._site.jobs_dir, self._site.node, self.job)
        return how

    def _certs(self) -> dict[str, bytes]:
        """File name -> content of the node's certificates for a job of another user; else empty."""
        directory = self._site.reach.certs
        if directory is None or self._site.job_user is None:
            return {}
        from elastic.security.keyring import FLEET_CA  # nodes without certificates need no cryptography

        return {name: (directory / name).read_bytes() for name in (f"{Role.WORKER}.pem", FLEET_CA)}

    async def _renew(self) -> None:
        """Copy new certificates of the node for the job, so that they are used without a restart. Never returns."""
        written: dict[str, bytes] = {}
        while True:
            await asyncio.sleep(RENEW_S)
            with self._writing("certificates_unwritten"):
                if (certs := self._certs()) != written:
                    with acting(self._site.job_user):
                        self._write_certs(certs)
                    written = certs

    def _fill(self, certs: Mapping[str, bytes]) -> bytes:
        """Write the files of the job's directory. Returns the content of job.json."""
        spec = self._submission.spec
        for part in ("logs", "journal"):
            file_modes.make_directory(self.directory / part)
        identity = self._submission.identity
        with suppress(FileExistsError):
            create_atomically(self.directory / "id", identity.encode())
        found = read_regular(self.directory / "id").decode(errors="replace")
        if found != identity:
            raise ConfigError(
                f"{self.directory.absolute()} belongs to another job of that name, {found:.64}; move that directory "
                "aside"
            )
        document = codec.to_json(with_environment(spec, self._site.node))
        write_atomically(self.directory / "job.json", document, file_modes.SETTINGS)
        self._write_certs(certs)
        storage = storage_at(self._submission.checkpoints)
        settings = Settings(
            root=storage.url,
            every=spec.checkpoint_every,
            keep=spec.checkpoint_keep,
            job=spec.name,
            job_id=identity,
            resume=self._submission.resume,
            memory=str(self._memory.path) if self._memory is not None else "",
            snapshot_every=spec.snapshot_every,
            interruptions=self._submission.interruptions,
        )
        write_atomically(
            self.directory / "checkpoints.json", json.dumps(asdict(settings)).encode(), file_modes.SETTINGS
        )
        return document

    def _write_certs(self, certs: Mapping[str, bytes]) -> None:
        if certs:
            (self.directory / CERTS).mkdir(mode=0o700, exist_ok=True)
        for name, content in certs.items():
            write_atomically(self.directory / CERTS / name, content, 0o600)

    def _write_token(self) -> None:
        with acting(self._site.job_user):
            write_atomically(self.directory / TOKEN, self._token.encode(), 0o600)

    def _how(self, document: bytes) -> AgentStart:
        """document: the content of job.json."""
        site, spec, user = self._site, self._submission.spec, self._site.job_user
        reach = site.reach
        if user is not None and reach.certs is not None:
            reach = replace(reach, certs=self.directory / CERTS)
        options = {
            "--job-dir": str(self.directory.absolute()),
            "--node": site.node,
            "--slots": str(self.slots),
            **reach.words(),
            "--notices": f"{RELAYED}{self.directory.absolute()}",
            "--grace": str(site.grace_s),
            **site.log_words,
        }
        variables = user.environment() if user is not None else {}
        if self.devices is not None:
            variables[DEVICES_VARIABLE] = ",".join(self.devices)
        words = tuple(word for option in options.items() for word in option)
        digest = hashlib.sha256(document).hexdigest()
        user_name = user.name if user is not None else ""
        return AgentStart(str(self.directory.absolute()), words, variables, spec.directory, digest, user_name)

    async def _start(self, how: AgentStart) -> subprocess.Popen[bytes]:
        if self._standby is not None and not self._standby.fits(how):
            await self._end_standby()
        standby, self._standby = self._standby, None
        if standby is None:
            return WaitingAgent(how, self._site.job_user).begin()
        self._journal.write("standby_begins", job=self.job, pid=standby.process.pid)
        return standby.begin()

    async def _stand_by(self) -> None:
        """Keep a standby for the living agent: start one, and replace a dead one. Never returns."""
        record = record_of(self._site.jobs_dir, self._site.node, self.job)
        while True:
            await asyncio.sleep(STANDBY_AFTER_S)
            if self._standby is not None and self._standby.process.poll() is not None:
                await self._end_standby()
            if self.ending or self._standby is not None or not record.exists():
                continue
            try:
                self._standby = WaitingAgent(AgentStart.recorded(record), self._site.job_user)
                self._journal.write("standby_started", job=self.job, pid=self._standby.process.pid)
            except (OSError, ValueError) as error:
                if str(error) != self._standby_refused:
                    self._standby_refused = str(error)
                    self._journal.write("standby_refused", job=self.job, because=str(error))

    async def _end_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is not None:
            await asyncio.to_thread(agent_process.end, [standby])

    def _last_words(self) -> str:
        try:
            path = self.directory / "logs" / LOGS[1]
            with acting(self._site.job_user), open(path, "rb", opener=file_modes.regular) as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))  # the event loop waits meanwhile
                lines = file.read(LOG_TAIL_BYTES).decode(errors="replace").splitlines()
        except OSError:  # the directory may have been moved
            return ""
        return f": {' | '.join(map(log_line.message, lines[-LOG_TAIL_LINES:]))}" if lines else ""

    def _say(self, trouble: str) -> None:
        if trouble != self.trouble:
            if trouble:
                self._journal.write("job_agent_trouble", job=self.job, because=trouble)
            self.trouble = trouble
            self._changed()


def pause_s(lived_s: float, before_s: float) -> float:
    """Seconds to wait before an agent is started again. lived_s: how long the last agent lived. before_s: the last
    pause."""
    return 0.0 if lived_s > LONG_LIFE_S else min(BACKOFF_MAX_S, max(BACKOFF_MIN_S, 2 * before_s))


def _told_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    known = isinstance(error, ConfigError | OSError)
    return str(error) if known else f"{type(error).__name__}: {error}"


async def _first(event: asyncio.Event, other: asyncio.Event | None = None, within_s: float | None = None) -> bool:
    """Wait for one of two events, at most within_s. Returns whether `event` is set."""
    tasks = [asyncio.create_task(one.wait()) for one in (event, other) if one is not None]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return event.is_set()
