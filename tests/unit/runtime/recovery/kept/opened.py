"""A program: a sharded training in two rounds, the second of which goes on from memory. A tracer of system calls sees
`/elastic.keep begins` and `/elastic.keep ends` asked for around the call that fills it."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import fully_shard

import elastic
from runtime.recovery.kept.choice import RoundNumber, newest_whole
from runtime.recovery.kept.look import KeptHere
from runtime.recovery.kept.place import KeptPlace
from tests.memory_directory import memory_directory
from tests.unit.runtime.recovery.kept.worlds import fork

STEPS = 3


def train(place: KeptPlace) -> None:
    named = {"RANK": 0, "LOCAL_RANK": 0, "GROUP_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in named.items()}, **place.to_environment())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    os.path.exists("/elastic.keep begins")
    kept = elastic.keep(model, optimizer)
    os.path.exists("/elastic.keep ends")
    for _ in range(STEPS):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.done()
    kept.wait()


def main() -> None:
    with memory_directory() as directory:
        print(directory, flush=True)
        for number in (1, 2):
            source = newest_whole(KeptHere(directory, cast(Any, None)).check(0, 1))
            assert (0 if source is None else source.step) == STEPS * (number - 1)
            place = KeptPlace(directory, RoundNumber(0, number), source)
            if os.waitpid(fork(functools.partial(train, place)), 0)[1]:
                sys.exit(1)


if __name__ == "__main__":
    main()
