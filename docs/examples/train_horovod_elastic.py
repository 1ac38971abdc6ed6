"""Train a small network with workers that come and go, with Horovod's elastic names: the shape of Horovod's own
pytorch_mnist_elastic.py.

    elastic run --workers 3 docs/examples/train_horovod_elastic.py
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import elastic.horovod.torch as hvd  # was: import horovod.torch as hvd


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--points", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to watch it")
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    points = torch.randn(args.points, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(points, points.sin().sum(1).gt(0).long())
    sampler = hvd.elastic.ElasticSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)

    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 2))
    optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    @hvd.elastic.run
    def train(state):
        # Called again when the workers have changed, with the state where it was.
        while state.epoch < args.epochs:
            state.model.train()
            for x, y in loader:
                state.optimizer.zero_grad()
                loss = F.cross_entropy(state.model(x), y)
                loss.backward()
                state.optimizer.step()
                sampler.record_batch(state.batch, len(x))
                state.batch += 1
                if state.batch % 5 == 0 and hvd.rank() == 0:
                    print(
                        f"Train Epoch: {state.epoch} batch {state.batch} workers {hvd.size()} "
                        f"lr {optimizer.param_groups[0]['lr']:.3f} Loss: {loss.item():.6f}",
                        flush=True,
                    )
                time.sleep(args.pause)
                state.commit()
            loss = hvd.allreduce(loss.detach(), name="loss")
            if hvd.rank() == 0:
                print(f"Epoch {state.epoch}: average loss {loss.item():.4f}", flush=True)
            state.epoch += 1
            state.batch = 0
            sampler.set_epoch(state.epoch)
            state.commit()

    def on_state_reset():
        # Scale the learning rate by the number of workers.
        for param_group in optimizer.param_groups:
            param_group["lr"] = args.lr * hvd.size()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, batch=0)
    state.register_reset_callbacks([on_state_reset])
    train(state)


if __name__ == "__main__":
    main()
