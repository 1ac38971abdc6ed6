"""Scenarios as text: paragraphs of events, `----`, and what the machine then shows.

    # A comment tells the story.
    event with arguments
    another event
    ----
    state
      -> action

`pytest --rewrite` records the present answers. Commit such a diff only if you understand it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Interpreter(Protocol):
    def feed(self, line: str) -> list[str]:
        """Apply one event line; the actions it led to, one a line."""
        ...

    def show(self) -> list[str]:
        """The state, in a line or more."""
        ...


def play(text: str, machine: Interpreter) -> str:
    """The same text with the machine's own answers."""
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        story = paragraph.split("\n----")[0].splitlines()
        answers = [answer for line in story if not line.startswith("#") for answer in machine.feed(line)]
        shown = [*machine.show(), *(f"  -> {answer}" for answer in answers)]
        told = all(line.startswith("#") for line in story)
        paragraphs.append("\n".join(story if told else [*story, "----", *shown]))
    return "\n\n".join(paragraphs) + "\n"


def check(path: Path, machine: Interpreter, *, rewrite: bool) -> None:
    recorded = path.read_text()
    played = play(recorded, machine)
    if rewrite:
        path.write_text(played)
    else:
        assert played == recorded, f"{path.name} is answered differently; see the diff"


def arguments(words: list[str]) -> dict[str, str]:
    """`key=value` words."""
    return dict(word.split("=", 1) for word in words if "=" in word)
