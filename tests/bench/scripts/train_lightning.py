"""A language model by Lightning, the same file for torchrun and `elastic run --ranks`, plus stamps."""

import os
import sys
from pathlib import Path

import lightning as L
import torch
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


class Turns(L.Callback):
    """One block of steps at a time."""

    def __init__(self):
        name = os.environ.get("ELASTIC_WORKER_ID") or f"rank{os.environ['RANK']}-{os.getpid()}"
        self.stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), name)
        self.gate = turnstile.enter(name)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.gate.wait(trainer.global_step)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.stamps.write(trainer.global_step - 1, 0, 0, int(os.environ["WORLD_SIZE"]), 0.0)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=256, n_layer=4, n_head=4))

    def training_step(self, batch, batch_idx):
        return self.net(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-5)


torch.set_num_threads(1)
L.seed_everything(0)
trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=turnstile.OPEN,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=sys.argv[1],
    callbacks=[Turns()],
)
trainer.fit(Model(), DataLoader(Words(), batch_size=4, shuffle=True))
