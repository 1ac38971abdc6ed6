"""Print docs/events.md."""

from __future__ import annotations

from elastic.records.events import page

print(page.text(), end="")
