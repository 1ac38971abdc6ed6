"""A few shapes of SVG as text. Coordinates are pixels, y grows downwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeAlias

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
    if most <= 0:
        return [0.0]
    rough, size = most / about, 1e-9
    while size * 10 <= rough:
        size *= 10
    step = next((size * n for n in (1, 2, 5, 10) if size * n >= rough), size * 10)
    return [n * step for n in range(int(most / step + 1e-9) + 1)]


def _hinted(shape: str, kind: str, hint: str) -> str:
    name = shape.partition(" ")[0]
    return f'<{shape} class="{kind}"><title>{escape(hint)}</title></{name}>' if hint else f'<{shape} class="{kind}"/>'
