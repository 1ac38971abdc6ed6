"""A whole chaos run: the job once undisturbed, once with faults, and what both have left on disk.

<home>/quiet/    the job directory of the undisturbed run
<home>/faulty/   that of the run with faults
<home>/chaos.json  what was asked for: command, preset, seed, plan
<home>/job.json    the job's specification, where it was given by a file

A run can be repeated from its report, with the same command, seed and plan, and the two compared.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chaos_tests.cluster.job_handle import Followed, JobFailed
from chaos_tests.cluster.local_job import LocalJob, elastic_run
from chaos_tests.run.narrator import Narrator
from chaos_tests.scenario.faults import Ground
from chaos_tests.scenario.schedule import Planned, ground_of, plan, preset_of
from elastic.config import JobSpec, Timing
from elastic.errors import ConfigError, ExitCode
from elastic.platforms.local.script_command import command as script_command
from elastic.records.files import write_atomically
from elastic.records.job_directory import default_name, read_json
from elastic.records.journal import read_all
from elastic.wire import codec

START_S = 300.0
"""From the start of the command to its first applied step."""
SHARE = 0.8
"""The share of the undisturbed run's time for which faults are planned by default; in the rest the job recovers."""
RESTARTS = 1_000_000
"""A segmentation fault counts as the script's own; a schedule may hold many."""

HANGS, HANG_LIMIT_S = "hang-script", 30.0
"""The fault that takes as long as the hang limit, and that limit, in seconds: the least that there may be."""

CHECKPOINT_EVERY, SNAPSHOT_EVERY = "4 s", "2 s"


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
    ranks: int = 0
    """Logical ranks of a script for torchrun; 0: the script calls elastic.join(), or `job` says the number."""
    restart: bool = False
    """Whether the script is one for torchrun that runs in rounds; `job` says it otherwise."""
    slots: int = 0
    """Workers of each node; 0: faults decide whether there are several nodes, and each has one worker."""
    allowed: tuple[str, ...] = ()
    """Invariants that may stay undecided."""

    @property
    def hangs(self) -> bool:
        """Whether a script is to hang."""
        return any(one.kind == HANGS for one in self.plan)

    @property
    def hang_s(self) -> float:
        """The job's hang limit, in seconds, where no file says it: short where a script is to hang."""
        return HANG_LIMIT_S if self.hangs else Timing().hang_s


def quiet_run(campaign: Campaign) -> float:
    """Returns the seconds from the first step to the end. Raises JobFailed if it does not end well."""
    narrator = Narrator()
    job_dir = campaign.home / "quiet"
    with on_one_machine(campaign, job_dir, lambda job: narrator.hear(job.new_events(), job.steps())) as job:
        job.until("a first step was applied, or a first round has begun", job.has_begun, START_S)
        begun_s = time.monotonic()
        if (status := job.ended(deadline_s=24 * 3600.0)) != 0:
            raise JobFailed(f"the undisturbed run ended with {status}\n{job.output()}")
    return time.monotonic() - begun_s


def quiet_run_in(earlier: Path) -> Path:
    """The undisturbed run of another campaign, or any job directory of the same command. Raises ConfigError."""
    source = earlier / "quiet" if (earlier / "quiet").is_dir() else earlier
    if not (source / "result.json").exists():
        raise ConfigError(f"{source} holds no job that has ended; give the directory of an earlier chaos run")
    result = read_json(source / "result.json")
    if result is None or result.get("exit_code") != ExitCode.DONE:
        raise ConfigError(
            f"the job in {source} did not end well, so that nothing can be compared with it; run it again"
        )
    return source


def adopt_quiet_run(campaign: Campaign, earlier: Path) -> float:
    """Use that run in place of an own one."""
    source = quiet_run_in(earlier)
    shutil.copytree(source, campaign.home / "quiet")
    times = {line["event"]: line["t_mono_ns"] for line in read_all(campaign.home / "quiet")}
    return float(times["finished"] - times["running"]) / 1e9


@contextmanager
def on_one_machine(
    campaign: Campaign, job_dir: Path, on_poll: Callable[[Followed], None], environment: dict[str, str] | None = None
) -> Iterator[LocalJob]:
    """Its job as `elastic run` runs it."""
    if campaign.job:
        specification = campaign.home / "job.json"
        write_atomically(specification, codec.to_json(_of_file(campaign)))
        program = [sys.executable, "-m", "chaos_tests.cluster.local_job", str(specification), str(job_dir)]
    else:
        options = ["--max-restarts", str(RESTARTS), "--workers", str(campaign.workers)]
        options += ["--ranks", str(campaign.ranks)]
        options += ["--restart", "--hang-limit", f"{campaign.hang_s:g}"] if campaign.restart else []
        program = elastic_run(job_dir, options, campaign.command)
    directory = Path(campaign.directory) if campaign.directory else None
    with LocalJob(job_dir, program, on_poll, environment, directory) as job:
        yield job


def ground(campaign: Campaign) -> Ground:
    """What kind of a job its faults need, or is asked for."""
    needed = ground_of([planned.kind for planned in campaign.plan] or preset_of(campaign.preset).weights)
    return Ground.CLUSTER if campaign.slots and needed is Ground.MACHINE else needed


def specification(campaign: Campaign) -> JobSpec:
    """What the campaign's job on several nodes is. A job whose file says nothing of checkpoints takes them often, so
    that there are some when all workers are lost."""
    if campaign.job:
        return _of_file(campaign)
    name, command = script_of(campaign.command, campaign.directory)
    return JobSpec(
        name=default_name(name),
        command=command,
        workers=campaign.workers,
        ranks=campaign.ranks,
        restart=campaign.restart,
        timing=Timing(hang_s=campaign.hang_s),
        max_restarts=RESTARTS,
        checkpoint_every=CHECKPOINT_EVERY,
        snapshot_every=SNAPSHOT_EVERY,
        directory=campaign.directory,
    )


def script_of(words: Sequence[str], directory: str = "") -> tuple[str, tuple[str, ...]]:
    """Its name, and the command of a worker. directory: from which it is looked for; "": here. Raises ConfigError if
    there is no such script or module."""
    module = words[0] == "-m"
    try:
        with chdir(directory or "."):
            return script_command(words[1:] if module else words, module=module, verb="chaos run")
    except OSError as error:
        raise ConfigError(f"{directory}, where the job ran, cannot be entered: {error.strerror}") from error


def _of_file(campaign: Campaign) -> JobSpec:
    """The job of a file. If one of its scripts is to hang, its hang limit is short: that fault does not last as long as
    an ordinary limit, so it would never be seen."""
    spec = codec.job_from_json(campaign.job.encode(), "the job")
    if not campaign.hangs or not spec.restart:
        return spec
    hang_s = min(spec.timing.hang_s, max(HANG_LIMIT_S, spec.timing.progress_s))
    return replace(spec, timing=replace(spec.timing, hang_s=hang_s))


def read_campaign(home: Path) -> Campaign:
    """As it was asked for. Raises ConfigError if there was none."""
    try:
        return from_document(home, json.loads((home / "chaos.json").read_bytes()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        because = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{home} holds no chaos run (chaos.json: {because}); give the --job-dir of `elastic chaos run`"
        ) from error


def from_document(home: Path, fields: Mapping[str, Any]) -> Campaign:
    """As chaos.json or a report has it. Raises TypeError, ValueError or KeyError if it is none."""
    plan = tuple(Planned(**planned) for planned in fields["plan"])
    command, allowed = (tuple(map(str, fields.get(name, ()))) for name in ("command", "allowed"))
    return Campaign(**{**fields, "home": home, "plan": plan, "command": command, "allowed": allowed})


def planned(campaign: Campaign, quiet_s: float) -> Campaign:
    """With its plan, and written down. quiet_s: how long the undisturbed run took."""
    duration_s = campaign.duration_s if campaign.duration_s is not None else SHARE * quiet_s
    if not campaign.plan:
        campaign = replace(campaign, plan=plan(preset_of(campaign.preset), campaign.seed, duration_s))
    fields = asdict(campaign)
    del fields["home"]
    write_atomically(campaign.home / "chaos.json", json.dumps(fields, indent=1).encode() + b"\n")
    return campaign


Report = Mapping[str, Any]


def read_report(path: Path) -> Report:
    """report.json, or that of a directory. Raises ConfigError if it is none."""
    path = path / "report.json" if path.is_dir() else path
    try:
        document: Report = json.loads(path.read_bytes())
        from_document(path.parent, document["asked"])
        list(differences(document, document))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give a report.json of `elastic chaos`") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        because = f"{type(error).__name__} {error}"
        raise ConfigError(f"{path} is no report of `elastic chaos`: {because!s:.200}") from error
    return document


def differences(before: Report, after: Report) -> Iterator[str]:
    """Sentences on what came out differently. Times and victims are not compared: machines are not that regular."""
    answers = {one["number"]: one["answer"] for one in before["invariants"]}
    for one in after["invariants"]:
        was = answers.get(one["number"], "not decided")
        if one["answer"] != was:
            yield f"{one['number']} is {one['answer']}, was {was}: {one['because']}"
    for name in ("digest", "quiet_digest", "steps"):
        if before[name] != after[name]:
            yield f"{name} is {after[name]!s:.16}, was {before[name]!s:.16}"
    done, then = _kinds(after), _kinds(before)
    for number in sorted({*done, *then}):
        if done.get(number) != then.get(number):
            was, now = (kinds.get(number, "not done") for kinds in (then, done))
            yield f"fault {number} is {now}, was {was}"


def _kinds(report: Report) -> dict[int, str]:
    """The kind of each fault that was done, in both parts if it has two, by its number."""
    skipped = {one["number"] for one in report.get("skipped", ())}
    return {int(one["number"]): str(one["fault"]) for one in report["faults"] if one["number"] not in skipped}
