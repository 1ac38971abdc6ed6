"""A planted defect that changes nothing would only show that chaos finds nothing."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TypeAlias, cast

import pytest

from tests.mutants.catalogue import MUTANTS


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_defect_names_only_what_there_is(name: str) -> None:
    mutant = MUTANTS[name]
    module = import_module(mutant.module)
    for named in re.findall(r"\bmodule\.([\w.]+)", inspect.getsource(mutant.patch)):
        operator.attrgetter(named)(module)


Place: TypeAlias = tuple[object, str]


@pytest.mark.parametrize("name", list(MUTANTS))
def test_a_defect_is_planted_where_there_is_something(name: str) -> None:
    mutant = MUTANTS[name]
    module = import_module(mutant.module)
    owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    before = _values(owners)
    try:
        mutant.patch(module)
        after = _values(owners)
    finally:
        for (owner, attribute), value in before.items():
            if vars(owner)[attribute] is not value:
                setattr(owner, attribute, value)
    assert after.keys() == before.keys(), "it adds something, and changes nothing"
    changed = [(value, after[place]) for place, value in before.items() if after[place] is not value]
    assert changed
    assert _values(owners) == before
    for sound, planted in changed:
        if inspect.isfunction(sound):
            _bind_as(sound, cast(Callable[..., object], planted))


def _bind_as(sound: Callable[..., object], planted: Callable[..., object]) -> None:
    """Raises TypeError if the planted function cannot be called as the sound one is: it would fail instead."""
    parameters = inspect.signature(sound).parameters.values()
    for called in (parameters, [one for one in parameters if one.default is one.empty]):
        words = [one for one in called if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        named = [one.name for one in called if one.kind is one.KEYWORD_ONLY]
        inspect.signature(planted).bind(*words, **dict.fromkeys(named))


def _values(owners: Iterable[object]) -> dict[Place, object]:
    return {(owner, name): value for owner in owners for name, value in vars(owner).items()}
