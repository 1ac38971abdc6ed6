"""An elastic script for Horovod, but for its import: 300 tensors, rounded gradients, and momentum, which a run lacks
that begins anew. All ranks train the same batches, so two ranks have the mean that one has, bit for bit."""

import os
import sys
import time
from pathlib import Path

import torch

import elastic.horovod.torch as hvd

GATES = Path(os.environ["LIVE_GATES"])


def stands(step):
    """Whether this step is held up, alike on all ranks."""
    return hvd.broadcast_object((GATES / str(step)).exists(), root_rank=0)


def main(steps, pause_s):
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(number % 7 + 1)) for number in range(300)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
    )

    @hvd.elastic.run
    def train(state):
        hvd.broadcast_optimizer_state(state.optimizer, root_rank=0)
        print(f"begins at step {state.step} of {hvd.size()}", flush=True)
        while state.step < steps:
            while stands(state.step):
                time.sleep(0.1)
                state.commit()  # workers come
            optimizer.zero_grad()
            scale = 1.0 + state.step % 5
            torch.stack([weight.sub(scale).square().sum() for weight in model]).sum().backward()
            optimizer.step()
            state.step += 1
            time.sleep(pause_s)
            state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
