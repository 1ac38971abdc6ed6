"""The script of trainings with job.steps(outer=...): outer_program.py PROGRAM, with steps_program.py's environment."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import elastic
from tests.fates.draw import Program
from tests.fates.models import INPUTS, model_of, optimizer_of, scheduler_of
from tests.unit.jobs import dataset


def outer_of(program: Program, model: nn.Module, optimizer: torch.optim.Optimizer) -> elastic.DiLoCo:
    named: dict[str, Any] = {"every": program.every}
    if "momentum_mean" in program.extras:
        named["moments"] = "mean"
    if "momentum_reset" in program.extras:
        named["moments"] = "reset"
    if "delay" in program.extras:
        named["delay"] = 1
    if "mixed" in program.extras:
        named["alpha"] = 0.25
    if "pieces" in program.extras:
        named["fragments"] = 2
    if "localsgd" in program.extras:
        return elastic.LocalSGD(model, optimizer, every=program.every)
    return elastic.DiLoCo(model, optimizer, **named)


def main() -> None:
    program = Program.from_json(sys.argv[1])
    extras, pause_s = program.extras, 0.0 if "FATES_QUIET" in os.environ else program.pause_ms / 1000
    job = elastic.join(seed=11)
    if sink := os.environ.get("FATES_SINK"):
        job.log_to(elastic.JsonLines(sink))
    torch.manual_seed(5)
    data = dataset(program.samples, INPUTS)
    model = model_of(program.model)
    optimizer = optimizer_of(program.optimizer, model.parameters())
    scheduler = scheduler_of(program.schedule, optimizer)
    outer = outer_of(program, model, optimizer)
    registered: dict[str, Any] = {"model": model, "optimizer": optimizer, "outer": outer}
    if scheduler is not None:
        registered["scheduler"] = scheduler
    job.register(**registered)
    if "state" in extras:
        job.state.setdefault(seen=(0, None))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mixed = torch.autocast("cpu", torch.bfloat16) if "autocast" in extras else contextlib.nullcontext()
        with mixed:
            scores = checkpoint(model, x, use_reentrant=False) if "checkpointing" in extras else model(x)
            return F.cross_entropy(scores, y)

    source: Any = {"shards": program.shards}
    if program.source != "drawn":
        loader = job.loader(data, program.batch_size, shards=program.shards, tail="pad", shuffle=True)
        source = {"data": loader}
    rounds = program.steps // program.every * (2 if "pieces" in extras else 1)
    noise = torch.randn(INPUTS) * 0.1 if "draw_in_epoch" in extras else torch.zeros(INPUTS)
    for step in job.steps(**source, total=rounds, outer=outer):
        for batch in step:
            time.sleep(pause_s)
            if program.source == "drawn":
                x = torch.randn(3, INPUTS)
                batch = x, (x.sum(1) > 0).long()
            x, y = batch
            loss: Any = loss_of(x + noise, y)
            loss.backward()
            if "accumulate" in extras and step.inner_index % 2 == 0:
                step.log(half=loss.detach())
                continue  # H is even, so no round ends between the two
            if "clip" in extras:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            step.log(loss=loss.detach())
        if "state" in extras:
            job.state.seen = (step.index, step.metrics.get("loss"))
        if "once" in extras and step.index % 4 == 2:
            assert job.once(int, step.index) == step.index
        if "evaluate" in extras and step.index % 6 == 4:
            found = job.evaluate(lambda x, y: {"loss": F.cross_entropy(model(x), y)}, data, batch_size=8)
            job.log(found=found["loss"])
    job.print("digest", job.digest())


if __name__ == "__main__":
    main()
