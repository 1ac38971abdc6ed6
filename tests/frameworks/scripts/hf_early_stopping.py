"""Fine-tuning by a subclass of transformers.Trainer that weighs its loss and logs what it sees, with label smoothing in
the evaluation, early stopping and a learning rate that follows the evaluation. `hf_early_stopping.py OUTPUT_DIR`."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed


class Points(torch.utils.data.Dataset):
    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(samples, 6, generator=generator)
        noise = 0.8 * torch.randn(samples, generator=generator)
        self.labels = (self.points[:, 0] * self.points[:, 1] + noise > 0).long()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"x": self.points[index], "labels": self.labels[index]}


class Model(nn.Module):
    """No model of transformers, with BatchNorm and a frozen first layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16).requires_grad_(False)
        self.body = nn.Sequential(nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, x, labels=None):
        return {"logits": self.body(self.first(x))}


class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(inputs["x"])
        loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], weight=torch.tensor([1.0, 2.0]))
        if self.state.global_step % 3 == 0:  # in training and in evaluations
            self.log({"margin": outputs["logits"].diff(dim=1).abs().mean().item()})
        return (loss, outputs) if return_outputs else loss


class Best(TrainerCallback):
    """Keeps what it has seen in a list of its own, and decides by it."""

    def __init__(self):
        self.losses = []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.losses.append(metrics["eval_loss"])
        assert len(self.losses) == state.global_step // 5

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(pace())


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


set_seed(3)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=4,
    per_device_eval_batch_size=16,
    num_train_epochs=20,
    learning_rate=5e-2,
    lr_scheduler_type="reduce_lr_on_plateau",
    lr_scheduler_kwargs={"factor": 0.5, "patience": 1},
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=5,
    save_strategy="best",
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    greater_is_better=False,
    report_to=[],
    seed=3,
)
trainer = Weighted(
    model=Model(),
    args=arguments,
    train_dataset=Points(120, 0),
    eval_dataset=Points(64, 1),
    compute_metrics=accuracy,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=6), Best()],
)
trainer.train()
assert trainer.state.global_step < 150, "it stops early"
trainer.predict(Points(30, 2))
trainer.save_model()
trainer.save_state()
