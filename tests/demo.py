"""`python -m tests.demo`: train through two kills and compare with the quiet run, bit for bit.

A GPT is trained twice by three workers. Nothing happens to the first run. In the second a worker is killed with
SIGKILL inside a step, and when its replacement has joined, rank 0 is killed too. Everything that is claimed at the end
is read from the two ledgers and the journals. Exit code 1, and the first differing step, if the runs differ.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from chaos_tests.cluster.local_job import elastic_run
from chaos_tests.run.narrator import Narrator
from elastic.errors import ElasticError
from elastic.records.journal import PHASES, read_all, recoveries
from elastic.records.ledger import compare
from elastic.records.ledger import read as read_ledger
from tests.soak.driven_job import DrivenJob

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "examples" / "train_gpt.py"
WORKERS = 3
STEPS = 200
FIRST_KILL_STEP = 15
STEPS_BETWEEN = 10
"""Steps of the full world between a replacement's first step and the next kill."""

DEADLINE_S = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Train through two kills and compare with the quiet run.")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each run (default %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep both job directories there")
    options = parser.parse_args()
    home = options.keep or Path(tempfile.mkdtemp(prefix="elastic-demo-"))
    home.mkdir(parents=True, exist_ok=True)
    try:
        line, fine = demonstrate(home.absolute(), options.steps)
    except ElasticError as error:
        line, fine = f"demo: FAILED: {error}", False
    print(line)
    if fine and options.keep is None:
        shutil.rmtree(home)
    else:
        print(f"journals and ledgers: {home}", file=sys.stderr)
    return 0 if fine else 1


def demonstrate(home: Path, steps: int) -> tuple[str, bool]:
    """Both runs. Returns the last line and whether everything was as promised."""
    print(f"quiet run: {WORKERS} workers, {steps} steps, nothing happens", flush=True)
    quiet = _quiet_run(home / "quiet", steps)
    print("\nfaulty run: the same, and two of its workers are killed with SIGKILL", flush=True)
    faulty, victims = _faulty_run(home / "faulty", steps)
    print()
    return judge(home, quiet, faulty, victims)


def judge(home: Path, quiet: dict[str, Any], faulty: dict[str, Any], victims: list[str]) -> tuple[str, bool]:
    """The verdict, from the files of both runs and nothing else."""
    expected, found = read_ledger(home / "quiet" / "steps.jsonl"), read_ledger(home / "faulty" / "steps.jsonl")
    lines = read_all(home / "faulty")
    told = recoveries(lines)
    for one in told:
        split = "  ".join(f"{phase} {one[f'{phase}_ms']:.1f}" for phase in PHASES)
        print(f"recovery of {', '.join(one['lost'])}: {one['recovery_ms']:.1f} ms = {split} (redo is not counted)")
    steps = [line["step"] for line in found]
    lost = sum(steps.count(line["step"]) != 1 for line in expected)
    restarted = len(restarted_survivors(lines, victims))
    numbers = (
        f"digest={faulty['digest']} quiet={quiet['digest']} lost_steps={lost} restarted_survivors={restarted} "
        f"recovery_ms={median([one['recovery_ms'] for one in told] or [0.0]):.0f}"
    )
    if (difference := compare(expected, found)) is not None:
        return f"demo: DIFFERENT: {difference} (quiet run, faulty run)\ndemo: {numbers}", False
    fine = faulty["digest"] == quiet["digest"] and not lost and not restarted and len(told) == len(victims)
    return f"demo: {'OK' if fine else 'FAILED'} {numbers}", fine


def restarted_survivors(lines: list[dict[str, Any]], victims: list[str]) -> list[str]:
    """Members that nobody killed and whose process ended before the job, or was another one later."""
    members = {worker for line in lines if line["event"] == "committed" for worker in line["members"]}
    over_ns = min((line["t_mono_ns"] for line in lines if line["event"] == "finished"), default=0)
    ended = {line["worker_id"] for line in lines if line["event"] == "worker_exited" and line["t_mono_ns"] < over_ns}
    pids: dict[str, set[int]] = {}
    for line in lines:
        if line["who"] == line["worker_id"]:
            pids.setdefault(line["who"], set()).add(line["pid"])
    return sorted(worker for worker in members - {*victims} if worker in ended or len(pids.get(worker, ())) > 1)


def _quiet_run(job_dir: Path, steps: int) -> dict[str, Any]:
    with _start(job_dir, steps, Narrator(steps)) as job:
        return job.wait(DEADLINE_S)


def _faulty_run(job_dir: Path, steps: int) -> tuple[dict[str, Any], list[str]]:
    narrator = Narrator(steps)
    with _start(job_dir, steps, narrator) as job:
        first = _kill(job, narrator, after_step=FIRST_KILL_STEP, rank=-1)
        joined = _await_full_world(job, first)
        second = _kill(job, narrator, after_step=joined + STEPS_BETWEEN, rank=0)
        _await_full_world(job, second)
        return job.wait(DEADLINE_S), [first, second]


def _start(job_dir: Path, steps: int, narrator: Narrator) -> DrivenJob:
    command = [str(SCRIPT), "--steps", str(steps)]
    program = elastic_run(job_dir, ["--workers", str(WORKERS)], command)
    return DrivenJob(job_dir, program, lambda job: narrator.hear(job.new_events(), job.steps()))


def _kill(job: DrivenJob, narrator: Narrator, *, after_step: int, rank: int) -> str:
    """Kill the member of that rank inside the first step after `after_step`. Returns its worker id.

    A step's line reaches the ledger when the next step has begun, so right after one everybody is inside a step.
    """
    job.until(f"step {after_step} was applied", lambda: len(job.steps()) > after_step, DEADLINE_S)
    victim = job.until("there were members to kill", lambda: _in_step(job.members(), rank), DEADLINE_S)
    count = len(job.steps())
    job.until("another step was applied", lambda: len(job.steps()) > count, DEADLINE_S)
    job.inject(victim, signal.SIGKILL)
    narrator.say(f"kill -KILL {victim['pid']}: {victim['worker_id']}, rank {victim['rank']}, inside {victim['phase']}")
    return str(victim["worker_id"])


def _in_step(members: list[dict[str, Any]], rank: int) -> dict[str, Any] | None:
    if len(members) < WORKERS or "step" not in members[rank]["phase"]:
        return None
    return members[rank]


def _await_full_world(job: DrivenJob, victim: str) -> int:
    """Until as many members as before have applied a step without the victim. Returns that step."""

    def full() -> dict[str, Any] | None:
        line = job.steps()[-1]
        return line if line["world_size"] == WORKERS and line["generation"] > before else None

    before = job.until(
        f"{victim} was replaced or left behind",
        lambda: next((line["generation"] for line in job.steps()[::-1] if line["world_size"] < WORKERS), None),
        DEADLINE_S,
    )
    return int(job.until(f"the replacement of {victim} had joined", full, DEADLINE_S)["step"])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
