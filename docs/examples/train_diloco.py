"""The small GPT of train_gpt.py, trained by replicas that average every H steps: DiLoCo, or LocalSGD.

    elastic run --workers 2 docs/examples/train_diloco.py --every 25
    elastic run --workers 4 docs/examples/train_diloco.py --every 25 --fragments 5 --delay 1
    elastic run --workers 4 docs/examples/train_diloco.py --every 25 --quorum 3 --grace 2

Any number of workers, whoever dies or joins, gives the bits of one worker; with --quorum it does not, and nobody waits
for slow or dead workers. Each line says how many inner steps each
replica has made, the loss in the last round, the held-out loss of the outer parameters, how far the replicas were
apart, and how many bytes were summed so far.
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
    parser.add_argument("--every", type=int, default=25, help="inner steps between two averages")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences of one inner step of all replicas")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--alpha", type=float, default=0.0)
    parser.add_argument("--moments", choices=("own", "mean", "reset"), default="own")
    parser.add_argument("--quorum", type=int, default=0, help="replicas that a round waits for; 0: for all")
    parser.add_argument("--grace", type=float, default=0.0, help="seconds for which it then waits for the others")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--local-sgd", action="store_true", help="the mean of the parameters instead of DiLoCo")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--eval-every", type=int, default=100, help="inner steps between two evaluations")
    args = parser.parse_args()

    job = elastic.join(seed=1207)
    text, held_out = stdlib_bytes()
    model = GPT(args.dim, args.layers, 4, args.context).to(job.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if args.local_sgd:
        outer = elastic.LocalSGD(model, optimizer, every=args.every, moments=args.moments)
    else:
        outer = elastic.DiLoCo(
            model,
            optimizer,
            torch.optim.SGD(model.parameters(), lr=args.outer_lr, momentum=0.9, nesterov=True),
            every=args.every,
            fragments=args.fragments,
            delay=args.delay,
            alpha=args.alpha,
            moments=args.moments,
        )
    if args.quorum:
        outer.with_quorum(args.quorum, args.grace)
    train = job.loader(Windows(text, args.context), args.batch_size, shards=args.replicas, shuffle=True)
    test = Windows(held_out, args.context, limit=256)
    job.register(model=model, optimizer=optimizer, outer=outer)
    job.state.setdefault(bytes=0.0)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    per_round = args.every // args.fragments
    for step in job.steps(train, total=args.steps // per_round, outer=outer):
        for x, y in step:  # one inner step of one replica
            loss = loss_of(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
        job.state.bytes += step.metrics["elastic.summed_bytes"]
        made = (step.index + 1) * per_round
        if made % args.eval_every == 0:
            result = job.evaluate(lambda x, y: {"loss": loss_of(x, y)}, test)
            job.print(
                f"{made} inner steps: loss {step.metrics['loss']:.4f}, held-out {result['loss']:.4f}, "
                f"drift {step.metrics['elastic.drift']:.3f}, {job.state.bytes / 1e6:.1f} MB summed"
            )
    job.print(f"digest {job.digest()}")


if __name__ == "__main__":
    main()
