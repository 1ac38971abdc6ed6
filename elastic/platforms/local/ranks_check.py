"""`elastic doctor --ranks N`: whether a script for torchrun may be run with `elastic run --ranks N`.

The script runs its first steps as one worker that has all ranks; once more, with the ranks of each step in the opposite
order; as a newcomer that enters the first run, whose worker is lost one step later; and from a checkpoint of the first
run. The guards that would stop it in a job stop it here, and the last three runs must have the bits of the first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from elastic.agent.process.process_start import COLD, worker_environment
from elastic.agent.worker.environment import RANKS
from elastic.errors import ConfigError
from elastic.platforms.local import rank_findings
from elastic.platforms.local.examined_runs import ScriptRuns, failure
from elastic.platforms.local.rank_findings import RankRefusal, RanksReport
from elastic.platforms.local.run_differences import Check, EndedRun

ONCE = "one worker with all ranks"
RUNS = 4


def examine(command: Sequence[str], ranks: int, steps: int) -> RanksReport:
    """Run the first steps of the script. command: as `python SCRIPT`. Raises ConfigError if it fails by itself."""
    with TemporaryDirectory(prefix="elastic-doctor-") as directory:
        words = (command[0], "-c", COLD, *command)
        environment = worker_environment(os.environ, {RANKS: str(ranks)})
        return _Examined(ScriptRuns(words, steps, Path(directory), environment), ranks).report()


class _Examined:
    def __init__(self, runs: ScriptRuns, ranks: int) -> None:
        self._runs = runs
        self._ranks = ranks
        self._whole = False
        """Epochs are not cut short: the script has too few for that."""
        self._begun = 0
        self._refusals: list[RankRefusal] = []
        self._checks: list[Check] = []

    def report(self) -> RanksReport:
        once = self._once()
        if not self._refusals:
            self._compare(once)
        return RanksReport(
            self._ranks,
            max((line["step"] for line in once.lines), default=0),
            tuple(self._refusals),
            tuple(self._checks),
            rank_findings.limits_of(once.lines),
        )

    def _once(self) -> EndedRun:
        once = self._run("once", ONCE)
        if once.exit_code == 0 and once.lines and once.lines[-1]["step"] < self._runs.steps:
            self._whole, self._begun = True, 0
            once = self._run("once", f"{ONCE}, with whole epochs")
        self._refused(once, ONCE)
        if once.exit_code != 0 and not self._refusals:
            raise failure(once)
        if not once.lines and not self._refusals:
            raise ConfigError("the script ended without a step")
        return once

    def _compare(self, once: EndedRun) -> None:
        at = self._runs.at
        other = self._run("backwards", rank_findings.OPPOSITE, backwards=True)
        if not self._stopped(other, rank_findings.OPPOSITE):
            difference = rank_findings.by_order(once.lines, other.lines)
            alike = None
            if difference is not None:
                alike = rank_findings.not_alike(once.lines, self._run("again", rank_findings.ALIKE).lines)
            if alike is not None:
                self._checks.append(Check(rank_findings.ALIKE, alike))
                return
            self._checks.append(Check(rank_findings.OPPOSITE, difference))
        plan = (("joins", f"a newcomer in step {at}"), ("resumed", f"from a checkpoint before step {at}"))
        for name, title in plan:
            if not 0 < at < once.lines[-1]["step"]:
                self._checks.append(Check(title, None, tried=False))
                continue
            late = self._run(name, title)
            if not self._stopped(late, title):
                found = rank_findings.of_late(once.lines, other.lines, late.lines, at, name)
                self._checks.append(Check(title, found))

    def _run(self, name: str, title: str, **more: Any) -> EndedRun:
        self._begun += 1
        examination = replace(self._runs.examination(name, **more), whole_epochs=self._whole)
        said = f"run {min(self._begun, RUNS)} of {RUNS}, {title}"
        return self._runs.run(name, examination, said)

    def _refused(self, ended: EndedRun, title: str) -> bool:
        refusal = rank_findings.refusal_of(ended, title, os.getcwd())
        if refusal is not None:
            self._refusals.append(refusal)
        return refusal is not None

    def _stopped(self, ended: EndedRun, title: str) -> bool:
        """Whether a later run did not come to its end."""
        if self._refused(ended, title):
            return True
        if ended.exit_code != 0:
            self._checks.append(Check(title, rank_findings.failed(ended)))
        return ended.exit_code != 0
