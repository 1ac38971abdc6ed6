"""`elastic doctor --exact`: whether a script's bits depend on anything but its seed, and what the reason may be.

The script runs its first steps as a job of one, twice alike; once with each shard in a process of its own; once from a
checkpoint of the first run; and once as a newcomer that enters the first run. The first two must agree in every bit, or
no two runs of it ever will; the others must agree with them, or its bits depend on which worker has which shard, on
interruptions, or on who joins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from elastic.errors import ConfigError
from elastic.platforms.local.examined_runs import ScriptRuns, failure
from elastic.platforms.local.run_differences import (
    Check,
    Difference,
    Line,
    first_difference,
    indented,
    late_difference,
    moved_names,
)

_HOW = {"resumed": " when it went on from a checkpoint", "joins": " when it entered as a newcomer"}
_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")


@dataclass(frozen=True, slots=True)
class ExactnessReport:
    steps: int
    shards: int
    checks: tuple[Check, ...]

    @property
    def exact(self) -> bool:
        return all(check.difference is None for check in self.checks)

    def document(self) -> dict[str, Any]:
        return {"exact": self.exact, **asdict(self)}

    def text(self) -> Iterator[str]:
        yield f"{self.steps} steps of {self.shards} shards"
        for check in self.checks:
            if check.difference is None:
                yield f"  {'same bits' if check.tried else 'too short'}  {check.name}"
            else:
                yield f"  DIFFERENT  {check.name}"
                yield from indented(check.difference)
        yield "exact" if self.exact else "not exact"


def examine(command: Sequence[str], steps: int) -> ExactnessReport:
    """Run the first steps of the script. Raises ConfigError if it fails, or has no steps."""
    with TemporaryDirectory(prefix="elastic-doctor-") as directory:
        runs = _Runs(tuple(command), steps, Path(directory))
        once, again = runs.lines("once"), runs.lines("again")
        alike = first_difference(once, again)
        if alike is not None:
            alike = _explained_alike(alike, once, again, runs)
        checks = [Check("two runs, alike", alike)]
        if alike is None:
            apart = first_difference(once, runs.lines("apart"))
            if apart is not None:
                apart = _explained_apart(apart, once)
            checks.append(Check("each shard in a process of its own", apart))
            plan = (("resumed", f"from a checkpoint before step {runs.at}"), ("joins", f"a newcomer in step {runs.at}"))
            for name, title in plan:
                tried = 0 < runs.at < once[-1]["step"]
                late = _entered(once, again, runs.lines(name), runs.at, name) if tried else None
                checks.append(Check(title, late, tried))
    return ExactnessReport(once[-1]["step"], once[0]["shards"] or 1, tuple(checks))


class _Runs(ScriptRuns):
    def lines(self, name: str) -> list[Line]:
        """What the script's process has noted. name: once, again, apart, and, when `once` has run, resumed and joins.

        Raises ConfigError.
        """
        ended = self.run(name, self.examination(name, apart=name == "apart"))
        if ended.exit_code != 0:
            raise failure(ended, _HOW.get(name, ""))
        if not ended.lines:
            raise ConfigError("the script ended without a step; it has to call elastic.join() and job.steps()")
        return ended.lines

    def nondeterministic_kernels(self) -> list[str]:
        """Operations of which torch warns."""
        ended = self.run("kernels", self.examination("kernels", deterministic=True))
        return sorted(set(_KERNEL.findall(ended.errors)))


def _entered(once: Sequence[Line], again: Sequence[Line], late: Sequence[Line], at: int, how: str) -> Difference | None:
    """As `late_difference`, with the likely reason. again: a second run from the first step on."""
    found = late_difference(once, late, at, how)
    if found is None:
        return None
    if how == "resumed" and found.step == at - 1:
        because = (
            "what lies before the steps of an epoch is run again by a run that goes on in that epoch, and changes what "
            "the checkpoint holds: do it behind the steps of the epoch before, or only if job.state does not know of it"
        )
        return Difference(at, found.what, because)
    generators, variables = (moved_names(field, once, again, late, at) for field in ("generators", "variables"))
    if generators:
        because = (
            f"the generator `{generators[0]}` begins anew in each process: use those of torch, numpy and random, which "
            "are seeded by epoch and by step, or step.shard.generator"
        )
    elif variables:
        because = (
            f"`{variables[0]}` is another one there, because it is neither registered nor in job.state: put it into "
            "one of them, and change it behind the inner loop or behind the steps of an epoch, not before"
        )
    else:
        because = (
            "something is neither registered nor in job.state, and goes on in a process or is made before the steps "
            "of an epoch: a counter, a copy of the weights, an iterator; or it depends on job.rank or job.restarted"
        )
    return Difference(found.step, found.what, because)


def _explained_alike(found: Difference, one: Sequence[Line], other: Sequence[Line], runs: _Runs) -> Difference:
    unseeded = [name for name, state in one[0]["generators"].items() if other[0]["generators"].get(name) != state]
    if unseeded:
        because = (
            f"the generator `{unseeded[0]}` starts differently in each run: give it a seed, and in the inner loop use "
            "step.shard.generator or step.shard.numpy instead"
        )
    elif one[0]["state"] != other[0]["state"]:
        because = (
            "it differs before the first step: is the model built before elastic.join(), which seeds torch, numpy and "
            "random, or from something that no seed decides, such as the clock, a file or the order of a set?"
        )
    elif kernels := runs.nondeterministic_kernels():
        because = f"torch has no deterministic kernel for {', '.join(kernels)} here"
    else:
        because = (
            "something in the loop is decided by no seed: the clock, a process id, the order of a set, a thread, a "
            "network, os.urandom, or a kernel that is not deterministic"
        )
    return Difference(found.step, found.what, because)


def _explained_apart(found: Difference, lines: Sequence[Line]) -> Difference:
    step = found.step or 0
    before, after = lines[step], lines[min(step + 1, len(lines) - 1)]
    moved = [name for name, state in after["generators"].items() if before["generators"].get(name) != state]
    if moved:
        because = (
            f"the generator `{moved[0]}` goes on from shard to shard, and which shards a worker has depends on the "
            "world: use step.shard.generator or step.shard.numpy"
        )
    else:
        because = (
            "a shard finds something that an earlier one left in its process: a generator or a counter of the script's "
            "own, a cache, a tensor kept outside the loop. Make it of step.shard, register it, or use step.cached()"
        )
    return Difference(found.step, found.what, because)
