"""Log records as lines, and the message of such a line.

    text   2026-11-25T20:45:31.123Z INFO elastic.fleet.node.leader_session: attending_fleet address=10.0.0.11:7070
    json   {"ts": "2026-11-25T20:45:31.123Z", "level": "INFO", "logger": "elastic.fleet.node.leader_session",
            "msg": "attending_fleet", "address": "10.0.0.11:7070"}

Times are UTC. A record may have fields, in its attribute `fields`, and an exception. As text, each line of a traceback
has the same beginning; as JSON a record is always one line, and "traceback" has the exception.
Characters that could forge a line, or move the cursor of a terminal, are escaped.
"""

from __future__ import annotations

import json
import logging
import re
import time
from enum import StrEnum


class LogFormat(StrEnum):
    """How log lines are written."""

    TEXT = "text"
    JSON = "json"


FIELDS = "fields"
"""The attribute of a record that has its fields, a mapping; also the key in `extra`."""

_OWN = ("ts", "level", "logger", "msg", "traceback")
_BEGINNING = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ [\w.]+: ")


class LineFormatter(logging.Formatter):
    """A record as one line, or of text as several, without the last line break."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__()
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, FIELDS, {})
        ts = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{min(int(record.msecs), 999):03d}Z"
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        stack = self.formatStack(record.stack_info) if record.stack_info else ""
        traceback = "\n".join(filter(None, (exception, stack)))
        if self.form is LogFormat.JSON:
            line = {"ts": ts, "level": record.levelname, "logger": record.name, "msg": record.getMessage()}
            line |= {f"{name}_" if name in _OWN else name: value for name, value in fields.items()}
            return json.dumps(line | ({"traceback": traceback} if traceback else {}), default=str)
        said = record.getMessage() + "".join(f" {name}={_shown(value)}" for name, value in fields.items())
        lines = [*(said.splitlines() or [""]), *traceback.splitlines()]
        return "\n".join(f"{ts} {record.levelname} {record.name}: {_printable(line)}" for line in lines)


def message(line: str) -> str:
    """The message of a line in either format, with the traceback if a JSON line has one; another line as it is."""
    if (found := _BEGINNING.match(line)) is not None:
        return line[found.end() :]
    if not line.startswith('{"ts"'):
        return line
    try:
        document = json.loads(line)
        return "\n".join(document[name] for name in ("msg", "traceback") if name in document)
    except (ValueError, TypeError, RecursionError):
        return line


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    plain = text and not any(c in ' "=' or not c.isprintable() for c in text)
    return text if plain or not isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
