"""The pictures of the page, from a story, and the few shapes of SVG that they are made of.

Coordinates are pixels, y grows downwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import TypeAlias

from chaos_tests.checkers.history import Run
from chaos_tests.report.story import Blow, Story, histogram

WIDTH = 1000.0
LEFT, RIGHT = 90.0, 10.0
ROW = 26.0
PLOT = 130.0

Scale = Callable[[float], float]


def timeline(story: Story) -> str:
    """A row for each slot and one for services and the machine; generations above, faults through all rows."""
    x = _scale(story.length_s, LEFT, WIDTH - RIGHT)
    slots = sorted({life.slot for life in story.lives})
    others = sorted({target for blow in story.blows if not blow.slots for target in blow.targets})
    rows = {name: 46.0 + ROW * place for place, name in enumerate([*slots, *others])}
    bottom = 46.0 + ROW * len(rows)
    shapes = [text((LEFT - 8, y + 17), name.removeprefix("elastic."), "label", "end") for name, y in rows.items()]
    for life in story.lives:
        y = rows[life.slot]
        member_s = life.ended_s if life.member_s is None else life.member_s
        hint = f"{life.worker}: {life.because}"
        shapes.append(rect(x(life.born_s), y + 4, x(member_s) - x(life.born_s), ROW - 8, "starting", hint))
        if life.member_s is not None:
            shapes.append(rect(x(member_s), y + 4, x(life.ended_s) - x(member_s), ROW - 8, "member", hint))
    shapes += _generations(story, x, bottom)
    for blow in story.blows:
        shapes += _blow(blow, rows, x, bottom)
    shapes += _seconds(story.length_s, x, bottom)
    return drawing(WIDTH, bottom + 22, shapes, "members, generations and faults over time")


def _generations(story: Story, x: Scale, bottom: float) -> list[str]:
    shapes, last = [text((LEFT - 8, 14), "generation", "label", "end")], -100.0
    for at_s, number, kind in story.generations:
        shapes.append(line((x(at_s), 18), (x(at_s), bottom), f"generation {kind}", f"generation {number}: {kind}"))
        if x(at_s) - last > 14:
            last = x(at_s)
            shapes.append(text((last, 14), number, "small", "middle"))
    return shapes


def _blow(blow: Blow, rows: dict[str, float], x: Scale, bottom: float) -> list[str]:
    hint = f"#{blow.number} {blow.kind}: {', '.join(blow.targets)}"
    shapes = [line((x(blow.begun_s), 36), (x(blow.begun_s), bottom), "fault", hint)]
    shapes.append(text((x(blow.begun_s), 33), blow.number, "small fault-number", "middle"))
    lasting = blow.ended_s - blow.begun_s > 0.5 and not blow.kind.startswith("kill")
    for name in blow.slots or blow.targets:
        width = x(blow.ended_s) - x(blow.begun_s) if lasting else 4.0
        shapes.append(rect(x(blow.begun_s), rows[name] + 4, width, ROW - 8, "struck", hint))
    return shapes


def step_rate(story: Story) -> str:
    """Steps a second, and the faults."""
    x = _scale(story.length_s, LEFT, WIDTH - RIGHT)
    most = max(story.rates, default=0.0) or 1.0
    y = _scale(most, PLOT, 10.0)
    points = [(x(min(second + 0.5, story.length_s)), y(rate)) for second, rate in enumerate(story.rates)]
    shapes = _grid(most, y, "steps/s")
    shapes += [line((x(blow.begun_s), 10), (x(blow.begun_s), PLOT), "fault", blow.kind) for blow in story.blows]
    shapes += [polyline(points, "curve"), *_seconds(story.length_s, x, PLOT)]
    return drawing(WIDTH, PLOT + 22, shapes, "steps applied in each second")


def scalar(faulty: Run, quiet: Run, name: str) -> str:
    """A logged scalar over the steps, of both runs. One hides the other where they are equal."""
    runs = {"quiet": _values(quiet, name), "curve": _values(faulty, name)}
    values = [value for points in runs.values() for _, value in points]
    low, high = min(values, default=0.0), max(values, default=1.0)
    count = max((step for points in runs.values() for step, _ in points), default=1)
    x = _scale(max(count, 1), LEFT, WIDTH - RIGHT)
    y = _scale((high - low) or 1.0, PLOT, 10.0)
    shapes = _grid((high - low) or 1.0, y, name, low)
    shapes += [polyline([(x(step), y(value - low)) for step, value in points], k) for k, points in runs.items()]
    shapes += [text((x(tick), PLOT + 14), f"{tick:g}", "small", "middle") for tick in ticks(count)]
    return drawing(WIDTH, PLOT + 22, shapes, f"{name} over the steps")


def recoveries(values_ms: Sequence[float]) -> str:
    """How many recoveries took how long."""
    rows = histogram(values_ms)
    y = _scale(max(count for _, count in rows) or 1, PLOT, 20.0)
    width = (WIDTH - LEFT - RIGHT) / len(rows)
    shapes = [text((LEFT - 8, 14), "recoveries", "label", "end")]
    for place, (label, count) in enumerate(rows):
        left = LEFT + place * width
        shapes.append(text((left + width / 2, PLOT + 14), f"{label} ms", "small", "middle"))
        if count:
            shapes.append(rect(left + 6, y(count), width - 12, PLOT - y(count), "member", f"{count}"))
            shapes.append(text((left + width / 2, y(count) - 4), count, "small", "middle"))
    return drawing(WIDTH, PLOT + 22, shapes, "how long recoveries took")


def _values(run: Run, name: str) -> list[tuple[int, float]]:
    scalars = ((step.number, step.line["scalars"].get(name)) for step in run.steps)
    return [(number, value) for number, value in scalars if isinstance(value, int | float)]


def _scale(most: float, low: float, high: float) -> Scale:
    return lambda value: low + (high - low) * value / (most or 1.0)


def _grid(most: float, y: Scale, name: str, offset: float = 0.0) -> list[str]:
    shapes = [text((LEFT - 8, 14), name, "label", "end")]
    for tick in ticks(most, about=3):
        shapes.append(line((LEFT, y(tick)), (WIDTH - RIGHT, y(tick)), "grid"))
        if y(tick) > 24:
            shapes.append(text((LEFT - 8, y(tick) + 4), f"{tick + offset:.3g}", "small", "end"))
    return shapes


def _seconds(length_s: float, x: Scale, bottom: float) -> list[str]:
    return [text((x(tick), bottom + 14), f"{tick:g} s", "small", "middle") for tick in ticks(length_s)]


Point: TypeAlias = tuple[float, float]


def drawing(width: float, height: float, shapes: Iterable[str], title: str) -> str:
    body = "\n".join(shapes)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">\n{body}\n</svg>'
    )


def rect(x: float, y: float, width: float, height: float, kind: str, hint: str = "") -> str:
    return _hinted(f'rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}"', kind, hint)


def line(start: Point, end: Point, kind: str, hint: str = "") -> str:
    (x1, y1), (x2, y2) = start, end
    return _hinted(f'line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"', kind, hint)


def polyline(points: Sequence[Point], kind: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}"/>'


def text(at: Point, words: object, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" class="{kind}" text-anchor="{anchor}">{escape(str(words))}</text>'


def ticks(most: float, about: int = 8) -> list[float]:
    """Round numbers from 0 to most, roughly so many."""
    if not 0 < most < math.inf:  # the distance of two numbers may be none
        return [0.0]
    rough, size = most / about, 1e-9
    while size * 10 <= rough:
        size *= 10
    step = next((size * n for n in (1, 2, 5, 10) if size * n >= rough), size * 10)
    return [n * step for n in range(int(most / step + 1e-9) + 1)]


def _hinted(shape: str, kind: str, hint: str) -> str:
    name = shape.partition(" ")[0]
    return f'<{shape} class="{kind}"><title>{escape(hint)}</title></{name}>' if hint else f'<{shape} class="{kind}"/>'
