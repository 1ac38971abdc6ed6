"""A loop without an end of its own, `while True: next(it)`, counted by the script, with an average of the weights."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(epochs=2):
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    x = torch.randn(120, 12)
    data = TensorDataset(x, x.sum(1, keepdim=True).tanh())
    model = DDP(nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Dropout(0.1), nn.Linear(20, 1)))
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=5, sampler=sampler, drop_last=True)
    total = epochs * len(loader) - 1
    it, epoch, step, seen = iter(loader), 0, 0, []
    while True:
        try:
            bx, by = next(it)
        except StopIteration:
            epoch += 1
            sampler.set_epoch(epoch)
            it = iter(loader)
            bx, by = next(it)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / total)
        loss = F.mse_loss(model(bx), by)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        average.update_parameters(model.module)
        step += 1
        seen.append(loss.item())
        if step % 5 == 0 and dist.get_rank() == 0:
            print(f"step {step} of {total}, loss {sum(seen[-5:]) / 5:.4f}, {len(seen)} losses", flush=True)
        time.sleep(float(os.environ.get("NAP", "0")))
        if step == total:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
