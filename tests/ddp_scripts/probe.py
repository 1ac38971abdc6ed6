"""A linear probe: the model is in eval() also while its last layer is trained, so that nothing else changes. The
loader's processes ask who they are, and a part of the data is empty."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, get_worker_info


def begin_process(worker_id):
    assert get_worker_info().id == worker_id


def batches_of(loader):
    for x, y in loader:
        yield x.float(), y


def main(epochs=3):
    dist.init_process_group(backend="gloo")
    torch.manual_seed(5)
    x = torch.randn(176, 10)
    y = (x[:, :3].sum(1) > 0).long()
    train_set, test_set = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])
    net = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    for name, parameter in net.named_parameters():
        parameter.requires_grad = name.startswith("3.")
    model = DDP(net)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=6, sampler=sampler, num_workers=1, worker_init_fn=begin_process)
    test_loader = DataLoader(test_set, batch_size=5, sampler=DistributedSampler(test_set, shuffle=False))
    nothing = Subset(train_set, [])
    extra = DataLoader(nothing, batch_size=6, sampler=DistributedSampler(nothing, shuffle=False))
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.eval()
        for source in (extra, loader):
            for x, y in batches_of(source):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(float(os.environ.get("NAP", "0")))
        right = torch.zeros(2)
        for x, y in test_loader:  # with gradients, which nothing asks for
            right += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(right)
        assert right[1] == 80
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {right[0] / right[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
