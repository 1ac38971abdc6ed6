"""Train a small GPT, byte by byte, on the source of Python's standard library.

    python docs/examples/train_gpt.py                        one process
    elastic run --workers 3 docs/examples/train_gpt.py       three, of which any may die: the same bits

Every tenth file is held out for evaluation. The last line is the digest of the final parameters and optimizer.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elastic


def stdlib_bytes() -> tuple[Tensor, Tensor]:
    """The library's source as two uint8 tensors: training and held-out text. The same on every machine with the same
    Python."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    train = b"".join(file.read_bytes() for number, file in enumerate(files) if number % 10)
    held_out = b"".join(file.read_bytes() for file in files[::10])
    return torch.frombuffer(bytearray(train), dtype=torch.uint8), torch.frombuffer(
        bytearray(held_out), dtype=torch.uint8
    )


class Windows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Consecutive pieces of a text; the target of each byte is the next one."""

    def __init__(self, text: Tensor, length: int, limit: int | None = None) -> None:
        self.text, self.length = text, length
        self.count = min((len(text) - 1) // length, limit or len(text))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout * self.training)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, dim: int, layers: int, heads: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)

    def forward(self, x: Tensor) -> Tensor:
        y = self.byte(x) + self.position(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(y)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of one step, over all workers")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=50, help="steps between two evaluations")
    args = parser.parse_args()

    job = elastic.join(seed=1207)
    text, held_out = stdlib_bytes()
    model = GPT(args.dim, args.layers, args.heads, args.context).to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    train = job.loader(Windows(text, args.context), args.batch_size, shards=args.shards, shuffle=True)
    test = Windows(held_out, args.context, limit=64)
    job.register(model=model, optimizer=optimizer, scheduler=scheduler)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    for step in job.steps(train, total=args.steps):
        for x, y in step:  # the shards this worker holds just now
            loss = loss_of(x, y)
            loss.backward()
            step.log(loss=loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the mean gradient of all shards, the same everywhere
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step.index + 1) % args.eval_every == 0 or step.index + 1 == step.total:
            result = job.evaluate(lambda x, y: {"loss": loss_of(x, y)}, test)
            job.print(f"step {step.index + 1} loss {step.metrics['loss']:.4f} held-out {result['loss']:.4f}")
    job.print(f"digest {job.digest()}")


if __name__ == "__main__":
    main()
