"""A script for Horovod, but for its import: accumulation over batches, clipping between synchronize() and step(), an
evaluation, broadcasts, and sums of gradients."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import elastic.horovod.torch as hvd


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def test(model, loader, sampler):
    model.eval()
    loss = accuracy = 0.0
    for x, y in loader:
        output = model(x)
        loss += F.cross_entropy(output, y, reduction="sum").item()
        accuracy += output.argmax(1).eq(y).float().sum()
    loss = metric_average(loss / len(sampler), "loss")
    accuracy = metric_average(float(accuracy) / len(sampler), "accuracy")
    if hvd.rank() == 0:
        print(f"loss {loss:.4f} accuracy {accuracy:.4f}", flush=True)
    return loss


def main(epochs=2):
    hvd.init()
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(96, 6, generator=generator)
    data = TensorDataset(x, x.sum(1).gt(0).long() + x[:, 0].gt(1).long())
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    test_sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(data, batch_size=8, sampler=test_sampler)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * hvd.size())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2,
        compression=hvd.Compression.fp16,
        op=hvd.Sum,
    )
    first = hvd.broadcast(torch.tensor(0), root_rank=0, name="first epoch").item()
    for epoch in range(first, epochs):
        model.train()
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            if i % 2 == 0:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if i % 2 == 1:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with optimizer.skip_synchronize():
                    optimizer.step()
                scheduler.step()
        test(model, test_loader, test_sampler)
    hvd.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
