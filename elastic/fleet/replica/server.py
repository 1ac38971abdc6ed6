"""One replica of a fleet's rendezvous: `elastic rendezvous` runs it.

It listens, stands for election as the fleet's leader, and takes part in every job that has begun. All of it runs on
one asyncio thread; each user of the store has a thread of its own, so that none waits for another's call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from elastic.errors import ConfigError, StoreError, StoreUnavailable
from elastic.fleet import probes, registry
from elastic.fleet.documents import FleetJob, FleetState, Result
from elastic.fleet.findings import ETCD_BROKEN, ETCD_INSTEAD
from elastic.fleet.replica.admission import Admission
from elastic.fleet.replica.leader import FleetLeader
from elastic.fleet.replica.service import FleetService
from elastic.process import file_modes, notify
from elastic.protocol.membership import Resized, State, Stopped
from elastic.records import retention
from elastic.records.files import write_atomically
from elastic.records.journal import Journal, journal_path
from elastic.rendezvous.job_replica import JobReplica, settle_down, win
from elastic.rendezvous.leader import JobOrigin, StoreThread
from elastic.rendezvous.server import REPLICAS, stop_signal
from elastic.rendezvous.service import SERVER_OPTIONS, RendezvousService
from elastic.security.secure_server import SecureServer, ServerCertificates
from elastic.store.election import Candidate
from elastic.store.etcd import EtcdStore
from elastic.store.lease import RETRY_S, LeaseKeeper
from elastic.wire import codec
from elastic.wire.services import add_to_server

if TYPE_CHECKING:
    from elastic.metrics.replica import ReplicaMetrics  # most replicas show none

SILENCE_S = 2.0
"""Seconds for which a replica trusts a silent watch of the documents before it reads them again."""

STOP_S = 60.0
"""Seconds that the nodes of a stopped job may take to leave it in order."""

STOP_POLL_S = 0.2

END_S = 30.0
"""Seconds that a replica may take to end, for a service manager: it gives its leads back to etcd, which may be slow."""

REST_S = 1.0
"""Seconds before a replica stands again after its lead has ended: the same cause may end it again at once."""


LOOK_AGAIN_S = 2.0
"""Seconds until a member of etcd that did not answer is asked for its version again."""


class Server:
    """One replica. directory: for journals, and `rendezvous.json`, which has its address. unsafe_etcd: any version of
    etcd will do. metrics: where the replica shows what it knows; None: nowhere. listens: called when it does, and what
    could end a start has been tried."""

    def __init__(
        self,
        directory: Path,
        etcd: Sequence[str],
        listen: str,
        lock: ServerCertificates,
        *,
        unsafe_etcd: bool = False,
        metrics: ReplicaMetrics | None = None,
        listens: Callable[[], None] = lambda: None,
    ) -> None:
        self._listens = listens
        self._metrics = metrics
        self._unsafe_etcd = unsafe_etcd
        self._lock = lock
        self._directory = directory
        self._endpoints = list(etcd)
        self._listen = listen
        self._changed = asyncio.Event()
        """Set when the documents have to be read again."""
        self._admission = Admission(self._refused, self._changed.set)
        self._service = RendezvousService(self._admission)
        self._parts: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, asyncio.Task[None]] = {}
        self._sizes: set[asyncio.Task[None]] = set()
        self._running: set[str] = set()
        self._unread: dict[str, str] = {}
        self._address = ""

    async def run(self) -> int:
        """Serve until a signal comes; returns 128 + its number. Raises ConfigError if the port is taken, and for a
        member of etcd that may lose data."""
        settle_down()
        stopped = stop_signal()
        with (
            self._journal_at(self._directory, "", logged=logging.INFO) as journal,
            SecureServer(self._lock, journal) as secure,
            EtcdStore(self._endpoints, tls=self._lock.etcd) as etcd,
        ):
            self._journal, self._etcd = journal, etcd
            unknown = [] if self._unsafe_etcd else await self._judged(self._endpoints)
            self._refusals = secure.refusals
            self._fleet_service = FleetService(self._service, journal, secure.shown, self._directory, self._look)
            server = secure.server(SERVER_OPTIONS)
            add_to_server("Rendezvous", self._service, server)
            add_to_server("Fleet", self._fleet_service, server)
            self._address = secure.bind(server, self._listen)
            await server.start()
            document = {"address": self._address, "pid": os.getpid()}
            write_atomically(self._directory / "rendezvous.json", json.dumps(document).encode())
            self._listens()
            shown_at: dict[str, Any] = {"metrics": self._metrics.url} if self._metrics is not None else {}
            journal.write("listening", address=self._address, etcd=self._endpoints, **shown_at)
            notify.ready(f"listens at {self._address}")
            duties = (self._judge_others(unknown), self._follow(), self._stand(), secure.watch(), notify.keep_alive())
            work = [asyncio.create_task(duty) for duty in duties]
            if self._metrics is not None:
                shown = self._metrics.watch(self._address, self._fleet_service.overview, self._service.leads)
                work.append(asyncio.create_task(shown))
            either: tuple[asyncio.Future[Any], ...] = (*work, stopped)
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                for task in work:
                    if task.done():
                        task.result()
                return stopped.result()
            finally:
                notify.stopping("ends", END_S)
                running = [*work, *self._parts.values(), *self._stops.values()]
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                await server.stop(grace=0.5)
                journal.write("stopped")

    @staticmethod
    def _journal_at(directory: Path, job: str, *, logged: int) -> Journal:
        who = f"rendezvous-{os.getpid()}"
        path = journal_path(directory, who)
        return Journal(path, job, who, socket.gethostname(), retention=REPLICAS, logged=logged)

    # ------------------------------------------------------------------------------------------ the fleet's lead

    async def _stand(self) -> None:
        """Stand for election as the fleet's leader, and lead whenever elected."""
        service, etcd = self._fleet_service, self._etcd
        candidate = Candidate(etcd, registry.NAME, self._address, time.monotonic)
        with contextlib.closing(StoreThread()) as store:
            try:
                while True:
                    term = await win(candidate, store, self._saw, self._journal)
                    async with LeaseKeeper(candidate, term) as tenure:
                        service.fleet_leader = FleetLeader(tenure, etcd, store, self._journal)
                        service.leader = self._address
                        self._journal.write("leading_fleet", term=term)
                        because = ""
                        try:
                            because = await service.fleet_leader.lead()
                        finally:
                            service.fleet_leader, service.leader = None, ""
                            self._journal.write("not_leading_fleet", term=term, because=because)
                    with contextlib.suppress(StoreError):  # the lease ends it anyway
                        await store.call(candidate.resign)
                    await asyncio.sleep(REST_S)
            finally:
                with contextlib.suppress(StoreError):
                    await store.call(candidate.resign)

    async def _judged(self, endpoints: Sequence[str]) -> list[str]:
        """The members of etcd in `endpoints` that do not answer. Raises ConfigError for a member that may lose data."""
        looks = [asyncio.to_thread(probes.of_etcd, endpoint, self._open_etcd) for endpoint in endpoints]
        found = await asyncio.gather(*looks)
        for endpoint, member in zip(endpoints, found, strict=True):
            if member.get("version") in ETCD_BROKEN:
                raise ConfigError(
                    f"the member {endpoint} of etcd has version {member['version']}, which may lose data when it is "
                    f"killed: {ETCD_INSTEAD}; or give --allow-unsafe-etcd, if its data may be lost"
                )
        return [endpoint for endpoint, member in zip(endpoints, found, strict=True) if member["because"]]

    async def _judge_others(self, unknown: Sequence[str]) -> None:
        """Check the members that did not answer at the start, as soon as they do. Never returns. Raises ConfigError."""
        while unknown:
            await asyncio.sleep(LOOK_AGAIN_S)
            unknown = await self._judged(unknown)
        await asyncio.Event().wait()

    def _open_etcd(self, endpoint: str) -> EtcdStore:
        return EtcdStore([endpoint], tls=self._lock.etcd)

    def _look(self) -> object:
        """The facts that this replica finds (probes.py). Any thread."""
        return probes.of_replica(self._directory, self._endpoints, self._open_etcd)

    def _saw(self, leader: str) -> None:
        self._fleet_service.leader = leader

    def _refused(self, because: str, job: str, node: str, peer: str) -> None:
        self._refusals.say(because, at="Attend", caller=f"agent {node}", peer=peer, job=job)

    # ------------------------------------------------------------------------------------------------- documents

    async def _follow(self) -> None:
        """Read the documents whenever they have changed, and do what they ask of every replica."""
        loop = asyncio.get_running_loop()
        with contextlib.closing(StoreThread()) as store:
            while True:
                self._changed.clear()
                self._admission.reads()
                began_s = time.monotonic()
                try:
                    state, revision = await store.call(registry.read, self._etcd)
                    if self._metrics is not None:
                        self._metrics.read(time.monotonic() - began_s)
                    watch = await store.call(
                        lambda since=revision + 1: self._etcd.watch(
                            registry.ROOT, since, lambda event: _wake(loop, self._changed), timeout_s=SILENCE_S
                        )
                    )
                except StoreError as error:
                    self._journal.write("documents_unread", because=str(error))
                    await asyncio.sleep(RETRY_S)
                    continue
                self._apply(state, revision)
                try:
                    async with asyncio.timeout(SILENCE_S):  # wait_for may lose a cancel that comes with the event
                        await self._changed.wait()
                except TimeoutError:
                    pass
                finally:
                    watch.cancel()

    def _apply(self, state: FleetState, revision: int) -> None:
        if self._fleet_service.fleet_leader is not None:
            self._fleet_service.fleet_leader.read(state, revision)
        for key, because in state.unread.items():
            if self._unread.get(key) != because:
                self._journal.write("document_unread", key=key, because=because)
        self._unread = dict(state.unread)
        self._running = {job.name for job in state.jobs if job.runs}
        self._admission.read(state)
        for name in self._running & self._service.leads.keys():
            if (leader := self._service.leads[name].leader) is not None:
                leader.keep(partial(self._admission.stands, name))
        for job in state.jobs:
            if job.runs and job.name not in self._parts:
                self._parts[job.name] = asyncio.create_task(self._take_part(job))
                self._parts[job.name].add_done_callback(partial(self._part_ended, job.name))
            elif job.runs and self._parts[job.name].done() and (result := self._service.leads[job.name].result):
                self._parts[job.name] = asyncio.create_task(self._tell_end_again(job.name, result))
                self._parts[job.name].add_done_callback(partial(self._part_ended, job.name))
            if job.runs and job.stop is not None and job.name not in self._stops:
                self._stops[job.name] = asyncio.create_task(self._enforce(job))
                self._stops[job.name].add_done_callback(partial(self._stop_ended, job.name))
            self._resize(job)
        unread = {key.partition("/")[2] for key in state.unread}
        for name in self._parts.keys() - {job.name for job in state.jobs}:
            if self._parts[name].done() or name not in unread:  # it is over, and forgotten
                self._parts.pop(name).cancel()  # cut off from the store, it may not have heard of the job's end
                self._service.leads.pop(name, None)
        known = unread | self._parts.keys() | {job.name for job in state.jobs}
        for name in retention.forget(self._directory / "jobs", known, registry.ENDED_KEPT):
            self._journal.write("directory_removed", job=name)

    # ------------------------------------------------------------------------------------------------------ jobs

    def _resize(self, job: FleetJob) -> None:
        """Tell the job's leader, if it is here, of the size that an operator has given the job. Each reading of the
        documents tells a new leader."""
        entry = self._service.leads.get(job.name)
        if (
            job.size is None
            or entry is None
            or (leader := entry.leader) is None
            or leader.group.size == job.size.workers
        ):
            return
        task = asyncio.create_task(leader.post(Resized(job.size.workers)))
        self._sizes.add(task)
        task.add_done_callback(self._sizes.discard)

    def _part_ended(self, job: str, task: asyncio.Task[None]) -> None:
        """A part that failed, for lack of disk for example, begins again with the next reading of the documents."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._journal.write("part_failed", job=job, because=f"{type(error).__name__}: {error}")
            self._parts.pop(job, None)

    def _stop_ended(self, job: str, task: asyncio.Task[None]) -> None:
        """A stop that failed begins again with the next reading of the documents."""
        self._stops.pop(job, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._journal.write("stop_failed", job=job, because=f"{type(error).__name__}: {error}")

    async def _take_part(self, job: FleetJob) -> None:
        """Take part in a job until it is over, and the fleet knows it."""
        directory = self._directory / "jobs" / job.name
        file_modes.make_directory(directory / "logs")
        spec = replace(job.spec, env=())  # a replica does not need the workers' environment
        write_atomically(directory / "job.json", codec.to_json(spec), file_modes.SETTINGS)
        with (
            self._journal_at(directory, job.name, logged=logging.DEBUG) as journal,
            contextlib.closing(StoreThread()) as store,
        ):
            ended = partial(self._write_end, store, job.name)
            origin = JobOrigin(job.submission.resume, revives=True)
            part = JobReplica(spec, directory, self._etcd, self._address, self._service, journal, origin, ended)
            part.write_address()
            await part.run()

    async def _write_end(self, store: StoreThread, job: str, told: dict[str, object]) -> None:
        """Write the end of a job: its slots are free from now on, even if its workers still do something after the
        training."""
        exit_code, generation = cast(int, told["exit_code"]), cast(int, told["generation"])
        result = Result(exit_code, str(told["because"]), str(told["digest"]), generation)
        while True:
            try:
                return await store.call(registry.end, self._etcd, job, result)
            except StoreUnavailable:
                await asyncio.sleep(RETRY_S)

    async def _tell_end_again(self, job: str, told: dict[str, object]) -> None:
        """Write the end of a job that the documents have as running, though this replica has seen it end: etcd was
        restored from a backup."""
        self._journal.write("end_told_again", job=job, because=told["because"])
        with contextlib.closing(StoreThread()) as store:
            await self._write_end(store, job, told)

    async def _enforce(self, job: FleetJob) -> None:
        """End a stopped job, if this replica leads it. Its nodes leave it; if it still forms, or has not ended STOP_S
        after this replica heard of the stop, it is ended at once. Runs until the job is over: a failed part begins
        again, and may lead again."""
        assert job.stop is not None
        because, ends_s, told = f"stopped: {job.stop.because}", time.monotonic() + STOP_S, 0
        while job.name in self._running:
            entry = self._service.leads.get(job.name)
            if entry is not None and (leader := entry.leader) is not None:
                if leader.group.state is State.FORMING or time.monotonic() >= ends_s:
                    await leader.post(Stopped(because, at_once=True))
                elif leader.term != told:
                    told = leader.term
                    await leader.post(Stopped(because, at_once=False))
            await asyncio.sleep(STOP_POLL_S)


def _wake(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(changed.set)
