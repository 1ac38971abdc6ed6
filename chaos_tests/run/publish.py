"""Judge a chaos run from its files, and write report.html, report.json and junit.xml beside them."""

from __future__ import annotations

import json
from dataclasses import asdict

from chaos_tests.checkers import Judgement, judge
from chaos_tests.report import documents
from chaos_tests.run.campaign import Campaign
from chaos_tests.run.read_history import read_history
from elastic.errors import ConfigError
from elastic.records.files import write_atomically
from elastic.records.journal import read_all, recoveries


def report(campaign: Campaign, may_be_unknown: frozenset[str] = frozenset()) -> tuple[Judgement, ...]:
    """What every checker says. may_be_unknown: invariants that may stay unknown in a run that passes.

    Raises ConfigError if a run has left nothing to judge.
    """
    history = read_history(campaign.home / "faulty", campaign.home / "quiet")
    if not history.faulty.events:
        raise ConfigError(f"{campaign.home / 'faulty'} holds no journal; the run did not begin")
    findings = judge(history)
    told = recoveries(read_all(campaign.home / "faulty"))
    asked = {**asdict(campaign), "home": str(campaign.home)}
    document = documents.document(asked, history, findings, told, may_be_unknown)
    for name, text in (
        ("report.json", json.dumps(document, indent=1) + "\n"),
        ("junit.xml", documents.junit(findings, document["seconds"], may_be_unknown)),
        ("report.html", documents.page(asked, history, findings, told, may_be_unknown)),
    ):
        # Words of a script may be no text.
        write_atomically(campaign.home / name, text.encode(errors="backslashreplace"))
    return findings
