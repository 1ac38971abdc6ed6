"""A script for torchrun that knows nothing of this project: it sums over all ranks until a file appears.

A line of JSON for each sum, in a file of its own: rank, world, restarts, sum.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

directory = Path(os.environ["LINES"])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with (directory / f"{os.environ['NODE']}-{os.getpid()}.jsonl").open("w") as lines:
    over = False
    while not over:
        ranks, ends = torch.tensor([rank + 1.0]), torch.tensor([float((directory / "stop").exists())])
        dist.all_reduce(ranks)
        dist.all_reduce(ends)
        over = bool(ends.item())
        line = {"rank": rank, "world": world, "restarts": restarts, "sum": ranks.item()}
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        time.sleep(0.05)
dist.destroy_process_group()
