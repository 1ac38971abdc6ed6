"""The daemon of a node: `elastic agent` runs it. It follows the fleet's leader, and decides nothing.

The leader sends the list of all jobs that this node has to run. New jobs are started, jobs that are missing have to
leave. Jobs do not notice that no leader of the fleet answers, or that another one leads: the agent of each job attends
the job's leader by itself.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic.agent.process import agent_process
from elastic.agent.process.agent_process import WaitingAgent
from elastic.errors import ConfigError, ElasticError
from elastic.fleet.documents import Submission
from elastic.fleet.node import job_environment
from elastic.fleet.node.job_environment import NodeSettings
from elastic.fleet.node.job_runner import SLACK_S, STOP_S, JobDuty, JobRunner
from elastic.fleet.node.leader_session import GOODBYE_S, FleetLeaderSession, Offer
from elastic.fleet.node.notice_board import NoticeBoard
from elastic.preemption import selection
from elastic.process import log, notify, stop_signals
from elastic.records import host_memory
from elastic.records.journal import Journal
from elastic.security.channels import ChannelFactory
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb

STANDBYS_S = 60.0
"""Seconds for which a new daemon keeps standbys of jobs that ran here before; a job that is not back by then goes on
elsewhere, or is over."""

MARGIN_S = 10.0
"""Seconds that a service manager gives this process beyond what its jobs may take."""

DEPARTURE_POLL_S = 0.5
"""Seconds between two looks whether all jobs have left a node that has to go: their agents say so in files."""


@dataclass(frozen=True, slots=True)
class Reread:
    """What the file of settings says now. changed, refused: name -> the value in force, and the value in the file, of
    settings that may change while the agent runs, and of those that may not."""

    slots: int
    labels: tuple[str, ...]
    notices: str
    log_level: str
    changed: Mapping[str, tuple[object, object]]
    refused: Mapping[str, tuple[object, object]]


class SettingsFile(Protocol):
    """The settings of an agent that come from a file too."""

    def reread(self) -> Reread:
        """Read the file again. Raises ConfigError, and then nothing has changed."""


class Daemon:
    """The daemon of a node. Main thread only: workers die with the thread that started them."""

    def __init__(
        self,
        site: NodeSettings,
        offer: Offer,
        journal: Journal,
        channels: ChannelFactory,
        standbys: Mapping[str, WaitingAgent] | None = None,
        settings: SettingsFile | None = None,
    ) -> None:
        """standbys: job -> a standby for a job that this node may be given. settings: the file that SIGHUP has read
        again; None: SIGHUP ends the daemon."""
        self._site = site
        self._journal = journal
        self._devices = job_environment.of_node(os.environ)
        self._board = NoticeBoard(journal, self._noticed)
        self._runners: dict[str, JobRunner] = {}
        self._standbys = dict(standbys or {})
        self._duties: dict[str, pb.Duty] = {}
        self._over: dict[str, str] = {}
        """Job -> its result, a JSON object."""
        self._unstarted: dict[str, str] = {}
        self._attendance = FleetLeaderSession(site, offer, journal, channels, self)
        self._settings = settings
        self._status: int | None = None
        self._changed = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal came and no job runs here any more. Returns 128 + the signal's number."""
        host_memory.sweep()  # a daemon that was killed with its keepers may have left memory
        loop = asyncio.get_running_loop()
        for number, asked in stop_signals.obeyed().items():
            loop.add_signal_handler(number, self._signalled, asked)
        if self._settings is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._board.watch(selection.sources(self._site.notices, os.environ))
        stop_signals.begin()
        attending = asyncio.create_task(self._attendance.always())
        waiting = asyncio.create_task(self._end_standbys(STANDBYS_S))
        speaking = asyncio.create_task(notify.keep_alive())
        try:
            while not self._is_done():
                await self._next_change(attending)
                if attending.done():
                    attending.result()
            await self._attendance.part(attending)
        finally:
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)
            for task in (waiting, speaking):
                task.cancel()
            await self._end_standbys()
            for runner in self._runners.values():
                runner.stop()
            for runner in self._runners.values():
                await runner.ended()
            self._board.notices.close()
        assert self._status is not None
        return self._status

    def _is_done(self) -> bool:
        self._changed.clear()
        self._reconcile()
        return self.done

    async def _next_change(self, attending: asyncio.Task[None]) -> None:
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(self._changed.wait())]
        waiting += [asyncio.create_task(runner.ended()) for runner in self._runners.values()]
        within_s = DEPARTURE_POLL_S if self._board.because else None
        await asyncio.wait([*waiting, attending], timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    def _signalled(self, number: signal.Signals) -> None:
        """The first signal empties the node in order, a second one at once."""
        name = signal.Signals(number).name
        if self._status is not None:
            self._journal.write("daemon_signalled", signal=name, leaves="at once")
            for runner in self._runners.values():
                runner.stop()
            return
        self._journal.write("daemon_signalled", signal=name, leaves=f"within {self._leave_s:g} s", jobs=self._jobs)
        self._end_in_order(128 + number, f"its daemon was asked to end ({name})")

    @property
    def _leave_s(self) -> float:
        """Seconds that its jobs may take to leave."""
        return self._site.grace_s + SLACK_S + STOP_S

    @property
    def _jobs(self) -> list[str]:
        return sorted(self._runners)

    def _end_in_order(self, status: int, because: str) -> None:
        self._status = status
        notify.stopping(f"leaves its jobs within {self._leave_s:g} s", self._leave_s + GOODBYE_S + MARGIN_S)
        self._changed.set()
        self._attendance.say(pb.NodeWord(leaves=pb.NodeLeaves(because=because)))

    def _reload(self) -> None:
        """Take the settings that the file has now, as far as they may change; of a file with a mistake, none."""
        if self._status is not None:
            return  # a daemon that ends needs no settings
        assert self._settings is not None
        is_ready = self._attendance.term > 0  # before that it has told nobody that it is
        if is_ready:
            notify.reloading()
        try:
            now = self._settings.reread()
        except ConfigError as error:
            self._journal.write("settings_unread", because=f"{error}; everything stays as it was")
        else:
            for name, (kept, wanted) in now.refused.items():
                kept = "the default" if kept is None else kept
                because = "it cannot change while the agent runs; restart the agent for it"
                self._journal.write("setting_refused", setting=name, keeps=kept, wanted=wanted, because=because)
            if "log_level" in now.changed:
                log.configure(now.log_level)
            if {"slots", "label"} & now.changed.keys():
                self._attendance.offer(now.slots, now.labels)
            if "notices" in now.changed:
                self._board.watch(selection.sources(now.notices, os.environ))
            self._journal.write("settings_read", changed={name: list(values) for name, values in now.changed.items()})
        finally:
            if is_ready:
                notify.ready("has read its settings again")

    # ------------------------------------------------------------------------------------------------- jobs

    def _reconcile(self) -> None:
        """Start and end jobs as the leader wants. A job's new agent waits until its old agent has gone."""
        for job, runner in list(self._runners.items()):
            if runner.over:
                del self._runners[job]
                self._told()
        for job, runner in self._runners.items():
            duty = self._duties.get(job)
            if job in self._over:
                runner.finish(self._over[job])
            if duty is not None:
                runner.grant(duty.token)
            other = duty is None or duty.leave or duty.slots != runner.slots
            if self._status is not None or (other and not runner.finishing):
                runner.leave()
        self._board.look(runner.directory for runner in self._runners.values())
        unstarted: dict[str, str] = {}
        for job, duty in self._duties.items():
            if not (job in self._runners or duty.leave or self._status is not None):
                because = self._begin(duty)
                if because:
                    unstarted[job] = because
        if unstarted != self._unstarted:
            self._unstarted = unstarted
            self._told()

    def _begin(self, duty: pb.Duty) -> str:
        """Start a new job. Returns why it cannot be started now, or ""."""
        try:
            submission = codec.from_json(Submission, duty.document.encode())
        except ElasticError as error:
            return f"the job cannot be read here: {error}; is this agent as new as the rendezvous?"
        if self._board.because:
            return f"the node has to go, and begins nothing new: {self._board.because}"
        taken = (device for runner in self._runners.values() for device in runner.devices or ())
        own = job_environment.choose(self._devices, taken, duty.slots)
        if self._devices and len(own) < duty.slots:
            ending = [job for job, runner in self._runners.items() if runner.devices and runner.ending]
            if ending:
                return f"the job waits for the GPUs of {', '.join(ending)}, which has not ended here yet"
        given, standby = own if self._devices else None, self._standbys.pop(duty.job, None)
        runner = JobRunner(
            self._site,
            JobDuty(submission, duty.slots, given, duty.token),
            self._board,
            self._journal,
            self._told,
            standby,
        )
        self._runners[runner.job] = runner
        self._told()
        return ""

    async def _end_standbys(self, after_s: float = 0.0) -> None:
        """End the standbys of jobs that have not come back after so many seconds."""
        await asyncio.sleep(after_s)
        ended, self._standbys = self._standbys, {}
        for job in ended:
            self._journal.write("standby_ended", job=job)
            agent_process.forget(self._site.jobs_dir, self._site.node, job)
        await asyncio.to_thread(agent_process.end, list(ended.values()))

    def _noticed(self) -> None:
        """Tell the agents and the leader that the node's notices have changed."""
        for runner in self._runners.values():
            runner.notify()
        self._attendance.say(self._notice())
        self._changed.set()

    def _notice(self) -> pb.NodeWord:
        return pb.NodeWord(leaves=pb.NodeLeaves(because=self._board.because, notice=True))

    def _told(self) -> None:
        """Tell the leader which jobs are here, and what does not run as it should."""
        because = {job: runner.trouble for job, runner in self._runners.items()} | self._unstarted
        troubles = [pb.Trouble(job=job, because=text) for job, text in because.items()]
        troubles = [trouble for trouble in troubles if trouble.because]
        self._attendance.say(pb.NodeWord(troubles=pb.NodeTroubles(troubles=troubles, holds=sorted(self._runners))))

    # -------------------------------------------------------------------------------------------------- leader

    @property
    def done(self) -> bool:
        return self._status is not None and not self._runners

    def on_welcome(self) -> None:
        if self._status is not None:
            self._attendance.say(pb.NodeWord(leaves=pb.NodeLeaves(because="its daemon was asked to end")))
        if self._board.because:
            self._attendance.say(self._notice())
        self._told()

    def on_end(self) -> None:
        """With the exit code of SIGTERM, after which a service manager starts the program that is installed now."""
        if self._status is None:
            self._journal.write("daemon_told_to_end", jobs=self._jobs)
            self._end_in_order(128 + signal.SIGTERM, "its daemon was told to end")

    def on_duties(self, duties: dict[str, pb.Duty], over: dict[str, str]) -> None:
        self._duties, self._over = duties, over
        self._changed.set()
