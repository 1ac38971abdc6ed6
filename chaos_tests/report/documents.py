"""The verdict as JSON for programs, and as JUnit for continuous integration."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from xml.sax.saxutils import quoteattr

from chaos_tests.checkers import Judgement, Truth
from chaos_tests.checkers.history import History
from chaos_tests.report.story import tell

INJECTED = "I16"
"""The invariant that says whether there were faults: a run without faults proves nothing."""

NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What an XML file may not hold, not even escaped: a reader refuses the file then. Messages of scripts have colours."""


def document(
    asked: Mapping[str, Any],
    history: History,
    findings: Sequence[Judgement],
    recoveries: Sequence[Mapping[str, Any]],
    may_be_unknown: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """What report.json holds. asked: the campaign. recoveries: as elastic.records.journal tells them."""
    story = tell(history.faulty)
    return {
        "passed": passed(findings, may_be_unknown),
        "headline": headline(findings, may_be_unknown),
        "asked": dict(asked),
        "steps": len(history.faulty.steps),
        "seconds": round(story.length_s, 3),
        "digest": (history.faulty.result or {}).get("digest", ""),
        "quiet_digest": (history.quiet.result or {}).get("digest", ""),
        "invariants": [
            {
                "number": finding.invariant.number,
                "name": finding.invariant.name,
                "answer": str(finding.verdict.answer),
                "because": finding.verdict.because,
                "at": list(finding.verdict.at),
            }
            for finding in findings
        ],
        "faults": [
            {"number": b.number, "fault": b.kind, "targets": list(b.targets), "at_s": b.begun_s, "ended_s": b.ended_s}
            for b in story.blows
        ],
        "skipped": [{"number": n, "fault": kind, "because": because} for n, kind, because in story.skipped],
        "recoveries": [dict(recovery) for recovery in recoveries],
    }


def passed(findings: Sequence[Judgement], may_be_unknown: frozenset[str] = frozenset()) -> bool:
    """Whether every invariant that applies is true; of those named, also unknown will do."""
    fine = (Truth.TRUE, Truth.NOT_APPLICABLE)
    return all(finding.verdict.answer in fine or _allowed(finding, may_be_unknown) for finding in findings)


def headline(findings: Sequence[Judgement], may_be_unknown: frozenset[str] = frozenset()) -> str:
    """The verdict in a line, with what it does not speak of; first of all, that there were no faults."""
    remarks = [one.verdict.because for one in findings if one.invariant.number == INJECTED and not _true(one)]
    for what, unproved in (
        ("not applicable", [one for one in findings if one.verdict.answer is Truth.NOT_APPLICABLE]),
        ("unknown, as allowed", [one for one in findings if _allowed(one, may_be_unknown)]),
    ):
        if unproved:
            remarks.append(f"{what}: {', '.join(one.invariant.number for one in unproved)}")
    word = "PASSED" if passed(findings, may_be_unknown) else "NOT PASSED"
    return f"{word} ({'; '.join(remarks)})" if remarks else word


def _true(finding: Judgement) -> bool:
    return finding.verdict.answer is Truth.TRUE


def _allowed(finding: Judgement, may_be_unknown: frozenset[str]) -> bool:
    return finding.verdict.answer is Truth.UNKNOWN and finding.invariant.number in may_be_unknown


def junit(findings: Sequence[Judgement], seconds: float, may_be_unknown: frozenset[str] = frozenset()) -> str:
    """JUnit XML with one test case for each invariant. An invariant that is not applicable, or unknown and allowed to
    be, counts as skipped; any other unknown invariant counts as an error."""
    cases = []
    counted: Counter[str] = Counter()
    for finding in findings:
        name = quoteattr(f"{finding.invariant.number} {finding.invariant.name}")
        because = quoteattr(finding.verdict.because)
        match finding.verdict.answer:
            case Truth.TRUE:
                counts_as, told = "passed", ""
            case Truth.FALSE:
                at = escape("\n".join(finding.verdict.at))
                counts_as, told = "failures", f"<failure message={because}>{at}</failure>"
            case Truth.UNKNOWN if not _allowed(finding, may_be_unknown):
                counts_as, told = "errors", f"<error message={because}/>"
            case answer:
                skipped = quoteattr(f"{answer}: {finding.verdict.because}")
                counts_as, told = "skipped", f"<skipped message={skipped}/>"
        counted[counts_as] += 1
        cases.append(f'  <testcase classname="chaos" name={name}>{told}</testcase>')
    counts = " ".join(f'{what}="{counted[what]}"' for what in ("failures", "errors", "skipped"))
    # A suite keeps its name from run to run, unless the run proves nothing.
    injected = any(_true(finding) for finding in findings if finding.invariant.number == INJECTED)
    title = "chaos" if injected else f"chaos: {headline(findings, may_be_unknown)}"
    head = f'<testsuite name={quoteattr(title)} tests="{len(cases)}" {counts} time="{seconds:.3f}">'
    text = "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', head, *cases, "</testsuite>", ""])
    return NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)
