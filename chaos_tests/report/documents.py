"""The verdict as JSON for programs, as JUnit for continuous integration, and as one page for people."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from xml.sax.saxutils import quoteattr

from chaos_tests.checkers import Judgement, Truth
from chaos_tests.checkers.history import History
from chaos_tests.report import plots
from chaos_tests.report.story import Story, tell

INJECTED = "I16"
"""The invariant that says whether there were faults: a run without faults proves nothing."""

NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What an XML file may not hold, not even escaped: a reader refuses the file then. Messages of scripts have colours."""

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --dim: #68717d; --line: #d8dde3; --member: #4f7cc4;
  --starting: #b9c6da; --fault: #c8452d; --struck: #e98f3a; --good: #2c7a4b; --bad: #c8452d; --open: #9a6a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #16191d; --dim: #98a2ae; --line: #343a42;
  --member: #5d8ddb; --starting: #46556b; --good: #5cc184; --bad: #f07a63; --open: #e0b050; --fault: #f07a63; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1040px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
p.dim, .dim { color: var(--dim) } svg { width: 100%; height: auto; display: block }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .25rem .6rem .25rem 0;
  border-bottom: 1px solid var(--line); vertical-align: top } code { font-size: .85em; overflow-wrap: anywhere }
.true { color: var(--good) } .false { color: var(--bad) } .unknown { color: var(--open) }
.not-applicable { color: var(--dim) }
td.true, td.false, td.unknown, td.not-applicable { font-weight: 600; white-space: nowrap }
text { fill: var(--ink); font: 12px system-ui, sans-serif } text.small { font-size: 10.5px; fill: var(--dim) }
text.fault-number { fill: var(--fault) } rect.member { fill: var(--member) } rect.starting { fill: var(--starting) }
rect.struck { fill: var(--struck) } line.grid { stroke: var(--line) } line.fault { stroke: var(--fault);
  stroke-dasharray: 2 3 } line.generation { stroke: var(--dim); stroke-width: .6; opacity: .6 }
polyline { fill: none; stroke-width: 1.5 } polyline.curve { stroke: var(--member) }
polyline.quiet { stroke: var(--struck); stroke-width: 3.5; opacity: .55 }
"""


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


def page(
    asked: Mapping[str, Any],
    history: History,
    findings: Sequence[Judgement],
    recoveries: Sequence[Mapping[str, Any]],
    may_be_unknown: frozenset[str] = frozenset(),
) -> str:
    """Everything in one file that asks the network for nothing."""
    story = tell(history.faulty)
    names = [name for step in history.faulty.steps[:1] for name in step.line["scalars"]]
    name = "loss" if "loss" in names else next(iter(names), "")
    word = str(passed(findings, may_be_unknown)).lower()
    parts = [
        f'<h1>Chaos: <span class="{word}">{escape(headline(findings, may_be_unknown))}</span></h1>',
        f'<p class="dim"><code>{escape(" ".join(asked["command"]))}</code> &middot; preset {escape(asked["preset"])} '
        f"&middot; seed {asked['seed']} &middot; {len(story.blows)} faults in {story.length_s:.0f} s</p>",
        "<h2>Members, generations, faults</h2>",
        '<p class="dim">light: a process starts &middot; full: it is a member &middot; orange: a fault lasts &middot; '
        "thin lines: generations</p>",
        plots.timeline(story),
    ]
    if history.faulty.steps:
        parts += ["<h2>Steps in each second</h2>", plots.step_rate(story)]
    if name:
        parts += [
            f"<h2>{escape(name)}</h2>",
            '<p class="dim">wide: the undisturbed run &middot; narrow: this one</p>',
            plots.scalar(history.faulty, history.quiet, name),
        ]
    complete = [float(one["recovery_ms"]) for one in recoveries if one["complete"]]
    parts += ["<h2>Recoveries</h2>", plots.recoveries(complete)]
    parts += ["<h2>Invariants</h2>", _findings(findings), "<h2>Faults</h2>", _faults(story)]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>Chaos: {escape(asked["preset"])}</title><style>{CSS}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _findings(findings: Sequence[Judgement]) -> str:
    rows = [
        f"<tr><td>{one.invariant.number}</td><td>{escape(one.invariant.name)}</td>"
        f'<td class="{one.verdict.answer.replace(" ", "-")}">{one.verdict.answer}</td>'
        f"<td>{escape(one.verdict.because)}{_places(one.verdict.at)}</td></tr>"
        for one in findings
    ]
    return f"<table>{''.join(rows)}</table>"


def _places(at: Sequence[str]) -> str:
    return "".join(f"<br><code>{escape(place)}</code>" for place in at)


def _faults(story: Story) -> str:
    rows = [
        (blow.number, blow.kind, ", ".join(blow.targets), f"{blow.begun_s:.1f} s to {blow.ended_s:.1f} s")
        for blow in story.blows
    ]
    rows += [(number, kind, "skipped", because) for number, kind, because in story.skipped]
    cells = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in sorted(rows))
    return f"<table>{cells}</table>"
