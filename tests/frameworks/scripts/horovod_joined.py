"""A script for Horovod, but for its import, whose ranks have different numbers of batches: who has no more joins."""

import sys
import time

import torch

import elastic.horovod.torch as hvd


def main(pause_s):
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for batch in range(12 - 6 * hvd.rank()):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + hvd.rank())).square().mean().backward()
        optimizer.step()
        print(f"batch {batch} of {hvd.size()} ranks", flush=True)
        time.sleep(pause_s)
    last = hvd.join()
    print(f"rank {last} joined last", flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
