"""Documents as YAML 1.2 that readers of YAML 1.1 take alike: mappings and lists in blocks, texts in quotes unless they
are plain words. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

WORD = re.compile(r"(?=.*[A-Za-z])[A-Za-z/.](?:[A-Za-z0-9_./-]|:(?=[A-Za-z0-9]))*")
"""Cannot be anything but a text, unless it is one of NO_WORDS."""

NO_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}

NUMBER_LIKE = re.compile(r"\.[0-9.eE]*|\.(inf|nan)", re.IGNORECASE)

BLOCK = re.compile(r"(?:[\t\x20-\x7e\xa0-\u2027\u202a-\ud7ff]*\n)+")
"""A text of whole lines, which can stand as it is. U+2028 and U+2029 end a line for readers of YAML 1.1."""

Value = Mapping[str, "Value"] | Sequence["Value"] | str | int | bool | None


def documents_text(documents: Sequence[Mapping[str, Value]]) -> str:
    """All of them, for `kubectl apply -f -`."""
    return "".join(f"---\n{''.join(line + chr(10) for line in _lines(document))}" for document in documents)


def _lines(value: Value) -> Iterator[str]:
    """The lines of a mapping or list that is not empty."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(f"{scalar(key)}:", item, "  ")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            if isinstance(item, Mapping | list | tuple) and item:
                first, *rest = _lines(item)
                yield f"- {first}"
                yield from (f"  {line}" if line else "" for line in rest)
            else:
                yield from _entry("-", item, "  ")


def _entry(head: str, item: Value, indent: str) -> Iterator[str]:
    if isinstance(item, Mapping | list | tuple) and item:
        yield head
        yield from (f"{indent}{line}" if line else "" for line in _lines(item))
    elif isinstance(item, str) and BLOCK.fullmatch(item) and item[0] not in " \t\n" and not item.endswith("\n\n"):
        yield f"{head} |"
        yield from (f"{indent}{line}" if line else "" for line in item.split("\n")[:-1])
    else:
        yield f"{head} {scalar(item)}"


def scalar(value: Value) -> str:
    """On one line."""
    if isinstance(value, str):
        if WORD.fullmatch(value) and not NUMBER_LIKE.fullmatch(value) and value.lower() not in NO_WORDS:
            return value
        return f'"{"".join(map(_quoted, value))}"'
    return json.dumps(value)


def _quoted(letter: str) -> str:
    """As in JSON, but for what JSON has to write as two."""
    return json.dumps(letter)[1:-1] if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}"
