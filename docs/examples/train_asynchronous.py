"""The small GPT of train_gpt.py, trained by workers that never wait for each other: through a store, or by gossip.

    elastic run --workers 4 docs/examples/train_asynchronous.py --every 25
    elastic run --workers 4 docs/examples/train_asynchronous.py --every 5 --gossip

The result depends on the times of the run. Each line is the end of a phase: how many units are left, the loss of the
phase, and the held-out loss of the common parameters.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from train_gpt import GPT, Windows, stdlib_bytes

import elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="inner steps of each replica")
    parser.add_argument("--every", type=int, default=25, help="inner steps between two exchanges")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of one inner step of all replicas")
    parser.add_argument("--gossip", action="store_true", help="in pairs, without a store")
    parser.add_argument("--outer-lr", type=float, default=0.9)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--phase-s", type=float, default=60.0, help="seconds of a phase")
    args = parser.parse_args()

    job = elastic.join(seed=1207)
    text, held_out = stdlib_bytes()
    model = GPT(args.dim, args.layers, 4, args.context).to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    outer: elastic.Asynchronous | elastic.Gossip
    if args.gossip:
        outer = elastic.Gossip(model, optimizer, every=args.every)
    else:
        outer = elastic.Asynchronous(model, optimizer, every=args.every, lr=args.outer_lr, momentum=args.momentum)
    train = job.loader(Windows(text, args.context), args.batch_size, shards=args.replicas, shuffle=True)
    test = Windows(held_out, args.context, limit=256)
    job.register(model=model, optimizer=optimizer, outer=outer)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    total = args.steps // args.every
    for phase in elastic.asynchronous(job, train, outer=outer, total=total, phase_s=args.phase_s):
        for x, y in phase:  # one inner step of this worker
            loss = loss_of(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            phase.log(loss=loss)
        result = job.evaluate(lambda x, y: {"loss": loss_of(x, y)}, test)
        said = ", ".join(f"{name} {value:.3f}" for name, value in sorted(phase.metrics.items()))
        job.print(f"phase {phase.index}: {outer.left.count} units left, held-out {result['loss']:.4f}, {said}")


if __name__ == "__main__":
    main()
