"""Traces of machines that come and go: what is read, what it does to a job, and the shape of those that are made."""

from __future__ import annotations

import statistics
from itertools import accumulate, groupby, pairwise

import pytest

from chaos_tests.run import request
from chaos_tests.scenario.schedule import Planned, plan_of_trace
from chaos_tests.scenario.traces import Absence, Change, absences, as_csv, divided, generate, read_trace
from elastic.cli import main
from elastic.errors import ConfigError

CSV = """\
# three machines
0,add,a
0,add,b
0,add,c
60000,remove,b
60000,remove,c
90000,add,d
120000,add,c
"""


def test_a_trace_of_nodes_is_read() -> None:
    trace = read_trace(CSV, "t.csv")
    assert trace[3:6] == (Change(60.0, "b", False), Change(60.0, "c", False), Change(90.0, "d", True))
    assert read_trace(as_csv(trace), "t.csv") == trace


@pytest.mark.parametrize(
    "text", ["0,2\n60000,1\n120000,2\n", "[2, 1, 2]", '{"metadata": {"gap_seconds": 60}, "data": [2, 1.0, 2]}']
)
def test_counts_are_read_and_the_oldest_goes_first(text: str) -> None:
    came = [Change(0.0, "n0", True), Change(0.0, "n1", True)]
    assert read_trace(text, "t") == (*came, Change(60.0, "n0", False), Change(120.0, "n2", True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no node ever goes"),
        ("0,add,a\n", "no node ever goes"),
        ("0,add\n", "'add' is no number|is not ms,COUNT"),
        ("0,add,a\n5,gone,a\n", "line 2: '5,gone,a' is not ms,add,NODE"),
        ("0,add,a\n5,remove,b\n", "line 2: remove of b, which is not there"),
        ("0,add,a\n5,add,a\n", "line 2: add of a, which is there already"),
        ("9,add,a\n5,remove,a\n", "line 2: 5 ms is before the line above it"),
        ("-1,add,a\n", "is no time in milliseconds"),
        ("0,add,../a\n", "is no name of a node"),
        ("0,3\n5,x\n", "line 2: '5,x' is not ms,COUNT"),
        ("[3, true]", "True is no number of nodes"),
        ("[3, -1]", "-1 is no number of nodes"),
        ("[3, 1e99]", "1e\\+99 is no number of nodes"),
        ('{"data": 3}', "neither a list"),
        ('{"metadata": {"gap_seconds": 0}, "data": []}', "gap_seconds=0"),
        ("[3", "not valid JSON"),
    ],
)
def test_a_bad_trace_says_where_and_what(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_trace(text, "t.csv")


def test_places_are_empty_until_another_node_takes_them() -> None:
    trace = read_trace(CSV, "t.csv")
    assert absences(trace, 3, 1.0) == (Absence(0.0, 1, 30.0), Absence(0.0, 2, 60.0))
    assert absences(trace, 3, 10.0) == (Absence(0.0, 1, 3.0), Absence(0.0, 2, 6.0))
    assert absences(trace, 1, 1.0) == (), "the first place keeps its node"


def test_a_smaller_fleet_has_its_losses_at_the_same_instants() -> None:
    trace = read_trace("[8, 7, 2, 3, 8, 0, 8]", "t.json")
    at_s = [(change.at_s, change.there) for change in divided(trace, 4)]
    # 8 nodes are two; one goes, then the other one; one comes with one node, the second one with five.
    assert at_s[:6] == [(0.0, True), (0.0, True), (60.0, False), (120.0, False), (180.0, True), (240.0, True)]
    assert at_s[6:] == [(300.0, False), (300.0, False), (360.0, True), (360.0, True)], "all of them, and all again"
    assert len(absences(divided(trace, 4), 2, 1.0)) == 4


@pytest.mark.parametrize(
    ("name", "most", "lost", "instants"),
    [
        ("bamboo-p3", 32, 167, 79),
        ("bamboo-g4dn", 24, 74, 48),
        ("parcae-hh", 32, 19, 9),
        ("parcae-hl", 32, 11, 6),
        ("parcae-lh", 24, 18, 8),
        ("parcae-ll", 18, 4, 3),
    ],
)
def test_published_traces_have_what_was_published(name: str, most: int, lost: int, instants: int) -> None:
    trace = read_trace(request.trace_path(name).read_text(), name)
    counts = list(accumulate(1 if change.there else -1 for change in trace))
    gone = [change.at_s for change in trace if not change.there]
    assert (max(counts), len(gone), len(set(gone))) == (most, lost, instants)
    small = divided(trace, 8)
    assert {change.at_s for change in small if not change.there} <= set(gone)
    assert max(accumulate(1 if change.there else -1 for change in small)) == -(-most // 8)


def test_who_leaves_for_good_leaves_its_place_empty_to_the_end() -> None:
    trace = read_trace("0,add,a\n0,add,b\n1000,remove,a\n3000,remove,b\n4000,add,c\n9000,remove,c\n", "t")
    assert absences(trace, 2, 1.0) == (Absence(0.0, 0, 3.0), Absence(2.0, 1, 6.0), Absence(8.0, 0, 0.0))


def test_a_plan_follows_the_trace_and_ends_with_the_duration() -> None:
    trace = read_trace(CSV, "t.csv")
    planned = plan_of_trace(trace, 3, 10.0)
    assert planned == (Planned(1, 1.0, "reclaim", "", 1, 3.0), Planned(2, 1.0, "reclaim", "", 2, 6.0))
    assert plan_of_trace(trace, 3, 10.0, duration_s=0.5) == ()
    assert planned[0].fault.by == "capacity.reclaim" and planned[0].lasts_s == 3.0


def test_what_is_generated_has_the_published_shape() -> None:
    trace = generate(5, 12, 30 * 24 * 3600.0)
    assert trace == generate(5, 12, 30 * 24 * 3600.0) != generate(6, 12, 30 * 24 * 3600.0)
    bursts = [(at_s, len(list(changes))) for at_s, changes in groupby(trace[12:], key=lambda change: change.at_s)]
    assert 110 < statistics.median(after - before for (before, _), (after, _) in pairwise(bursts)) < 130
    assert max(size for _, size in bursts) == 6
    assert {True, False} == {change.there for change in trace[12:]}


@pytest.mark.parametrize("name", ["spot-8-nodes", "spot-32-nodes"])
def test_what_comes_along_was_made_as_its_first_line_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    head, _, body = request.trace_path(name).read_text().partition("\n")
    assert main(head.removeprefix("# elastic ").split()) == 0
    assert capsys.readouterr().out == body
    assert read_trace(body, name)
