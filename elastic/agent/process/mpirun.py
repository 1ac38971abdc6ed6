"""The agent's side of `--ring mpi`: one `mpirun`, whose ranks are given to the workers.

mpirun starts mpi_placeholder.py for each rank, which sends the environment variables that make a process that rank. A
worker gets them with its own settings, and is the agent's child like any other. When the worker ends, its placeholder
stays: deaths are detected without MPI, because the library's own handling of a death was seen to crash living ranks.
When a placeholder ends first, the rank or mpirun was ended, and the worker has to end, as its next call of MPI would.

Ranks are given once, at the start. MPI cannot give a rank twice, so a worker that replaces a lost one has none. Nor can
MPI start without one of them: a worker that waits in MPI_Init for an ended one is ended too, and replaced without MPI.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from elastic.agent.process import mpi_placeholder, worker_process
from elastic.agent.process.process_start import worker_environment
from elastic.agent.worker.mpi_ranks import Ranks
from elastic.errors import ConfigError
from elastic.process import children
from elastic.protocol.worker_slot import describe
from elastic.records import host_memory, temp_dirs
from elastic.records.journal import Journal

START_S = 30.0
"""Seconds from the start of mpirun until all its ranks have reported. A tenth of a second is usual."""
DEAF = ("/bin/sh", "-c", 'trap "" TERM INT HUP; exec "$@"', "sh")
"""Starts a program that ignores signals to stop, which mpirun passes to its children. They end with mpirun."""

JOIN_S = 60.0
"""Seconds from when all workers are about to join until all have joined; less than one is usual. A worker that is late
is frozen or hangs, and all others with it."""
RANKS_CHECK_S = 1.0

INSTALL = "pip install 'elastic-ring[mpi]' (mpi4py, and Open MPI 5 with ULFM)"
SCHEDULERS = ("SLURM_", "PBS_", "LSB_", "LSF_", "SGE_", "PRTE_", "PRRTE_")
"""Prefixes of variables that would make mpirun ask a scheduler for machines; all ranks are on this machine."""
TUNING = "OMPI_MCA_"
"""Prefix of Open MPI's settings. They are the user's own, unless an outer mpirun has set them."""
IDENTITY = ("PMIX_", "OMPI_", "PRTE_", "OPAL_", "UCX_")
"""Prefixes of the variables that make a process a rank."""
LOG_LINES = 3

_Arrival: TypeAlias = tuple[dict[str, str], asyncio.StreamReader, asyncio.StreamWriter]


def find() -> str:
    """The path of mpirun. Raises ConfigError, with what to install, unless `--ring mpi` can work here."""
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(f"--ring mpi needs mpi4py, which {sys.executable} does not have: {INSTALL}")
    where = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    mpirun = shutil.which("mpirun", path=where)
    if mpirun is None:
        raise ConfigError(f"--ring mpi needs the mpirun of Open MPI 5, and none is on PATH: {INSTALL}")
    info = shutil.which("ompi_info", path=str(Path(mpirun).parent))
    said = subprocess.run([info], capture_output=True, text=True).stdout if info else ""
    if "ftmpi" not in said:
        raise ConfigError(
            f"--ring mpi needs an Open MPI with ULFM, and {mpirun} belongs to none: no ompi_info beside it names the "
            f"extension 'ftmpi'; {INSTALL}"
        )
    return mpirun


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of mpirun: what a worker inherits, without schedulers' variables, and with the user's settings of
    Open MPI unless an outer mpirun has set them."""
    kept = {name: value for name, value in worker_environment(inherited, {}).items() if not name.startswith(SCHEDULERS)}
    if "OMPI_COMM_WORLD_SIZE" in inherited:
        return kept
    return {**kept, **{name: value for name, value in inherited.items() if name.startswith(TUNING)}}


class Mpirun:
    """Used on the agent's event loop only. on_lost: called with the id of a worker that has to end, because its rank
    was ended or MPI_Init cannot return in it."""

    def __init__(self, log: Path, journal: Journal, on_lost: Callable[[str], None]) -> None:
        self._log = log
        self._journal = journal
        self._on_lost = on_lost
        self._ranks: Ranks | None = None
        self._scratch: temp_dirs.TempDirectory | None = None
        self._holders: dict[str, _Holder] = {}
        self._left: set[str] = set()
        self._joining_s = 0.0
        """When all workers were first about to join; 0: they have not been yet."""
        self._settled = False
        """Whether all workers have joined, or never will."""
        self._watching: list[asyncio.Task[None]] = []
        self._program: _Program | None = None
        self._end_noted = False

    async def start(self, workers: Sequence[str]) -> None:
        """Start mpirun with one rank for each of these workers. Raises ConfigError if that fails."""
        program = find()
        try:
            self._scratch = temp_dirs.TempDirectory(host_memory.PARENT, host_memory.PREFIX)
        except OSError as error:
            raise ConfigError(f"--ring mpi needs {host_memory.PARENT}, and cannot use it: {error.strerror}") from error
        self._ranks = Ranks(tuple(workers), self._scratch.path)
        try:
            async with asyncio.timeout(START_S):
                await self._start(program, self._ranks)
        except TimeoutError as late:
            raise ConfigError(f"mpirun has not started its ranks within {START_S:g} s: {self._words()}") from late
        finally:
            if len(self._holders) < len(workers):
                await self.close()
        self._watching += [asyncio.create_task(self._watch_mpirun()), asyncio.create_task(self._watch_joining())]

    async def _start(self, program: str, ranks: Ranks) -> None:
        arrivals: asyncio.Queue[_Arrival] = asyncio.Queue()

        async def arrived(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            arrivals.put_nowait((json.loads(await reader.readline()), reader, writer))

        address = str(ranks.directory / "ranks")
        server = await asyncio.start_unix_server(arrived, address, limit=2**20)
        try:
            self._program = running = self._run(program, ranks, address)
            while len(self._holders) < len(ranks.workers):
                arrival = asyncio.ensure_future(arrivals.get())
                over = asyncio.ensure_future(running.ended.wait())
                await asyncio.wait((arrival, over), return_when=asyncio.FIRST_COMPLETED)
                over.cancel()
                if not arrival.done():
                    arrival.cancel()
                    raise ConfigError(f"mpirun {running.how} before all its ranks were there: {self._words()}")
                self._take(ranks, *arrival.result())
        finally:
            server.close()

    def _run(self, program: str, ranks: Ranks, address: str) -> _Program:
        options = ["--with-ft", "ulfm", "--oversubscribe", "--bind-to", "none", "-n", str(len(ranks.workers))]
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
        # mpirun inherits blocked stop signals and keeps them blocked; it is ended with SIGKILL.
        placeholder = (sys.executable, "-I", "-S", str(Path(mpi_placeholder.__file__)), address)
        command = children.dying_with_this(program, *options, *DEAF, *placeholder)
        variables = {**environment(os.environ), "TMPDIR": str(ranks.directory)}
        return _Program(children.start(command, self._log, env=variables, process_group=None))

    def _take(
        self, ranks: Ranks, its: Mapping[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        worker_id = ranks.workers[int(its["OMPI_COMM_WORLD_RANK"])]
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        identity = {name: value for name, value in its.items() if name.startswith(IDENTITY)}
        self._holders[worker_id] = _Holder(struct.unpack("3i", credentials)[0], identity, writer)
        self._watching.append(asyncio.create_task(self._watch(worker_id, reader)))

    async def _watch(self, worker_id: str, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        if worker_id not in self._left:
            self._journal.write("rank_ended", worker_id=worker_id)
            self._on_lost(worker_id)

    async def _watch_mpirun(self) -> None:
        assert self._program is not None
        await self._program.ended.wait()
        if self._holders.keys() - self._left:
            self._note_end()

    def _note_end(self) -> None:
        """Journal the end of mpirun, once."""
        if self._program is not None and not self._end_noted:
            self._end_noted = True
            self._journal.write("mpirun_ended", because=self._program.how, words=self._words())

    async def _watch_joining(self) -> None:
        while not self._settled:
            await asyncio.sleep(RANKS_CHECK_S)
            self.look(time.monotonic())

    def settings(self, worker_id: str) -> dict[str, str]:
        """Environment variables of a worker that is about to start; {} without mpirun."""
        if self._ranks is None:
            return {}
        holder = self._holders.get(worker_id)
        shared = {"OMPI_MCA_btl_sm_backing_directory": str(self._ranks.directory)}
        return {**(holder.identity if holder else {}), **shared, **self._ranks.to_environment()}

    def why_lost(self, worker_id: str) -> str:
        """What has ended the rank of a worker, and so the worker; "": nothing has."""
        holder = self._holders.get(worker_id)
        if holder is None or self._program is None:
            return ""
        if how := self._program.how:
            self._note_end()
            return f"mpirun {how}"
        return "its rank of mpirun was ended" if holder.has_ended else ""

    def left(self, worker_id: str) -> str:
        """Note that the worker has ended. Returns why_lost."""
        holder = self._holders.get(worker_id)
        if holder is None or self._ranks is None:
            return ""
        because = self.why_lost(worker_id)
        self._left.add(worker_id)
        self._ranks.gone(self._ranks.workers.index(worker_id)).touch()
        if worker_id in (joining := self._ranks.joining()):
            self._strand(joining, f"{worker_id} ended while it was joining the others")
        return because

    def look(self, now_s: float) -> None:
        """To be called now and then: check whether all workers have joined, once all were about to."""
        if self._ranks is None or self._settled:
            return
        if not (joining := self._ranks.joining()):
            self._settled = all(self._ranks.joined(n).exists() for n in range(len(self._ranks.workers)))
            return
        self._joining_s = self._joining_s or now_s
        if now_s >= self._joining_s + JOIN_S:
            self._strand(joining, f"not all workers had joined the others within {JOIN_S:g} s")

    def _strand(self, joining: set[str], because: str) -> None:
        """End these workers: MPI_Init will never return in them."""
        self._settled = True
        if ended := sorted(joining - self._left):
            self._journal.write("mpi_not_started", because=because, ended=ended)
        for worker_id in ended:
            self._on_lost(worker_id)

    async def close(self) -> None:
        """End mpirun and remove its files."""
        for watching in self._watching:
            watching.cancel()
        for holder in self._holders.values():
            holder.writer.close()
        self._holders.clear()
        if self._program is not None:
            await self._program.end()
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    def _words(self) -> str:
        """The last lines that mpirun has printed."""
        with contextlib.suppress(FileNotFoundError):
            lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
            if said := [line for line in lines if line.strip("-")]:
                return " ".join(said[-LOG_LINES:])
        return "it said nothing"


class _Program:
    """mpirun itself. How it ended is known as soon as its end has begun, because the ends of its placeholders and of
    the workers may be noticed first."""

    def __init__(self, started: subprocess.Popen[bytes]) -> None:
        self._process, self.pid = started, started.pid
        self.ended = asyncio.Event()
        self._pidfd = os.pidfd_open(started.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self.ended.set()

    @property
    def how(self) -> str:
        """How mpirun has ended, in words; "": it runs."""
        status = self._process.returncode
        if status is not None:
            return describe(status)
        status = worker_process.ending_status(self.pid)
        return describe(status) if status else ""

    async def end(self) -> None:
        if not self.ended.is_set():
            self._process.kill()
            await self.ended.wait()


@dataclass(frozen=True, slots=True)
class _Holder:
    """A placeholder that has a rank. identity: the environment variables that make a process this rank."""

    pid: int
    identity: Mapping[str, str]
    writer: asyncio.StreamWriter

    @property
    def has_ended(self) -> bool:
        seen = worker_process.facts(self.pid)
        return seen is None or seen.state in "ZX"
