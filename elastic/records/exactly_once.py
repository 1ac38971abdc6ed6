"""Whether the ledger of a job proves that each sample of each epoch's plan was used exactly once.

The ledger's lines alone decide it, in two ways: the samples of a step are compared with the plan that its line names,
and the samples of an epoch are counted, which also finds a wrong plan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

import numpy as np

from elastic.protocol.sampling import Indices, SamplePlan, hash_of, hash_of_ranks
from elastic.records.ledger import Line, depends_on_time

NAMED_MAX = 20
"""Most samples that one finding names; further ones are counted."""


@dataclass(frozen=True, slots=True)
class EpochFinding:
    """A deviation from the plan. step: the job's number; None: the finding is about the whole epoch."""

    epoch: int
    step: int | None
    what: str


@dataclass(slots=True)
class Epoch:
    """What the ledger has of one epoch. Counts are samples, or draws if there are weights, or batches of a stream."""

    number: int
    """In its training loop."""
    order: str
    """"shuffled", "in order", "weighted", "stream"; "sampler": a DistributedSampler's; "unknown": the script's own, or
    those of workers that do not wait for each other."""
    steps: int = 0
    planned_steps: int | None = None
    used: int = 0
    """How many were used exactly once."""
    left_out: int = 0
    """How many samples of a finished epoch are the tail that tail="drop" leaves out."""
    repeated: int = 0
    """How many tail="pad" gives a second time, to fill up the last step."""
    findings: list[EpochFinding] = field(default_factory=list)
    loop: int = 0
    """The training loop, of a script that has several."""

    @property
    def finished(self) -> bool:
        return self.planned_steps is None or self.steps >= self.planned_steps

    @property
    def proved(self) -> bool:
        """Whether the plan was followed, in an epoch in progress as far as it is."""
        return self.order != "unknown" and not self.findings

    def find(self, step: int | None, what: str) -> None:
        """Add a finding; see EpochFinding."""
        self.findings.append(EpochFinding(self.number, step, what))


def prove(lines: Iterable[Line]) -> list[Epoch]:
    """The epochs of a ledger, in order, with their findings. Takes 8 bytes for each sample of one epoch."""
    epochs: list[Epoch] = []
    step = 0
    for (loop, number), group in groupby(lines, key=_place):
        if epochs:
            _close(epochs[-1])
        epoch = _examine(number, step, group)
        epoch.loop = loop
        # A loop begins with any epoch, as a script may go on counting; and one without steps has no line.
        begins = loop > (epochs[-1].loop if epochs else 0)
        before = epochs[-1].number if epochs else -1
        if number != before + 1 and not begins:
            epoch.findings.insert(0, EpochFinding(number, step, f"epoch {number} comes after epoch {before}"))
        epochs.append(epoch)
        step += epoch.steps
    return epochs


def _place(line: Line) -> tuple[int, int]:
    """(training loop, epoch) of a step"""
    return int((line.get("data") or {}).get("loop", 0)), int(line["epoch"])


def _close(epoch: Epoch) -> None:
    """Check an epoch that another one has followed."""
    if not epoch.finished:
        what = f"it ended after {epoch.steps} of {epoch.planned_steps} steps, and the rest of its samples was not used"
        epoch.find(None, what)


def _examine(number: int, first: int, lines: Iterator[Line]) -> Epoch:
    """Examine one epoch. first: the job's number of its first step. Lines after a misplaced line are not judged."""
    head = next(lines)
    data: dict[str, Any] | None = head.get("data")
    epoch = Epoch(number, "unknown" if data is None or depends_on_time(head) else data["order"])
    contents = _contents(epoch, first, data)
    for at, line in enumerate(chain([head], lines)):
        epoch.steps += 1
        if line["step"] != first + at:
            epoch.find(first + at, f"its line in the ledger is that of step {line['step']}")
            contents = None
        elif line.get("data") != data:
            epoch.find(first + at, "it was planned from other data than the epoch's first step")
            contents = None
        if contents is not None:
            contents.take(at, line["samples"])
    if contents is not None:
        contents.end()
    return epoch


class _Contents(ABC):
    """Examines the samples of an epoch's steps. first: the job's number of its first step."""

    def __init__(self, epoch: Epoch, first: int) -> None:
        self._epoch, self._first = epoch, first

    @abstractmethod
    def take(self, at: int, given: list[Any]) -> None:
        """Take the next step. at: its number in the epoch. given: what each shard had, as the ledger has it."""

    @abstractmethod
    def end(self) -> None:
        """Note that the last step was taken."""

    def _find(self, at: int, what: str) -> None:
        self._epoch.find(self._first + at, what)


def _contents(epoch: Epoch, first: int, data: dict[str, Any] | None) -> _Contents | None:
    if data is None or epoch.order == "unknown":
        return None
    match epoch.order:
        case "stream":
            return _Batches(epoch, first, data["shards"])
        case "sampler":
            return _Sampled(epoch, first, data)
    return _Samples(epoch, first, data)


class _Batches(_Contents):
    """Checks a stream: step after step each shard had its next batch."""

    def __init__(self, epoch: Epoch, first: int, shards: int) -> None:
        super().__init__(epoch, first)
        self._shards = shards

    def take(self, at: int, given: list[Any]) -> None:
        had = [shard.get("batch") for shard in given]
        self._epoch.used += had.count(at)
        if had != [at] * self._shards:
            self._find(at, f"its shards had the batches {had}, each should be {at}")

    def end(self) -> None:
        """Do nothing: the number of batches is not known."""


class _Sampled(_Contents):
    """Checks a torchrun script: each rank had what its DistributedSampler gives it, compared by hash."""

    def __init__(self, epoch: Epoch, first: int, data: dict[str, Any]) -> None:
        super().__init__(epoch, first)
        self._sha256 = data["sha256"]
        self._samples: int = data["samples"]
        self._planned: int = data["drawn"]
        self._ranks: list[list[int]] = [[] for _ in range(data["shards"])]
        self._listed = True

    def take(self, at: int, given: list[Any]) -> None:
        if len(given) != len(self._ranks):
            self._find(at, f"it had samples of {len(given)} ranks, there are {len(self._ranks)}")
        for rank, had in zip(self._ranks, given, strict=False):
            if isinstance(had, list):
                rank += had
            else:
                self._listed = False

    def end(self) -> None:
        epoch, drawn = self._epoch, [sample for rank in self._ranks for sample in rank]
        epoch.used = len(set(drawn))
        epoch.repeated = len(drawn) - epoch.used
        if not self._listed:
            what = "the samples of some steps are listed by their hash only, so the order of the epoch is not known"
        elif len(drawn) < self._planned:
            epoch.planned_steps = epoch.steps + 1  # the number of batches per step is not known
            return
        elif hash_of_ranks(self._ranks) != self._sha256:
            what = "its ranks had other samples, or in another order, than the DistributedSampler gives them"
        else:
            epoch.left_out = self._samples - epoch.used
            return
        epoch.find(None, what)


class _Samples(_Contents):
    """Checks a dataset: each step had the samples of its plan, and no sample came twice."""

    def __init__(self, epoch: Epoch, first: int, data: dict[str, Any]) -> None:
        super().__init__(epoch, first)
        self._plan = SamplePlan(
            length=data["samples"],
            batch_size=data["batch_size"],
            shards=data["shards"],
            seed=data.get("seed", 0),
            shuffle=epoch.order == "shuffled",
            tail=data["tail"],
        )
        epoch.planned_steps = self._plan.steps
        self._sizes = [end - start for start, end in map(self._plan.share, range(self._plan.shards))]
        self._places: list[Indices] = []

    def take(self, at: int, given: list[Any]) -> None:
        epoch = self._epoch
        if at >= self._plan.steps:
            self._find(at, f"the epoch's plan has only {self._plan.steps} steps")
        elif (sizes := [_size(shard) for shard in given]) != self._sizes:
            self._find(at, f"its shards had {sizes} samples, planned {self._sizes}")
        elif epoch.order == "weighted":
            epoch.used += sum(sizes)
        else:
            for shard, had in enumerate(given):
                planned = self._plan.indices(epoch.number, at, shard)
                if (deviation := _deviation(shard, had, planned)) is not None:
                    self._find(at, deviation)
                self._places.append(np.array(had if isinstance(had, list) else planned, dtype=np.int64))

    def end(self) -> None:
        if self._epoch.order != "weighted":
            places = np.concatenate(self._places) if self._places else np.zeros(0, dtype=np.int64)
            _count(self._epoch, self._first, self._plan, places)
        elif self._epoch.finished:
            self._epoch.left_out = max(0, self._plan.length - self._epoch.used)


def _size(shard: object) -> int:
    return len(shard) if isinstance(shard, list) else int(shard["n"]) if isinstance(shard, dict) else 0


def _deviation(shard: int, had: list[int] | dict[str, Any], planned: list[int]) -> str | None:
    """How a shard differs from its plan, or None."""
    if isinstance(had, dict):
        same = had["sha256"] == hash_of(planned)
        return None if same else f"shard {shard} had other samples than planned, by their hash"
    if had == planned:
        return None
    missing, foreign = sorted(set(planned) - set(had)), sorted(set(had) - set(planned))
    if not missing:
        return f"shard {shard} had its samples in another order, or one of them twice"
    return f"shard {shard} had {_named(foreign)} instead of {_named(missing)}"


def _count(epoch: Epoch, first: int, plan: SamplePlan, places: Indices) -> None:
    """Count how often each sample was used. places: the epoch's samples in the order of places, shape (K,)."""
    planned, padding = places[: plan.length], places[plan.length :]
    samples, counts = np.unique(planned, return_counts=True)
    epoch.used, epoch.repeated = int((counts == 1).sum()), len(padding)
    for sample in samples[counts > 1][:NAMED_MAX]:
        steps = ", ".join(str(first + at // plan.batch_size) for at in np.flatnonzero(planned == sample))
        epoch.find(None, f"sample {sample} was used more than once, in steps {steps}")
    if (counts > 1).sum() > NAMED_MAX:
        epoch.find(None, f"and {(counts > 1).sum() - NAMED_MAX} more samples were used more than once")
    if outside := [int(sample) for sample in samples if not 0 <= sample < plan.length]:
        epoch.find(None, f"the dataset has {plan.length} samples, so there is no {_named(outside)}")
    if epoch.finished:
        epoch.left_out = plan.length - len(planned)


def _named(samples: Sequence[int]) -> str:
    shown = ", ".join(map(str, samples[:NAMED_MAX]))
    more = len(samples) - NAMED_MAX
    return f"sample{'s' * (len(samples) > 1)} {shown}" + (f" and {more} more" if more > 0 else "")
