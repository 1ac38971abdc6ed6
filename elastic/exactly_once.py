"""Whether the ledger of a job proves that each sample of each epoch's plan was used exactly once.

It is decided from the ledger's lines alone, twice over: what a step had is compared with the plan that its line names,
and what an epoch had is counted, which would also find a plan that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from elastic.data import Indices, Plan, hash_of
from elastic.ledger import Line

NAMED_MAX = 20
"""Samples of one finding which are named; more are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as planned. step: of the job; None: of the epoch as a whole."""

    epoch: int
    step: int | None
    what: str


@dataclass(slots=True)
class Epoch:
    """What the ledger has of one epoch. Counts are samples, or draws if there are weights, or batches of a stream."""

    number: int
    order: str
    """ "shuffled", "in order", "weighted", "stream", or "unknown": the script draws its own."""
    steps: int = 0
    planned_steps: int | None = None
    used: int = 0
    """Once."""
    left_out: int = 0
    """Of a finished epoch: the tail that tail="drop" leaves out."""
    repeated: int = 0
    """What tail="pad" gives a second time, to fill up the last step."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.planned_steps is None or self.steps >= self.planned_steps

    @property
    def proved(self) -> bool:
        """Of an epoch in progress: as far as it is."""
        return self.order != "unknown" and not self.findings


def prove(lines: Iterable[Line]) -> list[Epoch]:
    """The epochs of a ledger, in order, with what is wrong in them. Holds the samples of one epoch at a time."""
    epochs: list[Epoch] = []
    step = 0
    for number, group in groupby(lines, key=lambda line: int(line["epoch"])):
        if epochs:
            _close(epochs[-1])
        epoch = _examine(number, step, list(group))
        before = epochs[-1].number if epochs else -1
        if number != before + 1:
            epoch.findings.insert(0, Finding(number, step, f"epoch {number} comes after epoch {before}"))
        epochs.append(epoch)
        step += epoch.steps
    return epochs


def _close(epoch: Epoch) -> None:
    """Another one has begun behind it."""
    if not epoch.finished:
        what = f"it ended after {epoch.steps} of {epoch.planned_steps} steps, and the rest of its samples was not used"
        epoch.findings.append(Finding(epoch.number, None, what))


def _examine(number: int, first: int, lines: Sequence[Line]) -> Epoch:
    data: dict[str, Any] | None = lines[0].get("data")
    epoch = Epoch(number, "unknown" if data is None else data["order"], steps=len(lines))
    for step, line in enumerate(lines, first):
        if line["step"] != step:
            epoch.findings.append(Finding(number, step, f"its line in the ledger is that of step {line['step']}"))
        if line.get("data") != data:
            epoch.findings.append(Finding(number, step, "it was planned from other data than the epoch's first step"))
    if data is None or epoch.findings:
        return epoch
    if epoch.order == "stream":
        epoch.findings += _examine_stream(epoch, first, lines, data["shards"])
    else:
        _examine_samples(epoch, first, lines, data)
    return epoch


def _examine_stream(epoch: Epoch, first: int, lines: Sequence[Line], shards: int) -> Iterator[Finding]:
    for place, line in enumerate(lines):
        given = [shard.get("batch") for shard in line["samples"]]
        epoch.used += given.count(place)
        if given != [place] * shards:
            yield Finding(epoch.number, first + place, f"its shards had the batches {given}, each should be {place}")


def _examine_samples(epoch: Epoch, first: int, lines: Sequence[Line], data: dict[str, Any]) -> None:
    weighted = epoch.order == "weighted"
    plan = Plan(
        length=data["samples"],
        batch_size=data["batch_size"],
        shards=data["shards"],
        seed=data.get("seed", 0),
        shuffle=epoch.order == "shuffled",
        tail=data["tail"],
    )
    epoch.planned_steps = plan.steps
    places: list[int] = []
    for at, line in enumerate(lines):
        if at == plan.steps:
            what = f"the epoch has {len(lines)} steps, and its plan {plan.steps}"
            epoch.findings.append(Finding(epoch.number, first + at, what))
            return
        sizes = [end - start for start, end in map(plan.share, range(plan.shards))]
        given = line["samples"]
        if (counts := [_size(shard) for shard in given]) != sizes:
            what = f"its shards had {counts} samples, planned {sizes}"
            epoch.findings.append(Finding(epoch.number, first + at, what))
        elif weighted:
            epoch.used += sum(sizes)
        else:
            for shard, had in enumerate(given):
                planned = plan.indices(epoch.number, at, shard)
                if (deviation := _deviation(shard, had, planned)) is not None:
                    epoch.findings.append(Finding(epoch.number, first + at, deviation))
                places += had if isinstance(had, list) else planned
    if not weighted:
        _count(epoch, first, plan, np.array(places, dtype=np.int64))
    elif epoch.finished:
        epoch.left_out = max(0, plan.length - epoch.used)


def _size(shard: object) -> int:
    return len(shard) if isinstance(shard, list) else int(shard["n"]) if isinstance(shard, dict) else 0


def _deviation(shard: int, had: list[int] | dict[str, Any], planned: list[int]) -> str | None:
    """In what a shard differs from its plan."""
    if isinstance(had, dict):
        same = had["sha256"] == hash_of(planned)
        return None if same else f"shard {shard} had other samples than planned, by their hash"
    if had == planned:
        return None
    missing, foreign = sorted(set(planned) - set(had)), sorted(set(had) - set(planned))
    if not missing:
        return f"shard {shard} had its samples in another order, or one of them twice"
    return f"shard {shard} had {_named(foreign)} instead of {_named(missing)}"


def _count(epoch: Epoch, first: int, plan: Plan, places: Indices) -> None:
    """places: all samples of the epoch in the order of their places, shape (K,)."""
    planned, padding = places[: plan.length], places[plan.length :]
    samples, counts = np.unique(planned, return_counts=True)
    epoch.used, epoch.repeated = int((counts == 1).sum()), len(padding)
    for sample in samples[counts > 1][:NAMED_MAX]:
        steps = ", ".join(str(first + at // plan.batch_size) for at in np.flatnonzero(planned == sample))
        epoch.findings.append(Finding(epoch.number, None, f"sample {sample} was used more than once, in steps {steps}"))
    if (counts > 1).sum() > NAMED_MAX:
        what = f"and {(counts > 1).sum() - NAMED_MAX} more samples were used more than once"
        epoch.findings.append(Finding(epoch.number, None, what))
    if outside := [int(sample) for sample in samples if not 0 <= sample < plan.length]:
        what = f"the dataset has {plan.length} samples, so there is no {_named(outside)}"
        epoch.findings.append(Finding(epoch.number, None, what))
    if epoch.finished:
        epoch.left_out = plan.length - len(planned)


def _named(samples: Sequence[int]) -> str:
    shown = ", ".join(map(str, samples[:NAMED_MAX]))
    more = len(samples) - NAMED_MAX
    return f"sample{'s' * (len(samples) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")
