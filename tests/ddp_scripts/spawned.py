"""Ranks that the script starts itself, with mp.spawn; a transformer under torch.compile; gradients of every micro-batch
reduced, as without no_sync()."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EVERY = 2


class Text(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 17, (9,), generator=generator)
        return tokens[:-1], tokens[1:]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.unused = nn.Linear(4, 4)
        self.head = nn.Linear(16, 17)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.layers(self.embed(x), mask=mask, is_causal=True))


def run(rank, world, epochs):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DDP(Decoder(), find_unused_parameters=True)
    if os.environ.get("COMPILE"):
        model = torch.compile(model, backend=os.environ["COMPILE"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [warm, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)], milestones=[3]
    )
    data = Text()
    sampler = DistributedSampler(data, num_replicas=world, rank=rank)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / EVERY
            loss.backward()
            if (i + 1) % EVERY == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            time.sleep(float(os.environ.get("NAP", "0")))
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item() * EVERY:.4f}", flush=True)
    dist.destroy_process_group()


def main(epochs=2):
    world = int(os.environ.get("WORLD_SIZE", "2"))
    mp.spawn(run, args=(world, epochs), nprocs=world, join=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
