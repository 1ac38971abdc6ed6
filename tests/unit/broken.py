"""Bytes as they come from outside when somebody is confused, or means harm: for hypothesis."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

DEEP = b"[" * 100_000
"""Deeper than any parser that recurses."""

ODD: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, -1, 0, 2**63, 2**64, 10**400, 0.5, float("nan"), float("inf"), "", "\ud800", "x" * 5000, [], {}, [[]]]
)


def json_values() -> st.SearchStrategy[Any]:
    leaves = ODD | st.integers() | st.floats() | st.text(max_size=8)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    )


def json_bytes() -> st.SearchStrategy[bytes]:
    return json_values().map(lambda value: json.dumps(value).encode())


@st.composite
def mutated(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Some bytes of it are others, or missing, or come twice; nothing else is changed."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        if not data:
            break
        at, length = draw(st.integers(0, len(data) - 1)), draw(st.integers(1, 8))
        match draw(st.sampled_from(["other", "bit", "missing", "twice", "torn"])):
            case "other":
                data[at] = draw(st.integers(0, 255))
            case "bit":
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "missing":
                del data[at : at + length]
            case "twice":
                data[at:at] = data[at : at + length]
            case "torn":
                del data[at:]
    return bytes(data)


@st.composite
def documents(draw: st.DrawFn, whole: dict[str, Any]) -> bytes:
    """The object as JSON, with a value somewhere in it replaced, also by another of its own, removed or added."""
    document = copy.deepcopy(whole)
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
            place = place[key]
            continue
        match draw(st.sampled_from(["other", "missing", "added", "own", "twice"])):
            case "missing":
                del place[key]
            case "added" if isinstance(place, dict):
                place[draw(st.text(max_size=6))] = draw(json_values())
            case "own":
                place[key] = copy.deepcopy(draw(st.sampled_from(list(_within(whole)))))
            case "twice" if isinstance(place, list):
                place.append(copy.deepcopy(place[key]))
            case _:
                place[key] = draw(json_values())
        break
    return json.dumps(document).encode()


def _within(value: Any) -> Iterator[Any]:
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _within(item)
