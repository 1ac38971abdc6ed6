"""docs/metrics.md, the alert rules and the dashboard speak of the metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from elastic.metrics.catalogue import CATALOGUE, MetricKind

DOCS = Path(__file__).parents[4] / "docs"


def test_the_page_has_each_metric_with_its_type_labels_and_meaning() -> None:
    (table,) = re.findall(r"<!-- catalogue -->\n(.*?)<!-- /catalogue -->", (DOCS / "metrics.md").read_text(), re.DOTALL)
    rows = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table.splitlines()[2:]]
    assert [(name, kind, labels, text) for name, kind, labels, _, text in rows] == [
        (f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), m.text) for m in CATALOGUE
    ]
    assert all(unit for _, _, _, unit, _ in rows)


def test_rules_and_dashboard_name_only_metrics_that_there_are_and_each_is_on_the_dashboard() -> None:
    parts = {m.name: ("_bucket", "_sum", "_count") if m.kind is MetricKind.HISTOGRAM else ("",) for m in CATALOGUE}
    known = {name + part: name for name, ends in parts.items() for part in ends} | {"elastic_job": ""}
    registry = json.loads((DOCS / "metrics" / "grafana.json").read_text())
    shown = " ".join(target["expr"] for panel in registry["panels"] for target in panel["targets"])
    rules = " ".join(re.findall(r"expr: >-\n +(.*)", (DOCS / "metrics" / "alerts.yml").read_text()))
    named = {text: set(re.findall(r"\belastic_\w+", text)) for text in (shown, rules)}
    assert (named[shown] | named[rules]) - known.keys() == set()
    assert set(parts) - {known[name] for name in named[shown]} == set()
