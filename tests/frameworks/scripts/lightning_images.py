"""A small network for images by pytorch_lightning, with BatchNorm and Dropout, random transforms, samples that are
drawn by weight, and the loop's ends: validate, test and predict. `lightning_images.py OUTPUT_DIR`."""

import json
import os
import sys
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler


class Stripes(Dataset):
    def __init__(self, samples, seed, noise):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 2, (samples,), generator=generator)
        images = torch.zeros(samples, 1, 8, 8)
        images[self.labels == 0, :, ::2] = 1
        images[self.labels == 1, :, :, ::2] = 1
        self.images, self.noise = images + torch.randn(images.shape, generator=generator), noise

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        return image + self.noise * torch.randn(image.shape), self.labels[index]


class Network(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(288, 2)
        )
        self.right = []
        self.total = torch.tensor(0.0)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        images, labels = batch
        return images - images.mean(), labels

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.body(images), labels)
        self.total = self.total + loss.detach()
        self.log_dict({"train_loss": loss, "batch": float(batch_idx)}, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log("total", self.total)
        self.total = torch.tensor(0.0)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        right = (self.body(images).argmax(1) == labels).float()
        self.right.append(right)
        return {"right": right}

    def on_validation_epoch_end(self):
        self.log("val_accuracy", torch.cat(self.right).mean())
        self.right.clear()

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("test_loss", nn.functional.cross_entropy(self.body(images), labels))

    def predict_step(self, batch, batch_idx):
        return self.body(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Outputs(Callback):
    """Collects what validation_step() returns."""

    def __init__(self):
        self.counts = []
        self.seen = 0

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen += len(outputs["right"])

    def on_validation_epoch_end(self, trainer, module):
        self.counts.append(self.seen)
        self.seen = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        time.sleep(pace())


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


pl.seed_everything(3)
outputs = Outputs()
trainer = pl.Trainer(
    accelerator="cpu",
    max_epochs=4,
    logger=CSVLogger(sys.argv[1], name="logs", version="v"),
    callbacks=[ModelCheckpoint(dirpath=f"{sys.argv[1]}/best", monitor="val_accuracy", mode="max"), outputs],
    log_every_n_steps=2,
    limit_train_batches=8,
    enable_progress_bar=False,
)
data = Stripes(200, 0, 0.3)
drawn = WeightedRandomSampler(torch.linspace(1, 2, 200), 160)
held = DataLoader(Stripes(50, 1, 0.0), batch_size=8)
network = Network()
trainer.validate(network, held, verbose=False)
trainer.fit(network, DataLoader(data, batch_size=4, sampler=drawn, num_workers=1), held)
tested = trainer.test(network, held, verbose=False)
predicted = trainer.predict(network, held)
assert sum(map(len, predicted)) == 50
assert set(outputs.counts[2:]) == {50}, outputs.counts
if trainer.is_global_zero:
    found = {"tested": tested, "predicted": torch.cat(predicted).tolist(), "counts": outputs.counts}
    (Path(sys.argv[1]) / "found.json").write_text(json.dumps(found))
