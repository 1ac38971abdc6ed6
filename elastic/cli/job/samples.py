"""`elastic samples`: proves from the ledger that each sample of each epoch's plan was used exactly once."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.cli.options import add_answer, answer, newest_job_dir
from elastic.errors import ConfigError, ExitCode
from elastic.records import ledger
from elastic.records.files import read_job
from elastic.records.job_directory import check_job

if TYPE_CHECKING:
    from elastic.records.exactly_once import Epoch

FINDINGS_SHOWN_MAX = 20

EXAMPLES = """\
examples:
  elastic samples                                     of the newest job in ./elastic-jobs
  elastic samples --job-dir elastic-jobs/train-1
  elastic samples --job-dir elastic-jobs/train-1 --json | jq .proved

Each step's line in steps.jsonl is compared with the plan that it names, and the samples of each epoch are counted. It
may be asked while the job runs: then the epoch in progress is proved as far as it is.

exit codes:
  0 each sample of each epoch's plan was used exactly once
  1 it was not, or the ledger does not know the samples: the script draws its own, or workers do not wait for each other
  2 bad input: no job, or no step yet
"""


def add(verbs: Any) -> None:
    """The verb."""
    verb = verbs.add_parser(
        "samples",
        help="prove that each sample was used exactly once",
        description="Prove from the ledger alone that each sample of each epoch's plan was used exactly once, or name "
        "those that were not.",
        epilog=EXAMPLES,
    )
    verb.add_argument(
        "--job-dir",
        type=Path,
        action="append",
        dest="job_dirs",
        metavar="DIR",
        help="of a job of several machines: those of all its nodes, one after the other (default: the newest in "
        "./elastic-jobs, of a job that runs if one does)",
    )
    add_answer(verb, _run)


def _run(options: argparse.Namespace) -> int:
    from elastic.records.exactly_once import prove  # with numpy, which the other verbs do without

    job_dirs = options.job_dirs or [newest_job_dir()]
    parts = [_part(job_dir) for job_dir in job_dirs]
    try:
        epochs = prove(ledger.lines(parts[0]) if len(parts) == 1 else _merged(job_dirs, parts))
    except FileNotFoundError as error:
        if len(parts) > 1:
            raise ConfigError(
                f"{error.filename} is not there; give the directories of nodes that had members"
            ) from error
        epochs = []
    except ledger.LedgerConflict as error:
        raise ConfigError(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{_named(parts)} is damaged: {type(error).__name__} {error}") from error
    if not epochs:
        raise ConfigError(f"{_named(job_dirs)} has no applied step yet, so there is nothing to prove")
    proved = all(epoch.proved for epoch in epochs)
    code = ExitCode.DONE if proved else ExitCode.SCRIPT_FAILED
    return answer(options, _document(epochs, proved), "\n".join(_table(epochs, proved)), code)


def _merged(job_dirs: list[Path], parts: list[Path]) -> list[ledger.Line]:
    specs = [read_job(job_dir) for job_dir in job_dirs]
    return ledger.merged(parts, stable=all(spec.reduction.stable and not spec.restart for spec in specs))


def _part(job_dir: Path) -> Path:
    check_job(job_dir)
    return job_dir / "steps.jsonl"


def _named(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))


def _document(epochs: list[Epoch], proved: bool) -> dict[str, Any]:
    return {
        "proved": proved,
        "epochs": [{**asdict(epoch), "finished": epoch.finished, "proved": epoch.proved} for epoch in epochs],
    }


def _table(epochs: list[Epoch], proved: bool) -> Iterator[str]:
    yield f"{'epoch':>5} {'order':<8} {'steps':>13} {'used':>12} {'left out':>9} {'repeated':>9}"
    for epoch in epochs:
        steps = f"{epoch.steps}/{epoch.planned_steps}" if epoch.planned_steps is not None else f"{epoch.steps}"
        counts = f"{epoch.used:>12} {epoch.left_out:>9} {epoch.repeated:>9}"
        yield f"{_shown(epoch):>5} {epoch.order:<8} {steps:>13} {counts}  {_verdict(epoch)}"
    findings = [finding for epoch in epochs for finding in epoch.findings]
    for finding in findings[:FINDINGS_SHOWN_MAX]:
        where = f"epoch {finding.epoch}" + (f", step {finding.step}" if finding.step is not None else "")
        yield f"{where}: {finding.what}"
    if len(findings) > FINDINGS_SHOWN_MAX:
        yield f"and {len(findings) - FINDINGS_SHOWN_MAX} more; --json has all of them"
    if proved:
        yield "proved: each sample of each epoch's plan was used exactly once"
    else:
        yield "not proved"


def _shown(epoch: Epoch) -> str:
    """Its number; "1:0" in the second training loop."""
    return f"{epoch.loop}:{epoch.number}" if epoch.loop else f"{epoch.number}"


def _verdict(epoch: Epoch) -> str:
    if epoch.order == "unknown":
        return "the script draws its own samples, or workers do not wait; the ledger does not know them"
    if epoch.findings:
        return "not as planned"
    once = {"weighted": "each place drawn once", "stream": "each batch once", "sampler": "each rank its own"}.get(
        epoch.order, "each sample once"
    )
    return once if epoch.finished else f"{once} so far"
