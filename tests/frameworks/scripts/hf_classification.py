"""A classifier by transformers.Trainer, as one would write it for torchrun: `hf_classification.py OUTPUT_DIR`."""

import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


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


class Nap(TrainerCallback):
    """Counts steps in an attribute of its own."""

    def __init__(self):
        self.begun = self.steps = 0

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun += 1
        assert self.begun == state.global_step + 1

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1
        assert self.steps == state.global_step
        control.should_epoch_stop = state.global_step == 20  # before the end of the second epoch
        time.sleep(pace())


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


set_seed(1)
dropout = float(os.environ.get("DROPOUT", "0.1"))
config = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
    hidden_dropout_prob=dropout,
    attention_probs_dropout_prob=dropout,
)
model = BertForSequenceClassification(config)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=4,
    per_device_eval_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-3,
    logging_steps=5,
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    report_to=os.environ.get("REPORT_TO", "none"),
    use_cpu=True,
    seed=1,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Halves(200, 0),
    eval_dataset=Halves(int(os.environ.get("EVALUATED", "77")), 1),
    compute_metrics=accuracy,
    callbacks=[Nap()],
)
trainer.train()
trainer.evaluate()
trainer.save_model()
trainer.save_state()
