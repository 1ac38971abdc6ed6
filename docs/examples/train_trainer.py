"""A classifier by transformers.Trainer, as one writes it for torchrun: it does not use elastic-ring.

torchrun --nproc-per-node=4 docs/examples/train_trainer.py
elastic run --workers 3 --ranks 4 docs/examples/train_trainer.py
"""

import argparse

import torch
from torch.utils.data import TensorDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)


def halves(samples: int, seed: int) -> TensorDataset:
    """Sequences of 16 words, and whether their first half has the larger sum."""
    words = torch.randint(5, 100, (samples, 16), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(words, (words[:, :8].sum(1) > words[:, 8:].sum(1)).long())


def batch(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    words, labels = map(torch.stack, zip(*samples, strict=True))
    return {"input_ids": words, "labels": labels}


def accuracy(prediction) -> dict[str, float]:  # type: ignore[no-untyped-def]
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--output", default="trainer-output")
options = parser.parse_args()
set_seed(0)
config = BertConfig(
    vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, num_labels=2
)
arguments = TrainingArguments(
    output_dir=options.output,
    num_train_epochs=options.epochs,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    logging_steps=10,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    remove_unused_columns=False,
    report_to=[],
    use_cpu=True,
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=arguments,
    train_dataset=halves(2000, seed=0),
    eval_dataset=halves(500, seed=1),
    data_collator=batch,
    compute_metrics=accuracy,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
trainer.save_model()
