"""An image classifier by accelerate with BatchNorm, random noise, objects that are gathered, an average of the weights,
and a trigger that ends training early. `accelerate_images.py OUTPUT_DIR`."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS = 6


class Bars(Dataset):
    """Images of a bar in one of four places, with noise that is drawn anew each time."""

    def __init__(self, samples, noise):
        self.samples = samples
        self.noise = noise

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        image = self.noise * torch.randn(1, 8, 8)
        image[0, 2 * (index % 4) : 2 * (index % 4) + 2] += 1
        return image, index % 4


class Average:
    """Of the weights, as diffusers' EMAModel: it counts, and is not prepared."""

    def __init__(self, parameters):
        self.shadow = [parameter.detach().clone() for parameter in parameters]
        self.steps = 0

    def step(self, parameters):
        self.steps += 1
        for shadow, parameter in zip(self.shadow, parameters, strict=True):
            shadow.sub_((1 - min(0.9, self.steps / (self.steps + 4))) * (shadow - parameter.detach()))


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


def main():
    set_seed(4)
    output = sys.argv[1]
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(512, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    train = DataLoader(Bars(150, 1.0), batch_size=4, shuffle=True, drop_last=True)
    evaluated = DataLoader(Bars(50, 1.0), batch_size=4)
    average = Average(model.parameters())
    model, optimizer, train, evaluated, scheduler = accelerator.prepare(model, optimizer, train, evaluated, scheduler)
    losses = []
    for epoch in range(EPOCHS):
        model.train()
        for step, (images, labels) in enumerate(train):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            average.step(model.parameters())
            if step == 5:
                losses.append(accelerator.gather(loss.detach()).mean().item())
            if epoch == 4 and step == 3:
                accelerator.set_trigger()
            time.sleep(pace())
        scheduler.step()
        if accelerator.check_trigger():
            break
        model.eval()
        right, seen, wrong = 0, 0, []
        for images, labels in evaluated:
            with torch.no_grad():
                found = model(images).argmax(-1)
            pairs = zip(labels.tolist(), found.tolist(), strict=True)
            wrong.extend(gather_object([f"{label}-{other}" for label, other in pairs if label != other]))
            found, labels = accelerator.gather_for_metrics((found, labels))
            right += (found == labels).long().sum()
            seen += labels.shape[0]
        record = {"accuracy": right.item() / seen, "seen": seen, "wrong": wrong, "lr": scheduler.get_last_lr()}
        if accelerator.is_main_process:
            os.makedirs(output, exist_ok=True)
            with open(os.path.join(output, f"epoch-{epoch}.json"), "w") as file:
                json.dump(record, file)
    accelerator.save_model(model, os.path.join(output, "model"))
    if accelerator.is_main_process:
        found = hashlib.sha256(b"".join(shadow.numpy().tobytes() for shadow in average.shadow)).hexdigest()
        Path(output, "average.json").write_text(json.dumps([average.steps, found]))


if __name__ == "__main__":
    main()
