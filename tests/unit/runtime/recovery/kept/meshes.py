"""A program: a training whose state is read by processes in another mesh: FSDP2, HSDP, tensor parallelism with FSDP2.

The arguments are meshes, each a round: `fsdp:2`, `hsdp:2x2` (replicas x shards), `tp:2x2` (shards x tensor parallel),
`exact:2x2` (the same with exact sums).
Prints for each round `MESH STEP LOADED DIGEST`: the step with which it begins, the digest of all weights and moments
when they are loaded (- in the first round), and two steps later.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import sys
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elastic
from runtime.recovery.kept.choice import RoundNumber, newest_whole
from runtime.recovery.kept.look import KeptHere
from runtime.recovery.kept.place import KeptPlace
from tests.memory_directory import memory_directory
from tests.unit.runtime.recovery.kept.worlds import fork

STEPS, UNITS = 2, 3


class Block(nn.Module):
    """Tensor parallelism of torch wants hidden units that it can divide evenly; the rest is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(9), nn.Linear(9, 24), nn.Linear(24, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def shard(model: Model, kind: str, shape: tuple[int, ...]) -> None:
    names = {"fsdp": ("shards",), "hsdp": ("replicas", "shards")}.get(kind, ("shards", "parallel"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    is_parallel = "parallel" in names
    if is_parallel:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["parallel"], plan)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["shards"] if is_parallel else mesh)


def digest(model: Model, optimizer: torch.optim.Optimizer) -> str:
    """Of whole tensors. A collective."""
    moments = [value for state in optimizer.state.values() for value in state.values()]
    found = hashlib.sha256()
    for tensor in (*model.state_dict().values(), *moments):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().double().numpy().tobytes())
    return found.hexdigest()[:16]


def rank(number: int, said: str, home: Path, place: KeptPlace) -> None:
    kind, _, words = said.partition(":")
    shape = tuple(map(int, words.split("x")))
    world = math.prod(shape)
    named = {"RANK": number, "LOCAL_RANK": number, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in named.items()}, **place.to_environment())
    torch.set_num_threads(1)
    store = FileStore(str(home / f"store.{place.round}"), world)
    dist.init_process_group("gloo", store=store, rank=number, world_size=world)
    torch.manual_seed(0)
    model = Model()
    shard(model, kind, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    kept = elastic.keep(model, optimizer, units=UNITS if kind == "exact" else None)
    first, loaded = kept.step, digest(model, optimizer) if kept.step else "-"
    for _ in range(STEPS):
        for unit in kept.units() if kind == "exact" else (0,):
            x = torch.randn(7, 9, generator=torch.Generator().manual_seed(UNITS * kept.step + unit))
            model(x).square().sum().backward()
        if kind == "exact":
            kept.clip_norm(0.1)
        optimizer.step()
        optimizer.zero_grad()
        kept.done()
    kept.wait()
    ended = digest(model, optimizer)
    if number == 0:
        print(said, first, loaded, ended, flush=True)


def chain(meshes: list[str]) -> None:
    with memory_directory() as directory:
        for number, said in enumerate(meshes, 1):
            world = math.prod(map(int, said.partition(":")[2].split("x")))
            source = newest_whole(KeptHere(directory, cast(Any, None)).check(0, 1))
            place = KeptPlace(directory, RoundNumber(0, number), source)
            ranks = [fork(functools.partial(rank, r, said, Path(directory), place)) for r in range(world)]
            if any([os.waitpid(pid, 0)[1] for pid in ranks]):
                sys.exit(1)


if __name__ == "__main__":
    chain(sys.argv[1:])
