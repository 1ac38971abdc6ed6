"""What `elastic doctor --ranks` says of a script, from what its runs have noted. Pure.

The guards that stop a script under `elastic run --ranks` are the rules: a run is refused by the error that it raised.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic.platforms.local.run_differences import (
    Check,
    Difference,
    EndedRun,
    Line,
    first_difference,
    indented,
    late_difference,
    moved_names,
)

RULES: Mapping[str, str] = {
    "ConfigError": "samplers are for N ranks; what is trained is made before the loop",
    "UnknownBatches": "training batches are of a DistributedSampler, or of ddp.batches()",
    "ReadAhead": "each batch comes to backward() before the next batch is taken",
    "MidShardCollective": "no collective before backward(); in an evaluation all_reduce alone",
    "TwoBackwards": "one backward() that reduces for each batch",
    "LeftPass": "all ranks leave the loop behind the same step, gradients reduced",
    "TooEarly": "optimizer.step() comes behind backward()",
    "StrayGradient": "zero_grad() in each step",
    "StateChanged": "weights and learning rates are the same in each turn of a step",
    "BufferChanged": "forward() changes BatchNorm's buffers only; an evaluation none",
    "NotCarried": "all state can be copied: no SyncBatchNorm, FSDP, LBFGS",
    "NotInPlace": "nothing depends on how many ranks a worker has",
    "Disagree": "all workers make the same calls",
    "JoinMissed": "a newcomer comes to the epoch in which the others are",
}
"""Error -> the rule that a script breaks which is stopped by it, in the order in which a script meets them."""

OPPOSITE = "ranks in the opposite order"
ALIKE = "two runs, alike"

_SIZES = {
    "list": "a list of {size:,} entries{grows}: newcomers get lists of at most {most:,} entries",
    "dict": "a dict of {size:,} entries: what changes in it is followed up to {most:,} entries",
    "tensor": "a tensor of {size:,} elements: newcomers get tensors of at most {most:,} elements, and averages of the "
    "weights",
    "level": "{size} levels deep: what is deeper than {most} levels is not followed",
    "objects": "{size} objects and dicts in one function: {most} are followed",
    "array": "a numpy array of {size:,} elements: arrays are not followed; use a number or a tensor",
    "set": "a set of {size:,} entries: sets are not followed; use a list or a dict",
}
"""Kind of a size, as runtime/frontends/ddp/frames/size_limits.py names it -> what is said of it."""


@dataclass(frozen=True, slots=True)
class RankRefusal:
    """A run that a guard has stopped. rule: the name of its error. place: FILE:LINE; "" if no line of the script stood
    then. message: what the script did, and what to write instead. run: which run it was."""

    rule: str
    place: str
    message: str
    run: str


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that the script changes, and whose size is limited. what: as an error would spell it."""

    what: str
    kind: str
    size: int
    most: int
    """The largest size that is followed; 0: none is."""
    grows: float
    """By how much in each step."""

    @property
    def text(self) -> str:
        grows = f" that grows by {self.grows:g} a step" if self.grows > 0 else ""
        return f"{self.what}: " + _SIZES[self.kind].format(size=self.size, most=self.most, grows=grows)

    @property
    def beyond(self) -> bool:
        """Whether it is not followed now: silent turns change it too, and newcomers do not get it."""
        return self.size > self.most


@dataclass(frozen=True, slots=True)
class RanksReport:
    ranks: int
    steps: int
    """Steps that the first run has trained."""
    refusals: tuple[RankRefusal, ...]
    checks: tuple[Check, ...]
    limits: tuple[Limit, ...]

    @property
    def qualifies(self) -> bool:
        return not self.refusals and all(check.difference is None for check in self.checks)

    def rules(self) -> dict[str, str]:
        """Rule -> "ok"; "refused"; or "open", as a run that is refused does not come to what lies behind."""
        refused = {refusal.rule for refusal in self.refusals}
        return {
            name: "refused" if name in refused else "open" if self.refusals else "ok"
            for name in dict.fromkeys([*RULES, *sorted(refused)])
        }

    def document(self) -> dict[str, Any]:
        return {
            "qualifies": self.qualifies,
            "ranks": self.ranks,
            "steps": self.steps,
            "rules": [
                {"name": name, "rule": RULES.get(name, ""), "state": state} for name, state in self.rules().items()
            ],
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "checks": [asdict(check) for check in self.checks],
            "limits": [{**asdict(limit), "said": limit.text} for limit in self.limits],
        }

    def text(self) -> Iterator[str]:
        yield f"{self.ranks} ranks, {self.steps} steps"
        rules = self.rules()
        for name, state in rules.items():
            if state != "open":
                yield f"  {state:<9}  {name:<18} {RULES.get(name, '')}".rstrip()
            yield from (line for refusal in self.refusals if refusal.rule == name for line in _told(refusal))
        if left := list(rules.values()).count("open"):
            yield f"  {'open':<9}  {left} other rules: a run that is refused ends there"
        for check in self.checks:
            state = "DIFFERENT" if check.difference else "same bits" if check.tried else "too short"
            yield f"  {state}  {check.name}"
            yield from indented(check.difference) if check.difference else ()
        for limit in self.limits:
            yield from _wrapped(limit.text, f"  {'beyond' if limit.beyond else 'limit':<9}  ")
        yield "qualifies" if self.qualifies else "does not qualify"


def _told(refusal: RankRefusal) -> Iterator[str]:
    yield " " * 13 + f"{refusal.place or 'at the end of the script'}, {refusal.run}:"
    yield from _wrapped(refusal.message, " " * 13)


def _wrapped(text: str, first: str) -> list[str]:
    return textwrap.wrap(
        text, 100, initial_indent=first, subsequent_indent=" " * 13, break_long_words=False, break_on_hyphens=False
    )


def refusal_of(ended: EndedRun, run: str, directory: str) -> RankRefusal | None:
    """None: the run came to its end, or the script has failed by itself. directory: in which the script was started;
    files below it are named without it."""
    raised = ended.raised
    if raised is None or not raised["ours"]:
        return None
    place, message = (raised[key].replace(f"{directory}/", "") for key in ("place", "message"))
    return RankRefusal(raised["raised"], place, message, run)


def failed(ended: EndedRun) -> Difference:
    """The difference to a run in which the script has failed by itself, while it did not in the first run."""
    raised = ended.raised
    what = f"its process ended with exit code {ended.exit_code}"
    if raised is not None:
        what = f"it raised {raised['raised']}: {raised['message']}" + (
            f" at {raised['place']}" if raised["place"] else ""
        )
    because = (
        "what it met there does not exist in a process that begins later: a value or a file that only the first "
        "process makes, or an epoch that this process passes by with one batch"
    )
    return Difference(None, what, because)


def limits_of(lines: Sequence[Line]) -> tuple[Limit, ...]:
    """The largest size of each thing, and how it has grown from the first step to the last."""
    seen: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for line in lines:
        for what, kind, size, most in line["sizes"]:
            seen.setdefault((what, kind), []).append((line["step"], size, most))
    found: list[Limit] = []
    for (what, kind), sizes in seen.items():
        (first, least, _), (last, largest, most) = sizes[0], sizes[-1]
        grows = (largest - least) / (last - first) if last > first else 0.0
        limit = Limit(what, kind, max(size for _, size, _ in sizes), most, round(grows, 2))
        if kind != "list" or grows > 0 or limit.size * 2 > most:
            found.append(limit)
    return tuple(sorted(found, key=lambda limit: (not limit.beyond, limit.what)))


def not_alike(once: Sequence[Line], again: Sequence[Line]) -> Difference | None:
    """The difference between two equal runs."""
    found = first_difference(once, again)
    if found is None:
        return None
    return Difference(
        found.step,
        found.what,
        "something is decided by no seed: the clock, a process id, the order of a set, a generator without a seed, a "
        "thread, a network, os.urandom, or a kernel that is not deterministic",
    )


def by_order(once: Sequence[Line], backwards: Sequence[Line]) -> Difference | None:
    """The difference to a run in which each step's turns came in the opposite order."""
    found = first_difference(once, backwards)
    if found is None:
        return None
    named = _beyond(once)
    because = "a turn finds what the turn before has left in its process, and workers have other ranks each: " + (
        f"{named}, see below" if named else "a cache, the batch of the step before, or another value that is not undone"
    )
    return Difference(found.step, found.what, because)


def of_late(once: Sequence[Line], other: Sequence[Line], late: Sequence[Line], at: int, how: str) -> Difference | None:
    """The difference to a run that begins in step `at`. other: a run from the first step on. how: "resumed" or
    "joins"."""
    found = late_difference(once, late, at, how)
    if found is None:
        return None
    names = moved_names("variables", once, other, late, at + 1) if at < once[-1]["step"] else []
    if named := _beyond(once):
        because = f"a newcomer does not get {named}, see below"
    elif names:
        because = (
            f"`{names[0]}` is another one there: it is nothing that a newcomer gets. Count in a number or a short list "
            "of the script, compute it from the step, or make it a buffer of the model"
        )
    else:
        because = (
            "something goes on in a process and is not copied: what only rank 0 computes, a value in a closure or a "
            "library, a cache; or the script computes with RANK or LOCAL_RANK"
        )
    return Difference(found.step, found.what, because)


def _beyond(lines: Sequence[Line]) -> str:
    """The names of what is not followed."""
    return ", ".join(limit.what for limit in limits_of(lines) if limit.beyond)
