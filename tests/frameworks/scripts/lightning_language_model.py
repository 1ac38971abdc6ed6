"""A language model by Lightning: accumulated gradients, clipping, a schedule, bfloat16, validation inside of epochs,
and CSVLogger. `lightning_language_model.py OUTPUT_DIR`."""

import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset


class Counting(Dataset):
    """Sequences that count up, of 4 to 16 words."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(4, 17, (samples,), generator=generator)
        self.starts = torch.randint(0, 40, (samples,), generator=generator)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return (self.starts[index] + torch.arange(int(self.lengths[index]))) % 47 + 1


def padded(samples):
    return {"words": nn.utils.rnn.pad_sequence(samples, batch_first=True)}


class Language(L.LightningModule):
    def __init__(self, dropout):
        super().__init__()
        self.words = nn.Embedding(48, 24, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, dropout, batch_first=True)
        self.head = nn.Linear(24, 48)

    def forward(self, words):
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return self.head(self.layer(self.words(words), src_mask=mask, is_causal=True))

    def loss(self, batch):
        words = batch["words"]
        logits = self(words[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten(), ignore_index=0)

    def training_step(self, batch):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.log("longest", float(batch["words"].shape[1]), reduce_fx="max", on_epoch=True, sync_dist=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Distance:
    """How far the weights have gone."""

    def __init__(self, module):
        self.last = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
        self.gone, self.batches = torch.zeros_like(self.last), 0

    def update(self, module):
        now = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
        self.gone += (now - self.last).abs()
        self.last, self.batches = now, self.batches + 1


class Averages(Callback):
    """Writes what it keeps beside the module: an average of the weights, a vector as long as all weights, and one that
    it tells itself. It counts batches, of which two are a step."""

    def on_fit_start(self, trainer, module):
        self._product = torch.ones(5000)

    def on_train_start(self, trainer, module):
        self.average = AveragedModel(module.head, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.distance = Distance(module)

    def state_dict(self):
        return {"product": self._product}

    def load_state_dict(self, state):
        self._product = state["product"].clone()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.average.update_parameters(module.head)
        self.distance.update(module)
        self._product = self._product * 1.001

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            tensors = [*self.average.parameters(), self.distance.gone, self._product]
            numbers = torch.tensor([self.average.n_averaged, self.distance.batches])
            content = b"".join(tensor.detach().numpy().tobytes() for tensor in (*tensors, numbers))
            Path(sys.argv[1], "averages.bin").write_bytes(content)


class Nap(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(pace() / 2)


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


L.seed_everything(2)
loggers = [CSVLogger(sys.argv[1], name=None, version="", flush_logs_every_n_steps=1)]
tracked = os.environ.get("REPORT_TO", "").split(",")
if "tensorboard" in tracked:
    loggers.append(TensorBoardLogger(sys.argv[1], name="events"))
if "mlflow" in tracked:
    loggers.append(MLFlowLogger("events", tracking_uri=os.environ["MLFLOW_TRACKING_URI"]))
if "wandb" in tracked:
    loggers.append(WandbLogger(project="events", save_dir=os.environ["WANDB_DIR"]))
trainer = L.Trainer(
    accelerator="cpu",
    strategy=sys.argv[2] if len(sys.argv) > 2 else "elastic",
    devices=4,
    max_epochs=1000,  # so that Lightning has to load the data to tell estimated_stepping_batches
    max_steps=int(os.environ.get("STEPS", "40")),
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    precision=os.environ.get("PRECISION", "bf16-mixed"),
    val_check_interval=0.5,
    logger=loggers,
    callbacks=[
        ModelCheckpoint(every_n_train_steps=10, save_top_k=-1, filename="{step}"),
        LearningRateMonitor("step"),
        Nap(),
        Averages(),
    ],
    log_every_n_steps=int(os.environ.get("LOG_EVERY", "2")),
    enable_progress_bar=False,
)
train = DataLoader(Counting(190, 0), batch_size=2, collate_fn=padded, shuffle=True)
held = DataLoader(Counting(int(os.environ.get("EVALUATED", "45")), 1), batch_size=4, collate_fn=padded)
trainer.fit(Language(float(os.environ.get("DROPOUT", "0.1"))), train, held)
