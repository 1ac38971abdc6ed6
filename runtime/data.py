"""Which samples a shard gets: a pure function of (seed, epoch, step, shard), without any iterator state.

The order of an epoch is a keyed bijection of 0..n-1, computed position by position in constant memory: an
alternating Feistel network (Luby & Rackoff 1988) on the smallest range of a power of two that holds n, and cycle
walking back into 0..n-1 (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). The round function is
a 64-bit multiply-xorshift mix; it shuffles well and hides nothing from an adversary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from elastic.errors import ConfigError

Indices: TypeAlias = NDArray[np.int64]
_Words: TypeAlias = NDArray[np.uint64]
Tail: TypeAlias = Literal["drop", "pad"]

LENGTH_MAX = 1 << 62
_ROUNDS = 8
_SHIFT = np.uint64(32)
_FIRST_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SECOND_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> _Words:
    digest = hashlib.blake2b(f"{seed},{epoch}".encode(), digest_size=8 * _ROUNDS, person=b"epoch order").digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _mix(words: _Words, key: np.uint64) -> _Words:
    words = (words ^ key) * _FIRST_MULTIPLIER
    words ^= words >> _SHIFT
    words *= _SECOND_MULTIPLIER
    words ^= words >> _SHIFT
    return words


def _feistel(words: _Words, keys: _Words, low_bits: int, high_bits: int) -> _Words:
    """One pass of the network over 0 .. 2**(low_bits + high_bits) - 1; the halves may differ by a bit."""
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


@dataclass(frozen=True, slots=True)
class Plan:
    """What an epoch of a dataset looks like, whatever the world.

    length: samples of the dataset. batch_size: samples of one step, split over the shards; if it does not divide,
    the first shards get one more. tail="drop" leaves out the samples after the last full batch of an epoch's
    order; "pad" fills the last step up with samples from the start of the same order, so those are seen twice.
    Raises ConfigError for what cannot be planned.
    """

    length: int
    batch_size: int
    shards: int
    seed: int = 0
    shuffle: bool = False
    tail: Tail = "drop"

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
        if self.steps == 0:
            raise ConfigError(
                f"the dataset has {self.length} samples, fewer than one step of batch_size={self.batch_size}: "
                'nothing would be trained; lower batch_size or use tail="pad"'
            )

    @property
    def steps(self) -> int:
        """Steps of one epoch."""
        full, rest = divmod(self.length, self.batch_size)
        return full + 1 if rest and self.tail == "pad" else full

    def share(self, shard: int) -> tuple[int, int]:
        """(first, end): where the samples of a shard lie within the batch of a step."""
        if not 0 <= shard < self.shards:
            raise IndexError(f"shard {shard} of {self.shards}")
        base, extra = divmod(self.batch_size, self.shards)
        first = shard * base + min(shard, extra)
        return first, first + base + (shard < extra)

    def indices(self, epoch: int, step: int, shard: int) -> list[int]:
        """The dataset indices of one shard; step counts within the epoch."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of an epoch of {self.steps}")
        first, end = self.share(shard)
        samples: list[int] = _batch(self, epoch, step)[first:end].tolist()
        return samples


@lru_cache(maxsize=4)
def _batch(plan: Plan, epoch: int, step: int) -> Indices:
    """All samples of a step. Kept for the next shard, because a network pass costs per call, not per sample."""
    first = step * plan.batch_size
    positions = np.arange(first, first + plan.batch_size, dtype=np.int64) % plan.length
    return permute(plan.seed, epoch, plan.length, positions) if plan.shuffle else positions
