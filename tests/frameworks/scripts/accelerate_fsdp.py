"""A classifier with FSDP2 by accelerate, a loop of its own, as one would write it for torchrun:
`accelerate_fsdp.py OUTPUT_DIR`.

accelerate shards on accelerators only: what is changed in it here has it shard on a CPU, over gloo.
"""

import functools
import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, set_seed
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4

own = AcceleratorState.__init__


@functools.wraps(own)
def on_a_cpu(self, *args, fsdp_plugin=None, **kwargs):
    own(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin


AcceleratorState.__init__ = on_a_cpu


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


def halves(samples, seed):
    """Which half of a row has the larger sum."""
    x = torch.randn(samples, 10, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, :5].sum(1) > x[:, 5:].sum(1)).long())


def pace():
    """Seconds that a step takes at least, which a test sets while the job runs."""
    file = Path(os.environ.get("LIVE_GATES", "")) / "pace"
    return float(file.read_text()) if file.is_file() else 0.0


def main():
    set_seed(6)
    output = Path(sys.argv[1])
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = nn.Sequential(nn.Linear(10, 12), Block(12), Block(12), nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.7)
    train = DataLoader(halves(160, 0), batch_size=4, shuffle=True)
    evaluated = DataLoader(halves(48, 1), batch_size=4)
    model, optimizer, train, evaluated, scheduler = accelerator.prepare(model, optimizer, train, evaluated, scheduler)
    assert isinstance(model, FSDPModule)
    history = []
    for _ in range(EPOCHS):
        model.train()
        total = 0.0
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            total += loss.item()
            time.sleep(pace())
        model.eval()
        right = 0
        for x, y in evaluated:
            with torch.no_grad():
                found, labels = accelerator.gather_for_metrics((model(x).argmax(-1), y))
            right += int((found == labels).sum())
        history.append([total, right, scheduler.get_last_lr()])
    moments = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in (*model.state_dict().values(), *moments)]
    if accelerator.is_main_process:
        digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in whole)).hexdigest()
        output.mkdir(parents=True, exist_ok=True)
        (output / "result.json").write_text(json.dumps({"digest": digest, "history": history}))


if __name__ == "__main__":
    main()
