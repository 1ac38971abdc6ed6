"""A trainer that saves when its machine is about to go, and a callback that asks: `hf_notice.py OUTPUT_DIR`."""

import json
import os
import signal
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

import elastic


class Signs(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        words = torch.arange(index, index + 8)
        return {"input_ids": words, "labels": torch.tensor(index % 2)}


class Asks(TrainerCallback):
    def on_drain(self, notice):
        with Path(os.environ["LIVE_GATES"], f"drained.{os.environ['ELASTIC_WORKER_ID']}").open("a") as file:
            file.write(f"{notice.because}\n")

    def on_step_end(self, args, state, control, **kwargs):
        # Trainer's own handler would save and stop in this worker alone.
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        gates, worker = Path(os.environ["LIVE_GATES"]), os.environ["ELASTIC_WORKER_ID"]
        notice = elastic.notice()
        said = notice and [notice.kind, notice.because, notice.source, round(notice.seconds_left)]
        with (gates / f"asked.{worker}").open("a") as file:
            file.write(json.dumps(said) + "\n")
        control.should_training_stop = state.global_step == int(os.environ["STEPS"])
        time.sleep(float((gates / "pace").read_text()) if (gates / "pace").exists() else 0.0)


set_seed(1)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=4,
    num_train_epochs=1000,
    enable_jit_checkpoint=True,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    seed=1,
)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
model = BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=16, **sizes))
Trainer(model=model, args=arguments, train_dataset=Signs(), callbacks=[Asks()]).train()
