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

from tests.fates.draw import KINDS, draw
from tests.fates.play import Broken, play, workspace


def many(
    first: int, trials: int, minutes: float, processes: int, home: Path | None, kinds: tuple[str, ...] = KINDS
) -> dict[str, Any]:
    """The summary, which is the last line printed, too: its "failed" are the seeds of trials that did not end as their
    quiet run. They leave their files in home, which is a temporary directory if it is None. kinds: as draw.draw."""
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
                running[pool.submit(_one, seed, home, kinds)] = seed
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
    summary: dict[str, Any] = {
        "home": str(home),
        "first_seed": first,
        "trials": done,
        "strikes": counts.total(),
        "skipped": skipped,
        "generations": generations,
        "kinds": dict(sorted(counts.items())),
        "failed": failed,
    }
    print(json.dumps(summary), flush=True)
    return summary


def _one(seed: int, parent: Path, kinds: tuple[str, ...]) -> dict[str, Any]:
    began_s = time.monotonic()
    try:
        home = workspace(parent, seed)
        played = play(draw(seed, kinds), home)
    except Broken as broken:
        return {"broken": str(broken)}
    except Exception as error:  # a file that is not there, a quiet run without end: the other trials go on
        return {"broken": f"{type(error).__name__}: {error}"}
    shutil.rmtree(home)
    return {
        "seconds": time.monotonic() - began_s,
        "done": played.done,
        "skipped": played.skipped,
        "generations": played.generations,
    }
