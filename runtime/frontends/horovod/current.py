"""hvd.init() and hvd.shutdown(): which world this process is in, and who it is there."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from elastic.agent.worker.environment import AGENT_SOCKET, RESTART
from elastic.errors import ConfigError
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.horovod.interrupts import NotInitialized
from runtime.frontends.horovod.member_world import MemberWorld
from runtime.frontends.horovod.process_sets import ProcessSet, ProcessSets
from runtime.frontends.horovod.rank_world import RankWorld
from runtime.frontends.horovod.torch_world import TorchWorld
from runtime.frontends.horovod.world import OneWorld, RankStanding, World

global_process_set = ProcessSet([])
"""All ranks."""


class _Here(threading.local):
    """The world of one thread: a script's loop belongs to the thread that called init()."""

    world: World | None = None
    sets: ProcessSets | None = None


_here = _Here()
_of_process: list[World] = []
"""The world of the thread that has called init() last: other threads of a script may ask who they are."""


def init(comm: object = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Enter the world that this process was started for; a second call does nothing. comm: a part of the ranks is
    refused, by ConfigError. process_sets: added as by add_process_set()."""
    if comm is not None:
        raise ConfigError("hvd.init(comm=): there is no MPI here; leave it out, or use a ProcessSet")
    if _here.world is not None:
        return
    _here.world = _world()
    _of_process[:] = [_here.world]
    _here.sets = ProcessSets(global_process_set, lambda: here("size").standing)
    for wanted in process_sets or ():
        add_process_set(wanted)


def _world() -> World:
    if (script := RankScript.current()) is not None:
        return RankWorld(script)
    if os.environ.get(AGENT_SOCKET) and os.environ.get(RESTART) != "1":
        return MemberWorld.of_this_process()
    return TorchWorld() if int(os.environ.get("WORLD_SIZE") or "1") > 1 else OneWorld()


def shutdown() -> None:
    """Forget the world and the process sets, until the next init(). A job goes on to the end of its script."""
    if _of_process == [_here.world]:
        _of_process.clear()
    _here.world = _here.sets = None


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() not since."""
    return _here.world is not None


def here(call: str) -> World:
    """The world of this thread. Raises NotInitialized."""
    if _here.world is None:
        raise NotInitialized(f"hvd.{call}() was called before hvd.init(): call that first, at the top of the script")
    return _here.world


@contextmanager
def entered(world: World) -> Iterator[None]:
    """This thread is in that world for a while: autograd has threads of its own for backward()."""
    before, _here.world = _here.world, world
    try:
        yield
    finally:
        _here.world = before


def _standing(call: str) -> RankStanding:
    """Also of another thread than that of the script, which calls no collective."""
    return (_of_process[0] if _here.world is None and _of_process else here(call)).standing


def size() -> int:
    """How many ranks there are: with --ranks N always N; in an elastic job the workers at the last commit."""
    return _standing("size").size


def rank() -> int:
    """The number of this rank, 0..size()-1."""
    return _standing("rank").rank


def local_size() -> int:
    """How many ranks this node may have."""
    return _standing("local_size").local_size


def local_rank() -> int:
    """The number of this rank on its node; also its CUDA device."""
    return _standing("local_rank").local_rank


def cross_size() -> int:
    """How many nodes there are."""
    return _standing("cross_size").cross_size


def cross_rank() -> int:
    """The number of this node."""
    return _standing("cross_rank").cross_rank


def is_homogeneous() -> bool:
    """Whether all nodes have as many ranks as this one."""
    found = _standing("is_homogeneous")
    return found.local_size * found.cross_size == found.size


# Process sets


def _sets(call: str) -> ProcessSets:
    here(call)
    assert _here.sets is not None
    return _here.sets


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """See ProcessSets.add."""
    return _sets("add_process_set").add(process_set, can_split=isinstance(_here.world, TorchWorld))


def remove_process_set(process_set: ProcessSet) -> bool:
    """See ProcessSets.remove."""
    return _sets("remove_process_set").remove(process_set)


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """Id -> ranks of each set."""
    return _sets("get_process_set_ids_and_ranks").by_id()
