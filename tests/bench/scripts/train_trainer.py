"""A language model by transformers.Trainer, the same file for torchrun and `elastic run --ranks`, plus stamps."""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from tests.bench import turnstile
from tests.bench.stamps import Stamps


class Words(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        words = torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Turns(TrainerCallback):
    """One block of steps at a time."""

    def __init__(self):
        name = os.environ.get("ELASTIC_WORKER_ID") or f"rank{os.environ['RANK']}-{os.getpid()}"
        self.stamps = Stamps(Path(os.environ["BENCH_STAMPS"]), name)
        self.gate = turnstile.enter(name)

    def on_step_begin(self, args, state, control, **kwargs):
        self.gate.wait(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        self.stamps.write(state.global_step - 1, 0, 0, int(os.environ["WORLD_SIZE"]), 0.0)


torch.set_num_threads(1)
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=64, n_embd=256, n_layer=4, n_head=4))
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=4,
    max_steps=turnstile.OPEN,
    logging_strategy="no",
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    seed=0,
)
Trainer(model=model, args=arguments, train_dataset=Words(), callbacks=[Turns()]).train()
