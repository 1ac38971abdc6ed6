"""The rendezvous service: `python -m elastic.rendezvous --job-dir DIR --etcd HOST:PORT`.

Every replica listens; the one that holds the election key leads. A leader owns one `membership.Group` and runs

    event = await mailbox.get()                        words of agents, results of commits, ticks
    group, actions = membership.step(group, event, now_s)
    for action in actions: perform(action)             tell agents, commit, write the journal, end the job

on one asyncio thread. The store is synchronous and has a thread of its own; its answers come back as events. A leader
relies on its lease by its own clock only, and forgets everything when it steps down: the next one learns it again
from the store's records and from what agents announce.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import grpc
import grpc.aio

from elastic import codec
from elastic.config import JobSpec
from elastic.election import Candidate, Taken
from elastic.errors import ConfigError, ElasticError, ExitCode, StoreError, StoreUnavailable
from elastic.etcd import EtcdStore
from elastic.files import read_job, write_atomically
from elastic.journal import Journal, journal_path
from elastic.membership import End
from elastic.reign import RETRY_S, Reign, StoreThread
from elastic.resume import read_settings
from elastic.service import SERVER_OPTIONS, Service
from elastic.wire.elastic_pb2_grpc import add_RendezvousServicer_to_server

VACANCY_S = 2.0
"""How long a candidate trusts a silent watch of the election key before it looks again."""


class Replica:
    """One process of the service, from listening to the end of the job."""

    def __init__(self, spec: JobSpec, job_dir: Path, etcd: str, listen: str) -> None:
        self._spec = spec
        self._job_dir = job_dir
        self._etcd = etcd
        self._listen = listen
        self._stopped: asyncio.Future[int] | None = None

    async def run(self) -> int:
        """Serve until the job is over (0) or a signal comes (128 + its number)."""
        loop = asyncio.get_running_loop()
        stopped: asyncio.Future[int] = loop.create_future()
        self._stopped = stopped
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, 128 + number)
        who = f"rendezvous-{os.getpid()}"
        server = grpc.aio.server(options=SERVER_OPTIONS)
        with (
            Journal(journal_path(self._job_dir, who), self._spec.name, who, socket.gethostname()) as journal,
            EtcdStore(self._etcd.split(",")) as etcd,
            _closing(StoreThread()) as store,
        ):
            service = Service(self._spec.name, journal)
            add_RendezvousServicer_to_server(service, server)
            address = _bind(server, self._listen)
            candidate = Candidate(etcd, self._spec.name, address, time.monotonic)
            await server.start()
            self._write_address(address)
            journal.write("listening", address=address)
            work = asyncio.create_task(self._stand_and_lead(service, candidate, store, journal, address))
            try:
                await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
                return stopped.result()
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                with contextlib.suppress(StoreError):  # the lease ends it anyway
                    await store.call(candidate.resign)
                await server.stop(grace=0.5)
                journal.write("stopped")

    def _stop(self, status: int) -> None:
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(status)

    def _write_address(self, address: str) -> None:
        document = {"address": address, "pid": os.getpid()}
        write_atomically(self._job_dir / "rendezvous.json", json.dumps(document).encode())

    async def _stand_and_lead(
        self, service: Service, candidate: Candidate, store: StoreThread, journal: Journal, address: str
    ) -> int:
        while True:
            term = await self._win(service, candidate, store)
            try:
                ended, chain = await store.call(lambda: (candidate.result(), candidate.chain()))
            except (StoreError, codec.WireError) as error:
                journal.write("not_leading", term=term, because=str(error))
                await asyncio.sleep(RETRY_S)
                continue
            if ended is not None:
                journal.write("job_was_over", term=term)
                self._write_result(ended)  # the leader that stored it may have died before it could
                return ExitCode.DONE
            settings = read_settings(self._job_dir)
            resumed = settings.resume if not settings.resume_from else ""  # a snapshot in memory is no checkpoint
            reign = Reign(self._spec, candidate, term, journal, store, resumed)
            service.reign, service.leader = reign, address
            self._write_address(address)
            journal.write("leading", term=term, highest=chain[-1].number if chain else 0)
            try:
                outcome = await reign.lead(chain)
                if isinstance(outcome, End):
                    await self._end(outcome, reign, journal)
                    return ExitCode.DONE
            finally:
                service.reign, service.leader = None, ""
                reign.dismiss()
            journal.write("deposed", term=term, because=outcome.because)
            with contextlib.suppress(StoreError):  # the lease ends it anyway
                await store.call(candidate.resign)

    async def _win(self, service: Service, candidate: Candidate, store: StoreThread) -> int:
        """Stand for election whenever the key may be free, until this replica has it. Returns the term."""
        while True:
            try:
                outcome = await store.call(candidate.stand)
                if not isinstance(outcome, Taken):
                    return outcome.term
                service.leader = outcome.leader
                await self._vacancy(candidate, store, outcome.revision)
            except StoreUnavailable:
                await asyncio.sleep(RETRY_S)

    async def _vacancy(self, candidate: Candidate, store: StoreThread, revision: int) -> None:
        """Until something happened to the election key, or the watch has been silent for long."""
        loop = asyncio.get_running_loop()
        happened = asyncio.Event()
        watch = await store.call(
            candidate.watch_leader, revision, lambda event: loop.call_soon_threadsafe(happened.set)
        )
        try:
            await asyncio.wait_for(happened.wait(), VACANCY_S)
        except TimeoutError:
            pass
        finally:
            watch.cancel()

    async def _end(self, end: End, reign: Reign, journal: Journal) -> None:
        """The result is in the store: write it down for whoever started the job, and let the agents go."""
        journal.write("job_ended", reign.generation, **asdict(end))
        self._write_result(reign.result(end))
        await reign.farewell(end)

    def _write_result(self, result: dict[str, object]) -> None:
        write_atomically(self._job_dir / "result.json", json.dumps(result).encode())


@contextlib.contextmanager
def _closing(thread: StoreThread) -> Iterator[StoreThread]:
    try:
        yield thread
    finally:
        thread.close()


def _bind(server: grpc.aio.Server, listen: str) -> str:
    """Listen there; the address with the port that was given. Raises ConfigError if the port is taken."""
    host = listen.rpartition(":")[0]
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {listen}: {error}; choose another port, or 0 for any") from error
    return f"{host}:{port}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m elastic.rendezvous", description="One replica of the rendezvous.")
    parser.add_argument(
        "--job-dir", type=Path, required=True, help="directory with job.json; rendezvous.json is written"
    )
    parser.add_argument("--etcd", required=True, help="host:port, several with commas, or unix:/path:1")
    parser.add_argument("--listen", default="127.0.0.1:0", help="address to serve agents on (default %(default)s)")
    options = parser.parse_args(argv)
    try:
        spec = read_job(options.job_dir)
        return asyncio.run(Replica(spec, options.job_dir, options.etcd, options.listen).run())
    except ElasticError as error:
        print(f"elastic: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT if isinstance(error, ConfigError) else ExitCode.BELOW_QUORUM


if __name__ == "__main__":
    sys.exit(main())
