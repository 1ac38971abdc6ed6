"""The random numbers of torch, numpy and Python's random, together: seeded from a position, or restored."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class ShardRandom:
    """A shard's own sources of random numbers, the same in every worker. They depend on the seed only and share nothing
    with the global generators. Each is made when it is asked for: most shards need neither."""

    seed: int

    @cached_property
    def generator(self) -> torch.Generator:
        """A generator on the CPU that begins with the seed."""
        generator = torch.Generator()
        generator.manual_seed(self.seed)
        return generator

    @cached_property
    def numpy(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


@cache
def _seed_devices() -> Callable[[int], object]:
    """Seeds the generators of the accelerator that is here. torch.manual_seed seeds those of every kind that torch
    knows, and formats the caller's stack for each kind that is not here, which takes longer than the seeding."""
    if not torch.accelerator.is_available():
        return torch.default_generator.manual_seed
    kind = torch.accelerator.current_accelerator()
    here = getattr(torch.get_device_module(kind), "manual_seed_all", torch.manual_seed)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)
        here(value)

    return seed


def seed_all(*position: object) -> int:
    """Seed torch (all devices), numpy and random from a position; returns the 63-bit seed."""
    derived = derived_seed(b"shard seed", ",".join(map(str, position)).encode())
    seed_generators(derived)
    return derived


def derived_seed(purpose: bytes, position: bytes) -> int:
    """A seed of 63 bits, another one for each purpose and position. purpose: at most 16 bytes."""
    return int.from_bytes(hashlib.blake2b(position, digest_size=8, person=purpose).digest(), "little") >> 1


def seed_generators(value: int) -> None:
    """Seed torch (all devices), numpy and random with a number of 64 bits at most."""
    _seed_devices()(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)


def seed_shard(seed: int, step: int, pass_no: int, shard: int, part: int = 0) -> int:
    """As `seed_all`, for the computation of a shard. part: the number of one of its parts, 0 if it has one only."""
    return seed_all(seed, step, pass_no, f"shard {shard}", *([part] if part else []))


def drawn_from() -> object:
    """The states of the random numbers of torch, numpy and random; they differ after any number was drawn."""
    numpy_state = np.random.get_state(legacy=False)
    return (
        torch.get_rng_state().numpy().tobytes(),
        [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else [],
        repr(numpy_state),
        random.getstate(),
    )


GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generator_state(generator: Any) -> Any:
    """The state of a generator, an object of one of the types in GENERATORS."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """Give a generator a state that generator_state() has returned for a generator of the same type."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


class RandomNumbers:
    """The generators of torch (of the CPU, and of the current GPU if one is in use), numpy and random, as an object
    with a state."""

    def state_dict(self) -> dict[str, object]:
        """Tensors and plain values."""
        numpy_state: Any = np.random.get_state(legacy=True)
        _, keys, *position = numpy_state
        version, words, gauss = random.getstate()
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
            "numpy": [torch.from_numpy(keys.astype(np.int64)), *map(float, position)],
            "random": [version, torch.tensor(words), gauss],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"])
        keys, position, has_gauss, gauss = state["numpy"]
        words = keys.numpy().astype(np.uint32)
        np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
        version, python, following = state["random"]
        random.setstate((version, tuple(python.tolist()), following))


class _BeforeFork:
    """What was true in this process before its last fork, or in the process from which it was forked."""

    used_gpu = False
    """torch refuses to use a GPU in a process that was forked from one which used it."""

    @classmethod
    def note(cls) -> None:
        cls.used_gpu = cls.used_gpu or torch.cuda.is_initialized()


os.register_at_fork(before=_BeforeFork.note)


@contextmanager
def randomness_kept() -> Iterator[None]:
    """Restore the RNGs of torch, numpy and random afterwards, because the code inside differs between workers."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    refused = _BeforeFork.used_gpu and not torch.cuda.is_initialized()
    try:
        with torch.random.fork_rng(devices=range(0 if refused else torch.cuda.device_count())):
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
