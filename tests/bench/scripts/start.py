"""What tests/bench/starts.py starts: joins a job of one, makes a model and an optimizer, and says when."""

import json
import resource
import time

import torch

import elastic

job = elastic.join()
joined_ns = time.monotonic_ns()
usage = resource.getrusage(resource.RUSAGE_SELF)
joined_cpu_s = usage.ru_utime + usage.ru_stime
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.zeros(1, 8)).sum().backward()
optimizer.step()
usage = resource.getrusage(resource.RUSAGE_SELF)
print(
    json.dumps(
        {
            "joined_ns": joined_ns,
            "joined_cpu_s": joined_cpu_s,
            "stepped_ns": time.monotonic_ns(),
            "stepped_cpu_s": usage.ru_utime + usage.ru_stime,
        }
    ),
    flush=True,
)
time.sleep(3600)
