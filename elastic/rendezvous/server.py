"""The rendezvous service of one job: `python -m elastic.rendezvous --job-dir DIR --etcd HOST:PORT`.

`elastic run` starts it. The service of many jobs is `elastic rendezvous` (elastic/fleet).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
from pathlib import Path
from typing import Any

import grpc.aio

from elastic.config import JobSpec
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.process import log, stop_signals
from elastic.process.log_line import LogFormat
from elastic.records.files import read_job
from elastic.records.job_directory import read_settings
from elastic.records.journal import Journal, journal_path
from elastic.records.retention import Retention
from elastic.rendezvous.job_replica import JobReplica, settle_down
from elastic.rendezvous.leader import JobOrigin
from elastic.rendezvous.service import SERVER_OPTIONS, RendezvousService
from elastic.security.channels import bind
from elastic.store.etcd import EtcdStore
from elastic.wire.services import add_to_server

REPLICAS = Retention("rendezvous-")

_log = logging.getLogger(__name__)


class Replica:
    """One process of the service of one job, from listening to the end of the job."""

    def __init__(self, spec: JobSpec, job_dir: Path, etcd: str, listen: str) -> None:
        self._spec = spec
        self._job_dir = job_dir
        self._etcd = etcd
        self._listen = listen

    async def run(self) -> int:
        """Serve until the job is over (0) or a signal comes (128 + its number)."""
        settle_down()
        stopped = stop_signal()
        who = f"rendezvous-{os.getpid()}"
        server = grpc.aio.server(options=SERVER_OPTIONS)
        with (
            Journal(
                journal_path(self._job_dir, who),
                self._spec.name,
                who,
                socket.gethostname(),
                retention=REPLICAS,
                logged=logging.DEBUG,
            ) as journal,
            EtcdStore(self._etcd.split(",")) as etcd,
        ):
            service = RendezvousService()
            add_to_server("Rendezvous", service, server)
            address = bind(server, self._listen, None)
            settings = read_settings(self._job_dir)
            resumed = settings.resume if not settings.resume_from else ""  # a snapshot in memory is no checkpoint
            part = JobReplica(self._spec, self._job_dir, etcd, address, service, journal, JobOrigin(resumed))
            await server.start()
            part.write_address()
            journal.write("listening", address=address)
            work = asyncio.create_task(part.run())
            try:
                either: tuple[asyncio.Future[Any], ...] = (work, stopped)
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    return stopped.result()
                work.result()
                return ExitCode.DONE
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                await server.stop(grace=0.5)
                journal.write("stopped")


def stop_signal() -> asyncio.Future[int]:
    """A future: 128 + the number of the first SIGTERM or SIGINT, sent or ordered."""
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if not stopped.done():
            stopped.set_result(128 + number)

    for sent, asked in stop_signals.obeyed().items():
        loop.add_signal_handler(sent, stop, asked)
    stop_signals.begin()
    return stopped


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m elastic.rendezvous", description="One replica of the rendezvous.")
    parser.add_argument(
        "--job-dir", type=Path, required=True, help="directory with job.json; rendezvous.json is written"
    )
    parser.add_argument("--etcd", required=True, help="host:port, several with commas, or unix:/path:1")
    parser.add_argument("--listen", default="127.0.0.1:0", help="address to serve agents on (default %(default)s)")
    log.add_options(parser)
    options = parser.parse_args(argv)
    log.beginning(LogFormat(options.log_format), options.log_level)()
    try:
        spec = read_job(options.job_dir)
        return asyncio.run(Replica(spec, options.job_dir, options.etcd, options.listen).run())
    except ElasticError as error:
        _log.critical("the replica ends: %s", error)
        return ExitCode.BAD_INPUT if isinstance(error, ConfigError) else ExitCode.BELOW_QUORUM
