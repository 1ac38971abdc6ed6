"""Loops of libraries under `elastic run --restart`: the recipes of docs/restart.md, as they stand there, with a script
that is killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.live.jobs import ROOT, Job

PAGE = (ROOT / "docs" / "restart.md").read_text()
LIGHTNING = """
import os, time
import lightning, torch
from lightning.pytorch.callbacks import ModelCheckpoint

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)

    def training_step(self, batch, number):
        time.sleep(0.05)
        x, y = batch
        return ((self.linear(x) - y) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

x = torch.randn(128, 8)
MODULE, EPOCHS, ACCELERATOR, DIRECTORY = Module(), 12, "cpu", "snapshots"
LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 16)
"""
HUGGING_FACE = """
import os, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, number):
        time.sleep(0.01)
        text = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": text, "labels": text}

MODEL = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
DATASET, STEPS, DIRECTORY = Dataset(), 40, "snapshots"
"""
BEGIN = """
with open(f"begun.{os.environ['RANK']}.{os.getpid()}", "w") as file:
    file.write(str(os.path.exists(newest or "")))
"""


@pytest.mark.parametrize(
    ("heading", "before", "snapshot", "end", "said"),
    [
        ("Lightning", LIGHTNING, "last.ckpt", "trainer.current_epoch", "ended at 12"),
        ("Hugging Face's Trainer", HUGGING_FACE, "checkpoint-10", "trainer.state.global_step", "ended at 40"),
    ],
)
def test_it_goes_on_from_its_snapshot(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mark: str,
    heading: str,
    before: str,
    snapshot: str,
    end: str,
    said: str,
) -> None:
    found = re.search(r"```python\n(.*?)```", PAGE.partition(f"### {heading}\n")[2], re.DOTALL)
    assert found is not None
    prepared, _, trained = found[1].rstrip().rpartition("\n")
    script = tmp_path / "train.py"
    script.write_text("\n".join((before, prepared, BEGIN, trained, f'print("ended at", {end}, flush=True)')))
    monkeypatch.chdir(tmp_path)
    with Job(tmp_path, "--workers", "2", "--restart", str(script)) as running:
        running.until("a snapshot", lambda: (tmp_path / "snapshots" / snapshot).exists() or None)
        (first,) = tmp_path.glob("begun.1.*")
        os.kill(int(first.suffix[1:]), signal.SIGKILL)
        assert running.wait() == 0, running.output
        assert said in running.output
    begun = {path: path.read_text() for path in tmp_path.glob("begun.*")}
    assert begun.pop(first) == "False"
    assert list(begun.values()).count("True") >= 2, begun
