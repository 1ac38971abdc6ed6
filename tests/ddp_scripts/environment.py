"""Its rank comes from the environment, read once, as in most tutorials; rank 0 alone saves. It trains until the file
END is there. In the directory OUT each worker writes down its environment, and rank 0 a file for each epoch."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANK = int(os.environ["RANK"])
MASTER = RANK == 0
OUT = Path(os.environ["OUT"])
NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")


def main():
    worker = os.environ["ELASTIC_WORKER_ID"]
    draft = OUT / f"{worker}.tmp"
    draft.write_text(json.dumps({name: int(os.environ[name]) for name in NAMES}))
    draft.rename(OUT / f"{worker}.json")
    dist.init_process_group("gloo")
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"])
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    model = DDP(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, rank=RANK))
    epoch, ended = 0, torch.zeros(())
    while not ended:
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep(float(os.environ.get("NAP", "0")))
        if MASTER:
            torch.save(model.module.state_dict(), OUT / f"{epoch}.{worker}.pt")
        epoch += 1
        ended = torch.tensor(float(Path(os.environ["END"]).exists()))
        dist.broadcast(ended, 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
