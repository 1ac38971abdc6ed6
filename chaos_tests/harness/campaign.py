"""A whole chaos run: the job once undisturbed, once with faults, and what both have left on disk.

<home>/quiet/    the job directory of the undisturbed run
<home>/faulty/   that of the run with faults
<home>/chaos.json  what was asked for: command, preset, seed, plan
<home>/job.json    the job's specification, where it was given by a file
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chaos_tests.harness import leftovers, processes, resources
from chaos_tests.harness.ambush.orders import Orders
from chaos_tests.harness.auditor import Auditor
from chaos_tests.harness.breaker import Breaker
from chaos_tests.harness.local import JobFailed, LocalJob, elastic_run
from chaos_tests.harness.narrator import Narrator
from chaos_tests.harness.recorder import Recorder
from chaos_tests.harness.schedule import Planned, plan, preset_of
from chaos_tests.harness.teller import Teller
from chaos_tests.harness.world import World
from elastic.files import write_atomically
from elastic.journal import read_all
from elastic.run import NODE

START_S = 300.0
"""From the start of the command to its first applied step."""
LOOK_S = 1.0
STALLED_S = 90.0
"""A run with faults in which no step was applied for so long is stopped; the checkers say what that means."""
SHARE = 0.8
"""Of the undisturbed run's time faults are planned for, if nobody says otherwise; the rest heals."""
RESTARTS = 1_000_000
"""A segmentation fault counts as the script's own; a schedule may hold many."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What was asked for. duration_s: faults are injected for so long; None: most of the undisturbed run's time.

    command: a script and its arguments. job: its specification as JSON, where it was given by a file.
    plan: empty until the preset and the seed have been made into one. directory: where the job runs; "": here.
    """

    home: Path
    command: tuple[str, ...]
    workers: int
    preset: str
    seed: int
    duration_s: float | None
    plan: tuple[Planned, ...] = ()
    job: str = ""
    directory: str = ""


def quiet_run(campaign: Campaign) -> float:
    """Returns the seconds from the first step to the end. Raises JobFailed if it does not end well."""
    narrator = Narrator()
    job_dir = campaign.home / "quiet"
    with _job(campaign, job_dir, lambda job: narrator.hear(job.new_events(), job.steps())) as job:
        job.until("a first step was applied", job.steps, START_S)
        begun_s = time.monotonic()
        if (status := job.ended(deadline_s=24 * 3600.0)) != 0:
            raise JobFailed(f"the undisturbed run ended with {status}\n{job.output()}")
    return time.monotonic() - begun_s


def adopt_quiet_run(campaign: Campaign, earlier: Path) -> float:
    """Use the undisturbed run of another campaign, or any job directory of the same command."""
    source = earlier / "quiet" if (earlier / "quiet").is_dir() else earlier
    if not (source / "result.json").exists():
        raise JobFailed(f"{source} holds no job that has ended; give the directory of an earlier chaos run")
    shutil.copytree(source, campaign.home / "quiet")
    times = {line["event"]: line["t_mono_ns"] for line in read_all(campaign.home / "quiet")}
    return float(times["finished"] - times["running"]) / 1e9


def faulty_run(campaign: Campaign, quiet_s: float, environment: Mapping[str, str] | None = None) -> Campaign:
    """The same with faults. Returns the campaign with its plan. Judging is another matter: see checkers.

    environment: of this run only. Raises JobFailed if the job does not come to its first step.
    """
    duration_s = campaign.duration_s if campaign.duration_s is not None else SHARE * quiet_s
    if not campaign.plan:
        campaign = replace(campaign, plan=plan(preset_of(campaign.preset), campaign.seed, duration_s, campaign.workers))
    write_atomically(campaign.home / "chaos.json", _document(campaign))
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        # etcd's socket lies below, and the path of a socket is short.
        temporary = Path(directory) / "t"
        temporary.mkdir()
        segments = resources.shared_memory()
        # torch keeps a cache among the temporary files for the next process, on purpose.
        own = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(Path(directory) / "torch")}
        orders = Orders(Path(directory) / "ambush")
        own |= orders.environment((environment or os.environ).get("PYTHONPATH", ""))
        _Faulty(campaign, temporary, segments, orders, {**(environment or {}), **own}).run()
    return campaign


class _Faulty:
    """The run with faults."""

    def __init__(
        self,
        campaign: Campaign,
        temporary: Path,
        segments: set[str],
        orders: Orders,
        environment: dict[str, str],
    ) -> None:
        self._campaign = campaign
        self._orders = orders
        self._quiet_steps = len((campaign.home / "quiet" / "steps.jsonl").read_bytes().splitlines())
        self._dir = campaign.home / "faulty"
        self._temporary, self._segments, self._environment = temporary, segments, environment
        self._narrator = Narrator()
        self._world = World()
        self._recorder: Recorder | None = None
        self._auditor: Auditor | None = None
        self._breaker: Breaker | None = None
        self._doors: set[resources.Door] = set()
        self._looked_s = 0.0
        self._stepped_s = math.inf
        """When the ledger grew last."""
        self._steps = 0

    def run(self) -> None:
        with _job(self._campaign, self._dir, self._turn, self._environment) as job:
            job.until("the job has a directory", (self._dir / "job.json").exists, START_S)
            name = json.loads((self._dir / "job.json").read_bytes())["name"]
            with Recorder(self._dir, name, job.mark) as self._recorder:
                self._auditor = Auditor(self._dir, self._recorder.journal)
                self._breaker = Breaker(
                    self._campaign.plan,
                    self._campaign.seed,
                    self._world,
                    Teller(self._recorder.journal, self._narrator.say),
                    self._orders,
                    self._dir,
                    job.mark,
                    self._quiet_steps,
                )
                try:
                    self._break(job, self._breaker)
                finally:
                    self._breaker.heal("the run is over")
                self._auditor.look_at_all()
                left = leftovers.left(job.mark, self._doors, self._temporary, self._segments)
                self._recorder.journal.write("left_behind", left=list(left))

    def _break(self, job: LocalJob, breaker: Breaker) -> None:
        """Until the job has ended."""
        breaker.prepare([f"{NODE}.{slot}.0" for slot in range(self._campaign.workers)])
        job.until("a first step was applied", job.steps, START_S)
        breaker.begin()
        while job.ended(LOOK_S) is None:
            if time.monotonic() - self._stepped_s > STALLED_S:
                self._narrator.say(f"no step was applied for {STALLED_S:.0f} s, so the job is stopped")
                job.stop()

    def _turn(self, job: LocalJob) -> None:
        lines, steps = list(job.new_events()), job.steps()
        self._world.feed(lines)
        self._narrator.hear(lines, steps)
        if len(steps) > self._steps:
            self._steps, self._stepped_s = len(steps), time.monotonic()
        if self._recorder is not None:
            self._recorder.look(len(steps))
        if self._auditor is not None:
            self._auditor.look(lines)
        if self._breaker is not None:
            self._breaker.poll(lines, len(steps))
        if time.monotonic() - self._looked_s > 1.0:
            self._looked_s = time.monotonic()
            self._doors |= resources.doors(processes.living(job.mark))


@contextmanager
def _job(
    campaign: Campaign, job_dir: Path, on_poll: Callable[[LocalJob], None], environment: dict[str, str] | None = None
) -> Iterator[LocalJob]:
    if campaign.job:
        specification = campaign.home / "job.json"
        write_atomically(specification, campaign.job.encode())
        program = [sys.executable, "-m", "chaos_tests.harness.starter", str(specification), str(job_dir)]
    else:
        options = ["--max-restarts", str(RESTARTS), "--workers", str(campaign.workers)]
        program = elastic_run(job_dir, options, campaign.command)
    directory = Path(campaign.directory) if campaign.directory else None
    with LocalJob(job_dir, program, on_poll, environment, directory) as job:
        yield job


def read_campaign(home: Path) -> Campaign:
    """As it was asked for. Raises JobFailed if there was none."""
    try:
        return from_document(home, json.loads((home / "chaos.json").read_bytes()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise JobFailed(f"{home} holds no chaos run ({error}); give the --job-dir of `elastic chaos run`") from error


def from_document(home: Path, fields: Mapping[str, Any]) -> Campaign:
    """As chaos.json or a report has it. Raises TypeError, ValueError or KeyError if it is none."""
    plan = tuple(Planned(**planned) for planned in fields["plan"])
    return Campaign(**{**fields, "home": home, "plan": plan, "command": tuple(map(str, fields["command"]))})


def _document(campaign: Campaign) -> bytes:
    fields = asdict(campaign)
    del fields["home"]
    return json.dumps(fields, indent=1).encode() + b"\n"
