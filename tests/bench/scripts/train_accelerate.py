"""A language model by accelerate in a loop of its own, the same file for torchrun and `elastic run --ranks`, plus
stamps. Each worker has one rank, so a turn of the loop is a step."""

import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from tests.bench import turnstile
from tests.bench.stamps import Stamps


class Words(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        words = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


torch.set_num_threads(1)
set_seed(0)
name = os.environ.get("ELASTIC_WORKER_ID") or f"rank{os.environ['RANK']}-{os.getpid()}"
stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), name)
gate = turnstile.enter(name)
accelerator = Accelerator(cpu=True)
model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=256, n_layer=4, n_head=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Words(), batch_size=4, shuffle=True))
model.train()
for step, batch in enumerate(loader):
    if step >= turnstile.OPEN:
        break
    gate.wait(step)
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    stamps.write(step, 0, 0, int(os.environ["WORLD_SIZE"]), 0.0)
