"""The script of trainings with job.steps(): steps_program.py PROGRAM, which is draw.Program as JSON. Prints its digest.

FATES_SINK: a file for the lines of elastic.JsonLines. FATES_QUIET: no pauses.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import elastic
from runtime.loop.job import Job
from tests.fates.draw import Program
from tests.fates.models import CLASSES, INPUTS, model_of, optimizer_of, scheduler_of
from tests.unit.features import jitter
from tests.unit.jobs import dataset


class Training:
    def __init__(self, job: Job, program: Program) -> None:
        self.job, self.program, self.extras = job, program, frozenset(program.extras)
        self.pause_s = 0.0 if "FATES_QUIET" in os.environ else program.pause_ms / 1000
        self.own = torch.Generator().manual_seed(1)
        """What it draws depends on how many shards this worker has had: the one thing here that is not exact."""
        self.data = dataset(program.samples, INPUTS)
        self.model = model_of(program.model)
        if "unsaved_buffer" in self.extras:
            self.model.register_buffer("scale", torch.ones(1), persistent=False)
        self.optimizer = optimizer_of(program.optimizer, self.model.parameters())
        registered: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.scheduler = scheduler_of(program.schedule, self.optimizer)
        if self.scheduler is not None:
            registered["scheduler"] = self.scheduler
        self.average = copy.deepcopy(self.model).requires_grad_(False) if "ema" in self.extras else None
        if self.average is not None:
            registered["average"] = self.average
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if "scaler" in self.extras else None
        )
        if self.scaler is not None:
            registered["scaler"] = self.scaler
        if "gan" in self.extras:
            self.critic = nn.Linear(CLASSES, 1)
            self.of_critic = torch.optim.Adam(self.critic.parameters(), 0.01)
            registered |= {"critic": self.critic, "of_critic": self.of_critic}
        job.register(**registered)
        if "state" in self.extras:
            job.state.setdefault(best=float("inf"), seen=(0, None), by_name={1: "one"})
        if "default_dict" in self.extras:
            job.state.setdefault(counts=defaultdict(int))
        if "tensor_state" in self.extras:
            job.state.setdefault(trace=torch.zeros(3))
        if "queue_state" in self.extras:
            job.state.setdefault(queue=torch.zeros(20_000))
        self.lr = self.optimizer.param_groups[0]["lr"]

    # ------------------------------------------------------------------------------------------- the loops

    def run(self) -> None:
        arguments: dict[str, Any] = {"nonfinite": "skip"} if "nonfinite" in self.extras else {}
        source = self._source()
        if source is None:
            arguments["shards"] = self.program.shards
        else:
            arguments["data"] = source
        if not self.program.epochs:
            for step in self.job.steps(**arguments, total=self.program.steps):
                self._step(step, torch.zeros(INPUTS))
            return
        if source is None:
            arguments["total"] = self.program.steps
        for epoch in self.job.epochs(self.program.epochs):
            noise = torch.randn(INPUTS) if "draw_in_epoch" in self.extras else torch.zeros(INPUTS)
            if "call_in_epoch" in self.extras:
                noise = noise + self._call(f"epoch-{epoch}")
            for step in self.job.steps(**arguments):
                self._step(step, noise)
            if "draw_in_epoch" in self.extras:
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.add_(torch.randn_like(parameter) * 1e-3)

    def _call(self, name: str) -> float:
        """What a script asks of its job before the steps of an epoch, or before the inner loop. A small number."""
        found = self.job.evaluate(lambda x, y: {"loss": F.cross_entropy(self.model(x), y)}, self.data, batch_size=16)
        assert self.job.once(str, name) == name and len(self.job.digest()) == 64
        if "save" in self.extras:
            self.job.save(name)
        self.job.log(**{name.split("-")[0]: found["loss"]})
        return found["loss"] * 1e-2 + (self._kept() if "read_state" in self.extras else 0.0)

    def _kept(self) -> float:
        """Of job.state, as it is now. A small number."""
        state = self.job.state
        trace = float(state.trace.sum()) * 1e-4 if "tensor_state" in self.extras else 0.0
        seen = (state.seen[0] % 5) * 1e-3 if "state" in self.extras else 0.0
        return trace + seen + (state.counts["k0"] % 7 * 1e-3 if "default_dict" in self.extras else 0.0)

    def _source(self) -> Any:
        p, arguments = self.program, dict[str, Any]()
        match p.source:
            case "drawn":
                return None
            case "stream":
                return self.job.stream(self._open, shards=p.shards)
            case "workers":
                arguments["workers"] = 2
            case "weighted":
                arguments["weights"] = [1 + i % 3 for i in range(p.samples)]
            case "transform":
                arguments["transform"] = jitter
        shuffle = p.source != "weighted"
        return self.job.loader(self.data, p.batch_size, shards=p.shards, tail="pad", shuffle=shuffle, **arguments)

    def _open(self, shard: int, epoch: int, skip: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1000 * epoch + shard)
        for number in range(self.program.steps if self.program.epochs else self.program.steps + 3):
            order = torch.randint(0, len(self.data), (3,), generator=generator)
            if number >= skip:
                yield self.data[order]

    def _step(self, step: Any, noise: torch.Tensor) -> None:
        if "draw_before_pass" in self.extras:
            noise = noise + torch.randn(INPUTS) * 0.1
        gain = random.uniform(0.9, 1.1) if "draw_after_pass" in self.extras else 1.0
        if "read_place" in self.extras:
            noise, gain = noise + 0.01 * (step.index % 3), gain * (1.0 if step.last_in_epoch else 0.9)
        if "read_state" in self.extras:
            gain += self._kept()
        if "call_before_pass" in self.extras and step.index % 11 == 5:
            noise = noise + self._call(f"entry-{step.index}")
        if "gan" in self.extras:
            self._critic(step)
        if "sam" in self.extras:
            self._pass(step, noise)
            climbed = self._climb()
            self.optimizer.zero_grad()
            self._pass(step, noise)
            with torch.no_grad():
                for parameter, amount in climbed:
                    parameter.sub_(amount)
        else:
            self._pass(step, noise)
        if gain != 1.0:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(gain)
        if "clip" in self.extras:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self._behind(step)

    def _pass(self, step: Any, noise: torch.Tensor) -> None:
        for batch in step:
            time.sleep(self.pause_s)
            x, y = self._batch(batch)
            if (
                "skip" in self.extras
                and self.program.shards > 1
                and step.shard.index == step.index % self.program.shards
            ):
                step.skip()
                continue
            loss: Any = self._loss(x + noise, y)
            if "nonfinite" in self.extras and step.index % 7 == 3 and step.shard.index == 0:
                loss = loss * float("nan")
            if self.scaler is not None:
                if step.index % 9 == 5 and step.shard.index == self.program.shards - 1:
                    loss = loss * float("inf")
                self.scaler.scale(loss).backward()
            else:
                loss.backward()
            if "accumulate" in self.extras:
                (self.model(x).square().mean() * 0.1).backward()
            if "weigh" in self.extras:
                step.weigh(1 + step.shard.index % 3)
            step.log(loss=loss.detach(), sum={"samples": len(x)})

    def _batch(self, batch: Any) -> Any:
        if self.program.source != "drawn":
            return batch
        x = torch.randn(3, INPUTS)
        if "draw_numpy" in self.extras:
            x = x * float(np.random.rand()) + batch.numpy.random()
        return x, (x.sum(1) > 0).long()

    def _inputs(self, x: torch.Tensor) -> torch.Tensor:
        if "own_generator" in self.extras:
            x = x + torch.rand(INPUTS, generator=self.own)
        return x * self.model.get_buffer("scale") if "unsaved_buffer" in self.extras else x

    def _loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self._inputs(x)
        if "checkpointing" in self.extras:
            return F.cross_entropy(checkpoint(self.model, x, use_reentrant=False), y)
        mixed = torch.autocast("cpu", torch.bfloat16) if "autocast" in self.extras else contextlib.nullcontext()
        with mixed:
            return F.cross_entropy(self.model(x), y)

    def _critic(self, step: Any) -> None:
        for batch in step:
            x, _ = self._batch(batch)
            with torch.no_grad():
                scores = self.model.eval()(x)
            self.model.train()
            loss: Any = F.softplus(-self.critic(scores + torch.randn_like(scores))).mean()
            loss.backward()
            step.log(critic=loss)
        self.of_critic.step()
        self.of_critic.zero_grad()

    def _climb(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        climbed: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    climbed.append((parameter, parameter.grad * 0.05))
                    parameter.add_(climbed[-1][1])
        return climbed

    def _behind(self, step: Any) -> None:
        """What comes between optimizer.step() and the next step."""
        job, metrics = self.job, step.metrics
        loss = metrics.get("loss", 0.0)
        if self.scheduler is not None:
            self.scheduler.step(*([loss] if self.program.schedule == "plateau" else []))
        elif self.program.schedule == "by_hand":
            self.optimizer.param_groups[0]["lr"] = self.lr / (1 + 0.1 * (step.index % 5))
        if self.average is not None:
            with torch.no_grad():
                for mean, parameter in zip(self.average.parameters(), self.model.parameters(), strict=True):
                    mean.mul_(0.9).add_(parameter, alpha=0.1)
        if "unsaved_buffer" in self.extras:
            self.model.get_buffer("scale").mul_(1.01)
        if "state" in self.extras:
            job.state.best = min(job.state.best, loss)
            job.state.seen = (step.index, loss)
            job.state.by_name[step.index % 3] = loss
        if "default_dict" in self.extras:
            job.state.counts[f"k{step.index % 4}"] += 1
        if "tensor_state" in self.extras:
            job.state.trace = job.state.trace * 0.9 + step.index
        if "queue_state" in self.extras:
            job.state.queue[step.index % 100 :: 100] = loss
        if "evaluate" in self.extras and step.index % 6 == 4:
            found = job.evaluate(lambda x, y: {"loss": F.cross_entropy(self.model(x), y)}, self.data, batch_size=8)
            self.optimizer.param_groups[0]["lr"] *= 0.99 if found["loss"] > 0.5 else 0.98
        if "once" in self.extras and step.index % 8 == 2:
            assert job.once(lambda: step.index) == step.index
        if "agree" in self.extras and step.index % 8 == 6:
            assert job.agree(step.index) == step.index
        if "save" in self.extras and step.index % 25 == 24:
            job.save(f"at-{step.index}")


def main() -> None:
    program = Program.from_json(sys.argv[1])
    job = elastic.join(seed=11)
    if sink := os.environ.get("FATES_SINK"):
        job.log_to(elastic.JsonLines(sink))
    torch.manual_seed(5)
    Training(job, program).run()
    job.print("digest", job.digest())


if __name__ == "__main__":
    main()
