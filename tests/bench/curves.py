"""Cost against size, as an image: both axes are logarithmic, so what is linear has a slope of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

WIDTH, HEIGHT = 470.0, 250.0
LEFT, TOP, RIGHT, BOTTOM = 60.0, 34.0, 130.0, 36.0

STYLE = """<style>text { fill: #1b1f24; font: 12px system-ui, sans-serif }
text.small { font-size: 10.5px; fill: #68717d } line.grid { stroke: #d8dde3; stroke-width: .7 }
polyline { fill: none; stroke-width: 2 } polyline.a { stroke: #4f7cc4 } polyline.b { stroke: #c8452d }
polyline.c { stroke: #3f9d63 } polyline.d { stroke: #8a63b8 } text.a { fill: #4f7cc4 } text.b { fill: #c8452d }
text.c { fill: #3f9d63 } text.d { fill: #8a63b8 }</style>"""


Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """points: (size, cost), costs above 0."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """caption: says the unit of the costs. across: what there are so many of."""

    caption: str
    across: str
    curves: Sequence[Curve]


def drawing(panels: Sequence[Panel], title: str) -> str:
    """Panels side by side; one of which nothing was measured is left out, as is a curve."""
    shapes = [STYLE, '<rect width="100%" height="100%" fill="#fff"/>']
    for number, panel in enumerate(panels):
        curves = [curve for curve in panel.curves if curve.points]
        shapes += _panel(number * WIDTH, panel, curves) if curves else []
    return _drawing(WIDTH * len(panels), HEIGHT, shapes, title)


def _panel(at: float, panel: Panel, curves: Sequence[Curve]) -> list[str]:
    low_x, high_x = _decades([x for curve in curves for x, _ in curve.points])
    low_y, high_y = _decades([y for curve in curves for _, y in curve.points])

    def place(x: float, y: float) -> Point:
        across = (math.log10(x) - low_x) / (high_x - low_x)
        up = (math.log10(y) - low_y) / (high_y - low_y)
        return at + LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    shapes = [_text((at + LEFT, TOP - 14), panel.caption)]
    for decade in range(low_y, high_y + 1):
        start, end = place(10**low_x, 10.0**decade), place(10**high_x, 10.0**decade)
        shapes += [_line(start, end, "grid"), _text((start[0] - 6, start[1] + 4), f"{10.0**decade:g}", "small", "end")]
    for decade in range(low_x, high_x + 1):
        start, end = place(10**decade, 10.0**low_y), place(10**decade, 10.0**high_y)
        shapes += [_line(start, end, "grid"), _text((start[0], start[1] + 16), 10**decade, "small", "middle")]
    shapes.append(_text((at + (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6), panel.across, "small", "middle"))
    taken: list[float] = []
    for kind, curve in zip("abcd", curves, strict=False):
        points = [place(x, y) for x, y in curve.points]
        height = points[-1][1] + 4
        while any(abs(height - other) < 13 for other in taken):
            height += 13
        taken.append(height)
        shapes += [_polyline(points, kind), _text((points[-1][0] + 6, height), curve.name, kind)]
    return shapes


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten around them."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _drawing(width: float, height: float, shapes: Iterable[str], title: str) -> str:
    body = "\n".join(shapes)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">\n{body}\n</svg>'
    )


def _line(start: Point, end: Point, kind: str) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _polyline(points: Sequence[Point], kind: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}"/>'


def _text(at: Point, words: object, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" class="{kind}" text-anchor="{anchor}">{escape(str(words))}</text>'
