"""Many trials, each in a process whose main thread starts its commands."""

from __future__ import annotations

import collections
import concurrent.futures
import json
import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fates.draw import draw
from tests.fates.play import Broken, play, workspace


def many(first: int, trials: int, minutes: float, processes: int, home: Path | None) -> list[int]:
    """Seeds of trials that did not end as their quiet run; the last line printed is a summary in JSON."""
    home = home or Path(tempfile.mkdtemp(prefix="fates-"))
    until_s = time.monotonic() + minutes * 60
    counts: collections.Counter[str] = collections.Counter()
    done = generations = skipped = 0
    failed: list[int] = []
    context = multiprocessing.get_context("spawn")  # each trial has a process whose main thread starts its commands
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        running: dict[concurrent.futures.Future[dict[str, Any]], int] = {}
        seed = first
        while True:
            while len(running) < processes and time.monotonic() < until_s and (not trials or seed < first + trials):
                running[pool.submit(_one, seed, home)] = seed
                seed += 1
            if not running:
                break
            ended, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in ended:
                number, result = running.pop(future), future.result()
                done += 1
                counts.update(result.get("done", ()))
                skipped += len(result.get("skipped", ()))
                generations += result.get("generations", 0)
                if "broken" in result:
                    failed.append(number)
                    print(f"trial {number}: BROKEN {result['broken']}", flush=True)
                else:
                    print(
                        f"trial {number}: {result['seconds']:.0f} s, {', '.join(result['done']) or 'nothing done'}",
                        flush=True,
                    )
    summary = {
        "first_seed": first,
        "trials": done,
        "strikes": counts.total(),
        "skipped": skipped,
        "generations": generations,
    }
    print(json.dumps({**summary, "kinds": dict(sorted(counts.items())), "failed": failed}), flush=True)
    return failed


def _one(seed: int, parent: Path) -> dict[str, Any]:
    home, began_s = workspace(parent, seed), time.monotonic()
    try:
        played = play(draw(seed), home)
    except Broken as broken:
        return {"broken": str(broken)}
    shutil.rmtree(home)
    return {
        "seconds": time.monotonic() - began_s,
        "done": played.done,
        "skipped": played.skipped,
        "generations": played.generations,
    }
