"""What the live tests train: BatchNorm, dropout, two passes a step, evaluation, save, once, and a stop at the end."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F

import elastic
from tests.live.scripts import gates

EPOCHS = 8
SAMPLES = 320
LAST = 150
"""The step in which all ask to stop; there would be 160."""
SLOW = 90
"""After this step each takes longer than the one before, seven minutes in all, until the gate `end` is open."""

job = elastic.join(seed=7)
made = torch.Generator().manual_seed(1)
inputs = torch.randn(SAMPLES, 16, generator=made)
labels = (inputs.sum(1) > 0).long()
data = torch.utils.data.TensorDataset(inputs, labels)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 2)
).to(job.device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
ahead = 1 if os.environ.get("ELASTIC_SLOT") == "0" else 0  # one worker fetches ahead, and nobody may notice
train = job.loader(data, batch_size=16, shards=4, shuffle=True, workers=ahead)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(train))


class Clerk:
    """Registered, so that a test can hold the leader in the middle of job.save()."""

    saving = False

    def state_dict(self) -> dict[str, int]:
        if self.saving:
            gates.hold("save")
        return {"desk": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"desk": 3}


clerk = Clerk()
job.register(model=model, optimizer=optimizer, scheduler=scheduler, clerk=clerk)
job.state.setdefault(best=-1.0, saves=0)


def score(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    gates.hold("evaluate")
    return {"accuracy": (model(x).argmax(1) == y).float().mean()}


def sign(epoch: int) -> str:
    gates.hold("once")
    if "ELASTIC_JOB_DIR" in os.environ:
        with (Path(os.environ["ELASTIC_JOB_DIR"]) / "once.txt").open("a") as signatures:
            signatures.write(f"{epoch} {job.worker_id}\n")
    return f"signed {epoch}"


for epoch in job.epochs(EPOCHS):
    assert job.once(sign, epoch) == f"signed {epoch}"
    for step in job.steps(train):
        # The test's own look: reading step.index here would bind a newcomer to this step.
        gates.hold(f"step {step._running.place.index}")
        for x, y in step:
            gates.pace()
            gates.hold("shard")
            gates.seize("interpreter")
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.log(loss=loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step.index == LAST:
            job.stop("enough")
        for x, y in step:
            gates.hold("second pass")
            (0.1 * F.cross_entropy(model(x), y)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        # Nobody can join while all wait for the gate: what a test waits for comes before, however long it takes.
        gates.slow("end", 0.01 * max(0, step.index - SLOW) ** 2)
        if step.index >= LAST - 10:
            gates.hold("end")
    accuracy = job.evaluate(score, data, batch_size=32)["accuracy"]
    if accuracy > job.state.best:
        job.state.best = accuracy
        job.state.saves += 1
        clerk.saving = True
        job.save("best")
        clerk.saving = False
job.print("steps", step.index + 1)
job.print("digest", job.digest())
