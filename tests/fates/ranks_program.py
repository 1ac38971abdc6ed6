"""The script of trainings under torchrun: ranks_program.py PROGRAM, which is draw.Program as JSON.

Nothing in it is of this project but ddp.batches(), where it draws its own batches. FATES_FILES: a directory for its
files. FATES_QUIET: no pauses.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import elastic.ddp as ddp
from tests.fates.draw import Program
from tests.fates.models import INPUTS, model_of, optimizer_of, scheduler_of
from tests.unit.jobs import dataset


class Jittered(Dataset[Any]):
    """Samples with noise from the generators of torch and random, as a transform of images has."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(INPUTS) + random.uniform(-0.1, 0.1), y


class Training:
    def __init__(self, program: Program) -> None:
        self.program, self.extras = program, frozenset(program.extras)
        self.pause_s = 0.0 if "FATES_QUIET" in os.environ else program.pause_ms / 1000
        self.snapshot = Path(os.environ["FATES_FILES"]) / "snapshot.pt"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        data = dataset(program.samples, INPUTS)
        self.model = model_of(program.model)
        unused = "unused" in self.extras
        self.ddp = DistributedDataParallel(
            self.model,
            find_unused_parameters=unused,
            static_graph="static_graph" in self.extras,
            gradient_as_bucket_view=unused,
        )
        self.optimizer = optimizer_of(program.optimizer, self.model.parameters())
        self.scheduler = scheduler_of(program.schedule, self.optimizer)
        self.average = (
            AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if "ema" in self.extras else None
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3, enabled="scaler" in self.extras)
        seen = Jittered(data) if program.source == "transform" else data
        self.sampler: DistributedSampler[Any] = DistributedSampler(seen, drop_last="drop_last" in self.extras)
        workers = 2 if program.source == "workers" else 0
        self.loader: Any = DataLoader(
            seen,
            program.batch_size,
            sampler=self.sampler,
            num_workers=workers,
            drop_last="drop_last" in self.extras,
            multiprocessing_context="fork" if workers else None,
        )
        if program.source == "drawn":
            self.loader = ddp.batches(self.drawn, steps=program.steps)
        self.batches = program.steps if program.source == "drawn" else len(self.loader)
        held_out = dataset(40, INPUTS)
        self.tests = DataLoader(held_out, 8, sampler=DistributedSampler(held_out, shuffle=False))
        self.steps = 0
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.began = 0
        if "own_snapshot" in self.extras and self.snapshot.exists():
            kept = torch.load(self.snapshot)
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(kept["scheduler"])
            if self.average is not None:
                self.average.load_state_dict(kept["average"])
            self.scaler.load_state_dict(kept["scaler"])
            self.steps, self.began = kept["steps"], kept["epoch"] + 1

    @staticmethod
    def drawn() -> Any:
        x = torch.randn(3, INPUTS)
        return x, (x.sum(1) > 0).long()

    def run(self) -> None:
        for epoch in range(self.began, self.program.epochs):
            self.sampler.set_epoch(epoch)
            self.ddp.train()
            self.train()
            if self.extras & {"evaluate", "evaluate_each"}:
                found = self.evaluate()
                if self.program.schedule == "plateau":
                    self.scheduler.step(found)
            if self.extras & {"save", "own_snapshot"} and self.rank == 0:
                self.save(epoch)

    def train(self) -> None:
        total, count = 0.0, 0
        meters: dict[str, list[float]] = {"loss": [], "lr": []}
        for number, (x, y) in enumerate(self.loader):
            time.sleep(self.pause_s)
            if self.program.schedule == "by_hand":
                for group in self.optimizer.param_groups:
                    group["lr"] = self.lr / (1 + 0.1 * (self.steps % 5))
            if "noise" in self.extras:
                x = x + 0.05 * torch.randn_like(x)
            silent = "accumulate" in self.extras and number % 2 == 0 and number + 1 < self.batches
            with self.ddp.no_sync() if silent else contextlib.nullcontext():
                mixed = torch.autocast("cpu", torch.bfloat16) if "autocast" in self.extras else contextlib.nullcontext()
                with mixed:
                    loss = F.cross_entropy(self.ddp(x), y)
                self.scaler.scale(loss).backward()
            total, count = total + loss.item(), count + 1
            if silent:
                continue
            if "clip" in self.extras:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if self.scheduler is not None and self.program.schedule != "plateau":
                self.scheduler.step()
            if self.average is not None:
                self.average.update_parameters(self.model)
            if "reduce_each" in self.extras and self.steps % 5 == 0:
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                if self.rank == 0:
                    print(f"step {self.steps} loss {mean.item() / self.world:.6f}", flush=True)
            if "gather_each" in self.extras and self.steps % 7 == 3:
                every: list[Any] = [None] * self.world
                dist.all_gather_object(every, round(loss.item(), 3))
                assert len(every) == self.world and None not in every
            if "meters" in self.extras:
                meters["loss"].append(loss.item())
                meters["lr"] = [*meters["lr"][-3:], self.optimizer.param_groups[0]["lr"]]
            self.steps += 1
        shown = torch.tensor([total, count], dtype=torch.float64)
        dist.all_reduce(shown)

    def evaluate(self) -> float:
        self.ddp.eval()
        each = "evaluate_each" in self.extras
        loss, count = torch.zeros(1), torch.zeros(1)
        with torch.no_grad():
            for x, y in self.tests:
                found = F.cross_entropy(self.model(x), y, reduction="sum").reshape(1)
                if each:
                    dist.all_reduce(found)
                loss += found
                count += len(x)
        dist.all_reduce(count)
        if not each:
            dist.all_reduce(loss)
        if loss.item() / count.item() > 0.5:  # so that a wrong figure changes the weights
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.99
        return loss.item() / count.item()

    def save(self, epoch: int) -> None:
        kept = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "average": self.average.state_dict() if self.average is not None else None,
            "scaler": self.scaler.state_dict(),
            "steps": self.steps,
            "epoch": epoch,
        }
        written = self.snapshot.with_suffix(".tmp")
        torch.save(kept, written)
        written.rename(self.snapshot)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    Training(Program.from_json(sys.argv[1])).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
