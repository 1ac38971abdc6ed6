"""An elastic script for Horovod, but for its import: a state with values of its own, two halves of each batch, and a
step without synchronize()."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic.horovod.torch as hvd


def main(epochs=2):
    hvd.init()
    torch.manual_seed(3)
    x = torch.randn(48, 6)
    data = TensorDataset(x, x.sum(1).gt(0).long())
    sampler = hvd.elastic.ElasticSampler(data, seed=1)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, epochs):  # noqa: B020  # as Horovod's own example
            for state.batch, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                for part in (0, 1):
                    F.cross_entropy(model(x[part:][:1]), y[part:][:1]).div(2).backward()
                optimizer.step()
                state.steps += 1
                for group in optimizer.param_groups:
                    group["lr"] = 0.2 / (1 + state.steps)
                sampler.record_batch(state.batch, len(x))
                state.commit()
            sampler.set_epoch(state.epoch + 1)
            state.batch = 0

    train(hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0, steps=0))
    hvd.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
