"""The random numbers of torch, numpy and Python's random, together: seeded from a position, or kept as they are."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class ShardRandom:
    """A shard's own sources of random numbers, the same wherever it runs."""

    seed: int
    generator: torch.Generator
    numpy: np.random.Generator


def own_random(seed: int) -> ShardRandom:
    """Generators that depend on the seed only and share nothing with the global ones."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    return ShardRandom(seed, generator, np.random.default_rng(seed))


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed_all(*position: object) -> int:
    """Seed torch (all devices), numpy and random from a position; returns the 63-bit seed."""
    text = ",".join(map(str, position))
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"shard seed").digest()
    derived = int.from_bytes(digest, "little") >> 1
    if _has_accelerator():
        torch.manual_seed(derived)
    else:
        # Without a device torch.manual_seed formats the caller's stack each time, to blame it for a failed start.
        torch.default_generator.manual_seed(derived)
    np.random.seed(derived & 0xFFFFFFFF)
    random.seed(derived)
    return derived


def seed_shard(seed: int, step: int, pass_no: int, shard: int, part: int = 0) -> int:
    """The same for the computation of a shard. part: of several that it has."""
    return seed_all(seed, step, pass_no, f"shard {shard}", *([part] if part else []))


def drawn_from() -> object:
    """Where the random numbers of torch, numpy and random stand; differs from before if any was drawn."""
    numpy_state = np.random.get_state(legacy=False)
    return (
        torch.get_rng_state().numpy().tobytes(),
        [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else [],
        repr(numpy_state),
        random.getstate(),
    )


@contextmanager
def randomness_kept() -> Iterator[None]:
    """Put the RNGs of torch, numpy and random back: what runs inside is not the same on every worker."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
