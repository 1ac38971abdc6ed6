"""docs/events.md, made from the table of events. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from elastic.records.events.table import ROWS, JournalEvent, Level

FIELDS: Mapping[str, str] = {
    "address": "where the process listens; of `attending_fleet` where the leader does",
    "advice": "what to do about it",
    "applied": "number of lines of the ledger",
    "at": "the method that was called; of `checkpoint_read` `completion` or `the end`",
    "attempt": "number of the failed attempt, from 1",
    "beat_s": "seconds from one report of an agent to the next",
    "because": "the reason, as a sentence or a part of one",
    "before": "how many workers the job was to have before",
    "began": "whether the job waited in the queue until now",
    "behind": "how many operations are over whose results this newcomer does not have yet",
    "bytes": "size in bytes: of the state, of the part, or of the whole entry",
    "caller": "who asked, by its certificate or its user; empty if that is not known",
    "changed": "setting -> [before, now]",
    "code": "exit code",
    "cpu_s": "seconds of processor time",
    "created": "etcd's revision at which the key was made",
    "dead": "ids of the members that are dead",
    "devices": "accelerators that the job has on the node",
    "digest": "digest of the final state",
    "ended": "ids of the workers that are ended",
    "entered": "the generation in which the worker is; 0: it is new",
    "entries": "names of the entries that were removed",
    "entry": "name of the checkpoint or snapshot",
    "etcd": "addresses of etcd, of a replica of a fleet",
    "exit_code": "exit code of the job",
    "fault": "kind of the fault, as in `elastic chaos list`",
    "from_outside": "whether a signal has ended the fork server; then another one is started",
    "goes_on_as": "name under which the job waits again",
    "hanging": "the worker whose script hangs",
    "held": "whether the copy is of a state that the donor has copied before",
    "held_until_ns": "CLOCK_MONOTONIC in nanoseconds until which the lease of the leader was good",
    "highest": "number of the newest generation; 0: there is none",
    "hung": "whether the member was stopped, silent or stuck, and not gone",
    "instead": "the entry from which the job goes on; empty: there is none",
    "jobs": "names of the jobs on the node",
    "jobs_dir": "directory of the jobs on the node",
    "keeps": "the value that stays",
    "key": "key of the document in etcd",
    "nodes": "nodes without a member that may have it; empty: they are not known",
    "kept_in": "the round that has kept the step: how often the job was started again, and the generation",
    "kind": "of a generation `form`, `loss` or `planned`; of a notice its kind; of `worker_signal_asked` what is asked "
    "for",
    "leaves": "when the jobs leave the node",
    "left": "sentences",
    "lethal": "whether the fault ends the worker",
    "level": "what of the script survives a change of the workers, as a sentence",
    "limit_s": "seconds without progress after which the worker is stuck",
    "lines": "number of lost lines",
    "log": "name of the log or journal",
    "members": "ids of the members, by rank",
    "message": "type and text of the exception",
    "metrics": "URL of the metrics",
    "missed": "how many newcomers of the slot were too late",
    "module": "name of the module",
    "modules": "number of imported modules",
    "ms": "milliseconds that the copy took",
    "newest": "newest term that the agent has heard of",
    "noted_s": "seconds within which the loss has to be noted",
    "number": "of the fault; of `commit_refused` and `etcd_put` of the generation",
    "of": "the dead member; of `gossip_skipped` the partner; of `update_lost` the worker that is gone",
    "op": "number of the operation in the job, from 0",
    "order": "kind of the order",
    "outdated": "how many copies were out of date too early, or results brought this newcomer no nearer",
    "over": "of `ring_up` what carries gradients, as in --ring; else whether the wish is taken back",
    "owner": "whose quota it is",
    "parts": "how many parts",
    "pass_no": "number of the pass in its step",
    "peak_bytes": "the most memory at a time, in bytes",
    "peer": "network address of the caller",
    "pieces": "numbers of the pieces of the parameters",
    "place": "of `script_failed` where the exception was raised; of a fault the point at which it strikes; of "
    "`checkpoint_read` `memory` or `disk`",
    "problem": "what is wrong with the entry; empty: every byte that was read is as its manifest says",
    "rank": "rank in the generation",
    "ranks": "MPI ranks of the members",
    "read": "whether the data was read",
    "reduced": "number of operations of which the worker has the result",
    "replaced": "whether another worker takes the slot; false: the job was complete",
    "reports": "ids of the members that have reported",
    "restarted": "whether the slot had a worker before",
    "resume": "the job from which this one goes on; empty: none",
    "revision": "etcd's revision",
    "round": "number of the attempt to leave the ring",
    "ruling": "`script`, `data`, `memory`, `no progress` or `node`",
    "script": "pid of the script; of `script_outlived` of its process",
    "seconds": "seconds that it took, or that were waited",
    "seconds_left": "seconds until the machine goes",
    "segment": "round and file of the segment",
    "series": "directory of the entry, by which periodic checkpoints and named saves are told apart",
    "setting": "name of the option",
    "shard_ms": "milliseconds that the worker takes for a shard",
    "shards": "number of shards of a step; of `balanced` worker id -> number",
    "signal": "name of the signal; of `script_killed` its number",
    "slot": "the slot, `node.number`; in an agent's line its number",
    "slots": "number of slots; of `placed` node -> number",
    "source": "of a copy the worker from which it came; of a notice the provider",
    "spoiled": "the checkpoint that the fault has damaged",
    "stall_ms": "milliseconds for which training stood still",
    "start": "`forked` or `cold`",
    "state": "state of the job",
    "status": "exit status of the script",
    "step": "number of the step, from 0",
    "target": "what is hit, if it is no worker",
    "term": "term of the leader: a later leader has a higher one",
    "times": "how often: refusals that the line stands for, failed attempts in a row",
    "total": "number of steps of the job",
    "wait_s": "seconds until the next attempt",
    "wanted": "the value that the file asks for",
    "words": "the traceback, or the last lines of output",
    "workers": "number of workers; of `dropped_unreachable` their ids",
    "world": "number of ranks",
}
"""Field -> what it holds, in all events that have it."""

SECTIONS: Mapping[str, str] = {
    "worker": "Workers\n\n`journal/<worker_id>.jsonl` in the directory of the job. For scripts that run in rounds "
    "(`--restart`) the generation is the round.",
    "agent": "Agents\n\n`journal/agent-<node>.jsonl` in the directory of the job.",
    "agent or daemon": "Agents and daemons\n\nThe journal of the job's agent or, in a fleet, of the node's daemon.",
    "leader": "The leader of a job\n\n`journal/rendezvous-<pid>.jsonl` in the directory of the job; in a fleet on each "
    "replica that has led it. `worker_id` is the worker that the line is about.",
    "replica": "Replicas of a fleet\n\n`journal/rendezvous-<pid>.jsonl` in the directory of the replica. `job` is the "
    "job that the line is about.",
    "daemon": "Daemons\n\n`journal/daemon-<node>.jsonl` in the directory of the node's jobs. `job` is the job that the "
    "line is about.",
    "any": "Several processes\n\nThe journal of the process that is named.",
    "harness": "`elastic chaos`\n\n`journal/harness.jsonl` in the directory of the job.",
}
"""Writer -> title and introduction of its section."""

HEAD = """\
<!-- Made by `python -m elastic.records.events > docs/events.md`. -->
# Events of the journals

Every process writes what happens into a journal, a file with one JSON object a line. `elastic story` tells the
journals in sentences, and the [dashboard](dashboard.md), the [time axis](timeline.md) and the [metrics](metrics.md) are
made from them. This page has all events, for people and programs that read the journals themselves.

Each line has `t_mono_ns` (CLOCK_MONOTONIC of the machine, in nanoseconds), `t_wall` (seconds since 1970), `job`,
`generation` (0: none), `node`, `pid`, `who` (the process that wrote it), `worker_id` (the writer, or the worker that
the line is about; empty: neither), `event`, and the [fields](#fields) of the event. A field with a question mark is not
in all lines.

| shown | where |
|---|---|
| bad, warn, good, info | among the events of the [dashboard](dashboard.md), in this colour |
| time axis | as an instant of [`elastic trace`](timeline.md) |
| console | by `elastic run` |
| warning | as a warning in [a daemon's log](status.md#the-log-of-a-daemon), which has all events of its journal |
| `elastic_...` | in this [metric](metrics.md) |

`elastic story` has all events but those that are *hidden*.
"""


def text() -> str:
    """The whole page."""
    return "\n".join((HEAD, *(_section(writer, told) for writer, told in SECTIONS.items()), _fields()))


def _section(writer: str, told: str) -> str:
    rows = (row for row in ROWS if row.writer == writer)
    return f"## {told}\n\n| event | fields | what it means | shown |\n|---|---|---|---|\n" + "".join(map(_line, rows))


def _line(row: JournalEvent) -> str:
    fields = ", ".join(f"`{name}`" for name in row.fields.split())
    return f"| `{row.name}` | {fields} | {_meaning(row)} | {', '.join(_shown(row))} |\n"


def _meaning(row: JournalEvent) -> str:
    said = re.sub(r"{(\w+)}", r"*\1*", row.said[:1].upper() + row.said[1:])
    return ". ".join(filter(None, (said, row.about)))


def _shown(row: JournalEvent) -> Iterator[str]:
    if row.level is not Level.PLAIN:
        yield f"*{row.level}*" if row.level is Level.HIDDEN else str(row.level)
    yield from (
        word for word, is_so in (("time axis", row.instant), ("console", row.console), ("warning", row.warns)) if is_so
    )
    yield from (f"`{metric}`" for metric in row.feeds)


def _fields() -> str:
    return "## Fields\n\n| field | what it holds |\n|---|---|\n" + "".join(
        f"| `{name}` | {meaning} |\n" for name, meaning in FIELDS.items()
    )
