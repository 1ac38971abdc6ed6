"""A classifier by transformers.Trainer with FSDP2, as one would write it for torchrun: `hf_fsdp.py OUTPUT_DIR`.

accelerate shards on accelerators only: what is changed in it here has it shard on a CPU, over gloo.
"""

import functools
import hashlib
import os
import sys
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

own = AcceleratorState.__init__


@functools.wraps(own)
def on_a_cpu(self, *args, fsdp_plugin=None, **kwargs):
    own(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


AcceleratorState.__init__ = on_a_cpu


class Halves(Dataset):
    """Which half of a sequence has the larger sum."""

    def __init__(self, samples, seed):
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(5, 100, (samples, 16), generator=generator)
        self.labels = (self.words[:, :8].sum(1) > self.words[:, 8:].sum(1)).long()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": self.labels[index]}


class Nap(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        assert isinstance(model, FSDPModule)
        time.sleep(pace())


class Average(TrainerCallback):
    """Of the weights, sharded as they are."""

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def on_step_end(self, args, state, control, model, **kwargs):
        for name, weight in model.named_parameters():
            self.weights[name].lerp_(weight.detach(), 0.1)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


set_seed(1)
config = BertConfig(
    vocab_size=100,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=32,
)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    per_device_train_batch_size=4,
    per_device_eval_batch_size=8,
    num_train_epochs=3,
    learning_rate=1e-3,
    logging_steps=5,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    seed=1,
    fsdp="full_shard auto_wrap",
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]},
)
average = Average()
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=arguments,
    train_dataset=Halves(160, 0),
    eval_dataset=Halves(64, 1),
    compute_metrics=accuracy,
    callbacks=[Nap(), average],
)
trainer.train()
trainer.save_state()
found = hashlib.sha256()
moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
for tensor in (*trainer.model.state_dict().values(), *moments, *average.weights.values()):
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    found.update(whole.detach().numpy().tobytes())
if trainer.is_world_process_zero():
    Path(sys.argv[1], "digest").write_text(found.hexdigest())
