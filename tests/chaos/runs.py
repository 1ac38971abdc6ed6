"""Chaos runs of a small script, each judged against one undisturbed run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import elastic
from chaos_tests.checkers import CheckerVerdict
from chaos_tests.run import campaign, faulty_run, publish
from chaos_tests.run.campaign import Campaign
from chaos_tests.scenario.catalogue import CATALOGUE
from chaos_tests.scenario.schedule import Planned
from elastic.config import JobSpec, Overlap, Reduction
from elastic.wire import codec
from tests.mutants import SITE, VARIABLE

ROOT = Path(elastic.__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "live" / "scripts" / "mlp.py"
DILOCO = ROOT / "docs" / "examples" / "train_diloco.py"
SNAPSHOTS = ROOT / "tests" / "live" / "programs" / "snapshots.py"
KEPT = SNAPSHOTS.with_name("kept_digest.py")
WORKERS = 3


def command(epochs: int) -> tuple[str, ...]:
    """Of an epoch that takes three workers two seconds or more."""
    return (str(SCRIPT), "--epochs", str(epochs), "--pause-s", "0.03")


@dataclass(frozen=True)
class Undisturbed:
    """A run to compare with. seconds: from its first step to its end."""

    home: Path
    command: tuple[str, ...]
    seconds: float
    restart: bool = False
    ranks: int = 0
    job: str = ""
    """Its specification, where the command alone does not say everything."""


def undisturbed(home: Path, epochs: int) -> Undisturbed:
    asked = Campaign(home, command(epochs), WORKERS, "kill", 0, None)
    return Undisturbed(home, asked.command, campaign.quiet_run(asked))


def undisturbed_fixed(home: Path, epochs: int) -> Undisturbed:
    """Gradients are summed as integers, into which those of each twelfth step do not fit, and are sent while backward
    goes on."""
    home.mkdir()
    words = (sys.executable, *command(epochs), "--spike-every", "12")
    job = JobSpec(
        name="fixed",
        command=words,
        workers=WORKERS,
        reduction=Reduction.FIXED,
        overlap=Overlap.ON,
        max_restarts=campaign.RESTARTS,
    )
    return _undisturbed_job(home, job)


def _undisturbed_job(home: Path, job: JobSpec) -> Undisturbed:
    """Of a job whose command does not say everything."""
    asked = Campaign(home, (), WORKERS, "kill", 0, None, job=codec.to_json(job).decode())
    return Undisturbed(home, asked.command, campaign.quiet_run(asked), job=asked.job)


def undisturbed_replicas(home: Path, steps: int) -> Undisturbed:
    """Of DiLoCo, whose differences are sent while inner steps are made. steps: of each replica, 20 a round."""
    home.mkdir()
    words = {"steps": steps, "every": 20, "delay": 10, "dim": 32, "layers": 1, "context": 32, "eval-every": steps}
    arguments = (word for name, value in words.items() for word in (f"--{name}", str(value)))
    job = JobSpec(
        name="replicas",
        command=(sys.executable, str(DILOCO), *arguments),
        workers=WORKERS,
        overlap=Overlap.ON,
        max_restarts=campaign.RESTARTS,
    )
    return _undisturbed_job(home, job)


def undisturbed_rounds(home: Path, steps: int) -> Undisturbed:
    """Of a script that is started again, and takes a tenth of a second for each step."""
    home.mkdir(exist_ok=True)
    asked = Campaign(home, (str(SNAPSHOTS), str(steps), "0.1"), WORKERS, "rounds", 0, None, restart=True)
    return Undisturbed(home, asked.command, campaign.quiet_run(asked), restart=True)


def undisturbed_kept(home: Path, steps: int) -> Undisturbed:
    """Of a script with four ranks that keeps its state in memory, and compares its digest with that of this run."""
    home.mkdir(exist_ok=True)
    command = (str(KEPT), str(steps), "0.1", str(home / "digest"))
    asked = Campaign(home, command, WORKERS, "rounds-kept", 0, None, restart=True, ranks=4)
    with patch.dict(os.environ, planted("")):
        return Undisturbed(home, asked.command, campaign.quiet_run(asked), restart=True, ranks=4)


def disturbed(
    home: Path, quiet: Undisturbed, faults: tuple[str, ...], *, gap_s: float, mutant: str = ""
) -> dict[str, CheckerVerdict]:
    """Invariant -> verdict of a run with these faults, one after the other; the mutant lives in this run alone."""
    home.mkdir()
    planned = tuple(Planned(n + 1, 1.0 + n * gap_s, kind, first_place(kind)) for n, kind in enumerate(faults))
    asked = Campaign(home, quiet.command, WORKERS, "kill", 7, None, planned, job=quiet.job, restart=quiet.restart)
    asked = replace(asked, ranks=quiet.ranks)
    campaign.adopt_quiet_run(asked, quiet.home)
    return judged(faulty_run.faulty_run(asked, quiet.seconds, planted(mutant)))


def first_place(kind: str) -> str:
    """The first place where a fault may strike; "" if it has none."""
    return next(iter(CATALOGUE[kind].places), "")


def judged(asked: Campaign) -> dict[str, CheckerVerdict]:
    return {finding.invariant.number: finding.verdict for finding in publish.report(asked)}


def planted(mutant: str) -> Mapping[str, str]:
    if not mutant:
        return {"PYTHONPATH": str(ROOT)}
    return {"PYTHONPATH": f"{SITE}:{ROOT}", VARIABLE: mutant}


def told(verdicts: Mapping[str, CheckerVerdict]) -> str:
    """For a failure."""
    return "\n".join(f"{number} {verdict.answer}: {verdict.because}" for number, verdict in verdicts.items())
