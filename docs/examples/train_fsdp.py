"""The small GPT of train_gpt.py with FSDP2: each process has a part of the weights, and keeps it in memory.

    python docs/examples/train_fsdp.py                                 one process
    elastic run --workers 3 --restart docs/examples/train_fsdp.py      three, of which any may die: the same bits

When a worker is lost or joins, the script is started again on all workers and goes on from the last step, with any
number of processes. The last line is the digest of the final weights.
"""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from train_gpt import GPT, Windows, stdlib_bytes

import elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--units", type=int, default=6, help="parts of a step, dealt to the processes that are there")
    parser.add_argument("--unit-size", type=int, default=4, help="sequences of a unit")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--print-every", type=int, default=10)
    args = parser.parse_args()

    if "RANK" not in os.environ:  # a process of its own, as under torchrun with one
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("nccl" if on_gpu else "gloo")
    text, _ = stdlib_bytes()
    windows = Windows(text, args.context)

    torch.manual_seed(1207)
    model = GPT(args.dim, args.layers, 4, args.context).to("cuda" if on_gpu else "cpu")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    kept = elastic.keep(model, optimizer, scheduler, units=args.units)

    def batch(step: int, unit: int) -> tuple[Tensor, Tensor]:
        """The samples of a unit follow from its place, whoever computes it."""
        order = torch.Generator().manual_seed(step * args.units + unit)
        pieces = [windows[i] for i in torch.randint(len(windows), (args.unit_size,), generator=order).tolist()]
        x, y = (torch.stack(part).to("cuda" if on_gpu else "cpu") for part in zip(*pieces, strict=True))
        return x, y

    while kept.step < args.steps:
        for unit in kept.units():
            x, y = batch(kept.step, unit)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / args.units
            loss.backward()
            kept.log(loss=loss * args.units)
        kept.clip_norm(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        kept.done()
        if kept.step % args.print_every == 0 and dist.get_rank() == 0:
            said = f"step {kept.step} loss {loss.item() * args.units:.4f} of a unit"
            print(f"{said}, {dist.get_world_size()} processes", flush=True)

    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if dist.get_rank() == 0:
        print(f"digest {digest.hexdigest()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
