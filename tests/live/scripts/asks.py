"""Asks whether this worker's node has to go, and writes each answer that is another one than before.

A file `asked.<worker_id>` has a line of JSON for each: kind, because, source and whole seconds left; or null. Before
the gate `noticed` a worker that it names waits until it has a notice.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import elastic
from tests.live.scripts import gates

TOLD = Path(os.environ["LIVE_GATES"])
ME = os.environ["ELASTIC_WORKER_ID"]
answers: list[elastic.NodeNotice | None] = []


def ask() -> None:
    while gates.shut("noticed") and ME in (TOLD / "noticed").read_text() and elastic.notice() is None:
        time.sleep(0.005)  # the notice comes on another thread: there is nothing to wait on
    notice = elastic.notice()
    if answers and notice is answers[-1]:
        return
    answers.append(notice)
    said = notice and [notice.kind, notice.because, notice.source, round(notice.seconds_left)]
    with (TOLD / f"asked.{ME}").open("a") as file:
        file.write(json.dumps(said) + "\n")
