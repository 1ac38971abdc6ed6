"""One job on one node: its directory, and the agent that runs its workers there.

    daemon --pipe--> keeper --parent-death signal--> agent of the job --> workers

The agent is the program that runs under `elastic run`, under a subreaper (elastic/agent/process/subreaper.py), so that
everything ends with this daemon, also if that is killed. An agent that ends while the job wants one here is started
again; so that this takes no time, one that has lived for a while has a standby, which has done its imports already.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from elastic import file_modes, stop_signals
from elastic.agent.handover import UpgradeRequest, UpgradeRequestFiles
from elastic.agent.process import agent_process
from elastic.agent.process.agent_process import LOGS, AgentStart, WaitingAgent, forget, record_of
from elastic.checkpoints.settings import Settings
from elastic.checkpoints.storage import storage_at
from elastic.errors import ConfigError
from elastic.fleet.documents import Submission
from elastic.fleet.job_environment import DEVICES_VARIABLE, NodeSettings, with_environment
from elastic.fleet.notice_board import NoticeBoard
from elastic.fleet.upgrade_state import JobKeeper, JobUpgradeState, keeper_of, replace_agent
from elastic.preemption.selection import RELAYED
from elastic.protocol.worker_slot import describe
from elastic.records import host_memory
from elastic.records.files import TOKEN, create_atomically, write_atomically
from elastic.records.journal import Journal
from elastic.records.resume import own
from elastic.security.job_user import acting
from elastic.security.roles import Role
from elastic.wire import codec

BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0
LONG_LIFE_S = 10.0
"""An agent that has lived so long has had workers in the job, and is started again at once."""

SLACK_S = 10.0
"""Beyond its grace, for an agent that leaves in order; then it is asked to stop at once."""

STOP_S = 6.0
"""From then until it is killed, with everything below it."""

STANDBY_AFTER_S = 30.0
"""How long an agent lives until it has a standby, and until a dead standby is replaced: torch is imported once more for
that, and the job's first steps are those that people wait for."""

LOG_TAIL_LINES = 5

CERTS = "certs"
"""In a job directory: what a job that runs as another user has of its node's certificates."""

RENEW_S = 60.0


class JobRunner:
    """Used on the event loop, by the main thread. devices: accelerators for its workers, maybe none of them; None: on a
    node without any.
    changed: called when `trouble` is another one, or it has ended. token: by which the job's leader admits its agent.
    handed: by the program before this one."""

    def __init__(
        self,
        site: NodeSettings,
        submission: Submission,
        slots: int,
        devices: tuple[str, ...] | None,
        board: NoticeBoard,
        journal: Journal,
        changed: Callable[[], None],
        token: str,
        handed: JobUpgradeState | None = None,
        standby: WaitingAgent | None = None,
    ) -> None:
        """standby: of the job, started beforehand; whether it fits is seen when it is needed."""
        self._site = site
        self._standby = standby
        self._standby_refused = ""
        self._agent_is_newer = False
        """Than this program, whose place the newer one takes in a moment: that one sees to a standby."""
        self._token = token
        self._board = board
        self._submission = submission
        self._slots = slots
        self.devices = devices
        self._journal = journal
        self._changed = changed
        self._dir = site.jobs_dir / submission.spec.name
        # Outlives each agent of the job: the state of workers that died with one is what they left here.
        self._memory = handed.scratch() if handed is not None else None
        if handed is None and submission.spec.snapshot_every != "off":
            self._memory = host_memory.claim()
            if self._memory is not None and site.job_user is not None:
                site.job_user.give(self._memory.path)
        self._keeper: JobKeeper | None = handed.process() if handed is not None else None
        """While it lives."""
        self._starting = self._keeper is None
        self._finish = asyncio.Event()
        if handed is not None and handed.finishing:
            self._finish.set()
        self._leave = asyncio.Event()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run())
        self.trouble = ""
        """Why there is no agent that runs as it should, or nothing."""

    @property
    def job(self) -> str:
        return self._submission.spec.name

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def over(self) -> bool:
        return self._task.done()

    @property
    def finishing(self) -> bool:
        """Whether the job is over."""
        return self._finish.is_set()

    @property
    def ending(self) -> bool:
        """Whether this ends without being started again."""
        return self._finish.is_set() or self._leave.is_set()

    def finish(self, result: str) -> None:
        """The job is over: its agent ends by itself, when its workers have done what their script does after the
        training. Any number of times.

        result: a JSON object. It is left where the agent looks when nobody answers for the job: replicas that were
        started again take no part in one that is over.
        """
        if self._finish.is_set():
            return
        self._finish.set()
        try:
            with acting(self._site.job_user):
                write_atomically(self._dir / "result.json", result.encode())
        except OSError as error:
            self._journal.write("result_unwritten", job=self.job, because=str(error))

    @property
    def directory(self) -> Path:
        return self._dir

    def grant(self, token: str) -> None:
        """Its agent is admitted by this token from now on."""
        if token != self._token:
            self._token = token
            try:
                self._write_token()
            except OSError as error:
                self._journal.write("token_unwritten", job=self.job, because=str(error))

    def notify(self) -> None:
        """Its agent is shown what notices stand on this node."""
        try:
            with acting(self._site.job_user):
                self._board.show(self._dir)
        except OSError as error:
            self._journal.write("notices_untold", job=self.job, because=str(error))

    def leave(self) -> None:
        """Between two steps, if the job goes on elsewhere; else the job stops after a step. Any number of times."""
        self._leave.set()

    def stop(self) -> None:
        """At once."""
        self._leave.set()
        self._stop.set()

    async def ended(self) -> None:
        """Until nothing is left of it."""
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        renewing = asyncio.create_task(self._renew())
        try:
            await self._live()
        finally:
            renewing.cancel()

    async def _live(self) -> None:
        wait_s = 0.0
        while self._keeper is not None or not self.ending:
            began_s = time.monotonic()
            try:
                if self._keeper is None:
                    self._starting = True
                    how = await asyncio.to_thread(self._prepare)
                    self._write_token()  # in the thread that grants another one
                    self.notify()
                    self._keeper = await self._start(how)
            except Exception as error:
                # Errors of the system, of a storage and of the job are told alike. So is one that nobody foresaw:
                # it is this job's trouble, not the node's, and tried again with a pause.
                because = f"the job cannot be started here: {_told_of(error)}"
                await self._end_standby()
            else:
                self._starting = False
                self._say("")
                status = await self._one_life(self._keeper)
                self._keeper = None
                because = f"the agent of the job {describe(status)}{self._last_words()}"
                self._journal.write("charge_ended", job=self.job, because=because)
            self._starting = False
            if self.ending:
                break
            self._say(because)
            wait_s = pause_s(time.monotonic() - began_s, wait_s)
            await _first(self._leave, self._finish, within_s=wait_s)
        if self._memory is not None:
            self._memory.remove()
        with suppress(OSError), acting(self._site.job_user):  # it has lost its worth by now
            (self._dir / TOKEN).unlink()
        await self._end_standby()
        forget(self._site.jobs_dir, self._site.node, self.job)
        self._say("")

    @property
    def in_the_way(self) -> str:
        """Why no other program can take over now, or nothing."""
        if self._leave.is_set():
            return f"{self.job} is leaving this node"
        return f"{self.job} is just being started" if self._starting else ""

    async def replace_agent(self, request: UpgradeRequest) -> str:
        """Have another program take its place. Returns why that was refused, or nothing."""
        if self._keeper is None:
            return ""
        self._agent_is_newer = True
        await self._end_standby()
        refused = await replace_agent(
            UpgradeRequestFiles(self._dir, self._site.node, self._site.job_user), request, self._keeper
        )
        self._agent_is_newer = not refused
        return f"{self.job}: {refused}" if refused else ""

    def holding(self, *, inherited: bool) -> JobUpgradeState:
        """inherited: by the program that takes this one's place, and given up here."""
        keeper = memory = None
        if inherited:
            keeper = keeper_of(self._keeper) if self._keeper is not None else None
            memory = self._memory.hand_over() if self._memory is not None else None
        return JobUpgradeState(self._submission, self._slots, self.devices, keeper, memory, self.finishing, self._token)

    async def _one_life(self, keeper: JobKeeper) -> int:
        """One agent's life. Returns its exit code, or minus the signal."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        pidfd = os.pidfd_open(keeper.pid)
        loop.add_reader(pidfd, ended.set)
        self._journal.write("charge_started", job=self.job, slots=self._slots, devices=self.devices, pid=keeper.pid)
        self._agent_is_newer = False
        standing_by = asyncio.create_task(self._stand_by())
        try:
            if not await _first(ended, self._leave):
                keeper.send_signal(stop_signals.order_to(keeper.pid, signal.SIGTERM))
                if not await _first(ended, self._stop, within_s=self._site.grace_s + SLACK_S):
                    keeper.send_signal(stop_signals.order_to(keeper.pid, signal.SIGINT))
                    await _first(ended, within_s=STOP_S)
            assert keeper.stdin is not None
            keeper.stdin.close()  # the keeper kills what is left, and ends
            await ended.wait()
        except asyncio.CancelledError:
            assert keeper.stdin is not None
            keeper.stdin.close()
            raise
        finally:
            standing_by.cancel()
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return keeper.wait()

    def _prepare(self) -> AgentStart:
        """The job's directory on this node. Returns how an agent is started in it. Raises ConfigError and OSError."""
        user = self._site.job_user
        if user is not None:
            file_modes.make_directory(self._dir)
            user.give(self._dir)
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
        """What the processes of a job that are not of the daemon's user need of the node's certificates."""
        directory = self._site.reach.certs
        if directory is None or self._site.job_user is None:
            return {}
        from elastic.security.keyring import FLEET_CA  # most nodes have no certificates, and need not read about them

        return {name: (directory / name).read_bytes() for name in (f"{Role.WORKER}.pem", FLEET_CA)}

    async def _renew(self) -> None:
        """New certificates of the node are used without a restart, also by its jobs. Never returns."""
        written: dict[str, bytes] = {}
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                if (certs := self._certs()) != written:
                    with acting(self._site.job_user):
                        self._write_certs(certs)
                    written = certs
            except OSError as error:
                self._journal.write("certificates_unwritten", job=self.job, because=str(error))

    def _fill(self, certs: Mapping[str, bytes]) -> bytes:
        """Returns what job.json says."""
        spec = self._submission.spec
        for part in ("logs", "journal"):
            file_modes.make_directory(self._dir / part)
        identity = self._submission.identity
        with suppress(FileExistsError):
            create_atomically(self._dir / "id", identity.encode())
        found = (self._dir / "id").read_text()
        if found != identity:
            raise ConfigError(
                f"{self._dir.absolute()} belongs to another job of that name, {found:.64}; move that directory aside"
            )
        document = codec.job_to_json(with_environment(spec, self._site.node))
        write_atomically(self._dir / "job.json", document, file_modes.SETTINGS)
        self._write_certs(certs)
        storage = storage_at(self._submission.checkpoints)
        own(storage, spec.name, identity)
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
        write_atomically(self._dir / "checkpoints.json", json.dumps(asdict(settings)).encode(), file_modes.SETTINGS)
        return document

    def _write_certs(self, certs: Mapping[str, bytes]) -> None:
        if certs:
            (self._dir / CERTS).mkdir(mode=0o700, exist_ok=True)
        for name, content in certs.items():
            write_atomically(self._dir / CERTS / name, content, 0o600)

    def _write_token(self) -> None:
        with acting(self._site.job_user):
            write_atomically(self._dir / TOKEN, self._token.encode(), 0o600)

    def _how(self, document: bytes) -> AgentStart:
        """document: of job.json, as it was written."""
        site, spec, user = self._site, self._submission.spec, self._site.job_user
        reach = site.reach
        if user is not None and reach.certs is not None:
            reach = replace(reach, certs=self._dir / CERTS)
        options = {
            "--job-dir": str(self._dir.absolute()),
            "--node": site.node,
            "--slots": str(self._slots),
            **reach.words(),
            "--notices": f"{RELAYED}{self._dir.absolute()}",
            "--grace": str(site.grace_s),
        }
        variables = user.environment() if user is not None else {}
        if self.devices is not None:
            variables[DEVICES_VARIABLE] = ",".join(self.devices)
        words = tuple(word for option in options.items() for word in option)
        digest = hashlib.sha256(document).hexdigest()
        user_name = user.name if user is not None else ""
        return AgentStart(str(self._dir.absolute()), words, variables, spec.directory, digest, user_name)

    async def _start(self, how: AgentStart) -> JobKeeper:
        if self._standby is not None and not self._standby.fits(how):
            await self._end_standby()
        standby, self._standby = self._standby, None
        if standby is None:
            return WaitingAgent(how, self._site.job_user).begin()
        self._journal.write("standby_begins", job=self.job, pid=standby.process.pid)
        return standby.begin()

    async def _stand_by(self) -> None:
        """While an agent lives, it has a standby: looks for it now and then. Never returns."""
        record = record_of(self._site.jobs_dir, self._site.node, self.job)
        while True:
            await asyncio.sleep(STANDBY_AFTER_S)
            if self._standby is not None and self._standby.process.poll() is not None:
                await self._end_standby()
            if self.ending or self._agent_is_newer or self._standby is not None or not record.exists():
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
            path = self._dir / "logs" / LOGS[1]
            with acting(self._site.job_user), open(path, errors="replace", opener=file_modes.regular) as file:
                lines = file.read().splitlines()
        except OSError:  # somebody has moved the directory
            return ""
        return f": {' | '.join(lines[-LOG_TAIL_LINES:])}" if lines else ""

    def _say(self, trouble: str) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._changed()


def pause_s(lived_s: float, before_s: float) -> float:
    """How long to wait with starting an agent again that has lived so long, or could not be started. before_s: how long
    was waited the last time."""
    return 0.0 if lived_s > LONG_LIFE_S else min(BACKOFF_MAX_S, max(BACKOFF_MIN_S, 2 * before_s))


def _told_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    known = isinstance(error, ConfigError | OSError)
    return str(error) if known else f"{type(error).__name__}: {error}"


async def _first(event: asyncio.Event, other: asyncio.Event | None = None, within_s: float | None = None) -> bool:
    """Wait for one of the two. Whether it was, or is, the first."""
    tasks = [asyncio.create_task(one.wait()) for one in (event, other) if one is not None]
    try:
        await asyncio.wait(tasks, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return event.is_set()
