"""An elastic script for Horovod, but for its import, that writes down which samples it has trained, one in a batch."""

import json
import sys
import time
from pathlib import Path

import torch

import elastic.horovod.torch as hvd


def main(samples, epochs, pause_s, seen):
    hvd.init()
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(samples), seed=3)

    @hvd.elastic.run
    def train(state):
        if hvd.rank() == 0:
            print(f"epoch {state.epoch} behind {sampler.processed_num} samples, {hvd.size()} workers", flush=True)
        while state.epoch < epochs:
            for number in sampler:
                optimizer.zero_grad()
                model(torch.tensor([[number / samples]])).sub(1.0).square().mean().backward()
                optimizer.step()
                with Path(seen).open("a") as file:
                    file.write(json.dumps([state.epoch, number]) + "\n")
                sampler.record_batch(0, 1)
                time.sleep(pause_s)
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
