"""One row a fault: each kind has one, its function takes what the row gives, and docs/chaos.md lists it."""

from __future__ import annotations

import re
from collections import Counter
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from types import UnionType
from typing import get_args, get_type_hints

import pytest

from chaos_tests.scenario.catalogue import CATALOGUE, ROWS
from chaos_tests.scenario.faults import Aim, Effect, Fault, needed
from chaos_tests.scenario.schedule import PRESETS

PAGE = Path(__file__).resolve().parents[4] / "docs" / "chaos.md"


def test_every_kind_has_one_row() -> None:
    assert Counter(fault.name for fault in ROWS) == Counter(CATALOGUE.keys())


@pytest.mark.parametrize("fault", ROWS, ids=lambda fault: fault.name)
def test_the_function_of_a_row_takes_what_the_row_gives(fault: Fault) -> None:
    function = resolve_name(f"chaos_tests.nemesis.{fault.by}")
    signature(function).bind("the scene", "what is planned", **fault.given)
    hints = get_type_hints(function)
    for name, value in fault.given.items():
        hint = hints.get(name, float)  # the fields of Roughness come by **rough
        assert isinstance(value, get_args(hint) if isinstance(hint, UnionType) else hint), (name, value)


@pytest.mark.parametrize("fault", ROWS, ids=lambda fault: fault.name)
def test_a_row_does_not_contradict_itself(fault: Fault) -> None:
    assert fault.for_s >= 0 and fault.count >= 1 and fault.about
    assert not fault.spark or (fault.places and needed(fault) > needed(Fault("", "", "", aim=fault.aim)))
    assert fault.aim is not Aim.ALL or fault.effect is not Effect.ENDS
    assert fault.effect is not Effect.LEAVES or not fault.stalls, "who leaves does so between two steps"
    assert fault.usual == any(
        fault.name in PRESETS[name].weights for name in ("everything", "partition", "cluster", "rounds")
    )


def listed() -> Counter[str]:
    """Kinds in the table of faults of docs/chaos.md, also those of which it writes the end alone."""
    table = PAGE.read_text().partition("| kinds | how it is done |")[2].partition("\n\n")[0]
    found: Counter[str] = Counter()
    for row in table.splitlines()[2:]:
        names = re.findall(r"`([a-z0-9-]+)`", row.split("|")[1])
        whole = [name for name in names if not name.startswith("-")]
        begun = [*whole, *(name.rpartition("-")[0] for name in whole)]
        ends = [start + end for end in names if end.startswith("-") for start in begun if start + end in CATALOGUE]
        assert len(ends) >= len(names) - len(whole), row
        found.update([*whole, *ends])
    return found


def test_the_page_lists_every_kind_once() -> None:
    assert listed() == Counter(CATALOGUE.keys())
