"""Several train() of transformers.Trainer: a head, then all of the model at a rate that follows from the first one, by
another Trainer that trains twice; evaluations between them. `hf_loops.py OUTPUT_DIR`."""

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
        self.labels = (self.points[:, 0] * self.points[:, 1] > 0).long()

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        return {"x": self.points[index], "labels": self.labels[index]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16))
        self.head = nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, x, labels=None):
        logits = self.head(self.base(x))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Pace(TrainerCallback):
    """Lets the tests run it slowly."""

    def on_step_end(self, args, state, control, **kwargs):
        file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
        time.sleep(float(file.read_text()) if file.is_file() else 0.0)


def made(name, rate, **more):
    return TrainingArguments(
        output_dir=str(Path(sys.argv[1]) / name),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=8,
        learning_rate=rate,
        logging_steps=3,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        **more,
    )


set_seed(3)
model, data, held = Model(), Points(96, 0), Points(50, 1)
model.base.requires_grad_(False)
best = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "save_total_limit": 1}
first = Trainer(
    model=model,
    args=made("first", 5e-2, num_train_epochs=4, **best, metric_for_best_model="loss", greater_is_better=False),
    train_dataset=data,
    eval_dataset=held,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2), Pace()],
)
output = first.train()
print(
    "trained 1", output.global_step, f"{output.training_loss:.6f}", round(output.metrics["train_loss"], 6), flush=True
)
figures = first.evaluate()
print("evaluated 1", f"{figures['eval_loss']:.6f}", len(first.state.log_history), flush=True)
first.save_model(str(Path(sys.argv[1]) / "head"))
model.base.requires_grad_(True)
rate = 1e-3 * (1 + figures["eval_loss"] + output.training_loss)  # bits of the first loop
second = Trainer(
    model=model,
    args=made("second", rate, num_train_epochs=5, save_strategy="no", lr_scheduler_type="cosine"),
    train_dataset=data,
    eval_dataset=held,
    callbacks=[Pace()],
)
output = second.train()
print("trained 2", output.global_step, f"{output.training_loss:.6f}", flush=True)
print("evaluated 2", f"{second.evaluate()['eval_loss']:.6f}", flush=True)
output = second.train()  # the same optimizer goes on
print("trained 3", output.global_step, f"{output.training_loss:.6f}", flush=True)
second.args.output_dir = sys.argv[1]
second.save_model()
second.save_state()
