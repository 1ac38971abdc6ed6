"""A program: the same training of a sharded model in several worlds, each with processes of its own.

Prints for each run a line `NAME WORLD DIGEST`. The arguments are names of runs with their worlds, as in `exact:123`.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # once, and not in each process: the first step of an optimizer asks for it, as does keep()
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import elastic
import runtime.recovery.kept.keep  # noqa: F401

UNITS = 7
"""Of which no world but 1 has as many in each turn."""
STEPS = 3

RUNS: dict[str, dict[str, Any]] = {
    "exact": {},
    "long": {"steps": 8},
    "foreach": {"adam": {"foreach": True}},
    "bf16": {"policy": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}},
    "plain": {"plain": True},
    "nan": {"poison": 5},
    "hsdp": {"replicas": True},
    "hsdp-nan": {"replicas": True, "poison": 5},
    "tp": {"parallel": 2},
    "tp-nan": {"parallel": 2, "poison": 5},
}
"""plain: torch's own sums and clip_grad_norm_, of 6 units. poison: the unit whose loss is infinite in the last step.
replicas: two of them, of two shards or more. parallel: so many ranks share each layer by tensor parallelism."""


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.2, self.training)


class Model(nn.Module):
    def __init__(self, hidden: int, width: int = 10, words: int = 13) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.embedding(x)
        for block in self.blocks:
            found = block(found)
        return self.head(found).clone()  # type: ignore[no-any-return]


def train(
    adam: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    *,
    plain: bool = False,
    poison: int = -1,
    replicas: bool = False,
    parallel: int = 0,
    steps: int = STEPS,
    done: Callable[[int], object] = lambda step: None,
) -> str:
    """Returns the digest of weights and moments. done: is called with kept.step, first and behind each step."""
    torch.manual_seed(0)
    model: Any = Model(42 if parallel else 41)  # tensor parallelism wants a number that it can divide
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(**(policy or {}))}
    if replicas and dist.get_world_size() > 1:
        options["mesh"] = init_device_mesh(
            "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards")
        )
    if parallel:
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // parallel, parallel), mesh_dim_names=("shards", "parallel")
        )
        for block in model.blocks:
            parallelize_module(block, mesh["parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        options["mesh"] = mesh["shards"]
    for module in (*model.blocks, model):
        fully_shard(module, **options)
    decayed, rest = ([p for p in model.parameters() if (p.ndim > 1) is large] for large in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, **(adam or {}))
    kept = elastic.keep(model, optimizer, units=None if plain else UNITS)
    rank, world = dist.get_rank(), dist.get_world_size()
    if plain:
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
    done(kept.step)
    while kept.step < steps:
        for unit in range(rank, 6, world) if plain else kept.units():
            if plain:
                torch.manual_seed(1000 * kept.step + unit)
            x = torch.randint(13, (3, 6), generator=torch.Generator().manual_seed(1000 * kept.step + unit))
            loss = F.cross_entropy(model(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten()) / UNITS
            if unit == poison and kept.step == steps - 1:
                loss = loss * math.inf
            loss.backward()
        if plain:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        else:
            norm = kept.clip_norm(0.05)
            assert (norm > 0.05) if poison < 0 or kept.step < steps - 1 else math.isnan(norm), "it is clipped"
        optimizer.step()
        optimizer.zero_grad()
        kept.done()
        done(kept.step)
    found = hashlib.sha256()
    for one in (*model.parameters(), *(state[key] for state in optimizer.state.values() for key in sorted(state))):
        whole = one.full_tensor() if isinstance(one, DTensor) else one
        found.update(whole.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run(name: str, number: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, world), rank=number, world_size=world)
    digest = train(**RUNS[name])
    if number == 0:
        print(name, world, digest, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def fork(call: Callable[[], object]) -> int:
    """The pid of a process that makes this call; its status is 1 if that raises."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            call()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def main(names: list[str]) -> None:
    for one in names:
        name, _, worlds = one.partition(":")
        for world in map(int, worlds):
            with tempfile.TemporaryDirectory() as directory:
                store = f"{directory}/store"
                ranks = [fork(functools.partial(run, name, number, world, store)) for number in range(world)]
                if any([os.waitpid(pid, 0)[1] for pid in ranks]):
                    sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
