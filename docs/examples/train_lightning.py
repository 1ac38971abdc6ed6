"""A classifier by Lightning, as one writes it for DDP: it does not use elastic-ring.

torchrun --nproc-per-node=4 docs/examples/train_lightning.py
elastic run --workers 3 --ranks 4 docs/examples/train_lightning.py
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def rings(samples: int, seed: int) -> TensorDataset:
    """Points in six dimensions, and whether they lie outside of a sphere."""
    points = torch.randn(samples, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.square().sum(1) > 5.3).long())


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):  # type: ignore[no-untyped-def]
        points, labels = batch
        loss = nn.functional.cross_entropy(self.body(points), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):  # type: ignore[no-untyped-def]
        points, labels = batch
        logits = self.body(points)
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):  # type: ignore[no-untyped-def]
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--output", default="lightning-output")
options = parser.parse_args()
L.seed_everything(0)
trainer = L.Trainer(
    accelerator="cpu",
    devices=4,
    strategy="ddp",
    max_epochs=options.epochs,
    logger=CSVLogger(options.output, name="logs"),
    callbacks=[
        ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{epoch}-{val_accuracy:.3f}"),
        EarlyStopping("val_loss", patience=4),
    ],
    log_every_n_steps=10,
    enable_progress_bar=False,
)
train = DataLoader(rings(4000, seed=0), batch_size=32, shuffle=True)
trainer.fit(Classifier(), train, DataLoader(rings(1000, seed=1), batch_size=100))
print("best:", trainer.checkpoint_callback.best_model_path)
