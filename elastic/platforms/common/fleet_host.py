"""`python -m elastic.platforms.common.fleet_host DIR CERTS LISTEN ETCD DATA`: etcd and one replica of the rendezvous,
for one job.

It ends when its input is closed or its parent is gone, and etcd with it. An etcd that ends meanwhile is started again
on its data. DIR: gets `rendezvous.json` when it listens. CERTS: of the replica. ETCD: the server's path; "": any.
DATA: what etcd keeps; "": nothing outlasts it.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
import threading
from pathlib import Path

from elastic.errors import ElasticError, ExitCode
from elastic.fleet.replica.server import Server
from elastic.process import log, stop_signals
from elastic.process.log_line import LogFormat
from elastic.security.keyring import of_role
from elastic.security.roles import Role
from elastic.security.secure_server import ServerCertificates
from elastic.store.embedded import EmbeddedEtcd

PARENT_LOOK_S = 1.0


def main(directory: Path, certs: Path, listen: str, binary: str, data: str) -> int:
    parent = os.getppid()
    begin = log.beginning(LogFormat.TEXT, log.LEVEL)
    try:
        lock = ServerCertificates(of_role(certs, Role.RENDEZVOUS))
        with EmbeddedEtcd(binary=binary or None, data=Path(data) if data else None) as etcd:
            over = threading.Event()
            for watch in ((_end_with, parent), (_keep, etcd, over)):
                threading.Thread(target=watch[0], args=watch[1:], daemon=True).start()
            try:
                # What etcd has is this job's alone: a version that may lose it when it is killed will do.
                return asyncio.run(
                    Server(directory, [etcd.endpoint], listen, lock, unsafe_etcd=True, listens=begin).run()
                )
            finally:
                over.set()
    except ElasticError as error:
        print(error, file=sys.stderr, flush=True)
        return ExitCode.BAD_INPUT


def _end_with(parent: int) -> None:
    """Ask this process to end when its input is closed, or its parent is another one."""
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], PARENT_LOOK_S)
        if readable and not os.read(0, 1):
            break
    os.kill(os.getpid(), stop_signals.ORDERS[signal.SIGTERM])


def _keep(etcd: EmbeddedEtcd, over: threading.Event) -> None:
    """The thread that has started etcd lives as long as etcd does: the kernel ends it with the thread. Where it cannot
    be started, as without memory for a process, this says so once, and tries again."""
    told = False
    while True:
        etcd.process.wait()
        if over.wait(PARENT_LOOK_S):
            return
        try:
            etcd.restart()
            told = False
        except (OSError, ElasticError) as error:
            if not told:
                print(f"etcd cannot be started again: {error}", file=sys.stderr, flush=True)
            told = True


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
