"""What happened to a worker, or around a generation, and why: made from the lines of a job's journals.

Pure: lines in, moments out, both in order of time. A line is chosen because it is about the worker or the generation,
or about workers whose loss or arrival led to the generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.records.events.table import Level, Line, row


@dataclass(frozen=True, slots=True)
class StoryMoment:
    """line: the journal line. said: a sentence about it. because: the reason that the line gives, or ""."""

    line: Line
    said: str
    because: str


_CAUSES = frozenset(
    {"fault_injected", "worker_dying", "worker_frozen", "worker_out_of_memory", "worker_exited", "stuck", "member_lost"}
)
_ARRIVALS = frozenset({"worker_started", "announced", "invited", "state_copied"})
_ENDS = frozenset({"quiesce_started", "job_ended"})
_CHANGES = frozenset({"submitted", "scaled", "stop_asked", "cordoned", "drain_asked"})
"""Changes made by operators."""
_DEPARTURES = frozenset({"drained", "demoted", "surplus", "notice", "node_leaves", "drain_asked", "agent_signalled"})
_LATE = frozenset({"kept_damaged"})
"""Found between rounds, when the next generation may be durable already that a worker has not entered yet."""
_FAILURES = frozenset(
    {
        "verdict",
        "node_excluded",
        "corrupted",
        "worker_failed",
        "worker_out_of_memory",
        "script_killed",
        "stuck",
        "slot_given_up",
    }
    | {"state_lost", "job_ended"}
)
"""What is told of why a job has ended, or is in trouble."""
CAUSES_SHOWN = 5
_ABORTS = frozenset({"quiesce_started", "quiesce_complete", "ring_aborted", "reported"})


def of_worker(lines: Iterable[Line], worker: str) -> list[StoryMoment]:
    """All lines about this worker; of generations, those with which it became a member or ceased to be one."""
    told, member = [], False
    for line in lines:
        listed = worker in line.get("members", ())
        if line["event"] == "committed":
            if listed != member:
                member = listed
                how = "becomes a member" if listed else "is no member any more"
                told.append(moment(line, f"{worker} {how} with generation {line['generation']}"))
        elif line["worker_id"] == worker and not _is_hidden(line):
            told.append(moment(line))
    return told


def of_generation(lines: Sequence[Line], number: int) -> list[StoryMoment]:
    """The story of a generation, from its causes to its end."""
    record = next((i for i, line in enumerate(lines) if _is_commit(line) and line["generation"] == number), None)
    if record is None:
        return []
    before = max((i for i in range(record) if _is_commit(lines[i])), default=None)
    members = set(lines[record].get("members", ()))
    others = set(lines[before].get("members", ())) if before is not None else set()
    chosen = {record} | set(_causes(lines, record, others - members, before))
    chosen |= {
        i
        for i, line in enumerate(lines[:record])
        if line["event"] in _ARRIVALS and line["worker_id"] in members - others
    }
    course = set(_course(lines, record, number))
    since, end = 0 if before is None else before, max(course, default=record)
    chosen |= course | {i for i in range(since, end) if lines[i]["event"] in _CHANGES}
    chosen |= {i for i, line in enumerate(lines) if line["event"] in _LATE and line["generation"] == number}
    return [moment(lines[i]) for i in sorted(chosen)]


def of_failures(lines: Sequence[Line]) -> list[StoryMoment]:
    """All failures of the job's workers, and what was decided because of them."""
    return [moment(line) for line in lines if line["event"] in _FAILURES]


def why(lines: Sequence[Line]) -> str:
    """What has ended the job, which a verdict begins with, or else the newest verdict; and how members were lost."""
    said = {line["event"]: _because(line) for line in lines if line["event"] in _FAILURES}
    lost = Counter(_because(line) for line in lines if line["event"] == "member_lost")
    causes = ", ".join(f"{count} {because}" for because, count in lost.most_common(CAUSES_SHOWN))
    causes += ", ..." * (len(lost) > CAUSES_SHOWN)
    cause = said.get("job_ended") or said.get("verdict") or "the job goes on"
    return f"{cause}\nmembers lost: {sum(lost.values())}{f' ({causes})' if causes else ''}"


def _because(line: Line) -> str:
    return str(line.get("because", "")).partition("\n")[0]


def generations(lines: Iterable[Line]) -> list[int]:
    """The numbers of all generations that were ever durable."""
    return sorted({line["generation"] for line in lines if _is_commit(line)})


def workers(lines: Iterable[Line]) -> list[str]:
    """The ids of all workers that were ever started."""
    return sorted({line["worker_id"] for line in lines if line["event"] == "worker_started"})


def _causes(lines: Sequence[Line], record: int, gone: set[str], before: int | None) -> Iterator[int]:
    """Lines about workers that are not in the generation any more, and about how the ring before it was left."""
    since = before if before is not None else 0
    nodes = {worker.rsplit(".", 2)[0] for worker in gone}
    for i in range(since, record):
        line = lines[i]
        of_gone = line["worker_id"] in gone and line["event"] in _CAUSES
        of_node = line.get("node") in nodes and line["event"] in _DEPARTURES and not line["worker_id"]
        of_drained = line["worker_id"] in gone and line["event"] in _DEPARTURES
        if of_gone or of_node or of_drained or line["event"] in _ABORTS:
            yield i


def _course(lines: Sequence[Line], record: int, number: int) -> Iterator[int]:
    """What members and leaders said of the generation until it ends, without operations after the first one."""
    begun: set[str] = set()
    for i in range(record + 1, len(lines)):
        line = lines[i]
        if line["generation"] > number and _is_commit(line):
            yield i
            return
        if line["event"] in _ENDS:
            yield i
            if line["event"] == "job_ended":
                return
        elif line["generation"] == number and line["event"] != "op_complete" and not _is_hidden(line):
            yield i
        elif line["generation"] == number and line["event"] == "op_complete" and line["worker_id"] not in begun:
            begun.add(line["worker_id"])
            yield i
        elif line["event"] == "drained" or (line["event"] in _CAUSES and line["worker_id"]):
            yield i


def _is_commit(line: Line) -> bool:
    return bool(line["event"] == "committed")


def _is_hidden(line: Line) -> bool:
    return row(line["event"]).level is Level.HIDDEN


class _Known(dict[str, Any]):
    """The fields of a line, for a sentence that may name one which the line does not have."""

    def __missing__(self, key: str) -> str:
        return "somebody" if key == "caller" else "?"


def moment(line: Line, said: str = "") -> StoryMoment:
    """A line in words. said: the sentence, if it is not that of the line's event."""
    event = str(line["event"])
    known = _Known(line)
    if isinstance(line.get("members"), list):
        known["members"] = ", ".join(map(str, line["members"])) or "nobody"
    if isinstance(line.get("slots"), Mapping):
        known["slots"] = ", ".join(f"{count} on {node}" for node, count in sorted(line["slots"].items())) or "no slot"
    words = event.replace("_", " ") + (f", {line['worker_id']}" if line["worker_id"] else "")
    text = said or (row(event).said or words.replace("{", "{{").replace("}", "}}")).format_map(known)
    because = "; ".join(str(line[key]) for key in ("because", "level") if line.get(key))
    return StoryMoment(line, text, because)
