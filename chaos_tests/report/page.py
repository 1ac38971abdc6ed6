"""What the report shows besides the page of the job (elastic/observability/dashboard): the verdict, and who was hit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from chaos_tests.checkers import Judgement
from chaos_tests.checkers.history import History, Run
from chaos_tests.report.documents import headline, passed
from chaos_tests.report.story import Story, tell

CSS = """
.above { padding: 1rem clamp(0.75rem, 3vw, 2rem); max-width: 1680px; margin: 0 auto }
.true { color: var(--good) } .false { color: var(--bad) } .unknown { color: var(--warn) }
.lanes td { position: relative; width: 90%; height: 1.6rem }
.lanes span { position: absolute; top: .2rem; bottom: .2rem; min-width: 3px }
.lanes .starting { background: var(--p-paused) } .lanes .member { background: var(--accent) }
.lanes .struck { background: var(--p-abort) }
.lanes .mark { border-left: 1px solid; padding-left: 2px; font-size: .75rem }
"""


def above(
    asked: Mapping[str, Any],
    history: History,
    findings: Sequence[Judgement],
    may_be_unknown: frozenset[str] = frozenset(),
) -> str:
    """HTML: what the report shows before the page of the job."""
    story = tell(history.faulty)
    word = str(passed(findings, may_be_unknown)).lower()
    skipped = (
        f"<tr><td>{number}</td><td>{escape(kind)} is skipped</td><td>{escape(because)}</td></tr>"
        for number, kind, because in story.skipped
    )
    parts = [
        f'<style>{CSS}</style><div class="above"><section class="card">'
        f'<h1>Chaos: <span class="{word}">{escape(headline(findings, may_be_unknown))}</span></h1>',
        f'<p class="soft"><code>{escape(" ".join(asked["command"]))}</code> &middot; preset {escape(asked["preset"])} '
        f"&middot; seed {asked['seed']} &middot; {len(story.blows)} faults in {story.length_s:.0f} s</p>",
        "<h2>Members, generations, faults</h2>",
        '<p class="soft">grey: a process starts &middot; blue: it is a member &middot; orange: a fault lasts</p>',
        lanes(story),
        "<h2>Invariants</h2>",
        _findings(findings),
        f"<table>{''.join(skipped)}</table>",
        "</section></div>",
    ]
    return "\n".join(parts)


def lanes(story: Story) -> str:
    """Over the time of the run a row for generations, faults, each slot, each service that was hit, and the machine."""
    length_s = story.length_s or 1.0
    rows: dict[str, list[str]] = {"generation": [], "fault": []}

    def put(row: str, kind: str, begun_s: float, ended_s: float, hint: str, text: object = "") -> None:
        where = f"left: {100 * begun_s / length_s:.2f}%; width: {100 * (ended_s - begun_s) / length_s:.2f}%"
        piece = f'<span class="{kind}" style="{where}" title="{escape(hint)}">{text}</span>'
        rows.setdefault(row, []).append(piece)

    for at_s, number, kind in story.generations:
        put("generation", "mark", at_s, at_s, f"generation {number} at {at_s:.1f} s: {kind}", number)
    for life in sorted(story.lives, key=lambda life: life.slot):
        member_s = life.ended_s if life.member_s is None else life.member_s
        hint = f"{life.worker}: {life.because}"
        put(life.slot, "starting", life.born_s, member_s, hint)
        if life.member_s is not None:
            put(life.slot, "member", member_s, life.ended_s, hint)
    for blow in story.blows:
        hint = f"#{blow.number} {blow.kind}: {', '.join(blow.targets)}, {blow.begun_s:.1f} s to {blow.ended_s:.1f} s"
        put("fault", "mark false", blow.begun_s, blow.begun_s, hint, blow.number)
        ended_s = blow.begun_s if blow.kind.startswith("kill") else blow.ended_s
        for name in blow.slots or blow.targets:
            put(name, "struck", blow.begun_s, ended_s, hint)
    cells = (f"<tr><th>{escape(name)}</th><td>{''.join(pieces)}</td></tr>" for name, pieces in rows.items())
    return f'<table class="lanes">{"".join(cells)}</table>'


def _findings(findings: Sequence[Judgement]) -> str:
    rows = [
        f"<tr><td>{one.invariant.number}</td><td>{escape(one.invariant.name)}</td>"
        f'<td class="{one.verdict.answer.replace(" ", "-")}">{one.verdict.answer}</td>'
        f'<td class="wide">{escape(one.verdict.because)}{_places(one.verdict.at)}</td></tr>'
        for one in findings
    ]
    return f"<table>{''.join(rows)}</table>"


def _places(at: Sequence[str]) -> str:
    return "".join(f"<br><code>{escape(place)}</code>" for place in at)


def rate(run: Run, begun_unix_s: float) -> dict[str, Any]:
    """Steps in each second, as the page of a job has its rate."""
    rates = tell(run).rates
    seconds = [begun_unix_s + second for second in range(len(rates))]
    return {"at": seconds, "values": {"steps_per_s": {"mean": list(rates)}}}
