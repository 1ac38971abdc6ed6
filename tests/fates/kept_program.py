"""The script of trainings in rounds with elastic.keep(): kept_program.py PROGRAM, which is draw.Program as JSON.

Its kind "units" is a sharded model (FSDP2) with the same bits in any world. "replayed" is a script for torchrun with a
model that each rank trains by itself, but for the gradients of DistributedDataParallel and a collective in the forward
pass; each rank draws from all generators. Behind the last step rank 0 writes a digest of all ranks into FATES_FILES.
FATES_QUIET: no pauses.
"""

from __future__ import annotations

import copy
import hashlib
import os
import random
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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import elastic
from tests.fates.draw import Program
from tests.fates.models import INPUTS, model_of, optimizer_of, scheduler_of

warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)


class Counter:
    """A value of the script's own; its position is not that of the other ranks."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Training:
    def __init__(self, program: Program) -> None:
        self.program, self.extras = program, frozenset(program.extras)
        self.pause_s = 0.0 if "FATES_QUIET" in os.environ else program.pause_ms / 1000
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.units = program.kind == "units"
        torch.manual_seed(5)
        self.model: Any = model_of(program.model)
        if self.units:
            for part in self.model.children():
                if any(parameter.requires_grad for parameter in part.parameters()):
                    fully_shard(part)
            fully_shard(self.model)
        else:
            torch.manual_seed(50 + self.rank)
            np.random.seed(self.rank)
            random.seed(self.rank)
            self.model = DistributedDataParallel(self.model, broadcast_buffers=self.program.shards % 2 == 0)
        self.optimizer = optimizer_of(program.optimizer, self.model.parameters())
        self.scheduler = scheduler_of(program.schedule, self.optimizer)
        self.counter = Counter(0 if self.units else 100 * self.rank)
        kept: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if self.scheduler is not None:
            kept["scheduler"] = self.scheduler
        if self.extras & {"counter", "own_loader"}:
            kept["counter"] = self.counter
        self.average = copy.deepcopy(self.model.module).requires_grad_(False) if "ema" in self.extras else None
        if self.average is not None:
            kept["average"] = self.average
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled="scaler" in self.extras)
        if "scaler" in self.extras:
            kept["scaler"] = self.scaler
        named: dict[str, Any] = {"units": program.shards} if self.units else {}
        self.kept = elastic.keep(**kept, every=program.every, **named)

    def run(self) -> None:
        while self.kept.step < self.program.steps:
            if self.units:
                self.step_of_units()
            else:
                self.step_of_ranks()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
            if "counter" in self.extras:
                self.counter.position += 1
            self.kept.done()

    def step_of_units(self) -> None:
        for _ in self.kept.units():
            time.sleep(self.pause_s)
            x = torch.randn(self.program.batch_size, INPUTS)
            if "noise" in self.extras:
                x = x * float(np.random.rand()) + random.random()
            loss: Any = F.cross_entropy(self.model(x), (x.sum(1) > 0).long())
            if "log" in self.extras:
                self.kept.log(loss=loss)
            (loss / self.program.shards).backward()
        if "clip" in self.extras:
            self.kept.clip_norm(1.0)
        self.optimizer.step()

    def step_of_ranks(self) -> None:
        time.sleep(self.pause_s)
        x = torch.randn(self.program.batch_size, INPUTS)
        if "own_loader" in self.extras:
            self.counter.position += random.randrange(1, 3)
            x = torch.randn(x.shape, generator=torch.Generator().manual_seed(self.counter.position))
        if "noise" in self.extras:
            x = x * float(np.random.rand()) + random.random()
        scores = self.model(x)
        loss: Any = F.cross_entropy(scores, (x.sum(1) > 0).long())
        if "gather" in self.extras:
            every = torch.cat(list(torch.distributed.nn.functional.all_gather(scores)))
            loss = loss + 0.1 * (every.std(0) - 1).square().sum()
        if "log" in self.extras:
            self.kept.log(loss=loss)
        self.scaler.scale(loss).backward()
        if "clip" in self.extras:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average is not None:
            with torch.no_grad():
                for mean, value in zip(self.average.parameters(), self.model.module.parameters(), strict=True):
                    mean.mul_(0.9).add_(value, alpha=0.1)

    def digest(self) -> str:
        """Of what this rank has; of shards, of all of them."""
        found = hashlib.sha256()
        tensors = list(self.model.state_dict().values())
        for parameter in self.model.parameters():
            tensors += [value for _, value in sorted(self.optimizer.state.get(parameter, {}).items())]
        if self.average is not None:
            tensors += self.average.state_dict().values()
        for value in tensors:
            whole = value.full_tensor() if isinstance(value, DTensor) else torch.as_tensor(value)
            found.update(whole.detach().double().contiguous().numpy().tobytes())
        found.update(str((self.counter.position, self.scaler.state_dict(), self.kept.step)).encode())
        if not self.units:
            found.update(repr((torch.rand(3).tolist(), np.random.random(3).tolist(), random.random())).encode())
        return found.hexdigest()


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    training = Training(Program.from_json(sys.argv[1]))
    training.run()
    every: list[Any] = [None] * training.world
    dist.all_gather_object(every, training.digest())
    if training.rank == 0:
        digests = sorted(set(every)) if training.units else every
        (Path(os.environ["FATES_FILES"]) / "digest").write_text(" ".join(digests))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads were seen to hang in destroy_process_group() behind a collective in a backward pass


if __name__ == "__main__":
    main()
