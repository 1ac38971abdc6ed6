"""A worker on paper: it speaks the protocol through elastic.agent.worker.client and trains nothing.

An operation is complete when a ring is up, so `reduced` is one more than the operation of the ring's plan. Files in
the job directory tell it what to do: `finish` (leave the loop), and `print` (say a line, once).
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
from pathlib import Path
from typing import NoReturn

from elastic.agent.worker.client import AgentClient
from elastic.errors import ExitCode
from elastic.protocol.messages import (
    Announce,
    Close,
    Fence,
    Finished,
    Generation,
    Kind,
    Order,
    Progress,
    Publish,
    Quiesce,
    Ready,
    Release,
    Report,
    RingUp,
)

BEAT_S = 0.1


class PaperWorker:
    def __init__(self) -> None:
        self.me = os.environ["ELASTIC_WORKER_ID"]
        self.job_dir = Path(os.environ["ELASTIC_JOB_DIR"])
        self.orders: queue.Queue[Order | str] = queue.Queue()
        self.client = AgentClient(
            os.environ["ELASTIC_AGENT_SOCKET"], job=os.environ["ELASTIC_JOB"], worker_id=self.me, job_dir=self.job_dir
        )
        self.client.connect(self.orders.put, self.orders.put)
        self.term = 0
        self.promise = 0
        self.entered = 0
        self.reduced = 0
        self.base: Generation | None = None
        self.printed = False

    def run(self) -> NoReturn:
        node, slot, _ = self.me.rsplit(".", 2)
        self.client.send(Announce(self.me, node, int(slot), os.getpid(), "127.0.0.1", 1, "paper"))
        while True:
            with contextlib.suppress(queue.Empty):
                self.obey(self.orders.get(timeout=BEAT_S))
            self.client.send(Progress(self.me, self.entered, self.reduced, self.reduced))
            if self.entered and (self.job_dir / "print").exists() and not self.printed:
                self.printed = True
                print(f"line of {self.me}", flush=True)
            if self.entered and (self.job_dir / "finish").exists():
                self.client.send(Finished(self.me, self.entered, "digest"))
                self.leave(ExitCode.DONE)

    def obey(self, order: Order | str) -> None:
        if isinstance(order, str):
            self.leave(ExitCode.SCRIPT_FAILED)
        if order.term < self.term:
            return
        self.term = order.term
        match order:
            case Publish(_, record):
                self.learn(record)
            case Quiesce(_, round_, up_to):
                self.promise = max(self.promise, up_to)
                self.client.send(
                    Report(
                        self.me,
                        round_,
                        self.promise,
                        self.entered,
                        has_state=self.entered > 0,
                        reduced=self.reduced,
                        kept=self.reduced - 1,
                    )
                )
            case Fence():
                self.leave(ExitCode.FENCED)
            case Close(_, _, exit_code):
                self.leave(exit_code)
            case Release():
                self.leave(ExitCode.DONE)

    def learn(self, record: Generation) -> None:
        if record.kind is not Kind.PLANNED:
            self.base = record
        if self.me not in record.ids:
            self.client.send(Ready(self.me, record.number))
        elif record.number > max(self.entered, self.promise):
            assert self.base is not None
            self.entered = record.number
            self.reduced = max(self.reduced, self.base.plan.op + 1)
            self.client.send(RingUp(self.me, record.number))
            self.client.record(self.line_of(0))

    def line_of(self, step: int) -> dict[str, object]:
        return {"step": step, "epoch": 0, "generation": self.entered, "lr": [0.1], "scalars": {}, "samples": []}

    def leave(self, code: int) -> NoReturn:
        self.client.close()
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    PaperWorker().run()
