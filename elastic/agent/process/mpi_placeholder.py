"""The program that `mpirun` starts for each rank: it hands the rank to a worker, and waits for the end.

    mpirun --parent-death signal--> placeholder --its environment--> agent --the same--> worker

A rank of Open MPI is a few environment variables: the address of mpirun, and the name of the rank. So the worker itself
may be a child of the agent, as in any other job. The command is `python -I -S THIS_FILE SOCKET`. The program imports
nothing of this package, because as many placeholders as workers start at the same time.
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
    """Wait until the agent is gone, or does not need mpirun any more; returns the exit code."""
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
