"""Logical ranks in a process that asks for them: by `elastic run --ranks N`, or by elastic.ddp.enable()."""

from __future__ import annotations

import builtins
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader

from elastic.agent.worker.environment import AGENT_SOCKET, RANKS, SLOT
from elastic.errors import ConfigError
from runtime.data.random_state import seed_all
from runtime.ddp import batches, held_back, process_group, wrapper
from runtime.ddp.rank_script import RankScript, watched_backward
from runtime.ddp.seams import Seams
from runtime.job import process_start

SEED = 0
"""Of what a script draws that seeds nothing itself."""


def enable() -> RankScript | None:
    """Replace what has to be replaced in torch, and set the environment of torchrun; a second call does nothing.

    None, and nothing is replaced, in a process that no agent has started, or without --ranks.
    """
    ranks, slot = int(os.environ.get(RANKS) or "0"), int(os.environ.get(SLOT) or "0")
    if RankScript.current() is not None or not os.environ.get(AGENT_SOCKET) or not ranks:
        return RankScript.current()
    script = RankScript(ranks, min(slot, ranks - 1))
    torch.set_num_threads(process_start.threads(None))
    os.environ.update(environment(ranks, script.home))
    install(Seams())
    script.enter()
    seed_all(SEED, "script")
    return script


def install(seams: Seams) -> None:
    """All seams. They do nothing in a thread without a script."""
    process_group.install(seams)
    wrapper.install(seams)
    held_back.install(seams)
    seams.wrap(DataLoader, "__iter__", batches.iterate)
    seams.wrap(torch.autograd, "backward", watched_backward)
    seams.wrap(torch.multiprocessing, "spawn", _spawn)
    seams.replace(builtins, "enumerate", batches.Counted)


def environment(ranks: int, home: int) -> dict[str, str]:
    """The variables that torchrun sets, of one node with all ranks. Nobody listens at the address."""
    return {
        "RANK": str(home),
        "LOCAL_RANK": str(home),
        "ROLE_RANK": str(home),
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "ROLE_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": os.environ.get("ELASTIC_JOB", "none"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _spawn(original: Any) -> Any:
    """Scripts that start their own ranks: this process is one already."""

    @functools.wraps(original)
    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *rest: Any, **kwargs: Any) -> Any:
        script = RankScript.current()
        if script is None or script.begun:
            return original(fn, args, nprocs, *rest, **kwargs)
        if nprocs != script.ranks:
            raise ConfigError(
                f"mp.spawn(nprocs={nprocs}), and the job has {script.ranks} ranks: start it with --ranks {nprocs}"
            )
        fn(script.home, *args)
        return None

    return spawn
