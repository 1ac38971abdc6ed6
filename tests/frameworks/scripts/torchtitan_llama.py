"""torchtitan's own trainer, sharded by FSDP2, kept in memory by elastic.keep: `torchtitan_llama.py OUTPUT_DIR`.

torchtitan trains on accelerators only: what is changed in it here has it train on a CPU, over gloo.
"""

import hashlib
import os
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

CPU = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    synchronize=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device: {},
)
with patch.multiple(torch._utils, _get_available_device_type=lambda: "cpu", _get_device_module=lambda kind: CPU):
    from torchtitan.config import ConfigManager
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.train import Trainer

import elastic  # noqa: E402

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


def alphabets(path):
    """Pieces of the alphabet, of different lengths."""
    draw = random.Random(0)
    starts = [draw.randrange(20) for _ in range(200)]
    return Dataset.from_dict({"text": [" ".join(LETTERS[at : at + draw.randrange(3, 9)]) for at in starts]})


output = Path(sys.argv[1])
words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *LETTERS])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
assets = output.with_name(f"{output.name}-assets-{os.environ['RANK']}")
assets.mkdir(parents=True, exist_ok=True)
tokenizer.save(str(assets / "tokenizer.json"))
text_datasets.DATASETS["alphabets"] = DatasetConfig("", alphabets, lambda sample: sample["text"])
options = {
    "job.dump_folder": output,
    "model.flavor": "debugmodel",
    "model.hf_assets_path": assets,
    "training.dataset": "alphabets",
    "training.local_batch_size": 2,
    "training.seq_len": 32,
    "training.steps": 20,
    "lr_scheduler.warmup_steps": 2,
    "debug.seed": 7,
    "checkpoint.interval": 8,
    "metrics.log_freq": 5,
    "activation_checkpoint.mode": "none",
    "training.mixed_precision_param": "float32",
}
said = [word for name, value in options.items() for word in (f"--{name}", str(value))]
trainer = Trainer(ConfigManager().parse_args([*said, "--checkpoint.enable"]))
for part in trainer.model_parts:
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)

kept = elastic.keep(
    *trainer.model_parts, trainer.optimizers, trainer.lr_schedulers, loader=trainer.dataloader, trainer=trainer
)
save, load = trainer.checkpointer.save, trainer.checkpointer.load


def saved(*args, **named):
    save(*args, **named)
    time.sleep(pace())
    kept.done()


trainer.checkpointer.save = saved
trainer.checkpointer.load = lambda *args, **named: kept.step or load(*args, **named)
trainer.train()

found = hashlib.sha256()
states = [part.state_dict() for part in trainer.model_parts]
for tensor in (tensor for state in (*states, trainer.optimizers.state_dict()) for tensor in state.values()):
    if isinstance(tensor, torch.Tensor):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(whole.detach().numpy().tobytes())
if os.environ["RANK"] == "0":
    (output / "digest").write_text(found.hexdigest())
trainer.close()
