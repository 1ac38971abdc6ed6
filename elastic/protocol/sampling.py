"""Which samples a shard gets: a pure function of (seed, epoch, step, shard), without any iterator state.

The order of an epoch is a keyed bijection of 0..n-1, computed position by position in constant memory: an
alternating Feistel network (Luby & Rackoff 1988) on the smallest range of a power of two that holds n, and cycle
walking back into 0..n-1 (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). The round function is
a 64-bit multiply-xorshift mix; it shuffles well and hides nothing from an adversary.

With weights, samples are drawn with replacement: the same mix turns (seed, epoch, place) into a uniform number, and the
sample is the place of that number among the running sums of the weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from elastic.errors import ConfigError

Indices: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]
Tail: TypeAlias = Literal["drop", "pad"]

LENGTH_MAX = 1 << 62
_ROUNDS = 8
_DRAW_ROUNDS = 3
_SHIFT = np.uint64(32)
_FIRST_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SECOND_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int, person: bytes = b"epoch order") -> _Words:
    digest = hashlib.blake2b(f"{seed},{epoch}".encode(), digest_size=8 * _ROUNDS, person=person).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(words: _Words, key: np.uint64) -> _Words:
    words = (words ^ key) * _FIRST_MULTIPLIER
    words ^= words >> _SHIFT
    words *= _SECOND_MULTIPLIER
    words ^= words >> _SHIFT
    return words


def _feistel(words: _Words, keys: _Words, low_bits: int, high_bits: int) -> _Words:
    """One pass of the network over 0 .. 2**(low_bits + high_bits) - 1; low_bits and high_bits may differ by one."""
    shift = np.uint64(low_bits)
    low_mask = np.uint64((1 << low_bits) - 1)
    high_mask = np.uint64((1 << high_bits) - 1)
    low, high = words & low_mask, words >> shift
    for i in range(0, _ROUNDS, 2):
        low ^= _mix(high, keys[i]) & low_mask
        high ^= _mix(low, keys[i + 1]) & high_mask
    return (high << shift) | low


def permute(seed: int, epoch: int, n: int, positions: Indices) -> Indices:
    """The samples at these positions of the shuffled order of 0..n-1.

    positions: int64, shape (K,), each in 0..n-1; returns int64, shape (K,). Different positions give different
    samples. n up to 2**62; memory and time depend on K only (expected: under two passes of the network).
    """
    bits = max(1, (n - 1).bit_length())
    low_bits, high_bits = (bits + 1) // 2, bits // 2
    keys = _round_keys(seed, epoch)
    limit = np.uint64(n)
    words = _feistel(positions.astype(np.uint64), keys, low_bits, high_bits)
    while (outside := np.flatnonzero(words >= limit)).size:
        words[outside] = _feistel(words[outside], keys, low_bits, high_bits)
    return words.astype(np.int64)


class Weights:
    """How often each sample is drawn, relative to the others. Holds 8 bytes per sample; equal to nothing but itself."""

    def __init__(self, weights: ArrayLike) -> None:
        """weights: shape (n,), finite and not negative, in any unit. Raises ConfigError."""
        try:
            sums = np.array(weights, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"weights= must be one number for each sample: {error}") from error
        if sums.ndim != 1:
            raise ConfigError(f"weights= has shape {sums.shape}; give one number for each sample, shape (samples,)")
        if (bad := np.flatnonzero(~(np.isfinite(sums) & (sums >= 0)))).size:
            raise ConfigError(
                f"weights= has {sums[bad[0]]} for sample {bad[0]}, and {bad.size} such in all; a weight is a finite "
                "number, 0 for a sample that is never drawn"
            )
        if not sums.any():
            raise ConfigError("weights= are all 0, so no sample can be drawn; give at least one of them a weight")
        sums /= sums.max()  # so that their sum cannot overflow
        np.cumsum(sums, out=sums)
        self._sums = sums
        self.digest = hashlib.sha256(sums.astype("<f8", copy=False).data).hexdigest()[:16]
        """The digest of the running sums, in hexadecimal: weights with other digests draw other samples."""

    def __len__(self) -> int:
        return len(self._sums)

    def draw(self, seed: int, epoch: int, places: Indices) -> Indices:
        """The sample of each place, int64, shape (K,). places: int64, shape (K,), not negative."""
        words = places.astype(np.uint64)
        for key in _round_keys(seed, epoch, b"weighted draw")[:_DRAW_ROUNDS]:
            words = _mix(words, key)
        # A 53-bit fraction below 1, times a sum of at least 1, is below the sum: the search stays within the samples.
        uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._sums[-1]
        drawn: Indices = np.searchsorted(self._sums, uniform, side="right").astype(np.int64)
        return drawn


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Which samples each step of an epoch has. It does not depend on the world.

    length: number of samples of the dataset. batch_size: samples of one step, split over the shards; if it does not
    divide evenly, the first shards get one more. tail="drop" leaves out the samples after the last full batch of an
    epoch's order; "pad" fills the last step up with samples from the start of the same order, which are then seen
    twice. weights: samples are drawn by weight, with replacement; an epoch has as many draws as there are samples, and
    tail applies to the draws. Raises ConfigError for values that cannot be planned.
    """

    length: int
    batch_size: int
    shards: int
    seed: int = 0
    shuffle: bool = False
    tail: Tail = "drop"
    weights: Weights | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError("the dataset is empty; give job.loader() a dataset with at least one sample")
        if self.length > LENGTH_MAX:
            raise ConfigError(f"a dataset of {self.length} samples is too long; at most {LENGTH_MAX} can be shuffled")
        if self.shards < 1:
            raise ConfigError(f"shards={self.shards} must be at least 1")
        if self.batch_size < self.shards:
            raise ConfigError(
                f"batch_size={self.batch_size} is below shards={self.shards}: it counts the samples of one optimizer "
                "step, and each shard needs at least one; raise batch_size or lower shards"
            )
        if self.tail not in get_args(Tail):
            raise ConfigError(f'tail={self.tail!r} must be "drop" or "pad"')
        if self.weights is not None and len(self.weights) != self.length:
            raise ConfigError(
                f"weights= has {len(self.weights)} numbers and the dataset {self.length} samples; give one for each"
            )
        if self.weights is not None and self.shuffle:
            raise ConfigError("shuffle=True and weights= exclude each other: what is drawn has no order; drop shuffle=")
        if self.steps == 0:
            raise ConfigError(
                f"the dataset has {self.length} samples, fewer than one step of batch_size={self.batch_size}: "
                'nothing would be trained; lower batch_size or use tail="pad"'
            )

    @property
    def steps(self) -> int:
        """The number of steps of one epoch."""
        full, rest = divmod(self.length, self.batch_size)
        return full + 1 if rest and self.tail == "pad" else full

    @property
    def order(self) -> Literal["weighted", "shuffled", "in order"]:
        if self.weights is not None:
            return "weighted"
        return "shuffled" if self.shuffle else "in order"

    def about(self) -> dict[str, Any]:
        """All that decides which samples a step has, as JSON; for weights their digest."""
        document: dict[str, Any] = {
            "order": self.order,
            "samples": self.length,
            "batch_size": self.batch_size,
            "shards": self.shards,
            "tail": self.tail,
        }
        if self.order != "in order":
            document["seed"] = self.seed
        if self.weights is not None:
            document["weights"] = self.weights.digest
        return document

    def share(self, shard: int) -> tuple[int, int]:
        """(first, end): the range of a shard's samples within the batch of a step."""
        if not 0 <= shard < self.shards:
            raise IndexError(f"shard {shard} of {self.shards}")
        base, extra = divmod(self.batch_size, self.shards)
        first = shard * base + min(shard, extra)
        return first, first + base + (shard < extra)

    def indices(self, epoch: int, step: int, shard: int) -> list[int]:
        """The dataset indices of one shard. step: counted from the start of the epoch."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of an epoch of {self.steps}")
        first, end = self.share(shard)
        samples: list[int] = _batch(self, epoch, step)[first:end].tolist()
        return samples


def hash_of(indices: list[int]) -> str:
    """SHA-256, in hex, of the indices as little-endian int64. The ledger names the samples of a large shard by it."""
    return hashlib.sha256(np.array(indices, dtype="<i8").tobytes()).hexdigest()


def hash_of_ranks(ranks: Iterable[list[int]]) -> str:
    """SHA-256, in hex, of what a DistributedSampler gives each rank in an epoch, rank after rank."""
    sha = hashlib.sha256()
    for indices in ranks:
        sha.update(hash_of(indices).encode())
    return sha.hexdigest()


@lru_cache(maxsize=4)
def _batch(plan: SamplePlan, epoch: int, step: int) -> Indices:
    """All samples of a step. Cached for the next shard, because a network pass costs per call, not per sample."""
    first = step * plan.batch_size
    places = np.arange(first, first + plan.batch_size, dtype=np.int64)
    if plan.weights is not None:
        return plan.weights.draw(plan.seed, epoch, places)
    places %= plan.length
    return permute(plan.seed, epoch, plan.length, places) if plan.shuffle else places
