"""What `mpirun` starts for each rank: it hands the rank to a worker of the agent, and waits for the end.

    mpirun --parent-death signal--> placeholder --its environment--> agent --the same--> worker

A rank of Open MPI is a few environment variables: where mpirun listens, and as whom to speak to it. So the worker
itself may be a child of the agent, forked, watched and ended as in any other job. `python -I -S THIS_FILE SOCKET`;
it imports nothing of this package, because there are as many as workers and all start at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys

PR_SET_PDEATHSIG = 1


def main(path: str) -> int:
    """Returns when the agent is gone, or has no use for mpirun any more."""
    mpirun = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != mpirun:
        return 1
    with socket.socket(socket.AF_UNIX) as agent:
        agent.connect(path)
        agent.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
        agent.recv(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
