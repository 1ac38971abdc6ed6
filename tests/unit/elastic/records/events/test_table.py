"""The table of events says what is written and what is read: the same names, with the fields that it declares."""

from __future__ import annotations

import re
from dataclasses import fields
from itertools import chain

import pytest

from chaos_tests.scenario.faults import JOINING, RECOVERY
from elastic.metrics.catalogue import CATALOGUE
from elastic.protocol import membership, worker_slot
from elastic.records.events import page
from elastic.records.events.alerts import notice
from elastic.records.events.page import FIELDS
from elastic.records.events.table import ROWS, TABLE, JournalEvent
from tests.unit.elastic.records.events.in_source import IN_EVERY_LINE, read, written
from tests.unit.sources import ROOT

OF_DATACLASS = {"worker_failed": worker_slot.TellLeader, "job_ended": membership.End}
"""Written with all fields of an action."""


def declared(row: JournalEvent) -> tuple[frozenset[str], frozenset[str]]:
    """Fields of every line, and those that a line may lack."""
    names = row.fields.split()
    perhaps = frozenset(name[:-1] for name in names if name.endswith("?"))
    return frozenset(names) - {f"{name}?" for name in perhaps}, perhaps


def test_each_event_has_one_row() -> None:
    assert len(TABLE) == len(ROWS)


def test_every_event_that_is_written_has_a_row() -> None:
    assert {one.event: one.where for one in written() if one.event not in TABLE} == {}


def test_every_row_is_written() -> None:
    assert TABLE.keys() - {one.event for one in written()} == set()


def test_every_event_that_a_reader_matches_has_a_row() -> None:
    assert {name: where for name, where in read().items() if name not in TABLE} == {}
    assert {*RECOVERY, *JOINING} <= TABLE.keys()


def wrong_fields(row: JournalEvent) -> frozenset[str]:
    """Fields that are written and not declared, or declared in another way than they are written."""
    found = [one for one in written() if one.event == row.name]
    several = {
        one.where for one in found for other in written() if other.where == one.where and other.event != one.event
    }
    every = frozenset.intersection(*(one.fields.always for one in found)) - IN_EVERY_LINE
    some = frozenset(chain(*(one.fields.always | one.fields.perhaps for one in found))) - IN_EVERY_LINE
    of_others = {
        name for one in found if one.where in several for name in one.fields.perhaps
    }  # of the call's other events
    always, perhaps = declared(row)
    undeclared = some - always - perhaps - of_others
    unwritten = frozenset() if any(one.fields.open for one in found) else (always | perhaps) - some
    return undeclared | unwritten | (every & perhaps) | ((always & some) - every - of_others)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_an_event_is_written_with_the_fields_of_its_row(row: JournalEvent) -> None:
    assert wrong_fields(row) == set()


@pytest.mark.parametrize(("name", "action"), OF_DATACLASS.items())
def test_an_event_with_the_fields_of_an_action_declares_them(name: str, action: type) -> None:
    assert {field.name for field in fields(action)} - IN_EVERY_LINE == declared(TABLE[name])[0]


def test_sentences_name_fields_that_the_line_has() -> None:
    named = {row.name: set(re.findall(r"{(\w+)", f"{row.said}{row.console}")) for row in ROWS}
    known = {row.name: frozenset().union(*declared(row), IN_EVERY_LINE) for row in ROWS}
    assert {name: some - known[name] for name, some in named.items() if some - known[name]} == {}


def test_a_row_says_what_its_event_means_and_feeds_metrics_that_there_are() -> None:
    assert [row.name for row in ROWS if not (row.said or row.about)] == []
    assert {name for row in ROWS for name in row.feeds} <= {metric.name for metric in CATALOGUE}


def test_every_field_has_a_meaning() -> None:
    assert {name for row in ROWS for names in declared(row) for name in names} == FIELDS.keys()


@pytest.mark.parametrize("row", [row for row in ROWS if row.console], ids=lambda row: row.name)
def test_a_line_that_lacks_fields_is_no_notice(row: JournalEvent) -> None:
    assert notice({"event": row.name}) is None


def test_the_page_is_what_the_table_makes() -> None:
    """python -m elastic.records.events > docs/events.md"""
    assert (ROOT / "docs" / "events.md").read_text(encoding="utf-8") == page.text()
