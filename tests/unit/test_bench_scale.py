"""What the bench of large jobs computes and draws from its figures."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from tests.bench.costs import plot, table
from tests.bench.curves import Curve, Panel, drawing
from tests.bench.machine import Drill
from tests.bench.report import missed
from tests.bench.scale import Figures

GOOD = Figures(1000, form_s=1.5, loss_ms=200, shrink_ms=400, etcd_writes=1, form_down=6000, loss_down=256, loss_up=140,
               resign_ms=300, adopt_s=1.0, resign_down=230, loss_cpu_ms=300)  # fmt: skip


def test_the_machine_forms_loses_one_and_gets_another_leader() -> None:
    """The drill itself checks who goes on; each word is counted once."""
    parts = {part.name: part.decisions for part in Drill(20).run() if part.name != "commit"}
    assert parts == {
        "elect": 1, "form": 40, "build": 20, "train": 40, "lose": 1, "report": 19, "rebuild": 19, "elect again": 1,
        "adopt": 38,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "row"),
    [
        ({"form_s": 2.1}, "formed"),
        ({"loss_ms": 501.0}, "loss announced"),
        ({"etcd_writes": 4}, "etcd writes"),
        ({"resign_ms": 2001.0}, "resigned"),
    ],
)
def test_a_target_that_is_missed_is_said(change: dict[str, float], row: str) -> None:
    assert not missed(table([GOOD], {}))
    rows = missed(table([replace(GOOD, **change)], {}))  # type: ignore[arg-type]
    assert len(rows) == 1 and row in rows[0].what


def test_bytes_that_grow_with_the_job_are_said() -> None:
    five = replace(GOOD, agents=5000, loss_down=260.0)
    assert not missed(table([GOOD, five], {}))
    assert [row.what for row in missed(table([GOOD, replace(five, loss_down=500.0)], {}))] == [
        "bytes to an agent for a loss, least and most"
    ]


def test_a_fleet_of_5000_has_ten_seconds_for_both() -> None:
    slow = replace(GOOD, agents=5000, form_s=7.0, shrink_ms=3100.0)
    assert [row.what for row in missed(table([slow], {}))] == ["5000 agents: formed, and one loss handled"]


def test_a_linear_cost_is_drawn_with_a_slope_of_one() -> None:
    image = drawing([Panel("bytes", "agents", [Curve("linear", [(10, 10), (100, 100), (1000, 1000)])])], "a title")
    root = ElementTree.fromstring(image)
    line = next(shape for shape in root.iter() if shape.tag.endswith("polyline"))
    (x1, y1), (x2, y2), (x3, y3) = ([float(c) for c in point.split(",")] for point in line.attrib["points"].split())
    assert math.isclose(x2 - x1, x3 - x2, abs_tol=0.2) and math.isclose(y2 - y1, y3 - y2, abs_tol=0.2)
    assert x3 > x1 and y3 < y1


def test_every_figure_of_the_plot_has_its_curve() -> None:
    image = plot([replace(GOOD, agents=100), GOOD])
    assert image.count("<polyline") == 8
    assert ElementTree.fromstring(image).attrib["aria-label"] == "cost against the number of agents"
