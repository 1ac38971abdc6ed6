"""`python -m tests.soak.soak`: kill a worker and let it be replaced, a hundred times; one worker is never killed.

That one, and the processes that serve the job, must end with the file descriptors, threads and memory they had after
a few rounds, and when the job has ended nothing of it may be left on the machine. Exit code 1, and the reason, if not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from chaos_tests.cluster.job_handle import Followed, JobFailed
from chaos_tests.cluster.local_job import elastic_run
from chaos_tests.nemesis.membership_view import MembershipView
from chaos_tests.support import processes, resources
from chaos_tests.support.resources import Before, left
from elastic.errors import ElasticError
from tests.soak.driven_job import DrivenJob
from tests.soak.held import HeldResources, held, least

SCRIPT = Path(__file__).resolve().parent / "scripts" / "tiny.py"
JOB = "soak"
WORKERS = 3
ROUNDS = 100
WARM_UP_ROUNDS = 10
"""Rounds before the first measurement: pools fill up and modules are imported in the first of them."""
MEASURED_STEPS = 10
"""The worker is looked at once in each of so many steps, and the smallest figures count."""
ROUND_S = 180.0
END_S = 60.0

THREADS_MORE_MAX = 2
RSS_MORE_MAX_MB = 20.0


Look: TypeAlias = dict[str, HeldResources]
"""What each process that lives through all rounds holds; the first is the worker that is never killed."""


@dataclass(frozen=True, slots=True)
class SoakOutcome:
    """before: after the warm-up. leftovers: what is still there although the job has ended."""

    rounds: int
    before: Look
    after: Look
    leftovers: tuple[str, ...]
    steps: int
    seconds: float

    def more(self) -> Look:
        """What each of them holds more than before."""
        return {name: held.since(self.before[name]) for name, held in self.after.items()}

    def faults(self) -> list[str]:
        """Why the soak failed; nothing if it did not."""
        found = list(self.leftovers)
        for name, more in self.more().items():
            if more.fds != 0:
                found.append(f"{name}: fds={more.fds:+d}, must stay the same")
            if more.threads > THREADS_MORE_MAX:
                found.append(f"{name}: threads={more.threads:+d}, at most {THREADS_MORE_MAX} more are fine")
            if more.rss_mb > RSS_MORE_MAX_MB:
                found.append(f"{name}: rss_mb={more.rss_mb:+.1f}, at most {RSS_MORE_MAX_MB:.0f} MiB more are fine")
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and replace workers many times, and look for leaks.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="kills in all (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of who is killed when (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", default=Path("build/soak/soak.json"), help="the figures")
    options = parser.parse_args()
    if options.rounds <= WARM_UP_ROUNDS:
        parser.error(f"--rounds must be above {WARM_UP_ROUNDS}, the rounds before the first measurement")
    processes.exit_on_signals()
    home = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        outcome = soak(home, options.rounds, options.seed)
        faults = outcome.faults()
    except (ElasticError, OSError) as error:
        return failed(str(error), home)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**asdict(outcome), "faults": faults}, indent=1) + "\n", encoding="utf-8")
    if faults:
        return failed("; ".join(faults), home)
    shutil.rmtree(home)
    more = next(iter(outcome.more().values()))
    print(
        f"soak: OK rounds={outcome.rounds} fds={more.fds:+d} threads={more.threads:+d} rss_mb={more.rss_mb:+.1f} "
        f"steps={outcome.steps} rounds_per_min={outcome.rounds / outcome.seconds * 60:.1f} left=nothing"
    )
    return 0


def failed(why: str, home: Path) -> int:
    print(f"journals and logs: {home}", file=sys.stderr)
    print(f"soak: FAILED {why}")
    return 1


def soak(home: Path, rounds: int, seed: int) -> SoakOutcome:
    """The whole run, in an empty directory. Raises JobFailed if the job does not come through a round."""
    temporary = home / "tmp"
    temporary.mkdir()
    at_first = Before.now(temporary)
    begun_s = time.monotonic()
    with Soak(home, rounds, seed, temporary) as job:
        before, after = job.run()
        seconds = time.monotonic() - begun_s
        job.end()
        leftovers = left(job.mark, job.ports, temporary, at_first)
        steps = job.steps()
    return SoakOutcome(rounds, before, after, leftovers, steps, seconds)


class Soak:
    """One job and its rounds. A context manager, like DrivenJob."""

    def __init__(self, home: Path, rounds: int, seed: int, temporary: Path) -> None:
        self._rounds = rounds
        self._dice = random.Random(seed)
        self._world = MembershipView()
        self._until = home / "enough"
        self.ports: set[resources.OpenPort] = set()
        """All on which the job's processes were seen to listen."""
        options = ["--workers", str(WORKERS), "--name", JOB]
        command = [str(SCRIPT), "--until", str(self._until)]
        # torch keeps a cache among the temporary files for the next process, on purpose.
        environment = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(home / "torch-cache")}
        self._job = DrivenJob(home / "job", elastic_run(home / "job", options, command), self._follow, environment)
        self.mark = self._job.mark

    def __enter__(self) -> Soak:
        self._job.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._job.__exit__(*error)

    def steps(self) -> int:
        """Applied steps. Raises JobFailed if one is missing, or is there twice."""
        numbers = [line["step"] for line in self._job.steps()]
        if numbers != list(range(len(numbers))):
            raise JobFailed(f"the ledger does not hold each step once: {len(numbers)} lines, {len(set(numbers))} steps")
        return len(numbers)

    def run(self) -> tuple[Look, Look]:
        """All rounds; what was held after the warm-up, and at the end."""
        self._await_full_world("the job has started")
        spared = self._dice.choice(self._world.members)
        lasting = {spared: self._world.pids[spared], **self._services()}
        begun_s = time.monotonic()
        for number in range(1, self._rounds + 1):
            self._round(number, spared)
            if number == WARM_UP_ROUNDS:
                first = self._look(lasting)
            if number % 10 == 0:
                now = self._look(lasting)[spared]
                rate = number / (time.monotonic() - begun_s) * 60
                print(
                    f"round {number:3d} of {self._rounds}, {rate:.1f} a minute: {spared} holds {now.fds} fds, "
                    f"{now.threads} threads, {now.rss_mb:.1f} MiB",
                    flush=True,
                )
        return first, self._look(lasting)

    def end(self) -> None:
        """Let the script come to its end."""
        self._until.touch()
        self._job.wait(END_S)

    def _round(self, number: int, spared: str) -> None:
        victim = self._dice.choice([worker for worker in self._world.members if worker != spared])
        member = {"worker_id": victim, "pid": self._world.pids[victim], "node": victim.split(".")[0]}
        self._job.inject(member, signal.SIGKILL)
        self._await_full_world(f"round {number}: {victim} was replaced", without=victim)

    def _await_full_world(self, what: str, without: str = "") -> None:
        """Until so many workers as there should be have completed a step together."""

        def full() -> bool:
            world = self._world
            return len(world.members) == WORKERS and world.steady and without not in world.members

        self._job.until(what, full, ROUND_S)

    def _services(self) -> dict[str, int]:
        """Pids of the job's own Python processes, by module."""
        return {name: pid for name, pid in processes.services(self.mark).items() if name.startswith("elastic.")}

    def _look(self, lasting: dict[str, int]) -> Look:
        """What they hold while the job steps and nothing else happens. Raises JobFailed if one of them is gone."""
        self.ports |= resources.open_ports(processes.living(self.mark))
        seen: list[Look] = []
        for _ in range(MEASURED_STEPS):
            self._await_step(len(self._job.steps()))
            try:
                seen.append({name: held(pid) for name, pid in lasting.items()})
            except OSError as error:
                raise JobFailed(f"one of {lasting} has ended although nobody killed it: {error}") from error
        return {name: least(look[name] for look in seen) for name in lasting}

    def _await_step(self, number: int) -> None:
        self._job.until(f"step {number} was applied", lambda: len(self._job.steps()) > number, ROUND_S)

    def _follow(self, job: Followed) -> None:
        self._world.feed(job.new_events())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
