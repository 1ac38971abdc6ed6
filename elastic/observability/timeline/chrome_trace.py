"""The trace event format (JSON object form), which Perfetto's interface, chrome://tracing and Speedscope open.

Format: "Trace Event Format", Google, section "JSON Object Format"; phases X (complete), B (begun), i (instant),
M (metadata).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic.observability.timeline.spans import Instant, Span


def document(found: Iterable[Span | Instant], job: str) -> dict[str, Any]:
    """JSON-able. A node is a process of the trace, a worker one of its threads; the job itself is the first process.
    Times are microseconds since 1970."""
    nodes: dict[str, int] = {"": 0}
    tracks: dict[tuple[str, str], int] = {}
    events: list[dict[str, Any]] = []
    for it in found:
        pid = nodes.setdefault(it.node, len(nodes))
        tid = tracks.setdefault((it.node, it.track), len(tracks))
        common = {"name": it.name, "cat": it.kind, "pid": pid, "tid": tid, "args": it.about}
        if isinstance(it, Span) and it.open:
            events.append({"ph": "B", "ts": it.start_ns / 1e3, **common})  # its E has not come yet
        elif isinstance(it, Span):
            events.append({"ph": "X", "ts": it.start_ns / 1e3, "dur": (it.end_ns - it.start_ns) / 1e3, **common})
        else:
            events.append({"ph": "i", "s": "p" if it.node else "g", "ts": it.at_ns / 1e3, **common})
    named = [_named("process_name", pid, 0, f"node {node}" if node else f"job {job}") for node, pid in nodes.items()]
    named += [_named("thread_name", nodes[node], tid, track) for (node, track), tid in tracks.items()]
    return {"traceEvents": [*named, *events], "displayTimeUnit": "ms", "otherData": {"job": job}}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
