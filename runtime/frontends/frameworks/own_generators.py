"""Generators of random numbers that a sampler, a collator or a dataset keeps for itself. Their state is what was drawn
in this process, which no other process has drawn: a newcomer, or a worker that has other ranks, would draw others."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from runtime.data.random_state import GENERATORS, derived_seed, generator_state, set_generator_state

DEPTH_MAX = 4
"""How many attributes of attributes are gone through, such as the sampler of a batch sampler."""
Owned = tuple[Any, str]
"""An object, and the name of its attribute that is a generator, or will be one."""
CLOSED = (type, ModuleType, FunctionType, BuiltinFunctionType, nn.Module, torch.Tensor, np.ndarray)
"""What is not gone through."""


def owned_by(*things: Any, samplers: bool = False) -> list[Owned]:
    """The generators in these objects and in their attributes, in an order that all processes have. samplers: also
    those of samplers, which a method of a trainer, as a collator, would reach."""
    closed = CLOSED if samplers else (*CLOSED, DataLoader, Sampler)
    found: list[Owned] = []
    seen: set[int] = set()

    def look(thing: Any, depth: int) -> None:
        if isinstance(thing, MethodType):
            thing = thing.__self__
        elif isinstance(thing, functools.partial):
            thing = thing.func
        if id(thing) in seen or depth > DEPTH_MAX or isinstance(thing, closed) or not hasattr(thing, "__dict__"):
            return
        seen.add(id(thing))
        for name, value in list(vars(thing).items()):
            if isinstance(value, GENERATORS) or (name == "generator" and _makes_its_own(thing)):
                found.append((thing, name))
            else:
                look(value, depth + 1)

    for thing in things:
        look(thing, 0)
    return found


def _makes_its_own(thing: Any) -> bool:
    """Whether it is a collator of transformers with `seed=`, which makes its generator with its first batch."""
    return getattr(thing, "seed", None) is not None and hasattr(thing, "get_generator")


def seed(owned: Iterable[Owned], *position: object) -> None:
    """Let each generator begin with a number that depends on the position, on its place and on its owner's `seed`."""
    for place, (owner, name) in enumerate(owned):
        given = getattr(owner, "seed", None)
        text = ",".join(map(str, (*position, place, *([given] if isinstance(given, int) else []))))
        value = derived_seed(b"own generator", text.encode())
        if _makes_its_own(owner):
            owner.generator, owner._generator_pid = owner.get_generator(value), os.getpid()
        else:
            _seed(getattr(owner, name), value)


def _seed(generator: Any, value: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(value)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(value).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(value & 0xFFFFFFFF)
    elif isinstance(generator, random.Random):
        generator.seed(value)


@contextmanager
def of_epoch(thing: Any, epoch: int) -> Iterator[None]:
    """What is drawn inside depends on the epoch and on the states that the generators of `thing` have, which they have
    again behind it. In epoch 0 they have them as they are, as in a run of the script by itself."""
    generators = [
        value for owner, name in owned_by(thing, samplers=True) if isinstance(value := getattr(owner, name), GENERATORS)
    ]
    states = [generator_state(generator) for generator in generators]
    try:
        for place, (generator, state) in enumerate(zip(generators, states, strict=True)):
            if epoch:
                words = state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state).encode()
                _seed(generator, derived_seed(b"order", words + f",{epoch},{place}".encode()))
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_generator_state(generator, state)
