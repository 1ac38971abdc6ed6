"""`--verify every=N`: whether hardware has changed a bit, by values that several workers have computed alike.

In the first pass of every N-th step, one shard is computed by its owner and again by two other members, or by the other
one twice. Before anything is summed, all members hear all digests of that shard (its gradients, buffers and weight) and
of every member's state. Gradients and states have the same bits on every worker, so equality is exact, and whoever
differs from the majority is wrong. Pure, but for the digests.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from elastic.agent.worker.environment import VERIFY
from elastic.errors import ConfigError
from runtime.allreduce.reduction.partial_sum import Json, Partial
from runtime.recovery.state.change_detection import value_sum

VOUCHED = "vouched"
"""The field of a header."""
FINGERPRINTS = ("weights, rates and job.state", "buffers")
"""What all members compare in every operation anyway: a small part of the state, another one each time."""
CANDIDATES = 3
"""So many members compute the shard, if there are as many; one of them may be its owner."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """what: the values that differ, in words. worker: whose they are; "": the members are of two opinions, and nobody
    can say who is wrong."""

    worker: str
    what: str


@dataclass(frozen=True, slots=True)
class Verification:
    """every: steps from one that is verified to the next; 0: none is."""

    every: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Raises ConfigError."""
        text = environ.get(VERIFY, "0")
        if not text.isdecimal():
            raise ConfigError(f"{VERIFY}={text!r} is no number of steps; write for example 100, or 0 for never")
        return cls(int(text))

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def shard(self, step: int, units: int) -> int | None:
        """The shard of this step that is verified, another one each time; None: none is."""
        return step // self.every % units if self.due(step) and units else None

    def again(self, step: int, rank: int, world: int, *, own: bool) -> int:
        """How often the worker of this rank computes that shard for no other purpose. own: whether it has computed it
        for the sum."""
        if own or world < 2 or not 0 <= rank < world:
            return 0
        chosen = (rank - step // self.every) % world < CANDIDATES
        return 2 if world == 2 else int(chosen)


def digest_of(leaf: Partial) -> str:
    """16 hex digits of a leaf's values, as they would be summed. Any single bit counts, but of logged values: a script
    may log what workers cannot have in common, as the time that a shard takes."""
    sums: dict[str, int] = {name: value_sum(flat) for name, flat in leaf.flats.items()}
    for name, loose in leaf.loose.items():
        sums[name] = sum(map(value_sum, loose.parts)) % (1 << 64)
    sums = {name: total % (1 << 64) for name, total in sums.items()}
    about = json.dumps([sums, {**leaf.meta(), "node": None, "scalars": None}], sort_keys=True)
    return hashlib.blake2b(about.encode(), digest_size=8).hexdigest()


def vouched(shard: int, digests: Sequence[str], state: Mapping[str, str]) -> Json:
    """What a member says in the header. digests: of the shard, each time that it has computed it."""
    return {"shard": shard, "digests": list[Json](digests), "state": dict[str, Json](state)}


def suspect(headers: Mapping[str, Mapping[str, Json]]) -> Suspect | None:
    """Who is wrong, by the headers of all members; None: nobody. Every member finds the same."""
    given = {worker: headers[worker].get(VOUCHED) for worker in sorted(headers)}
    said = {worker: cast(dict[str, Any], about) for worker, about in given.items() if about}
    objects = sorted({name for about in said.values() for name in about["state"]})
    for name in objects:
        states = {worker: [about["state"][name]] for worker, about in said.items() if name in about["state"]}
        if (found := _minority(states, f"the state of {name}")) is not None:
            return found
    for shard in sorted({about["shard"] for about in said.values() if about["digests"]}):
        computed = {worker: about["digests"] for worker, about in said.items() if about["shard"] == shard}
        if (found := _minority(computed, f"the values of shard {shard}")) is not None:
            return found
    for name in FINGERPRINTS:
        parts = {w: [cast(dict[str, str], header["fingerprint"]).get(name, "")] for w, header in headers.items()}
        if (found := _minority(parts, f"a part of its state ({name})")) is not None and found.worker:
            return found  # else all members say who has which value
    return None


def _minority(votes: Mapping[str, Sequence[str]], what: str) -> Suspect | None:
    counted = Counter(digest for digests in votes.values() for digest in digests).most_common(2)
    if len(counted) < 2:
        return None
    (right, most), (_, next_most) = counted
    if most == next_most:
        return Suspect("", what)
    return Suspect(next(worker for worker, digests in votes.items() if any(one != right for one in digests)), what)
