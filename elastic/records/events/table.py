"""Every event of the journals, a row each: its fields, what it means, and where and how it is shown. Pure.

A new event takes a row here. Readers that need one event at a time (story, dashboard, console, time axis, metrics, the
log of a daemon) take what they show from it; docs/events.md is made from it. Writers name their events by literals: a
test compares all of them, and all that readers match, with this table. Workers do not import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, TypeAlias

Line: TypeAlias = Mapping[str, Any]


class Level(StrEnum):
    """Where an event is shown: in stories and on the page of the dashboard, there in a colour of that name; HIDDEN: in
    neither, because it is frequent, or repeats another one; PLAIN: in stories alone."""

    HIDDEN = "hidden"
    PLAIN = "plain"
    INFO = "info"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class JournalEvent:
    """said: its sentence, with fields of the line in braces; "": it is shown by its name. about: what the sentence does
    not say, for docs/events.md. console: what `elastic run` prints for it, if anything; a function returns None for a
    line that need not be printed, and raises KeyError for one that lacks a field."""

    writer: str
    name: str
    fields: str
    """Names of the fields that are its own, those that a line may lack with a question mark."""
    said: str
    about: str = ""
    level: Level = Level.PLAIN
    instant: bool = False
    """Whether it is an instant of `elastic trace`."""
    warns: bool = False
    """Whether the log of a daemon has it as a warning."""
    console: str | Callable[[Line], str | None] = ""
    feeds: tuple[str, ...] = ()
    """The metrics that are computed from it."""

    @property
    def on_page(self) -> bool:
        """Whether the page of the dashboard shows it as a sentence."""
        return self.level not in (Level.HIDDEN, Level.PLAIN)


def _worker_failed(line: Line) -> str:
    then = " after the job was complete" if line.get("replaced") is False else ", and is replaced"
    return f"{line['worker_id']} {line['because']}{then}; its log is in logs/"


def _worker_out_of_memory(line: Line) -> str:
    had = f" It had {line['peak_bytes'] / 1e9:.1f} GB." if "peak_bytes" in line else ""
    return (
        f"{line['worker_id']} was killed: {line['because']}.{had} Smaller micro-batches or fewer workers on the "
        "machine need less"
    )


def _slot_given_up(line: Line) -> str | None:
    """Only the leader's line is shown: an agent's line has the number of the slot within its node."""
    if not isinstance(line["slot"], str):
        return None
    return f"slot {line['slot']} gets no worker any more: {line['because'].splitlines()[0]}; see its log in logs/"


def _fork_server_unusable(line: Line) -> str | None:
    if line["from_outside"] is not False:
        return None
    return f"workers cannot be forked and start with an interpreter of their own: {line['because']}"


def _mpi_not_started(line: Line) -> str:
    return (
        f"MPI cannot start: {line['because']}. {', '.join(map(str, line['ended']))} cannot be freed from MPI_Init; "
        "they are replaced, and gradients go over TCP. To try MPI again, stop the job and start it anew"
    )


HIDDEN, INFO, GOOD, WARN, BAD = Level.HIDDEN, Level.INFO, Level.GOOD, Level.WARN, Level.BAD
SAVES = "elastic_checkpoints_total"
THIN = "elastic_kept_thin_parts"
_LOSS = ("elastic_recovery_seconds",)
_SAVED = (SAVES, "elastic_checkpoint_bytes", "elastic_checkpoint_age_seconds")
_NOTICE = ("elastic_notice_seconds_left",)

_worker, _agent, _leader = (partial(JournalEvent, writer) for writer in ("worker", "agent", "leader"))
_replica, _daemon, _both = (partial(JournalEvent, writer) for writer in ("replica", "daemon", "agent or daemon"))
_any, _harness = (partial(JournalEvent, writer) for writer in ("any", "harness"))

# fmt: off
ROWS = (
    # Workers: start, join, generations
    _worker("state_held", "op bytes ms", "", "A donor has copied the state within its memory, to send it to a "
        "newcomer"),
    _worker("state_not_held", "because", "", "A donor has no memory for a copy of the state: newcomers wait, and it "
        "tries again. Give the workers there more memory", WARN),
    _worker("state_copied", "op held", "{worker_id} has copied the state, as of operation {op}"),
    _worker("copy_goes_on", "op bytes", "", "A newcomer keeps the part of the state that it has, and asks for the "
        "rest"),
    _worker("copy_failed", "because", "the copy of {worker_id} breaks off; it asks again", "A connection broke, or the "
        "donor left", WARN),
    _worker("gossip_skipped", "of because", "{worker_id} does not average with {of}", "It has ended, or did not answer "
        "within 5 s. It goes on with its own parameters"),
    _worker("pieces_fell_back", "pieces", "{worker_id} goes on with older pieces of the parameters", "Of each of "
        "them owner and mirror have died together, or this worker had left and was taken back; the metrics of the "
        "phase count the updates of which others know that they are lost", BAD, instant=True),
    _worker("update_lost", "of", "the update that {of} was about to send is lost", "By rank 0, at the end of the "
        "phase. Other workers make its inner steps again", WARN),
    _worker("copy_outdated", "op because", "the copy of {worker_id} is out of date; it copies anew",
        "The members no longer hold the results that came after it"),
    _worker("newcomer_no_nearer", "op behind", "{worker_id} takes over results no faster than members make them"),
    _worker("joined", "op", "{worker_id} trains with the others, from operation {op} on", "", GOOD, instant=True),
    _worker("initial_state_copied", "source", "", "Its initial parameters differed from those of rank 0",
        console="the initial parameters of {worker_id} differed from rank 0's and were copied from {source}; build the "
        "model after elastic.join(), which seeds all workers alike, to spare the copy"),
    _worker("entered", "kind members rank reduced", "{worker_id} enters generation {generation} as rank {rank}",
        feeds=_LOSS),
    _worker("ring_up", "over because", "{worker_id} is connected to all members of generation {generation}",
        "`because` is empty if gradients go over what was asked for", feeds=_LOSS),
    _worker("ring_over_mpi", "ranks", "", "By rank 0: gradients go over MPI in this generation"),
    _worker("ring_without_mpi", "because", "", "By rank 0: gradients go over TCP although MPI was asked for",
        console="generation {generation} sends its gradients over TCP: {because}"),
    _worker("ring_aborted", "", "{worker_id} has left the ring of generation {generation}"),
    _worker("reported", "reduced", "{worker_id} reports how far it is: {reduced} operations"),
    _worker("redo_started", "op", "{worker_id} goes on with operation {op}, which was interrupted", feeds=_LOSS),
    _worker("result_copied", "op source", "{worker_id} has the result that it had missed", feeds=_LOSS),
    _worker("op_complete", "op", "{worker_id} has operation {op} complete", "The first operation of each generation, "
        "and no later one", feeds=_LOSS),
    _worker("overlap_given_up", "op because", "", "Gradients that were sent early were wrong in the workers that "
        "`because` names; in this generation they are sent at the end of the pass"),
    _worker("pass_repeated", "step pass_no", "", "A pass is computed again, because gradients reached other parameters "
        "than in the pass before"),
    _worker("steps_planned", "total shards", "", "How large the job is: when the script has said it, and when it "
        "changes. `total` is null where a stream decides"),
    # Workers: scripts that run in rounds (--restart); the generation is the round
    _worker("script_started", "rank world script", "the script of {worker_id} starts as rank {rank} of {world}", "",
        INFO),
    _worker("script_ended", "status script", "the script of {worker_id} ends with status {status}",
        "A negative `status` is minus the signal", INFO),
    _worker("script_killed", "signal", "the script of {worker_id} is ended by signal {signal}", "The worker ends in "
        "the same way, and is replaced", BAD),
    _worker("script_stopped", "because", "the script of {worker_id} stands still, and is ended",
        console="the script of {worker_id} is {because}; it is ended, and the worker is replaced"),
    _worker("scripts_hang", "because", "no script of round {generation} gets anywhere; {worker_id} fails for all of "
        "them"),
    _worker("kept_agreed", "step", "the scripts of {worker_id} end behind step {step}, as those of all others",
        "Workers join or leave as planned. No step is done again", INFO),
    _worker("kept_found", "step kept_in", "round {generation} goes on from step {step}, which elastic.keep has in "
        "memory", "By rank 0", GOOD, feeds=(THIN,)),
    _worker("ranks_memory", "ranks because", "{worker_id} has little memory for its {ranks} ranks: {because}",
        "With --ranks, before the scripts of a round start, by what they had in the round before. Say --min-workers "
        "so that no worker has to take over so many, or give the machine more memory", WARN,
        console="{who} may be killed for want of memory: {because}"),
    _worker("kept_awaited", "step nodes", "round {generation} waits up to 30 s for a node whose memory has step {step}",
        "By rank 0. What the members have is older, or not whole", WARN,
        console="the scripts wait up to 30 s for a node whose memory has step {step}"),
    _worker("kept_room_awaited", "because", "round {generation} waits up to 30 s for room in memory: {because}",
        "By rank 0. Without room on each machine the round begins without what elastic.keep has kept, and it is void",
        WARN, console="the scripts wait up to 30 s for room in memory: {because}"),
    _worker("kept_incomplete", "because", "round {generation} finds no whole step in memory: {because}. The script "
        "begins with its own files, if it has any", "By rank 0. A part is what one rank has kept", BAD,
        console="what was kept in memory is lost: {because}; the scripts begin with their own files"),
    _worker("kept_thin", "step parts", "{parts} parts of the state of step {step} are on one machine alone",
        "When a round begins by rank 0, later by a worker whose script cannot send them to the next machine. If that "
        "machine is lost before the round has kept a step, so is the state", WARN, feeds=(THIN,)),
    _worker("kept_not_copied", "source step because", "", "A part that one machine alone has cannot be copied", WARN),
    _worker("kept_not_digested", "step because", "", "A part of the last step cannot be read for the digest", WARN),
    _worker("kept_damaged", "segment because", "{worker_id} finds a damaged piece of the state in memory, and removes "
        "it: {because}", "The job goes on from a step that is whole without it. Examine the memory of the machine", BAD,
        console="{who} found a damaged piece of the state in memory, and has removed it: {because}"),
    # Workers: checkpoints and snapshots
    _worker("checkpoint_part_written", "series entry bytes stall_ms seconds cpu_s", "", "The worker's own part is "
        "durable", HIDDEN),
    _worker("checkpoint_part_taken_over", "series entry of", "", "It has written the part of the dead member `of`"),
    _worker("checkpoint_complete", "series entry step bytes", "", "All parts are there, and the manifest is durable",
        HIDDEN, feeds=_SAVED),
    _worker("checkpoint_skipped", "step because", "", "The checkpoint before is still being written, so there is none "
        "of this step. If there are many, take checkpoints less often", feeds=(SAVES,)),
    _worker("checkpoint_retried", "entry because attempt", "", "An object store gave an error, and is asked again"),
    _worker("checkpoint_failed", "series entry because", "", "There is no such checkpoint; training goes on, and the "
        "next checkpoint is tried", BAD, feeds=(SAVES,), console="{who} could not make the checkpoint {entry}; "
        "training goes on: {because}"),
    _worker("checkpoints_pruned", "series entries", "", "Older checkpoints are removed, as `--keep` says"),
    _worker("checkpoints_not_pruned", "series because", "", "Older checkpoints could not be removed; it is tried again "
        "after the next one"),
    _worker("checkpoint_set_aside", "entry because instead", "", "A checkpoint cannot be read. It stays for you to "
        "examine; the job goes on from `instead`, or ends if that is empty", console="{who} cannot go on from the "
        "checkpoint {entry}: {because}"),
    _worker("snapshot_part_written", "series entry bytes stall_ms seconds cpu_s", "", "As `checkpoint_part_written`, "
        "in the memory of the node", HIDDEN),
    _worker("snapshot_complete", "series entry step bytes", "", "The memory of the node has the whole state of this "
        "step", HIDDEN, feeds=_SAVED),
    _worker("snapshot_skipped", "step because", "", "The snapshot before is still being written. After three in a row "
        "`elastic status` says what to do", HIDDEN, feeds=(SAVES,)),
    _worker("snapshot_failed", "series entry because", "", "There is no such snapshot; the node keeps the one before. "
        "See what fills /dev/shm and the memory", BAD, feeds=(SAVES,)),
    _worker("snapshots_not_pruned", "series because", "", "The one before is not removed; tried again after the next"),
    _worker("snapshots_off", "because", "", "The memory of this node takes no snapshots in this run. Give it more "
        "memory, or say `--snapshot-every off`", WARN),
    _worker("snapshot_set_aside", "entry because instead", "", "A snapshot cannot be read, and is removed; `instead` "
        "is empty", HIDDEN, console="{who} cannot go on from the snapshot {entry}, which is removed: {because}"),
    _worker("read_again", "entry because", "", "A checkpoint or snapshot could not be read; it is tried again"),
    _worker("state_restored", "entry step seconds", "{worker_id} has the state of step {step}, from a checkpoint", "",
        GOOD, instant=True),
    _worker("sink_gap", "because", "", "A tracker (`job.log_to`) is without the steps that `because` names; the ledger "
        "has them", BAD),
    # Workers: their end
    _worker("device_hung", "because", "the device of {worker_id} hangs, so that it ends: {because}",
        "It is replaced. If this happens again on the same GPU, take the node out of the job", BAD),
    _worker("fenced", "because", "{worker_id} finds that a later generation goes on without it",
        "It ends, and is replaced"),
    _worker("script_failed", "place message?", "the script of {worker_id} raises: {message}", "Also by the leader, "
        "with the message. The worker is replaced, unless another one has raised at the same place", BAD, instant=True),
    _worker("agent_lost", "because", "", "The connection to the agent has ended. If the agent is gone, the worker ends "
        "too"),
    _worker("flight_not_recorded", "because", "", "The worker trains without its flight recorder, for example on a "
        "full disk"),
    _worker("exit", "code", "{worker_id} ends with exit code {code}"),

    # Agents: processes
    _agent("worker_started", "restarted start because", "{worker_id} starts as process {pid}", "`because` says why it "
        "does not start by fork, and is empty if it does", INFO, instant=True,
        feeds=("elastic_workers_started_total",)),
    _agent("worker_dying", "because", "the main thread of {worker_id} has ended", feeds=_LOSS),
    _agent("worker_exited", "because", "the process of {worker_id} is gone", "", WARN, instant=True,
        feeds=(*_LOSS, "elastic_workers_ended_total")),
    _agent("worker_out_of_memory", "because peak_bytes?", "{worker_id} was killed by the kernel: {because}",
        "It had at most that many bytes at a time, with those that workers share. Smaller micro-batches (more shards) "
        "or fewer workers on the machine need less; so does --snapshot-every off", BAD, instant=True,
        console=_worker_out_of_memory),
    _agent("worker_failed", "because words replaced", "the script has ended {worker_id}", "", BAD,
        console=_worker_failed),
    _agent("worker_frozen", "because", "{worker_id} is frozen", "It lives, says nothing and uses no CPU: a signal, a "
        "debugger or a disk has stopped it. It is given up if that lasts", BAD, instant=True, feeds=_LOSS),
    _agent("worker_thawed", "", "{worker_id} is alive again", "", GOOD, instant=True),
    _agent("worker_signalled", "signal", "{worker_id} is sent {signal}"),
    _agent("stacks_asked", "", "{worker_id} is asked for the stacks of its threads", "They are in its log in logs/",
        WARN),
    _agent("slot_given_up", "slot because", "slot {slot} gets no worker any more", "By the leader too. The script has "
        "failed too often, or twice at the same place: see its log in logs/", BAD, instant=True,
        console=_slot_given_up),
    _agent("slots_not_written", "because", "", "The agent cannot write down which workers it has started. Mend the job "
        "directory before it is started again", console="node {node} cannot write down which workers it has started, "
        "and training goes on: {because}. Mend the job directory before the agent is started again"),
    _agent("fork_server_ready", "modules cpu_s", "", "Workers are forked from a process that has imported their "
        "libraries"),
    _agent("fork_server_without", "module because", "", "The module cannot be imported before a fork; each worker "
        "imports it"),
    _agent("fork_server_unusable", "from_outside because", "", "Workers start with an interpreter of their own",
        console=_fork_server_unusable),
    _agent("mpirun_ended", "because words", "", "Every worker that had a rank of mpirun ends with it",
        console="mpirun {because}, and every worker that had a rank of it ends with it"),
    _agent("mpi_not_started", "because ended", "", "MPI_Init does not return in the workers `ended`",
        console=_mpi_not_started),
    _agent("rank_ended", "", "", "The process of this worker that mpirun had started has ended"),
    _agent("ledger_late", "seconds because step", "", "The disk took no lines of the ledger for so long; none is "
        "missing", console="steps.jsonl could not be written for {seconds:.1f} s ({because}); no line of it is "
        "missing"),
    _agent("ledger_broken", "because", "", "A step contradicts the ledger, so the worker that reported it fails"),
    # Agents: the job
    _agent("attending", "term", "", "The agent takes orders from the leader of this term"),
    _agent("no_leader", "because", "", "The agent looks for a leader; training goes on. See whether the replicas and "
        "etcd run", WARN),
    _agent("parked", "because", "", "The workers of the node stop, because a leader elsewhere may assume that they are "
        "gone"),
    _agent("not_admitted", "because", "", "The job's leader refuses the agent, which ends"),
    _agent("ordered", "order because", "{worker_id} is told: {order}"),
    _agent("order_refused", "order term newest", "", "The order is of an earlier leader than the one that the agent "
        "attends", HIDDEN),
    _agent("job_over", "exit_code because", "", "The leader has said that the job is over"),
    _agent("agent_signalled", "signal", "", "The agent is asked to end: its node leaves the job"),
    # Agents: notices that the machine goes
    _agent("node_leaves", "seconds_left because", "node {node} has to go within {seconds_left} s",
        "Its workers leave between two steps", WARN, instant=True, console="node {node} has to go within "
        "{seconds_left:.0f} s: {because}"),
    _agent("node_late", "because", "", "The time of the node is nearly over, and workers are left",
        console="node {node} has not left yet; if others go on, its workers are ended now"),
    _agent("node_out", "because", "", "The time of the node is over: all its workers are ended"),
    _agent("node_stays", "because", "node {node} stays", "", GOOD, console="node {node} stays: {because}"),
    _agent("advised", "because", "", "The node has a notice that asks nobody to leave", console="node {node} is told, "
        "and stays: {because}"),
    _both("notices_watched", "source", "", "Notices of this provider are asked for"),
    _both("notice", "source kind seconds_left because", "node {node} has a notice", "`seconds_left` is null for a "
        "notice that asks nobody to leave", WARN, instant=True, feeds=_NOTICE),
    _both("notice_over", "source", "", "The provider has taken its notice back", GOOD, feeds=_NOTICE),
    _both("notices_unreadable", "source because", "", "The provider does not answer: until it does, this node learns "
        "of its end only when it comes", warns=True, console="node {node} cannot read the notices of {source}, and "
        "goes on asking: {because}"),
    _both("node_empty", "", "no worker is on node {node} any more", "The provider is told, if it wants to know", INFO),

    # Leader: members
    _leader("announced", "entered", "{worker_id} says that it is there"),
    _leader("invited", "", "{worker_id} is invited to become a member"),
    _leader("refused", "because at? caller? peer? times?", "{worker_id} is refused", "Also by every process that "
        "serves connections, with `at`. If you know the caller, mend what `because` says; else see who it is", WARN,
        warns=True, console="{worker_id} is refused: {because}", feeds=("elastic_refusals_total",)),
    _leader("newcomer_hung", "because", "{worker_id} hangs in its set-up and is ended", "", BAD,
        console="the replacement {worker_id} is ended, and its slot gets another process: {because}. See where it "
        "hangs in its log in logs/; a set-up that is only slow may take half of --pause-limit: make that longer"),
    _leader("newcomer_stuck", "because", "{worker_id} gets no further with its copy and is ended", "", BAD),
    _leader("newcomer_unreachable", "times wait_s", "no ring can be built with {worker_id}, which is tried again after "
        "{wait_s} s", "See whether the network and the GPU of its node are in order", BAD),
    _leader("newcomer_awaited", "outdated? missed?", "training waits for {worker_id}", "", WARN,
        console="training waits until {worker_id} has the state: members train faster than it copies and catches up, "
        "by {outdated} copies that were out of date too early or results that brought it no nearer"),
    _leader("newcomer_in_vain", "slot seconds", "", "Training has waited so long for the newcomer, and goes on without "
        "it. Its network is too slow, or `--pause-limit` too short", WARN),
    _leader("member_lost", "because rank hung", "{worker_id}, rank {rank}, is lost to the job", "", BAD, instant=True,
        feeds=(*_LOSS, "elastic_job_hangs_total")),
    _leader("worker_lost", "because", "", "A worker that was no member yet, or not any more, is lost"),
    _leader("worker_gone", "because", "", "A worker that had left the job in order has ended"),
    _leader("stuck", "because limit_s?", "{worker_id} lives and gets nowhere", "It is ended, and replaced", BAD,
        instant=True, console="{worker_id} lives and gets nowhere, and is ended: {because}. See where it hangs in its "
        "log in logs/"),
    _leader("verdict", "ruling because", "verdict, {ruling}", "What repeated failures prove, with the evidence "
        "([the rules](failure-model.md#verdicts)). The job ends, or goes on without the node", BAD, instant=True),
    _leader("corrupted", "because", "{worker_id} has other values than the other members", "With `--verify`. It is "
        "replaced, and its sums do not count; its node is left if there are others. Test the machine's memory and its "
        "processors", BAD, instant=True, console="{worker_id} on node {node} has other values than the other members, "
        "and is ended: {because}. Test the memory and the processors of this machine"),
    _leader("node_excluded", "because", "node {node} gets no worker any more", "Its members leave between two steps. "
        "See what is wrong with the machine; the job takes the node again after a new start", BAD, instant=True,
        console="node {node} is left out from now on: {because}"),
    _leader("expelled", "because", "{worker_id} is expelled", "", BAD, instant=True),
    _leader("kill", "because", "", "The agent is to kill an expelled worker that has not ended by itself"),
    _leader("straggler", "because", "{worker_id} is a straggler", "It is much slower than the others. See what else "
        "runs on its machine", WARN, instant=True, console="{worker_id} is a straggler: {because}"),
    _leader("straggler_over", "shard_ms", "{worker_id} is no straggler any more", "", GOOD),
    _leader("demoted", "because", "{worker_id} gives its place to a spare", "", WARN, console="{worker_id} gives its "
        "place to a spare, because it is too slow"),
    _leader("balanced", "shards because", "", "Slower members get fewer shards from now on", INFO),
    _leader("surplus", "because", "{worker_id} is one more than is wanted, and becomes a spare", "", INFO),
    _leader("drained", "", "{worker_id} has left between two steps", "", INFO, instant=True),
    _leader("finished", "digest", "{worker_id} has finished its training", "", GOOD),
    # Leader: generations
    _leader("quiesce_started", "because", "the members of generation {generation} are told to leave its ring", "", WARN,
        feeds=_LOSS),
    _leader("quiesce_complete", "round reports dead", "all that live have left it", feeds=_LOSS),
    _leader("dropped_unreachable", "workers", "", "No ring could be built with these members, and the others go on"),
    _leader("committed", "kind members because level?", "generation {generation} ({kind}) is durable, with {members}",
        "", INFO, feeds=(*_LOSS, "elastic_job_hangs_total")),
    _leader("commit_unanswered", "because", "", "etcd does not answer; the leader asks again until it knows"),
    _leader("commit_refused", "number because", "", "etcd has refused the record of a generation"),
    _leader("published", "kind because", "", "The record of the generation is on its way to its members", HIDDEN,
        feeds=(*_LOSS, "elastic_recoveries_total")),
    _leader("running", "", "generation {generation} trains", "", GOOD, feeds=(*_LOSS, "elastic_job_goodput_ratio")),
    _leader("state", "state because", "", "The state of the job, as in `elastic status`", HIDDEN,
        feeds=("elastic_job_goodput_ratio",)),
    # Leader: checkpoints
    _leader("pointer_moved", "series entry", "", "This entry is the newest complete one; its writer may remove older "
        "ones"),
    _leader("pointer_stays", "series entry", "", "The entry that was completed is not newer than this one"),
    _leader("pointer_refused", "entry because", "", "The writer of the entry is no member"),
    _leader("pointer_not_moved", "series entry because", "", "etcd did not answer; no checkpoint is removed"),
    _leader("pointer_unknown", "because", "", "etcd does not say which checkpoint is the newest; the next new one "
        "does"),
    _leader("unreadable", "entry because", "", "A worker cannot read what the job goes on from", WARN),
    _leader("state_lost", "because", "", "Every copy of the state in workers is lost; the job goes on from a snapshot "
        "or a checkpoint", BAD),
    # Leader: the job
    _leader("leading", "term highest", "{who} leads the job, term {term}", "", INFO, instant=True),
    _leader("not_leading", "term because", "", "The replica was elected and cannot lead; it stands again"),
    _leader("not_elected", "because", "", "By replicas of a fleet too: etcd has refused the election, which is tried "
        "again", warns=True),
    _leader("resigned", "term held_until_ns", "{who} has given its lead back"),
    _leader("deposed", "term because held_until_ns", "{who} leads it no longer", "Another replica leads, or etcd is "
        "away. Training goes on", WARN, instant=True),
    _leader("job_was_over", "term", "", "The replica was elected, and finds the result of the job"),
    _leader("job_ended", "exit_code because digest", "the job is over, exit {exit_code}", "", GOOD, instant=True),
    _leader("result_not_written", "because", "", "result.json could not be written; the agents hear the result all the "
        "same"),
    _leader("resized", "workers", "the job is to have {workers} workers", "", WARN),
    _leader("drain_asked", "over because caller peer", "{caller} wants node {node} empty", "", WARN, instant=True),
    _leader("worker_signal_asked", "kind caller peer", "{worker_id}: {caller} asks for this: {kind}", "", WARN),
    _leader("agent_silent", "because", "the agent of node {node} is silent", "See whether the node and its network are "
        "there", BAD),
    _leader("agent_dismissed", "because", "", "The node has no place in the job any more"),
    _leader("beat_changed", "beat_s", "", "Agents report in this interval from now on, because there are more or fewer "
        "of them"),

    # Replicas: the fleet
    _replica("leading_fleet", "term", "", "The replica leads the fleet"),
    _replica("not_leading_fleet", "term because", "", "It leads the fleet no longer; another replica is elected",
        warns=True),
    _replica("submitted", "resume caller peer", "{caller} submits it, from {peer}", "", INFO),
    _replica("scaled", "workers before caller peer", "{caller} wants {workers} workers instead of {before}", "", WARN,
        instant=True),
    _replica("stop_asked", "because caller peer", "{caller} stops it", "", WARN, instant=True),
    _replica("cordoned", "over because caller peer", "{caller} wants node {node} empty, of all jobs",
        "One line for each job on the node", WARN),
    _replica("agent_end_asked", "caller peer", "", "The daemon of the node shall end and be started again, as "
        "another version"),
    _replica("quota_changed", "owner slots caller peer", "", "The owner's jobs get so many slots before the jobs "
        "of others"),
    _replica("placed", "began slots", "the fleet gives it {slots}", "", INFO),
    _replica("preempted", "because", "it has to leave, with a checkpoint: {because}"),
    _replica("waits_again", "goes_on_as", "it goes on as {goes_on_as}, from where it was"),
    _replica("not_waiting_again", "because", "", "The preempted job cannot be put into the queue; it is tried again"),
    _replica("node_up", "slots address", "", "The daemon of the node attends"),
    _replica("node_down", "", "", "The daemon of the node does not attend any more. If nobody ended it, look at the "
        "node", warns=True),
    _replica("fleet_store_unanswered", "because", "", "etcd does not answer the fleet's leader, which asks again",
        warns=True),
    _replica("documents_unread", "because", "", "etcd does not give the fleet's documents; the replica asks again",
        warns=True),
    _replica("document_unread", "key because", "", "A document of the fleet is damaged, and is left out", warns=True),
    _replica("question_failed", "because", "", "A command failed: etcd did not answer, or refused it", warns=True),
    _replica("ended_jobs_not_forgotten", "because", "", "Entries of old jobs could not be removed from etcd; it is "
        "tried again", warns=True),
    _replica("directory_removed", "", "", "The files of an old job were removed"),
    _replica("part_failed", "because", "", "The replica takes no part in a job for now, for example on a full disk; it "
        "tries again", warns=True),
    _replica("stop_failed", "because", "", "A job could not be told to stop; it is tried again", warns=True),
    _replica("end_told_again", "because", "", "etcd has an ended job as running, for example after a restored backup; "
        "its end is written again"),
    _replica("listening", "address etcd? metrics?", "", "The replica serves"),
    _replica("stopped", "", "", "The replica ends in order"),

    # Daemons: nodes of a fleet
    _daemon("daemon_started", "address slots jobs_dir metrics?", "", "`elastic agent` of a fleet has begun on this "
        "node"),
    _daemon("daemon_told_to_end", "jobs", "", "The fleet's leader has asked for the end of this daemon, which `elastic "
        "upgrade` wants to have started again"),
    _daemon("daemon_signalled", "signal leaves jobs?", "", "The daemon is asked to end"),
    _daemon("attending_fleet", "term address", "", "The daemon attends the fleet's leader at this address"),
    _daemon("no_fleet_leader", "because", "", "The daemon finds no leader of the fleet; its jobs go on. See whether "
        "the replicas and etcd run", warns=True),
    _daemon("settings_read", "changed", "", "The daemon has read its file of options again, after SIGHUP"),
    _daemon("settings_unread", "because", "", "The file of options cannot be read; everything stays as it was",
        warns=True),
    _daemon("setting_refused", "setting keeps wanted because", "", "The file of options has another value, for which "
        "the daemon has to be started again", warns=True),
    _daemon("job_agent_started", "slots devices", "node {node} starts its agent"),
    _daemon("job_agent_ended", "because", "its agent on node {node} ends"),
    _daemon("job_agent_trouble", "because", "", "The job's agent does not start, or ends again and again; `elastic "
        "jobs` shows it", warns=True),
    _daemon("standby_started", "", "", "A standby waits, so that a later agent of the job begins at once"),
    _daemon("standby_begins", "", "", "The standby becomes the agent of the job"),
    _daemon("standby_ended", "", "", "The job has not come back, so its standby is ended"),
    _daemon("standby_refused", "because", "", "No standby can be started for the job, whose later agent starts more "
        "slowly", warns=True),
    _daemon("token_unwritten", "because", "", "The token that admits the agent to the job could not be written",
        warns=True),
    _daemon("result_unwritten", "because", "", "The result could not be written to the job directory", warns=True),
    _daemon("notices_untold", "because", "", "The job's agent could not be told of the node's notices", warns=True),
    _daemon("certificates_unwritten", "because", "", "New certificates could not be copied for the job, which keeps "
        "those that it has", warns=True),
    _daemon("log_unreadable", "log because", "", "A log or journal that was asked for cannot be read", warns=True),

    # Any process that serves connections, or keeps a journal
    _any("slowed", "because at caller peer times", "", "A caller sends too many messages, and is read more slowly",
        warns=True),
    _any("agent_refused", "because", "", "By the leader: an agent's message cannot be read"),
    _any("agent_stream_broke", "because", "", "By the leader: the connection to an agent has failed"),
    _any("node_refused", "because", "", "By the fleet's leader: a daemon's message cannot be read, or its name is "
        "taken", warns=True),
    _any("node_stream_broke", "because", "", "By the fleet's leader: a connection to a daemon has failed", warns=True),
    _any("worker_refused", "because", "", "By an agent: a worker's message cannot be read"),
    _any("worker_stream_broke", "because", "", "By an agent: the connection to a worker has failed"),
    _any("certificate_trouble", "because advice?", "", "A certificate ends soon, or is not valid yet", warns=True),
    _any("journal_gap", "lines", "", "So many lines before this one could not be written, for example on a full disk"),

    # The harness of `elastic chaos`
    _harness("fault_injected", "number fault place lethal noted_s? target? script? hanging? spoiled?",
        "{worker_id} is hit by {fault}", "Just before the fault", BAD, instant=True, feeds=_LOSS),
    _harness("fault_seen", "number because", "", "The fault has taken hold: so says /proc, or a journal"),
    _harness("fault_held", "number", "", "A new process where a fault lasts is hit as the one before it was"),
    _harness("fault_ended", "number", "", "The end of the fault was brought about, or it has none", INFO, feeds=_LOSS),
    _harness("fault_incomplete", "number because", "", "The second part of a fault in two parts never came"),
    _harness("fault_skipped", "number fault because", "", "The fault could not be done, and was not"),
    _harness("steps_seen", "applied", "", "So many lines are in the ledger now", HIDDEN),
    _harness("etcd_put", "key revision created number members", "", "The record of a generation was written"),
    _harness("etcd_gap", "because", "", "What happened in etcd meanwhile was not seen"),
    _harness("checkpoint_read", "place series entry step at read problem", "", "An entry that a worker has called "
        "complete. `read` is false if it is so large that only its files were looked at"),
    _harness("script_outlived", "script because", "", "A process of a script is there although the script has ended"),
    _harness("ledgers_differ", "because", "", "Two nodes tell a step differently, or a line of a ledger is damaged"),
    _harness("left_behind", "left", "", "What was there although the job had ended"),
)
# fmt: on

TABLE: Mapping[str, JournalEvent] = {row.name: row for row in ROWS}
_UNKNOWN = JournalEvent("", "", "", "")


def row(name: object) -> JournalEvent:
    """The row of an event; for an event of another version of the product, one that says nothing."""
    return TABLE.get(str(name), _UNKNOWN)
