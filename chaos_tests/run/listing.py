"""What `elastic chaos list` shows: presets, kinds of faults and traces, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chaos_tests.cluster import why_not
from chaos_tests.nemesis.nemesis import lacking
from chaos_tests.run.request import traces_here
from chaos_tests.scenario.catalogue import CATALOGUE
from chaos_tests.scenario.faults import Ground
from chaos_tests.scenario.schedule import PRESETS, ground_of


def document() -> dict[str, Any]:
    """ground: what kind of a job it needs. cannot: why it is skipped on this machine, or ""."""
    no_network = why_not()
    return {
        "presets": [
            {
                "name": name,
                "about": preset.about,
                "gap_s": preset.gap_s,
                "ground": ground_of(preset.weights),
                "faults": sorted(preset.weights),
                "cannot": no_network if ground_of(preset.weights) is Ground.NETWORK else "",
            }
            for name, preset in PRESETS.items()
        ],
        "faults": [
            {
                "name": name,
                "about": fault.about,
                "ground": fault.ground,
                "places": list(fault.places),
                "cannot": no_network if fault.ground is Ground.NETWORK else lacking(fault),
            }
            for name, fault in CATALOGUE.items()
        ],
        "traces": traces_here(),
    }


def text() -> str:
    return "\n".join(_lines(document()))


def _lines(told: dict[str, Any]) -> Iterator[str]:
    width = 1 + max(len(one["name"]) for one in (*told["presets"], *told["faults"]))
    yield "presets, with the mean time between two faults"
    for preset in told["presets"]:
        yield f"  {preset['name']:<{width}}{preset['gap_s']:2.0f} s  {preset['about']}"
        yield from _cannot(preset, width)
    for where in Ground:
        yield f"\nfaults of {'any job' if where is Ground.ANY else f'a job of {where}'}"
        for fault in (one for one in told["faults"] if one["ground"] == where):
            yield f"  {fault['name']:<{width}}{fault['about']}"
            if fault["places"]:
                yield f"  {'':<{width}}places: {', '.join(fault['places'])}"
            yield from _cannot(fault, width)
    yield "\ntraces"
    yield from (f"  {name}" for name in told["traces"])


def _cannot(one: dict[str, Any], width: int) -> Iterator[str]:
    if one["cannot"]:
        yield f"  {'':<{width}}not here: {one['cannot']}"
