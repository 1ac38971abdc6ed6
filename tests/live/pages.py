"""A page of docs/ as something to run: its blocks, and whether an output is what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROMPT = "$ "

_VARIES = re.compile(r"(?<=free at )\S+|step-[\w.-]+|\d[\d.]*(?:\+\w+)?")
"""What is another one in each run: paths, entries of checkpoints, numbers, versions."""

_MAYBE = re.compile(r"  N shards? of N ms|, and leads the fleet|(?<=^because ).*|(?<=had to go )\(.*\)")
"""What a line may have: how fast a worker is is not known at first, any replica may lead, a state may have come about
in another way, and not everybody is asked to leave before it is over."""

_PASSING = ("newest checkpoint ", "straggler ")
"""Lines of a status that come with time."""


@dataclass(frozen=True, slots=True)
class Block:
    """kind: of the fence. before: the paragraph above it, on one line."""

    kind: str
    text: str
    before: str

    @property
    def shows_output(self) -> bool:
        return self.text.startswith(_PROMPT)

    def commands(self) -> Iterator[tuple[str, str]]:
        """Of one that shows output: each command, and what it says."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def section(page: Path, heading: str) -> list[Block]:
    """The blocks below that heading, up to the next one."""
    text = page.read_text(encoding="utf-8")
    begin = text.index(f"\n## {heading}\n") + 1
    text = text[begin : text.index("\n#", begin)]
    found = []
    for fence in _FENCE.finditer(text):
        above = [part for part in text[: fence.start()].split("\n\n") if part.strip()]
        found.append(Block(fence[1], fence[2], " ".join(above[-1].split())))
    return found


def alike(shown: str, said: str) -> bool:
    """Whether they are the same but for what no two runs have in common."""
    return _plain(shown) == _plain(said)


def _plain(output: str) -> list[str]:
    lines = [" ".join(_MAYBE.sub("", _VARIES.sub("N", line.rstrip())).split()) for line in output.splitlines()]
    return [line for line in lines if not line.startswith(_PASSING)]
