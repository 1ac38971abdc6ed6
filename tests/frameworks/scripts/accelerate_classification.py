"""A classifier by accelerate, in a loop of its own: gathered predictions, a metric of a library, early stopping, and a
snapshot after each epoch. `accelerate_classification.py OUTPUT_DIR`."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

EPOCHS = 4


class Halves(Dataset):
    """Which half of a sequence has the larger sum."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(5, 100, (samples, 16), generator=generator)
        self.labels = (self.words[:, :8].sum(1) > self.words[:, 8:].sum(1)).long()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": self.labels[index]}


class Lines(GeneralTracker):
    """A line of JSON for each record."""

    name = "lines"
    requires_logging_directory = True

    def __init__(self, directory):
        super().__init__()
        self.directory = directory

    @on_main_process
    def start(self):
        os.makedirs(self.directory, exist_ok=True)
        self.file = Path(self.directory, "metrics.jsonl")

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def store_init_configuration(self, values):
        pass

    @on_main_process
    def log(self, values, step=None, **kwargs):
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


def main():
    set_seed(3)
    output = sys.argv[1]
    accelerator = Accelerator(
        cpu=True,
        log_with=Lines(output),
        project_config=ProjectConfiguration(project_dir=output, automatic_checkpoint_naming=True, total_limit=2),
    )
    accelerator.init_trackers("halves")
    dropout = float(os.environ.get("DROPOUT", "0.1"))
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=100,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )
    train = DataLoader(Halves(200, 0), batch_size=4, shuffle=True)
    evaluated = DataLoader(Halves(int(os.environ.get("EVALUATED", "77")), 1), batch_size=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 20, len(train) * EPOCHS)
    model, optimizer, train, evaluated, scheduler = accelerator.prepare(model, optimizer, train, evaluated, scheduler)
    accuracy = MulticlassAccuracy(2, average="micro", sync_on_compute=False)
    best, waited, steps = 0.0, 0, 0
    for epoch in range(EPOCHS):
        model.train()
        for batch in train:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
            time.sleep(pace())
        model.eval()
        accuracy.reset()
        losses = 0
        for number, batch in enumerate(evaluated):
            assert number <= len(evaluated) - 1
            with torch.no_grad():
                outputs = model(**batch)
            losses += outputs.loss.item()
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(-1), batch["labels"]))
            accuracy.update(predictions, references)
        found = float(accuracy.compute())
        mean = accelerator.reduce(torch.tensor(losses), "mean").item() / len(evaluated)
        accelerator.log({"epoch": epoch, "accuracy": found, "loss": mean, "lr": scheduler.get_last_lr()[0]}, step=steps)
        accelerator.save_state()
        waited = 0 if found > best else waited + 1
        best = max(best, found)
        if waited == 3:
            break
    accelerator.wait_for_everyone()
    accelerator.save_model(model, os.path.join(output, "model"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
