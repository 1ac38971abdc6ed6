"""Scripts of tests/ddp_scripts in the world of threads of tests/unit/worlds.py: deaths in any operation, newcomers, any
number of workers, in one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from runtime.frontends.ddp.enable import environment, install
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.seams import Seams
from runtime.session import Session, StepRecord
from tests.unit.jobs import Recorded, make_job
from tests.unit.worlds import Killed, World

RANKS = 4

Main = Callable[[], object]


class WrongGuess(RankScript):
    """Each step begins with the batch of a rank whose turn it is not, as if a worker had been lost meanwhile."""

    def _first_rank(self, owned: tuple[int, ...] | None) -> int:
        return (super()._first_rank(owned) + 1) % self.ranks


@contextmanager
def seams() -> Iterator[None]:
    """Everything replaced in torch, with a default process group for each thread, until the context ends."""
    found = Seams()
    found.replace(sys, "excepthook", sys.excepthook)  # torch wraps it in each init_process_group
    install(found)
    found.replace(distributed_c10d, "_world", ThreadLocalWorld())
    if not hasattr(ThreadLocalWorld, "comms"):  # torch 2.11 asks it for these when a group is destroyed
        found.replace(ThreadLocalWorld, "comms", [])
    for name in ("_register_process_group", "_unregister_process_group"):  # by name, one for all threads
        found.replace(distributed_c10d, name, lambda *args: None)
    threads, variables = torch.get_num_threads(), dict(os.environ)
    torch.set_num_threads(1)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.set_num_threads(threads)
        found.restore()
        os.environ.clear()
        os.environ.update(variables)
        RankScript._here.script = None


def run(session: Session, main: Main, ranks: int = RANKS, kind: type[RankScript] = RankScript) -> str:
    """The script's digest."""
    script = kind(ranks, sys._getframe())
    script.connect(make_job(session))
    script.enter()
    if hasattr(ThreadLocalWorld._world, "world"):
        del ThreadLocalWorld._world.world
    torch.manual_seed(0)
    os.environ.update(environment(script))
    try:
        main()
    finally:
        script.release()
    script.leave()
    digest = script.job.digest()
    script.job.close()
    return digest


@dataclass
class Outcome:
    digests: dict[str, str]
    errors: dict[str, BaseException]
    ledgers: dict[str, list[Any]]
    joined: dict[str, int]


def alone(main: Main, ranks: int = RANKS, kind: type[RankScript] = RankScript) -> tuple[str, list[Any]]:
    """Digest and ledger of a job of one."""
    session = Recorded()
    return run(session, main, ranks, kind=kind), ledger(session.records)


def ledger(records: list[StepRecord]) -> list[Any]:
    """What the records of all worlds have in common."""
    return [(record.step, record.epoch, record.lr, record.samples, record.data) for record in records]


def together(
    workers: int,
    main: Main,
    kills: Mapping[str, tuple[int, int]] | None = None,
    ranks: int = RANKS,
    kind: type[RankScript] = RankScript,
    **newcomers: int,
) -> Outcome:
    world = World(workers, kills=kills)

    def one(session: Any) -> str:
        return run(session, main, ranks, kind)

    world.run(one, **newcomers)
    errors = {name: error for name, error in world.errors.items() if not isinstance(error, Killed)}
    ledgers = {name: ledger(session.records) for name, session in world.sessions.items() if name in world.digests}
    return Outcome(dict(world.digests), errors, ledgers, dict(world.joined_at))
