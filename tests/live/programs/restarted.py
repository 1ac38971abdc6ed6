"""A script for torchrun that saves its own state: it adds over all ranks until its directory has a file `end`.

Each process writes a file `RANK.WORLD.ROUND` with its pid when its group is formed, one with `.json` behind its name
with its environment, and one with `.saved` behind it when it is asked to stop: with the notice that its node has then.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

import elastic


@record
def main() -> None:
    home = Path(sys.argv[1])

    def save(number: int, frame: object) -> None:
        notice = elastic.notice()
        said = json.dumps(notice and [notice.kind, notice.source, notice.seconds_left > 0])
        asked = started.with_name(started.name + ".asked")
        asked.write_text(said)
        asked.rename(started.with_name(started.name + ".saved"))
        sys.exit(0)

    dist.init_process_group("gloo")
    rank, world, rounds = dist.get_rank(), dist.get_world_size(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    for name in ("LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        assert os.environ[name], name
    started = home / f"{rank}.{world}.{rounds}"
    signal.signal(signal.SIGTERM, save)
    started.with_name(started.name + ".json").write_text(json.dumps(dict(os.environ)))
    started.with_suffix(".tmp").write_text(str(os.getpid()))
    started.with_suffix(".tmp").rename(started)
    ended = torch.zeros(1)
    while not ended:
        ended = torch.tensor([float((home / "end").exists())])
        dist.all_reduce(ended, dist.ReduceOp.MAX)
        if rank == 1 and (home / "fail").exists():
            (home / "fail").unlink()
            raise ValueError("planted in rank 1")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
