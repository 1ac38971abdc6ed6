"""A file that appears: for everything that can run a command, such as a preStop hook, a cron job or a test.

Empty, or with a number of seconds in it, or {"seconds_left": 90, "because": "rack 7 is switched off"}. Removing the
file takes the notice back. "source" in it names who says so, if that is not this file.
"""

from __future__ import annotations

import json
from pathlib import Path

from elastic.preemption.notice import LONGEST_S, Notice, NoticeKind
from elastic.preemption.provider import NoticeSource, Unanswered

DEFAULT_S = 120.0
LIMIT = 4096
"""Bytes of the file."""


def notice_in(text: str, path: str) -> Notice:
    """The notice in the file's text. Raises ValueError if it is none of the three forms."""
    document = json.loads(text) if text.strip() else {}
    if isinstance(document, int | float) and not isinstance(document, bool):
        document = {"seconds_left": document}
    if not isinstance(document, dict):
        raise ValueError("neither a number of seconds nor a JSON object")
    left_s, because = document.get("seconds_left", DEFAULT_S), document.get("because", f"{path} says so")
    if isinstance(left_s, bool) or not isinstance(left_s, int | float) or not 0 <= left_s <= LONGEST_S:
        raise ValueError(f"seconds_left={left_s!r:.40} must be a number from 0 to {LONGEST_S:g}")
    if not isinstance(because, str):
        raise ValueError(f"because={because!r} must be a sentence")
    if not isinstance(source := document.get("source", ""), str):
        raise ValueError(f"source={source!r} must be a name")
    return Notice(NoticeKind.RECLAIM, float(left_s), because, source)


class File(NoticeSource):
    pause_s = 0.25

    def __init__(self, path: Path) -> None:
        self.name = f"file {path}"
        self._path = path

    def look(self) -> Notice | None:
        try:
            with self._path.open("rb") as file:
                text = file.read(LIMIT).decode(errors="replace")
            return notice_in(text, str(self._path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise Unanswered(f"{self._path}: {error}") from error
