"""A script for torchrun with a sharded model (FSDP2), which elastic.keep keeps in memory. Arguments: a directory, and
how many steps.

The gradient of a step is a sum of integers that do not depend on the model, so it has the same bits in each world, and
AdamW computes each element for itself: the weights of the end are those of a loop in one process (`alone`).

Each process writes a file `ROUND.RANK` with its pid, its world and its first step when it begins a round, a line into
`ROUND.RANK.steps` behind each step, and the files that it has opened while it loaded. While the directory has no file
`STEP.go`, no process begins that step. A process that is asked to stop does so when it comes to such a step.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import elastic

UNITS = 6


class Sums(nn.Module):
    """Its output is linear in its weights, which no world divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = nn.Parameter(torch.randn(17, 5, generator=generator))
        self.bias = nn.Parameter(torch.randn(7, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.table * x[:85].view(17, 5)).sum() + (self.bias * x[85:]).sum()


def batch(step: int, unit: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + unit)
    return torch.randint(-8, 9, (92,), generator=generator).float()


def parts(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    groups = [{"params": [model.table], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all weights and moments, whole."""
    found = [*model.parameters(), *(value for p in model.parameters() for value in optimizer.state[p].values())]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
    return " ".join(one.detach().double().flatten().numpy().tobytes().hex() for one in whole)


def alone(steps: int) -> str:
    """The digest of a quiet run in one process, without shards."""
    model = Sums()
    optimizer, scheduler = parts(model)
    for step in range(steps):
        for unit in range(UNITS):
            model(batch(step, unit)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return digest(model, optimizer)


def main(home: Path, steps: int) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    dist.init_process_group("gloo")
    rank, world, number = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model: Any = fully_shard(Sums())
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    optimizer, scheduler = parts(model)
    opened: list[str] = []
    sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event == "open" else None)
    kept = elastic.keep(model, optimizer, scheduler)
    (home / f"{number}.{rank}.opened").write_text("\n".join(opened))
    started = home / f"{number}.{rank}"
    started.with_suffix(".tmp").write_text(f"{os.getpid()} {world} {kept.step}")
    started.with_suffix(".tmp").rename(started)
    while kept.step < steps:
        while not (home / f"{kept.step}.go").exists():
            if asked:
                sys.exit(0)
            time.sleep(0.01)
        for unit in range(rank, UNITS, world):
            model(batch(kept.step, unit)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        kept.done()
        with open(home / f"{number}.{rank}.steps", "a") as file:
            print(kept.step, file=file)
    result = digest(model, optimizer)
    if rank == 0:
        (home / "digest").write_text(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
