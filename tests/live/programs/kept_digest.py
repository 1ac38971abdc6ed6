"""A script for torchrun that keeps its state in memory: `kept_digest.py STEPS SECONDS FILE`, with seconds per step.

Behind its last step rank 0 writes the digest of all ranks into the file. If another run has written it, both have to be
the same.
"""

import os
import random
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.live.programs.kept_ranks import Barlow, Batches, digest

warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)


def main(steps: int, pause_s: float, file: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    np.random.seed(rank)
    random.seed(rank)
    training = Barlow(Batches(rank))
    if training.kept.step == 0:
        torch.manual_seed(70 + rank)
    while training.kept.step < steps:
        time.sleep(pause_s)  # this is the work
        training.step()
        training.kept.done()
    every: list[str] = [""] * world
    dist.all_gather_object(every, digest(training))
    if rank == 0:
        said = " ".join(every)
        with open(file, "a") as opened:
            opened.write(f"{said}\n")
        assert set(file.read_text().splitlines()) == {said}, "these are not the bits of the run before"
        print(f"digest {said[:16]}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads were seen to hang in destroy_process_group() behind a collective in a backward pass


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]))
