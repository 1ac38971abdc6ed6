"""Slurm: a signal some time before the time limit, `#SBATCH --signal=B:USR1@120`, and requeueing when asked.

How much time is left then is asked of Slurm, and again every minute: the limit may be raised, which takes the notice
back, and before the new end Slurm gives no second signal. The job's environment, SLURM_JOB_END_TIME, has the first
limit only; it counts where Slurm does not answer and it fits to the signal. Before the signal nobody is asked.
"""

from __future__ import annotations

import math
import re
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
ASK_TIMEOUT_S = 5.0
LOOK_S = 60.0
"""Between two looks at the time that is left."""
SLACK_S = 5.0
"""By which the time left may have grown without anybody having raised the limit: it is told in seconds, late."""


def seconds_of(text: str) -> float | None:
    """Seconds by what squeue prints for %L, [days-][[hours:]minutes:]seconds; infinite for UNLIMITED, else None."""
    if text == "UNLIMITED":
        return math.inf
    matched = re.fullmatch(r"(?:(\d+)-(?=\d+:\d+:))?(?:(?:(\d+):)?(\d+):)?(\d+)", text)
    if matched is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in matched.groups())
    return ((days * 24.0 + hours) * 60.0 + minutes) * 60.0 + seconds


def left_at_first(environment: Mapping[str, str], now_unix_s: float) -> float:
    """Seconds left at the signal by the job's first limit. now_unix_s: since 1970, as in SLURM_JOB_END_TIME."""
    end = environment.get(END, "")
    left_s = float(end) - now_unix_s if end.isdigit() else UNTOLD_S
    return left_s if 0 < left_s <= LONGEST_S else UNTOLD_S


class Slurm(NoticeSource):
    name = "Slurm"
    signals = (signal.SIGUSR1,)

    def __init__(self, environment: Mapping[str, str], *, requeue: bool) -> None:
        self.pause_s = 3600.0  # until the signal, only that is news
        if requeue:  # a look may be under way; one second more, so that a failure is told
            self.last_word_s = ASK_TIMEOUT_S + REQUEUE_TIMEOUT_S + 1.0
        self._environment = environment
        self._requeue = requeue
        self._signalled = False
        self._lead_s: float | None = None
        """How long before the end the node leaves; None: there was no signal yet."""
        self._end_unix_s = math.inf
        self._due = False
        """Whether the end is that near."""
        self._requeued = False

    def signalled(self) -> None:
        self._signalled = True
        self.pause_s = LOOK_S

    def look(self) -> Notice | None:
        if not self._signalled and self._lead_s is None:
            return None
        now_unix_s, left_s = time.time(), self._asked()
        if self._signalled:
            self._signalled = False
            if left_s is None or not 0 < left_s <= LONGEST_S:
                left_s = left_at_first(self._environment, now_unix_s)
            self._lead_s = left_s
        if left_s is not None:
            self._end_unix_s = now_unix_s + left_s
        assert self._lead_s is not None
        self._due = self._end_unix_s - now_unix_s <= self._lead_s + SLACK_S
        if not self._due:
            return None
        because = f"Slurm job {self._environment.get(JOB, '?')} reaches its time limit"
        return Notice(NoticeKind.TIME_LIMIT, max(0.0, self._end_unix_s - now_unix_s), because)

    def _asked(self) -> float | None:
        """Seconds left as Slurm says now; None where it does not say."""
        command = ["squeue", "--noheader", "--jobs", self._environment.get(JOB, ""), "--format", "%L"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return seconds_of(done.stdout.strip())

    def left(self) -> None:
        """Put the Slurm job back into the queue, if asked; that ends it here at once."""
        if not self._requeue or not self._due or self._requeued:
            return
        command = ["scontrol", "requeue", self._environment.get(JOB, "")]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=REQUEUE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unanswered(f"{' '.join(command)}: {error}") from error
        if done.returncode:
            raise Unanswered(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[:200]}")
        self._requeued = True  # Slurm ends the job by a signal, which is another notice, and refuses a second order
