"""A script for torchrun that loads and saves its own snapshot: `snapshots.py STEPS SECONDS`, with seconds per step.

The sum over all steps and ranks is that of the step numbers, whatever the world is. The snapshot is in the job's
directory, so each run of a job has its own. Beside it runs a process that has left its session, as helpers of libraries
do.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    steps, pause_s = int(sys.argv[1]), float(sys.argv[2])
    snapshot = Path(os.environ["ELASTIC_JOB_DIR"]) / "snapshot.json"
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    found = json.loads(snapshot.read_text()) if rank == 0 and snapshot.exists() else {"step": 0, "sum": 0.0}
    at = torch.tensor([float(found["step"]), float(found["sum"])], dtype=torch.float64)
    dist.broadcast(at, 0)
    while at[0] < steps:
        time.sleep(pause_s)  # this is the work
        part = at[:1] / world
        dist.all_reduce(part)
        at += torch.tensor([1.0, float(part.round())], dtype=torch.float64)
        if rank == 0:
            temporary = snapshot.with_suffix(".tmp")
            temporary.write_text(json.dumps({"step": int(at[0]), "sum": float(at[1])}))
            temporary.rename(snapshot)
    assert at[1] == steps * (steps - 1) / 2
    print(f"sum {at[1]:.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
