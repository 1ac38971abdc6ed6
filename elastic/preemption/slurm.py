"""Slurm: a signal some time before the time limit, `#SBATCH --signal=B:USR1@120`, and requeueing when asked.

The job's environment says when its time is over, SLURM_JOB_END_TIME; a limit that was raised later is not in it, so
only the signal counts, and a time that does not fit to it is ignored.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping

from elastic.preemption.notice import Notice, NoticeKind
from elastic.preemption.provider import NoticeSource, Unanswered

JOB = "SLURM_JOB_ID"
END = "SLURM_JOB_END_TIME"
UNTOLD_S = 60.0
"""Seconds left if the environment does not say."""
LONGEST_S = 3600.0
"""An end further away than this is not what the signal is about."""
REQUEUE_TIMEOUT_S = 20.0


def time_limit(environment: Mapping[str, str], now_unix_s: float) -> Notice:
    """What the signal means. now_unix_s: seconds since 1970, as in SLURM_JOB_END_TIME."""
    end = environment.get(END, "")
    left_s = float(end) - now_unix_s if end.isdigit() else UNTOLD_S
    if not 0 < left_s <= LONGEST_S:
        left_s = UNTOLD_S
    return Notice(NoticeKind.TIME_LIMIT, left_s, f"Slurm job {environment.get(JOB, '?')} reaches its time limit")


class Slurm(NoticeSource):
    name = "Slurm"
    pause_s = 3600.0
    """Only the signal is news."""
    signals = (signal.SIGUSR1,)

    def __init__(self, environment: Mapping[str, str], *, requeue: bool) -> None:
        self._environment = environment
        self._requeue = requeue
        self._signalled_unix_s: float | None = None

    def signalled(self) -> None:
        self._signalled_unix_s = time.time()

    def look(self) -> Notice | None:
        if self._signalled_unix_s is None:
            return None
        return time_limit(self._environment, self._signalled_unix_s)

    def left(self) -> None:
        """Put the Slurm job back into the queue, if asked; that ends it here at once."""
        if not self._requeue or self._signalled_unix_s is None:
            return
        command = ["scontrol", "requeue", self._environment.get(JOB, "")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=REQUEUE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unanswered(f"{' '.join(command)}: {error}") from error
        if done.returncode:
            raise Unanswered(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[:200]}")
