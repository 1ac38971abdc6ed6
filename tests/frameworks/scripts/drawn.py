"""Scripts of random trials (tests/fates) with a framework's own loop: `drawn.py PROGRAM`, draw.Program as JSON.

Its kinds are trainer (transformers.Trainer) and lightning. FATES_FILES: a directory, in which the leader leaves a file
`digest` of all that was logged, but for times. FATES_QUIET: no pauses.
"""

import csv
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

PROGRAM = json.loads(sys.argv[1])
EXTRAS, RANKS = PROGRAM["extras"], PROGRAM["shards"]
FILES = Path(os.environ["FATES_FILES"])
PAUSE_S = 0.0 if "FATES_QUIET" in os.environ else PROGRAM["pause_ms"] / 1000
EVERY = 2 if "accumulate" in EXTRAS else 1
INPUTS, CLASSES = 8, 3


class Points(Dataset):
    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, INPUTS, generator=generator)
        self.y = (self.x[:, 0] * self.x[:, 1] > 0).long() + (self.x[:, 2] > 1).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        if "noisy_data" in EXTRAS:
            x = x + 0.1 * torch.randn(INPUTS)
        return {"x": x, "labels": self.y[index]}


def network():
    middle = {
        "norms": [nn.BatchNorm1d(16), nn.LayerNorm(16)],
        "dropout": [nn.ReLU(), nn.Dropout(0.3)],
        "many": [layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.Tanh())],
    }.get(PROGRAM["model"], [nn.Tanh()])
    return nn.Sequential(nn.Linear(INPUTS, 16), *middle, nn.Linear(16, CLASSES))


def said(text):
    (FILES / "digest").write_text(hashlib.sha256(text.encode()).hexdigest())
    (FILES / "logged").write_text(text)


# ------------------------------------------------------------------------------------------------ transformers.Trainer


def trainer():
    import transformers
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.config = network(), transformers.PretrainedConfig()

        def forward(self, x, labels=None):  # Trainer keeps the labels where it smooths them
            scores = self.body(x)
            return {"logits": scores} | (
                {"loss": nn.functional.cross_entropy(scores, labels)} if labels is not None else {}
            )

    class Own(TrainerCallback):
        def __init__(self):
            self.steps, self.losses = 0, []

        def on_step_end(self, args, state, control, **kwargs):
            self.steps += 1
            assert self.steps == state.global_step
            if "leaves_epoch" in EXTRAS and state.global_step % 9 == 5:
                control.should_epoch_stop = True
            time.sleep(PAUSE_S)

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "loss" in logs:
                self.losses = [*self.losses[-3:], float(logs["loss"])]

    def accuracy(prediction):
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    transformers.logging.set_verbosity_error()
    set_seed(1)
    best = bool({"best", "early_stopping"} & set(EXTRAS))
    arguments = TrainingArguments(
        output_dir=str(FILES / "out"),
        per_device_train_batch_size=PROGRAM["batch_size"],
        per_device_eval_batch_size=4,
        num_train_epochs=PROGRAM["epochs"],
        learning_rate=1e-2,
        optim={"adamw_fused": "adamw_torch_fused", "sgd": "sgd", "adafactor": "adafactor", "rmsprop": "rmsprop"}.get(
            PROGRAM["optimizer"], "adamw_torch"
        ),
        lr_scheduler_type={"cosine": "cosine", "plateau": "reduce_lr_on_plateau"}.get(PROGRAM["schedule"], "linear"),
        warmup_steps=5 if PROGRAM["schedule"] == "warmup" else 0,
        gradient_accumulation_steps=EVERY,
        max_grad_norm=0.1 if "clip" in EXTRAS else 1.0,
        label_smoothing_factor=0.1 if "smoothed" in EXTRAS else 0.0,
        bf16="autocast" in EXTRAS,
        dataloader_drop_last="drop_last" in EXTRAS,
        dataloader_num_workers=2 if PROGRAM["source"] == "workers" else 0,
        logging_steps=3,
        logging_first_step="first" in EXTRAS,
        eval_strategy="epoch" if best or "evaluate" in EXTRAS or PROGRAM["schedule"] == "plateau" else "no",
        save_strategy="epoch" if best or "save" in EXTRAS else "no",
        save_total_limit=2,
        load_best_model_at_end=best,
        metric_for_best_model="accuracy" if best else None,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
    )
    running = Trainer(
        model=Net(),
        args=arguments,
        train_dataset=Points(PROGRAM["samples"], 0),
        eval_dataset=Points(29, 1),
        compute_metrics=accuracy,
        callbacks=[Own(), *([EarlyStoppingCallback(2)] if "early_stopping" in EXTRAS else [])],
    )
    running.train()
    if "twice" in EXTRAS:
        between = running.evaluate()["eval_loss"] if "evaluate" in EXTRAS else 1.0
        running.args.learning_rate = 3e-3 * between
        for callback in running.callback_handler.callbacks:
            if isinstance(callback, Own):
                callback.steps = 0
        running.train()
    found = running.evaluate() if "evaluate" in EXTRAS else {}
    if "predict" in EXTRAS:
        found["predicted"] = running.predict(Points(13, 2)).predictions.tolist()
    if running.is_world_process_zero():
        rows = [*running.state.log_history, found]
        times = ("runtime", "per_second", "preparation_time", "total_flos")
        said("\n".join(repr({k: v for k, v in row.items() if not k.endswith(times)}) for row in rows))


# ------------------------------------------------------------------------------------------------ Lightning


def lightning():
    import lightning as L
    from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.body = network()
            self.seen, self.total = 0, torch.zeros(())

        def loss(self, batch):
            return nn.functional.cross_entropy(self.body(batch["x"]), batch["labels"])

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.seen += 1
            self.total = self.total + loss.detach()
            self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def on_train_epoch_end(self):
            self.log("seen", float(self.seen))
            self.log("total", self.total)

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.loss(batch), sync_dist=True)

        def predict_step(self, batch, batch_idx):
            return self.body(batch["x"])

        def configure_optimizers(self):
            made = {"sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad}
            optimizer = made.get(PROGRAM["optimizer"], torch.optim.AdamW)(self.parameters(), lr=1e-2)
            if PROGRAM["schedule"] == "cosine":
                scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
            if PROGRAM["schedule"] == "plateau":
                scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss_epoch"}}
            return optimizer

    class Own(Callback):
        def __init__(self):
            self.steps = 0

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.steps += 1
            time.sleep(PAUSE_S)

    evaluates = bool({"best", "early_stopping", "evaluate"} & set(EXTRAS))
    callbacks = [Own()]
    if "best" in EXTRAS:
        callbacks.append(ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True))
    elif "save" in EXTRAS:
        callbacks.append(ModelCheckpoint(every_n_train_steps=7, save_top_k=-1))
    if "early_stopping" in EXTRAS:
        callbacks.append(EarlyStopping("val_loss", patience=1))
    L.seed_everything(1)
    logger = CSVLogger(str(FILES / "logs"), name="run", flush_logs_every_n_steps=5)
    loop = L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy="ddp",
        max_epochs=PROGRAM["epochs"],
        logger=logger,
        callbacks=callbacks,
        accumulate_grad_batches=EVERY,
        gradient_clip_val=0.1 if "clip" in EXTRAS else None,
        precision="bf16-mixed" if "autocast" in EXTRAS else "32-true",
        num_sanity_val_steps=2 if evaluates and "first" in EXTRAS else 0,
        limit_val_batches=None if evaluates else 0,
        log_every_n_steps=3,
        enable_checkpointing=bool({"best", "save"} & set(EXTRAS)),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, workers = Module(), 2 if PROGRAM["source"] == "workers" else 0
    named = {"batch_size": PROGRAM["batch_size"], "num_workers": workers, "drop_last": "drop_last" in EXTRAS}
    data = DataLoader(Points(PROGRAM["samples"], 0), shuffle=True, **named)
    held = DataLoader(Points(29, 1), batch_size=4)
    loop.fit(module, data, held if evaluates else None)
    if "twice" in EXTRAS:
        loop.fit_loop.max_epochs = 2 * PROGRAM["epochs"]
        loop.fit(module, data, held if evaluates else None)
    predicted = [scores.tolist() for scores in loop.predict(module, held)] if "predict" in EXTRAS else []
    if loop.is_global_zero:
        logger.finalize("success")
        rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
        said("\n".join(map(repr, [*rows, predicted])))


if __name__ == "__main__":
    {"trainer": trainer, "lightning": lightning}[PROGRAM["kind"]]()
