"""A loop over what Accelerator.prepare() gives, kept in memory by elastic.keep: accumulated gradients, a schedule, and
dropout. `accelerate_kept.py OUTPUT_DIR`: rank 0 writes `digest` there, of weights and moments."""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

EPOCHS = 4


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


def main():
    set_seed(3)
    sampling = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=sampling)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))
    points = torch.randn(160, 6)
    data = TensorDataset(points, (points[:, 0] * points[:, 1] > 0).long())
    train = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
    model, optimizer, train, scheduler = accelerator.prepare(model, optimizer, train, scheduler)
    kept = elastic.keep(model, optimizer, scheduler)
    in_epoch = len(train) // 2
    for epoch in range(kept.step // in_epoch, EPOCHS):
        train.set_epoch(epoch)
        done = 2 * (kept.step % in_epoch)
        for x, y in accelerator.skip_first_batches(train, done) if done else train:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                kept.done()
                time.sleep(pace())
    moments = [value for state in optimizer.state.values() for value in state.values()]
    found = hashlib.sha256()
    for one in (*model.state_dict().values(), *moments):
        found.update(one.detach().double().numpy().tobytes())
    if accelerator.is_main_process:
        os.makedirs(sys.argv[1], exist_ok=True)
        Path(sys.argv[1], "digest").write_text(found.hexdigest())
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
