"""Scripts for torchrun whose gradients cannot be taken apart by rank, with elastic.keep. Arguments: the kind of script,
a directory, and how many steps.

barlow: all ranks' embeddings are gathered in the forward pass, and gradients flow back through the collective. gan: two
DDP models that train against each other, with noise from the global generator. Each rank draws its own random numbers,
and has its own statistics of BatchNorm and its own loader, which gives it other batches than the others.

While the directory has no file `STEP.go`, no process begins that step (`go` opens all); files as of kept.py. Behind the
last step rank 0 writes `digest`: of the weights, the moments and the random numbers of all ranks. BALLAST_MB in the
environment: memory that each process holds in the first round.
"""

import hashlib
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastic

WIDTH = 64
warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)


def network(inputs: int, outputs: int) -> nn.Module:
    layers = (nn.Linear(inputs, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, outputs))
    return DistributedDataParallel(nn.Sequential(*layers), broadcast_buffers=False)


class Batches:
    """The batches of one rank; its position is not that of the others."""

    def __init__(self, rank: int) -> None:
        self.position = 100 * rank

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def next(self) -> torch.Tensor:
        self.position += random.randrange(1, 3)
        return torch.randn(6, 16, generator=torch.Generator().manual_seed(self.position))


class Barlow:
    """One model; its loss has the embeddings of all ranks."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.model = network(16, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.kept = elastic.keep(self.model, self.optimizer, batches=batches)

    def step(self) -> None:
        x = self.batches.next()
        views = [x + 0.1 * torch.randn_like(x), x + torch.from_numpy(np.random.normal(0, 0.1, x.shape)).float()]
        # One forward for both views: a second one of a DDP model would need a second backward.
        first, second = self.model(torch.cat(views)).chunk(2)
        every = [torch.cat(list(torch.distributed.nn.functional.all_gather(view))) for view in (first, second)]
        one, two = ((view - view.mean(0)) / (view.std(0) + 1e-3) for view in every)
        cross = one.T @ two / len(one)
        self.optimizer.zero_grad()
        (cross - torch.eye(len(cross))).square().sum().backward()
        self.optimizer.step()

    @property
    def parts(self) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        return [(self.model, self.optimizer)]


class Gan:
    """Two models, two optimizers, two backward passes in a step, one of them through both models."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.maker, self.critic = network(5, 16), network(16, 1)
        self.makes = torch.optim.Adam(self.maker.parameters(), lr=0.01, betas=(0.5, 0.9))
        self.judges = torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.9)
        self.kept = elastic.keep(self.maker, self.critic, self.makes, self.judges, batches=batches)

    def step(self) -> None:
        real, noise = self.batches.next(), torch.randn(6, 5)
        judged = self.critic(torch.cat([real, self.maker(noise).detach()]))
        wanted = torch.cat([torch.ones(6, 1), torch.zeros(6, 1)])
        self.judges.zero_grad()
        F.binary_cross_entropy_with_logits(judged, wanted).backward()
        self.judges.step()
        self.makes.zero_grad()
        made = self.critic(self.maker(torch.randn(6, 5)))
        F.binary_cross_entropy_with_logits(made, torch.ones(6, 1)).backward()
        self.makes.step()

    @property
    def parts(self) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        return [(self.maker, self.makes), (self.critic, self.judges)]


def digest(training: Any) -> str:
    """Of what this rank has."""
    found = hashlib.sha256()
    for model, optimizer in training.parts:
        tensors = [*model.state_dict().values()]
        tensors += [value for each in model.parameters() for _, value in sorted(optimizer.state[each].items())]
        for one in tensors:
            found.update(torch.as_tensor(one).detach().double().contiguous().numpy().tobytes())
    found.update(repr((torch.rand(3).tolist(), np.random.random(3).tolist(), random.random())).encode())
    found.update(str(training.batches.position).encode())
    return found.hexdigest()


def main(kind: str, home: Path, steps: int) -> None:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world, number = dist.get_rank(), dist.get_world_size(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(7)
    np.random.seed(rank)
    random.seed(rank)
    training: Barlow | Gan = (Barlow if kind == "barlow" else Gan)(Batches(rank))
    kept = training.kept
    if kept.step == 0:
        torch.manual_seed(70 + rank)
    ballast = torch.ones(int(os.environ.get("BALLAST_MB", "0")) << 18 if number == 0 else 0)
    started = home / f"{number}.{rank}"
    written = home / f"{started.name}.tmp"  # another rank has a name of its own
    written.write_text(f"{os.getpid()} {world} {kept.step}")
    written.rename(started)
    while kept.step < steps:
        while asked or not ((home / f"{kept.step}.go").exists() or (home / "go").exists()):
            if asked:
                sys.exit(0)
            time.sleep(0.01)
        training.step()
        kept.done()
        with open(home / f"{number}.{rank}.steps", "a") as file:
            print(kept.step, file=file)
    del ballast
    every: list[Any] = [None] * world
    dist.all_gather_object(every, digest(training))
    if rank == 0:
        (home / "digest").write_text(" ".join(every))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads were seen to hang in destroy_process_group() behind a collective in a backward pass


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
