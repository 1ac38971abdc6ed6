"""What an evaluation changes, also in objects of the script's own that its loop has put into a dict.

A logger makes its meters when they are needed first: meters["loss"], of a defaultdict, comes with the first batch. So
each rank begins without them, and behind the loop they are in the dict again, with the numbers of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from runtime.frontends.ddp.frames.evaluation_values import EvaluationValues
from runtime.frontends.ddp.frames.places import ScriptFrames, ValuePlace, attributes, is_dict
from runtime.frontends.ddp.frames.plain_values import born, is_number


class DictEntry(NamedTuple):
    """An object, and where it is in a dict."""

    owner: dict[Any, Any]
    key: Any
    thing: Any


class LoopValues(EvaluationValues):
    """The values when an evaluation began. Used by the script's thread only."""

    def __init__(self, frames: ScriptFrames) -> None:
        super().__init__(frames)
        self._made: dict[ValuePlace, DictEntry] = {}
        """What the turns so far have put into dicts, as the last turn has left it."""

    def added(self, rank: int, batches: int) -> dict[str, float]:
        """As there. A number in an object that the turn has made counts from 0 on."""
        found = super().added(rank, batches)
        for place, entry in self._new():
            found.update({place.under(name).text: float(value) for name, value in _numbers(entry.thing)})
        return found

    def put_back(self, *, objects: bool) -> None:
        super().put_back(objects=objects)
        for place, entry in list(self._new()):
            self._made[place] = entry
            del entry.owner[entry.key]

    def add(self, totals: Mapping[str, float], ranks: int) -> None:
        super().add(totals, ranks)
        for place, (owner, key, thing) in self._made.items():
            owner[key] = thing
            for name, value in _numbers(thing):
                mean = totals.get(place.under(name).text, 0.0) / ranks
                setattr(thing, name, int(mean) if type(value) is int and mean.is_integer() else mean)

    def _new(self) -> Iterator[tuple[ValuePlace, DictEntry]]:
        """The objects that have come to a dict since then."""
        for place, (owner, keys) in self._dicts.items():
            for key, value in born(owner, keys):
                if self._frames.is_followed(value) and not is_dict(value):
                    yield place.under(key), DictEntry(owner, key, value)


def _numbers(thing: Any) -> list[tuple[str, int | float]]:
    return [(name, value) for name, value in attributes(thing).items() if is_number(value)]
