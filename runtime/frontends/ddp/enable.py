"""Logical ranks in a process that asks for them: by `elastic run --ranks N`, or by elastic.ddp.enable()."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from elastic.agent.worker.environment import AGENT_SOCKET, RANKS, RESTART
from elastic.agent.worker.examination import Examination
from elastic.errors import ConfigError
from runtime.data.loader import check_count
from runtime.data.random_state import seed_all
from runtime.frontends.ddp import batches, held_back, process_group, wrapper
from runtime.frontends.ddp.rank_script import RankScript
from runtime.frontends.ddp.seams import Seams
from runtime.loop.job import begin

SEED = 0
"""The seed of a script that sets none."""


def enable(ranks: int | None = None) -> None:
    """Train this script as logical ranks: replace what has to be replaced in torch, and set the environment of
    torchrun. Call it before anything is made of torch.

    ranks: the WORLD_SIZE that the script sees for ever, however many workers there are; None: as `elastic run --ranks`
    or `elastic doctor --ranks` says. In a process that neither of the two has started, in one of `elastic run
    --restart`, and in a second call, nothing is done. Raises ConfigError if nothing says how many ranks there are, or
    if two say it differently.
    """
    told = int(os.environ.get(RANKS) or "0") or None
    examined = told is not None and Examination.from_environment(os.environ) is not None
    if not (os.environ.get(AGENT_SOCKET) or examined) or os.environ.get(RESTART) == "1":
        return
    if ranks is not None:
        check_count("ddp.enable(ranks=)", ranks)
    if ranks is not None and told not in (None, ranks):
        raise ConfigError(f"ddp.enable(ranks={ranks}), and the job was started with --ranks {told}; leave one out")
    if (number := ranks or told) is None:
        raise ConfigError("ddp.enable(): say how many ranks, by ddp.enable(ranks=8) or by `elastic run --ranks 8`")
    if RankScript.current() is not None:
        return
    script = RankScript(number)
    script.connect(begin(close=script.close))  # before the script's first line, which may ask for its rank
    os.environ.update(environment(script))
    install(Seams())
    script.enter()
    seed_all(SEED, "script")


def install(seams: Seams) -> None:
    """All seams. They do nothing in a thread without a script."""
    process_group.install(seams)
    wrapper.install(seams)
    held_back.install(seams)
    seams.wrap(DataLoader, "__iter__", batches.iterate)
    seams.wrap(_BaseDataLoaderIter, "__next__", batches.ask)
    seams.wrap(torch.multiprocessing, "spawn", _spawn)
    seams.replace(builtins, "enumerate", batches.Counted)


def environment(script: RankScript) -> dict[str, str]:
    """The variables that torchrun sets. RANK, LOCAL_RANK and GROUP_RANK are what no other worker of the job, worker of
    the node, and node has, as far as there are ranks. Each node may compute all ranks, so LOCAL_WORLD_SIZE is constant
    too. Nobody listens at the address."""
    session, home, ranks = script.training.session, str(script.home), str(script.ranks)
    return {
        "RANK": home,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads())),
        "LOCAL_RANK": str(min(session.local_rank, script.ranks - 1)),
        "ROLE_RANK": home,
        "GROUP_RANK": str(session.home.node),
        "ROLE_NAME": "default",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "ROLE_WORLD_SIZE": ranks,
        "GROUP_WORLD_SIZE": str(session.home.nodes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": os.environ.get("ELASTIC_JOB", "none"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _spawn(
    script: RankScript,
    original: Any,
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Scripts that start their own ranks: this process is one already."""
    if script.begun:
        return original(fn, args, nprocs, *rest, **kwargs)
    if nprocs != script.ranks:
        raise ConfigError(
            f"mp.spawn(nprocs={nprocs}), and the job has {script.ranks} ranks: start it with --ranks {nprocs}"
        )
    fn(script.home, *args)
    return None
