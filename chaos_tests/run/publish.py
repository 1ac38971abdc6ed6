"""Judge a chaos run from its files, and write report.html, report.json and junit.xml beside them."""

from __future__ import annotations

import json
from dataclasses import asdict

from chaos_tests.checkers import Judgement, judge
from chaos_tests.report import documents, page
from chaos_tests.run.campaign import Campaign
from chaos_tests.run.read_history import read_history
from elastic.errors import ConfigError
from elastic.observability.dashboard.job_history import numbers
from elastic.observability.dashboard.saved_page import saved_page
from elastic.observability.dashboard.thinned_series import ThinnedSeries
from elastic.records.files import write_atomically
from elastic.records.journal import read_all, recoveries


def report(campaign: Campaign) -> tuple[Judgement, ...]:
    """What every checker says. Raises ConfigError if a run has left nothing to judge."""
    may_be_unknown = frozenset(campaign.allowed)
    history = read_history(campaign.home / "faulty", campaign.home / "quiet")
    if not history.faulty.events:
        raise ConfigError(f"{campaign.home / 'faulty'} holds no journal; the run did not begin")
    findings = judge(history)
    told = recoveries(read_all(campaign.home / "faulty"))
    asked = {**asdict(campaign), "home": str(campaign.home)}
    document = documents.document(asked, history, findings, told, may_be_unknown)
    above = page.above(asked, history, findings, may_be_unknown)
    quiet = ThinnedSeries()
    for step in history.quiet.steps:
        quiet.add(step.number, dict(numbers(step.line["scalars"])))
    more = {
        "rate": page.rate(history.faulty, history.faulty.events[0].line["t_wall"]),
        "beside": {"name": "the undisturbed run", "steps": quiet.document()},
    }
    for name, text in (
        ("report.json", json.dumps(document, indent=1) + "\n"),
        ("junit.xml", documents.junit(findings, document["seconds"], may_be_unknown)),
        ("report.html", saved_page(campaign.home / "faulty", "chaos", above, more)),
    ):
        # Words of a script may be no text.
        write_atomically(campaign.home / name, text.encode(errors="backslashreplace"))
    return findings
