"""All at the top level: two groups of parameters, a scaler, an average, counts, an evaluation that drives the rate."""

import os
import time

import torch
import torch.distributed
import torch.nn as nn
import torch.utils.data as tud
from torch.optim.swa_utils import AveragedModel

torch.distributed.init_process_group("gloo")
local_rank = int(os.environ["LOCAL_RANK"])
rank = torch.distributed.get_rank()
is_main = rank == 0
world_size = int(os.environ["WORLD_SIZE"])
torch.manual_seed(11)
x = torch.randn(130, 6)
y = (x[:, 0] * x[:, 1] > 0).long()
train_set, valid_set = tud.TensorDataset(x[:96], y[:96]), tud.TensorDataset(x[96:], y[96:])
loader = tud.DataLoader(
    train_set,
    batch_size=6,
    sampler=tud.DistributedSampler(train_set, shuffle=False),
)
valid = tud.DataLoader(valid_set, batch_size=10)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
average = AveragedModel(model)
model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(
    [
        {"params": [p for n, p in model.named_parameters() if "weight" in n]},
        {"params": [p for n, p in model.named_parameters() if "bias" in n], "lr": 0.02},
    ],
    lr=0.05 * world_size,
    momentum=0.9,
)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
criterion = nn.CrossEntropyLoss()
seen, best, history, stale = 0, float("inf"), [], {"n": 0}
begin = time.time()
for epoch in range(1, 3 + 1):
    loader.sampler.set_epoch(epoch)
    model.train()
    running_loss, correct, total = 0.0, 0, 0
    for i, (inputs, targets) in enumerate(loader, 1):
        for group in optimizer.param_groups:
            group["weight_decay"] = 1e-3 * i
        with torch.autocast("cpu", enabled=False):
            outputs = model(inputs)
            loss = criterion(outputs, targets)
        _, predicted = outputs.max(1)
        optimizer.zero_grad()  # before the backward
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model.module)
        running_loss += loss.item() * inputs.size(0)
        correct += (predicted == targets).sum().item()
        total += targets.size(0)
        seen += len(inputs)
        history.append(norm.item())
        t = loss.detach().clone()
        torch.distributed.reduce(t, 0)
        if is_main and not i % 2:
            print(f"epoch {epoch} {i} {t.item() / world_size:.6f} {norm.item():.6f} {history[-1]:.6f} {seen}")
    stats = torch.tensor([running_loss, correct, total], dtype=torch.float64)
    torch.distributed.all_reduce(stats)
    model.eval()
    held = 0.0
    with torch.no_grad():
        for inputs, targets in valid:
            outputs = model(inputs)
            loss = criterion(outputs, targets)
            held += loss.item() / len(valid)
    plateau.step(held)
    if held < best:
        best = held
    else:
        stale["n"] += 1
    if is_main:
        loss, right = stats[0].item() / stats[2].item(), stats[1].item()
        print(f"epoch {epoch} {loss:.6f} {right:.0f} {held:.6f} {best:.6f} {stale['n']} {len(history)}")
        torch.save({"model": model.module.state_dict(), "best": best}, "top_level.pt")
if is_main:
    w = sum(p.double().sum().item() for p in model.module.parameters())
    a = sum(p.double().sum().item() for p in average.parameters())
    print(f"epoch {epoch} {w:.6f} {a:.6f} {time.time() > begin}")
torch.distributed.destroy_process_group()
