"""The time of a step of a GPT with 124 million parameters, in bf16 autocast, 32 sequences of 1024 tokens in 4 parts.

    python gpt.py plain     a loop without any distribution
    python gpt.py ddp       DistributedDataParallel over NCCL, in a world of one
    elastic run --workers 1 --ring nccl gpt.py elastic

Prints the median milliseconds of a step, over blocks of steps between which the host waits for the GPU.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

LAYERS, DIM, HEADS, LENGTH, VOCABULARY = 12, 768, 12, 1024, 50304
SEQUENCES, PARTS = 32, 4
BLOCK, BLOCKS = 5, 7
"""The first block is not counted."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """(B, LENGTH) int64 tokens to the mean loss of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight
        scores = F.linear(self.norm(self.blocks(x)), self.embed.weight)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def backward(model: nn.Module, tokens: Tensor, divisor: int = 1) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss: Any = model(tokens) / divisor
    loss.backward()


def report(seconds: list[float]) -> None:
    blocks = [1000 * sum(seconds[i : i + BLOCK]) / BLOCK for i in range(0, len(seconds), BLOCK)][1:]
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"step {statistics.median(blocks):.2f} ms ({min(blocks):.2f} to {max(blocks):.2f}), peak {peak:.2f} GiB",
        flush=True,
    )


def timed() -> Iterator[Callable[[], None]]:
    """Call what it yields when a step is over; the GPU is waited for at the end of a block only."""
    seconds: list[float] = []
    last = time.perf_counter()

    def over() -> None:
        nonlocal last
        if len(seconds) % BLOCK == BLOCK - 1:
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds.append(now - last)
        last = now

    for _ in range(BLOCK * BLOCKS):
        yield over
    report(seconds)


def plainly(way: str, tokens: Any) -> None:
    model: nn.Module = GPT().cuda()
    if way == "ddp":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
        dist.init_process_group("nccl")
        model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for over in timed():
        for number, part in enumerate(tokens[:SEQUENCES].chunk(PARTS)):
            last = number == PARTS - 1 or not isinstance(model, DDP)
            with contextlib.nullcontext() if last else model.no_sync():  # type: ignore[operator]
                backward(model, part.cuda(non_blocking=True), PARTS)
        optimizer.step()
        optimizer.zero_grad()
        over()


def elastically(tokens: Tensor) -> None:
    import elastic

    job = elastic.join(seed=1)
    model = GPT().to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = torch.utils.data.TensorDataset(tokens)
    train = job.loader(data, batch_size=SEQUENCES, shards=PARTS)
    job.register(model=model, optimizer=optimizer)
    for step, over in zip(job.steps(train, total=BLOCK * BLOCKS), timed(), strict=True):
        for (part,) in step:
            backward(model, part)
        optimizer.step()
        optimizer.zero_grad()
        over()


made = torch.Generator().manual_seed(1)
elements = torch.randint(VOCABULARY, (SEQUENCES * BLOCK * BLOCKS, LENGTH), generator=made)
if sys.argv[1] == "elastic":
    elastically(elements)
else:
    plainly(sys.argv[1], elements)
