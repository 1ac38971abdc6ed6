"""Trainers that cannot train in place, one after the other, and what they are told; at last one that trains, twice."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)), "labels": index % 2}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Numbers()[index] for index in range(24))


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=2)


class Collective(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        torch.distributed.all_reduce(loss.detach().clone())
        return loss


def told(kind, trainer):
    try:
        trainer.train()
    except Exception as error:
        print(f"{kind}: {type(error).__name__}: {error}", flush=True)
    else:
        print(f"{kind}: trained", flush=True)


def made(cls=Trainer, data=None, **arguments):
    fixed = {"output_dir": sys.argv[1], "per_device_train_batch_size": 2, "max_steps": 3, "report_to": []}
    settings = TrainingArguments(**fixed, use_cpu=True, save_strategy="no", disable_tqdm=True, **arguments)
    return cls(Model(), settings, train_dataset=data or Numbers())


told("stream", made(data=Stream()))
told("own loader", made(OwnLoader))
told("batch size", made(auto_find_batch_size=True))
trainer = made(Collective if "collective" in sys.argv else Trainer)
told("first", trainer)
told("second", trainer)
