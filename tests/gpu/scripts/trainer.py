"""tests/live/scripts/trainer.py for several workers on one GPU."""

import os
import runpy

from tests.live.jobs import TRAINER

# NCCL refuses two members on one GPU of one host; it believes what it is told of the host.
os.environ["NCCL_HOSTID"] = os.environ.get("ELASTIC_WORKER_ID", "alone")
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
runpy.run_path(str(TRAINER), run_name="__main__")
