"""A job whose steps go to three trackers. Arguments: directory, steps."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import elastic

here, steps = Path(sys.argv[1]), int(sys.argv[2])
job = elastic.join(seed=3)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
job.register(model=model, optimizer=optimizer)
job.log_to(elastic.MLflow("tests", "one", uri=f"sqlite:///{here}/mlflow.db"))
job.log_to(elastic.TensorBoard(here / "tensorboard"))
job.log_to(elastic.WandB("tests", "one", directory=here / "wandb", offline=True))
for step in job.steps(shards=6, total=steps):
    for _ in step:
        x = torch.randn(4, 8)
        loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        step.log(loss=loss)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.02)
