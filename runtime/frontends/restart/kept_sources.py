"""Where what was kept is: on this machine, or with which workers of other machines."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.agent.worker.environment import WorkerEnvironment
from elastic.errors import CheckpointCorrupt, NoMemory
from elastic.protocol.worker_id import node_of
from runtime.allreduce.ring.tls import TlsContexts
from runtime.frontends.restart.rounds import StartScript
from runtime.recovery.kept.choice import HeldSegment, KeptStep, RoundNumber, holders, mirrors_of, newest_whole
from runtime.recovery.kept.digest import leaf_digests
from runtime.recovery.kept.loading import opened
from runtime.recovery.kept.place import KeptPlace
from runtime.recovery.kept.remote import OtherMachines
from runtime.recovery.state.available_memory import free_bytes
from runtime.recovery.transfer.connection import CopyFailed
from runtime.worker.worker_session import WorkerSession

ROOM_BYTES = 1 << 20
"""With less free memory a machine keeps and loads nothing: what its scripts are told of other machines is a file
there."""


class KeptSources:
    """For the scripts of one worker. Used by its main thread."""

    def __init__(self, session: WorkerSession, told: WorkerEnvironment, memory: str) -> None:
        """memory: the job's directory in memory; "": there is none."""
        self._session = session
        self._told = told
        self._memory = memory

    def has_room(self, members: tuple[str, ...]) -> bool | None:
        """Whether this machine has the memory to take part in a round; None: it has no room there now. members: of the
        round; on one machine scripts can load what was kept also where nothing more has room."""
        if not self._memory or not mirrors_of(self._session.worker_id, members):
            return bool(self._memory)
        try:
            return True if free_bytes(self._memory) >= ROOM_BYTES else None
        except OSError:  # it is gone
            return False

    def environment(
        self, rank: int, members: tuple[str, ...], start: StartScript, number: RoundNumber
    ) -> dict[str, str]:
        """What a process of the script is told about keeping its state in the round of that number. Raises OSError."""
        source, because, others = start.source, "", ""
        if start.without:
            because = f"{start.without[0]} has no room in memory, or --snapshot-every off"
        elif mirrors := mirrors_of(self._session.worker_id, members):
            parts: dict[int, str] = {}
            count = 0
            if source is not None:
                source, parts, count = self._elsewhere(source, start.held)
            path = KeptPlace(self._memory, number).directory() / f"others.{rank}"
            OtherMachines(self._session.dial(), mirrors, parts, count).write(path)
            others = str(path)
        return KeptPlace(self._memory, number, source, because, others, own=self._told.ranks > 0).to_environment()

    def digests(
        self, members: tuple[str, ...], source: KeptStep, held: Mapping[str, tuple[HeldSegment, ...]]
    ) -> dict[str, str] | None:
        """Name -> digest of each tensor of this worker's share of a step. None: not all could be read; it is
        journaled."""
        here, parts, count = self._elsewhere(source, held)
        others = OtherMachines(self._session.dial(), (), parts, count)
        mine = members.index(self._session.worker_id), len(members)
        try:
            with opened(self._memory, here, others, TlsContexts(self._told.certs)) as segments:
                return leaf_digests(segments, *mine, own=self._told.ranks > 0)
        except (CopyFailed, CheckpointCorrupt, OSError, NoMemory, RuntimeError, MemoryError) as error:  # of torch, too
            self._session.note("kept_not_digested", step=source.step, because=str(error))
            return None

    def _elsewhere(
        self, source: KeptStep, held: Mapping[str, tuple[HeldSegment, ...]]
    ) -> tuple[KeptStep, dict[int, str], int]:
        """What is read of this step: on this machine alone, if it is whole there; which parts of it are on other
        machines: part -> worker; and how many parts."""
        me = self._session.worker_id
        alike = (
            one
            for worker, segments in held.items()
            for one in segments
            if node_of(worker) == node_of(me) and (one.step, one.round) == (source.step, source.round)
        )
        if (here := newest_whole(alike)) is not None:
            return here, {}, 0
        found = holders(held, source)
        away = {
            part.part: workers[self._told.slot % len(workers)]
            for part, workers in found.items()
            if node_of(me) not in map(node_of, workers)
        }
        return source, away, next(iter(found)).parts
