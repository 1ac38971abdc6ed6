"""A script for torchrun with a sharded model (FSDP2), which elastic.keep keeps in memory. Arguments: a directory, and
how many steps.

With units, a step has the same bits in each world. With REPLICAS=2 in the environment there are two of each shard, in a
world of four. `python kept.py alone STEPS` prints the digest of a quiet run of one
process.

Each process writes a file `ROUND.RANK` with its pid, its world and its first step when it begins a round, a line into
`ROUND.RANK.steps` behind each step, and the files that it has opened while it loaded. While the directory has no file
`STEP.go`, no process begins that step. A process that is asked to stop does so when it comes to such a step. One on a
node for which there is a file `full.NODE` keeps nothing more behind its next step, as if the memory was full.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import elastic

UNITS, COPIES, REPLICAS = 6, int(os.environ.get("COPIES", "1")), int(os.environ.get("REPLICAS", "1"))


class Model(nn.Module):
    """Its sizes are divided evenly by no world."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 17), nn.Linear(17, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(F.dropout(F.gelu(self.up(x)), 0.2, self.training)).clone()  # FSDP wants no view


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = Model()
        world = dist.get_world_size()
        has_replicas = REPLICAS > 1 and world >= 2 * REPLICAS and world % REPLICAS == 0
        shape, names = (REPLICAS, world // REPLICAS), ("replicas", "shards")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if has_replicas else None
        fully_shard(self.model.up, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        weights, biases = ([p for p in self.model.parameters() if (p.ndim > 1) is large] for large in (True, False))
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.kept = elastic.keep(self.model, self.optimizer, self.scheduler, units=UNITS, copies=COPIES)

    def step(self) -> None:
        for _ in self.kept.units():
            x = torch.randn(4, 5)
            loss = F.cross_entropy(self.model(x), x[:, :3].argmax(1))
            self.kept.log(loss=loss)
            (loss / UNITS).backward()
        self.kept.clip_norm(0.1)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.kept.done()

    def digest(self) -> str:
        """Of all weights and moments, whole."""
        parameters = list(self.model.parameters())
        found = [*parameters, *(value for each in parameters for value in self.optimizer.state[each].values())]
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in found]
        return " ".join(one.detach().double().flatten().numpy().tobytes().hex() for one in whole)


def main(home: Path, steps: int) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    dist.init_process_group("gloo")
    rank, world, number = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    opened: list[str] = []
    sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event == "open" else None)
    training = Training()
    kept = training.kept
    (home / f"{number}.{rank}.opened").write_text("\n".join(opened))
    started = home / f"{number}.{rank}"
    written = home / f"{started.name}.tmp"  # another rank has a name of its own
    written.write_text(f"{os.getpid()} {world} {kept.step}")
    written.rename(started)
    while kept.step < steps:
        while not (home / f"{kept.step}.go").exists():
            if asked:
                sys.exit(0)
            time.sleep(0.01)
        training.step()
        with open(home / f"{number}.{rank}.steps", "a") as file:
            print(kept.step, file=file)
        if (home / f"full.{os.environ['ELASTIC_WORKER_ID'].split('.')[0]}").exists():
            kept._stop_here("the test says so")
    result = training.digest()
    if rank == 0:
        (home / "digest").write_text(result)
    dist.destroy_process_group()


def alone(steps: int) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    training = Training()
    while training.kept.step < steps:
        training.step()
    print(training.digest())
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        alone(int(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
