"""What happened to a worker, or around a generation, and why: made from the lines of a job's journals.

Pure: lines in, moments out, both in order of time. A line is chosen because it is about the worker or the generation,
or about workers whose loss or arrival led to the generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Line: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoryMoment:
    """line: the journal line. said: a sentence about it. because: the reason that the line gives, or ""."""

    line: Line
    said: str
    because: str


SENTENCES = {
    "fault_injected": "{worker_id} is hit by {fault}",
    "worker_started": "{worker_id} starts as process {pid}",
    "announced": "{worker_id} says that it is there",
    "invited": "{worker_id} is invited to become a member",
    "refused": "{worker_id} is refused",
    "state_copied": "{worker_id} has copied the state, as of operation {op}",
    "state_restored": "{worker_id} has the state of step {step}, from a checkpoint",
    "copy_failed": "the copy of {worker_id} breaks off; it asks again",
    "copy_outdated": "the copy of {worker_id} is out of date; it copies anew",
    "joined": "{worker_id} trains with the others, from operation {op} on",
    "entered": "{worker_id} enters generation {generation} as rank {rank}",
    "ring_up": "{worker_id} is connected to all members of generation {generation}",
    "ring_aborted": "{worker_id} has left the ring of generation {generation}",
    "reported": "{worker_id} reports how far it is: {reduced} operations",
    "redo_started": "{worker_id} goes on with operation {op}, which was interrupted",
    "result_copied": "{worker_id} has the result that it had missed",
    "op_complete": "{worker_id} has operation {op} complete",
    "worker_dying": "the main thread of {worker_id} has ended",
    "ordered": "{worker_id} is told: {order}",
    "worker_exited": "the process of {worker_id} is gone",
    "worker_failed": "the script has ended {worker_id}",
    "worker_frozen": "{worker_id} is frozen",
    "worker_thawed": "{worker_id} is alive again",
    "worker_signalled": "{worker_id} is sent {signal}",
    "member_lost": "{worker_id}, rank {rank}, is lost to the job",
    "stuck": "{worker_id} lives and gets nowhere",
    "stacks_asked": "{worker_id} is asked for the stacks of its threads",
    "expelled": "{worker_id} is expelled",
    "fenced": "{worker_id} finds that a later generation goes on without it",
    "straggler": "{worker_id} is a straggler",
    "straggler_over": "{worker_id} is no straggler any more",
    "demoted": "{worker_id} gives its place to a spare",
    "surplus": "{worker_id} is one more than is wanted, and becomes a spare",
    "drained": "{worker_id} has left between two steps",
    "finished": "{worker_id} has finished its training",
    "script_started": "the script of {worker_id} starts as rank {rank} of {world}",
    "script_ended": "the script of {worker_id} ends with status {status}",
    "script_killed": "the script of {worker_id} is ended by signal {signal}",
    "script_stopped": "the script of {worker_id} stands still, and is ended",
    "scripts_hang": "no script of round {generation} gets anywhere; {worker_id} fails for all of them",
    "script_failed": "the script of {worker_id} raises: {message}",
    "device_hung": "the device of {worker_id} hangs, so that it ends: {because}",
    "exit": "{worker_id} ends with exit code {code}",
    "slot_given_up": "slot {slot} gets no worker any more",
    "newcomer_hung": "{worker_id} hangs in its set-up and is ended",
    "newcomer_stuck": "{worker_id} gets no further with its copy and is ended",
    "newcomer_unreachable": "no ring can be built with {worker_id}, which is tried again after {wait_s} s",
    "newcomer_awaited": "training waits for {worker_id}",
    "quiesce_started": "the members of generation {generation} are told to leave its ring",
    "quiesce_complete": "all that live have left it",
    "committed": "generation {generation} ({kind}) is durable, with {members}",
    "running": "generation {generation} trains",
    "notice": "node {node} has a notice",
    "node_leaves": "node {node} has to go within {seconds_left} s",
    "node_stays": "node {node} stays",
    "node_empty": "no worker is on node {node} any more",
    "drain_asked": "{caller} wants node {node} empty",
    "worker_signal_asked": "{worker_id}: {caller} asks for this: {kind}",
    "cordoned": "{caller} wants node {node} empty, of all jobs",
    "agent_silent": "the agent of node {node} is silent",
    "leading": "{who} leads the job, term {term}",
    "deposed": "{who} leads it no longer",
    "resized": "the job is to have {workers} workers",
    "resigned": "{who} has given its lead back",
    "placed": "the fleet gives it {slots}",
    "preempted": "it has to leave, with a checkpoint: {because}",
    "waits_again": "it goes on as {goes_on_as}, from where it was",
    "job_agent_started": "node {node} starts its agent",
    "job_agent_ended": "its agent on node {node} ends",
    "submitted": "{caller} submits it, from {peer}",
    "scaled": "{caller} wants {workers} workers instead of {before}",
    "stop_asked": "{caller} stops it",
    "job_ended": "the job is over, exit {exit_code}",
}
"""Other events are shown by their own name."""

HIDDEN = frozenset(
    {"checkpoint_part_written", "checkpoint_complete", "state", "published", "order_refused", "steps_seen"}
)
"""Events that are frequent and do not say what became of a worker, or that repeat another line."""

_CAUSES = frozenset({"fault_injected", "worker_dying", "worker_frozen", "worker_exited", "stuck", "member_lost"})
_ARRIVALS = frozenset({"worker_started", "announced", "invited", "state_copied"})
_ENDS = frozenset({"quiesce_started", "job_ended"})
_CHANGES = frozenset({"submitted", "scaled", "stop_asked", "cordoned", "drain_asked"})
"""Changes made by operators."""
_DEPARTURES = frozenset({"drained", "demoted", "surplus", "notice", "node_leaves", "drain_asked", "agent_signalled"})
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
    return [moment(lines[i]) for i in sorted(chosen)]


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
    return line["event"] in HIDDEN or str(line["event"]).startswith("snapshot_")


class Known(dict[str, Any]):
    """The fields of a line, for a sentence that may name one which the line does not have."""

    def __missing__(self, key: str) -> str:
        return "somebody" if key == "caller" else "?"


def moment(line: Line, said: str = "") -> StoryMoment:
    """A line in words. said: the sentence, if it is not that of the line's event."""
    event = str(line["event"])
    known = Known(line)
    if isinstance(line.get("members"), list):
        known["members"] = ", ".join(map(str, line["members"])) or "nobody"
    if isinstance(line.get("slots"), Mapping):
        known["slots"] = ", ".join(f"{count} on {node}" for node, count in sorted(line["slots"].items())) or "no slot"
    words = event.replace("_", " ") + (f", {line['worker_id']}" if line["worker_id"] else "")
    text = said or SENTENCES.get(event, words.replace("{", "{{").replace("}", "}}")).format_map(known)
    because = "; ".join(str(line[key]) for key in ("because", "level") if line.get(key))
    return StoryMoment(line, text, because)
