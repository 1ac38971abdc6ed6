"""A program: a training of three ranks, each of which also has what the others have not, in one round and in two.

Prints for each run a line `NAME DIGEST...`, one digest for each rank. The arguments are names of runs: `quiet` has one
round, `two` has two. In `order` and `random` the second round is not given the order of gradients, or the random
numbers. In `drift` the weights of one rank leave those of the others behind the first step. In `late` and `late-quiet`
what each rank trains for itself differs from the beginning and is trained from the second step on, in `zero` and
`zero-quiet` its first gradients are zero; in `lost` it is trained late, and is not given to elastic.keep. `hook` has
two rounds, and tells how many gradients DDP has given to a communication hook of each rank. `every` keeps each second
step, and `apart` each second or third one, as the ranks do not agree. In `full` one rank finds no room for a directory.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import elastic
from elastic.errors import ConfigError, Disagree, NotCarried
from runtime.data.random_state import RandomNumbers
from runtime.recovery.kept import ddp_order
from runtime.recovery.kept.choice import RoundNumber, newest_whole
from runtime.recovery.kept.look import KeptHere
from runtime.recovery.kept.place import KeptPlace
from tests.memory_directory import memory_directory
from tests.unit.runtime.recovery.kept.worlds import fork

warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)

WORLD, STEPS, FIRST = 3, 6, 3
WIDTH = 61


class Model(nn.Module):
    """Gradients come in another order than that in which parameters are made."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.norm, self.first = nn.Linear(WIDTH, 3), nn.BatchNorm1d(WIDTH), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.2))


class Hook:
    """A communication hook of DDP with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def sums(self, bucket: Any) -> Any:
        self.calls += len(bucket.gradients())
        return allreduce_hook(cast(Any, None), bucket)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Odd:
    """Its state has no JSON in one rank."""

    def __init__(self, name: str, rank: int) -> None:
        self.state = {"value": object() if name == "odd" and rank == 1 else 0}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def train(rank: int, name: str, until: int) -> str:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), broadcast_buffers=False)
    if name.startswith(("late", "zero")):
        torch.manual_seed(rank)
    own = nn.Linear(3, 2)  # each rank trains one for itself
    optimizer = torch.optim.SGD([*model.parameters(), *own.parameters()], lr=0.1, momentum=0.9)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(rank)
    hook = Hook()
    if name == "hook":
        model.register_comm_hook(None, lambda state, bucket: hook.sums(bucket))
    every = rank + 1 if name == "apart" else 2 if name == "every" else 1
    own_or_none = None if name == "lost" else own
    kept = elastic.keep(model, optimizer, every=every, own=own_or_none, hook=hook, more=Odd(name, rank))
    if name == "stops" and rank == 1:
        kept.turn_off("rank 1 says so")
    while kept.step < until:
        optimizer.zero_grad()
        x = torch.randn(5, 8) * random.random() + torch.tensor(np.random.normal(size=8), dtype=torch.float32)
        out = model(x)
        loss = out.square().sum()
        if kept.step or not name.startswith(("late", "lost")):
            factor = 0.0 if name.startswith("zero") and kept.step == 0 else 1.0
            loss = loss + own(out.detach()).square().sum() * factor
        loss.backward()
        optimizer.step()
        if name == "drift" and kept.step == 1 and rank == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01)
        kept.done()
    kept.wait()
    if name == "hook":
        return str(hook.calls)
    found = hashlib.sha256(repr((torch.rand(2).tolist(), np.random.random(), random.random())).encode())
    moments = [state["momentum_buffer"] for state in optimizer.state.values()]
    for one in (*model.state_dict().values(), *own.parameters(), *moments):
        found.update(one.detach().double().numpy().tobytes())
    return found.hexdigest()


def full(place: KeptPlace) -> Path:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def begin(rank: int, name: str, until: int, home: Path, place: KeptPlace) -> None:
    named = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ.update({key: str(value) for key, value in named.items()}, **place.to_environment())
    torch.set_num_threads(1)
    if name == "order":
        vars(ddp_order)["rehearse"] = lambda model, order: None
    if name == "random":
        RandomNumbers.load_state_dict = lambda self, state: None  # type: ignore[method-assign]
    if name == "full" and rank == 1:
        KeptPlace.directory = full  # type: ignore[assignment, method-assign]
    dist.init_process_group("gloo", store=FileStore(str(home / f"s.{place.round}"), WORLD), rank=rank, world_size=WORLD)
    try:
        said = train(rank, name, until)
    except (ConfigError, Disagree, NotCarried, RuntimeError) as error:
        said = type(error).__name__  # RuntimeError: the process group misses a rank that has raised Disagree
    (home / f"digest.{rank}").write_text(said)
    os._exit(0)  # the other round begins now; no farewell


def run(name: str) -> str:
    with memory_directory() as directory:
        home = Path(directory)
        for number, until in enumerate((STEPS,) if name.endswith("quiet") else (FIRST, STEPS), 1):
            source = newest_whole(KeptHere(directory, cast(Any, None)).check(0, 1))
            place = KeptPlace(directory, RoundNumber(0, number), source, own=True)
            first = (
                0 if number == 1 or name in ("odd", "stops", "apart", "full") else FIRST - FIRST % 2 * (name == "every")
            )
            assert (source.step if source else 0) == first, "the newest step is whole"
            pids = [fork(functools.partial(begin, rank, name, until, home, place)) for rank in range(WORLD)]
            if any([os.waitpid(pid, 0)[1] for pid in pids]):
                sys.exit(1)
        return " ".join((home / f"digest.{rank}").read_text() for rank in range(WORLD))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, run(argument), flush=True)
