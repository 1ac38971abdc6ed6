"""Two training loops by accelerate, one after the other: a head by an optimizer of its own, then all of the model by
another one, over other data and in other batches, at a rate that follows from an evaluation between them.
`accelerate_phases.py OUTPUT_DIR`."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def points(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


def evaluate(accelerator, model, loader):
    model.eval()
    right = 0
    for x, y in loader:
        with torch.no_grad():
            predictions = model(x).argmax(1)
        predictions, references = accelerator.gather_for_metrics((predictions, y))
        right += int((predictions == references).sum())
    return right


def train(accelerator, model, loader, optimizer, epochs):
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                model.zero_grad()  # the head's optimizer knows its own weights only
            time.sleep(pace())


set_seed(5)
output = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
first = torch.optim.AdamW(model[3].parameters(), lr=1e-2)
second = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
head_data = DataLoader(points(160, 0), batch_size=4, shuffle=True)
data = DataLoader(points(96, 1), batch_size=2, shuffle=True)
held = DataLoader(points(50, 2), batch_size=8)
model, first, second, head_data, data, held = accelerator.prepare(model, first, second, head_data, data, held)
train(accelerator, model, head_data, first, 2)
right = evaluate(accelerator, model, held)
for group in second.param_groups:
    group["lr"] = 1e-3 * (1 + right)
train(accelerator, model, data, second, 2)
figures = {"after the head": right, "after all": evaluate(accelerator, model, held)}
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    output.mkdir(parents=True, exist_ok=True)
    (output / "figures.json").write_text(json.dumps(figures))
