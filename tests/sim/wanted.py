"""What a search has to reach, and what it cannot, with the reason.

Wanted are all arms of the machines (arms.py) but those in EXCLUDED, all changes of state in CHANGES, and the paths in
RARE. A change of state that is neither there nor in SELDOM fails the search too: then the tables of the docs are not
complete.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from elastic.protocol.loop_state.state import ARCS as SCRIPT_ARCS
from elastic.protocol.loop_state.state import STANDINGS, ScriptStage
from elastic.protocol.membership.roster import ARCS

Change: TypeAlias = tuple[str, str, str, str]
"""machine, state, kind of event, state after it."""

RARE = (
    "a donor lost in mid-copy",
    "a double loss during SYNC",
    "a drain was taken back",
    "a late replica was told to stop",
    "a replica stopped early",
    "a result of a round could not be copied",
    "a survivor trained more than one replica",
    "a job began again before its first step",
    "a job began again twice",
    "a job to be revived had nothing to go on from",
    "a job was made larger",
    "a job was made smaller",
    "a job went on below quorum",
    "a job went on from a checkpoint",
    "a job went on from a snapshot",
    "a job went on twice",
    "a job went on where another node kept something older",
    "a leader change while every copy of the state is lost",
    "a member gave up a slow link",
    "a member held the state after all",
    "a member of a revived job died at once",
    "a leader change inside QUIESCING",
    "a newcomer came no nearer",
    "a newcomer copies anew",
    "a newcomer could not be connected",
    "a newcomer is the only one past k",
    "a newcomer joined a ring that waited for it",
    "a newcomer joined a ring that waited for its copy",
    "a newcomer joined after it had taken over results",
    "a newcomer that could not be connected was replaced",
    "a newcomer took over a result that was kept for nobody",
    "a newcomer was told what an early call gave in a later step",
    "a newcomer was too late for its epoch",
    "a newcomer went through a step as no holder, and copies anew",
    "a newcomer whose set-up hung was replaced",
    "a node was given up because its kernel had closed everything",
    "a planned change was voided by a loss",
    "a silent node was given up because the others waited for it",
    "a spare joined",
    "a stuck member was expelled and replaced",
    "a stuck newcomer was replaced",
    "a worker was demoted",
    "an agent was silent on a stream that was up",
    "an ahead-by-one survivor dies before its result is copied",
    "an early generation takes effect while a newcomer copies",
    "drainer and leader die in one moment",
    "newcomers are the only holders",
    "nobody answered, and all were ended",
    "nobody got on, and all were ended",
    "redo rule: computed alone",
    "redo rule: the operation is redone",
    "redo rule: the result is copied",
    "several events were taken together",
    "shards by speed in a loss generation",
    "shards followed speed",
    "two halves that see no common member",
    "two pending generations, and the highest is not in all headers",
    "workers without any leader were parked",
)

_STATES = {
    "worker": {str(stage): " ".join(sorted(after)) for stage, after in ARCS.items()},
    "detector": {"alive": "suspect frozen", "suspect": "alive frozen", "frozen": "alive suspect"},
    "membership": {
        "forming": "closed paused quiescing rebuilding running",
        "rebuilding": "closed closing forming paused quiescing running",
        "running": "closed closing forming paused quiescing",
        "paused": "closed closing forming quiescing running",
        "quiescing": "closed closing forming rebuilding",
        "closing": "closed",
    },
    "position": {"fresh": "ready", "ready": "collecting gone", "collecting": "ready gone"},
    "supervision": {
        "waiting": "away over starting",
        "starting": "over running",
        "running": "away leaving over stopping waiting",
        "leaving": "over stopping",
        "stopping": "over",
        "away": "over waiting",
        "over": "stopping",
    },
}
"""machine -> state -> those that may follow. From ALIVE a worker is FROZEN at once where it is seen to be stopped."""

_AT_ONCE = {
    ("worker", str(before), str(after)): f"by way of {between}, in one event"
    for before, betweens in ARCS.items()
    for between in betweens
    for after in ARCS[between] - ARCS[before] - {before}
}

_LISTED = "a leader names whom a record lists, and listed newcomers were ready; with member -> invited or ready too"
_COPIED = "the only holders of the state are newcomers whose copy another loss has made anew"
_ALIKE = "all numerics are alike here (numerics.txt)"
_ALL_STEPS = "a script here goes through all epochs and steps (left-by-break.txt of the unit scenarios)"
_NOT_LOST = "orders and words get lost here only with their agent or leader (told-again.txt)"

SELDOM = _AT_ONCE | {
    ("worker", "named", "invited"): _LISTED,
    ("worker", "member", "invited"): _LISTED,
    ("worker", "member", "ready"): _LISTED,
    ("worker", "named", "refused"): "its node has come back and says nothing of it for progress_s",
    ("worker", "announced", "refused"): _ALIKE,
    ("worker", "announced", "ready"): "an agent tells every leader of the invitation (ready-uninvited.txt)",
    ("worker", "invited", "member"): _COPIED,
    ("worker", "invited", "announced"): _NOT_LOST,
    ("worker", "refused", "member"): "it enters its generation in the moment in which it is given up",
    ("worker", "refused", "expelled"): "it lives on until every copy of the state is lost",
    ("worker", "killed", "expelled"): _NOT_LOST,
    ("membership", "forming", "closing"): "a member of whom nothing was heard comes back in the moment in which it has "
    "finished (finished-after-all.txt of the unit scenarios)",
    ("script", str(ScriptStage.BEFORE_STEPS), str(ScriptStage.AFTER_STEPS)): _ALL_STEPS,
    ("script", str(ScriptStage.BEFORE_STEPS), str(ScriptStage.OVER)): _ALL_STEPS,
    ("script", str(ScriptStage.HANDED_OUT), str(ScriptStage.BETWEEN)): "no script here gives a step back "
    "(the random scripts of test_loop_state.py do)",
    ("position", "fresh", "gone"): "a newcomer hears of the loss of all copies only when the job has formed anew "
    "(newcomer-of-before.txt of the unit scenarios)",
}
"""Changes of state that may be, and are not wanted."""

_MISSED_IN = (ScriptStage.COPYING, ScriptStage.BETWEEN)
"""Where a newcomer asks for a copy."""

_OF_SCRIPT = (
    *(("script", str(before), str(after)) for before, stages in SCRIPT_ARCS.items() for after in stages),
    *(("script", str(before), str(ScriptStage.MISSED)) for before in _MISSED_IN),
    *(("standing", str(before), str(after)) for before, standings in STANDINGS.items() for after in standings),
)

CHANGES = tuple(
    change
    for change in (
        *(
            (machine, before, after)
            for machine, states in _STATES.items()
            for before, afters in states.items()
            for after in afters.split()
        ),
        *_OF_SCRIPT,
    )
    if change not in SELDOM
)


class Excluded(NamedTuple):
    """because: why it is not wanted. test: which test of tests/unit takes it; a search runs that."""

    because: str
    test: str


_OVERLAP = "needs two members that compute one operation alone, and lose whom they were behind before either is done"
_NOBODY_STAYS = (
    "protocol/membership/planned_changes.py close_if_all_left: if g.running is None or g.running.ids "
    "or g.state is State.CLOSED"
)
_DAMAGED = Excluded("what is kept here can be read", "elastic/protocol/test_membership.py::test_scenario")
_STRANGER = Excluded(
    "an agent says of a worker first that it exists, to every leader",
    "elastic/protocol/test_ignored.py::test_a_word_of_a_stranger_changes_nothing",
)

_OVERTAKEN = Excluded(
    "needs a newcomer that is not told of a job formed anew, nor of its first generations, and finds it before it ends",
    "elastic/protocol/test_worker_state.py::test_scenario",
)

_THOUSANDS = "only a job of so many agents that each speaks less often is followed; those here are small"
_SHRINKS = "elastic/protocol/test_agent_silence.py::test_a_job_that_shrinks_gives_each_agent_the_time_to_hear_of_it"
_HARDLY = "elastic/protocol/test_agent_silence.py::test_a_few_agents_more_or_less_change_nothing"
_FOLLOWED = "protocol/failure_detector.py AgentMonitor.follow"
_NEAR = "if self.beat_s / STEADY < timing.beat_s < self.beat_s * STEADY"

_LOOPS = "protocol/loop_state/loops.py"
_LOOP_TESTS = "elastic/protocol/test_loop_state.py"
_MISTAKE = Excluded(
    "a mistake of the script, which ends its process",
    f"{_LOOP_TESTS}::test_a_mistake_of_the_script_is_refused_and_changes_nothing",
)
_SECOND = Excluded(_MISTAKE.because, f"{_LOOP_TESTS}::test_scenario")
_WITHOUT_STEP = Excluded(
    "a newcomer is told of a step in the epoch, and a script here does not leave its loop before that step",
    f"{_LOOP_TESTS}::test_scenario",
)

_OF_LOOPS = {
    "protocol/loop_state/state_machine.py step: if s.stage is ScriptStage.MISSED": Excluded(
        "its process ends at once", f"{_LOOP_TESTS}::test_scenario"
    ),
    "protocol/loop_state/state_machine.py _told": Excluded(
        "words an assertion that fails", f"{_LOOP_TESTS}::test_what_cannot_happen_is_asserted"
    ),
    f"{_LOOPS} loop_begun: if s.loop is not LoopKind.NONE": _SECOND,
    f"{_LOOPS} steps_begun: if s.stage is not begins": _SECOND,
    f"{_LOOPS} next_step: if s.stage is not ScriptStage.BETWEEN": _MISTAKE,
    f"{_LOOPS} pass_begun: if s.in_pass": _MISTAKE,
    f"{_LOOPS} pass_begun: if not s.in_step or (event.step, event.pass_no) != (s.step, s.pass_no)": _MISTAKE,
    f"{_LOOPS} step_left: if s.in_pass": _MISTAKE,
    f"{_LOOPS} step_left: if s.stage is ScriptStage.HANDED_OUT": _MISTAKE,
    f"{_LOOPS} called: if s.in_pass": _MISTAKE,
    f"{_LOOPS} called: if not s.entered": _MISTAKE,
    f"{_LOOPS} shared: if s.in_pass": _MISTAKE,
    f"{_LOOPS} shared: if s.entered": _MISTAKE,
    f"{_LOOPS} epoch_over: if s.joining": _WITHOUT_STEP,
    f"{_LOOPS} called: if s.joining and (not (before_steps or s.early))": _WITHOUT_STEP,
    "protocol/loop_state/newcomer.py joins: case events.MembersLost()": Excluded(
        "when all members are lost, a leader lists newcomers that hold a copy, and one that copies anew holds none",
        f"{_LOOP_TESTS}::test_scenario",
    ),
}

_VERDICT = Excluded(
    "workers of the simulator do not fail again and again for one cause, flip bits or evaluate; test_storms.py has the "
    "storms in which there is no verdict",
    "elastic/protocol/test_membership.py::test_scenario",
)
_VERDICTS = dict.fromkeys(
    (
        "protocol/membership/state_machine.py _died: not if g.state is not State.CLOSED",
        "protocol/membership/transitions.py become_closed: if cause is not None",
        "protocol/membership/verdicts.py raised: not if failure is not None",
        "protocol/membership/verdicts.py ended: if word.failure and (failure := _failure(g, "
        "word.worker_id, FailureKind(word.failure), word.because,",
        "protocol/membership/verdicts.py exclude",
        "protocol/membership/verdicts.py exclude: for worker in here",
        "protocol/membership/verdicts.py exclude: if worker in g.dead or refuse_if_excluded(g, worker, do)",
        "protocol/membership/verdicts.py exclude: not if worker in g.dead or refuse_if_excluded(g, worker, do)",
        "protocol/membership/verdicts.py exclude: if worker not in g.given_up and "
        "g.workers[worker].stage in (Stage.MEMBER, *NEWCOMERS)",
        "protocol/membership/verdicts.py exclude: not if worker not in g.given_up and "
        "g.workers[worker].stage in (Stage.MEMBER, *NEWCOMERS)",
        "protocol/membership/verdicts.py refuse_if_excluded: not if because is None or g.lists(worker) or "
        "seen.entered or (seen.stage is Stage.REFUSED)",
        "protocol/membership/planned_changes.py drain_is_over: if (because := "
        "g.failures.excluded.get(seen.member.node)) is not None and worker in g.drains",
        "protocol/membership/state_machine.py _apply: not if node not in g.failures.excluded",
        "protocol/membership/verdicts.py _judge: if g.failures.knows(failure.worker_id)",
        "protocol/membership/verdicts.py _judge: if (verdict := judge(g.failures.history)) is not None",
        "protocol/membership/verdicts.py _judge: if verdict.ruling not in (Ruling.DATA, Ruling.MEMORY)",
        "protocol/membership/verdicts.py _judge: not if verdict.ruling not in (Ruling.DATA, Ruling.MEMORY)",
        "protocol/membership/verdicts.py _judge: if verdict is not None and failure.node not in g.failures.excluded",
        "protocol/membership/verdicts.py note_of_same_place: if of_data",
        "protocol/membership/formation.py announced: if refuse_if_excluded(g, word.worker_id, do)",
        "protocol/membership/ring_reports.py heard_of_ring: case Corrupted()",
        "protocol/membership/ring_reports.py _corrupted",
        "protocol/membership/ring_reports.py _corrupted: if g.state is State.CLOSED or not "
        "g.lists(worker) or worker in g.dead or (worker in g.stuck)",
        "protocol/membership/ring_reports.py _corrupted: not if g.state is State.CLOSED or not "
        "g.lists(worker) or worker in g.dead or (worker in g.stuck)",
        "protocol/membership/ring_reports.py _corrupted: if len(before) >= SUSPECTS - 1 and done - "
        "before[1 - SUSPECTS] < SUSPECTS_WITHIN",
        "protocol/membership/ring_reports.py _corrupted: not if len(before) >= SUSPECTS - 1 and done - "
        "before[1 - SUSPECTS] < SUSPECTS_WITHIN",
        "protocol/membership/ring_reports.py _corrupted: if any((g.workers[other].member.node != node "
        "for other in g.alive(g.listed)))",
        "protocol/membership/ring_reports.py _corrupted: not if any((g.workers[other].member.node != "
        "node for other in g.alive(g.listed)))",
        "protocol/membership/hangs.py _limit_s: if one.said.doing is Doing.EVALUATION",
        "protocol/membership/hangs.py _limit_s: if in_shard and one.said.computes and (not usual_s)",
        "protocol/membership/hangs.py _evaluation_limit_s",
        "protocol/membership/hangs.py _evaluation_limit_s: if one.said.computes and (not one.usual_s)",
        "protocol/membership/hangs.py _evaluation_limit_s: not if one.said.computes and (not one.usual_s)",
        "protocol/membership/hangs.py _limit_alone_s: if one.said.doing is Doing.EVALUATION",
    ),
    _VERDICT,
)
EXCLUDED = _OF_LOOPS | {
    **_VERDICTS,
    "protocol/failure_detector.py AgentMonitor.beat_s": Excluded(_THOUSANDS, _SHRINKS),
    _FOLLOWED: Excluded(_THOUSANDS, _SHRINKS),
    f"{_FOLLOWED}: for node in self._silent": Excluded(_THOUSANDS, _SHRINKS),
    f"{_FOLLOWED}: {_NEAR}": Excluded(_THOUSANDS, _HARDLY),
    f"{_FOLLOWED}: not {_NEAR}": Excluded(_THOUSANDS, _SHRINKS),
    "protocol/worker_state/state_machine.py step: if generation_change.overtaken(p, generation)": _OVERTAKEN,
    "protocol/worker_state/generation_change.py give_way": _OVERTAKEN,
    "protocol/worker_state/state.py WorkerState.known": Excluded(
        "where sockets find an address; decides nothing",
        "elastic/protocol/test_ignored.py::test_a_newcomer_finds_the_address_of_any_member_it_knows_of",
    ),
    "agent/standing_words.py StandingWords.heard: case messages.Failed(exit_code=code) as failed if code != "
    "ExitCode.SCRIPT_FAILED": Excluded(
        "needs a script that fails by what ends the job, and another leader right behind the end of its worker",
        "elastic/agent/test_standing_words.py::"
        "test_what_ends_the_job_is_said_to_the_next_leader_also_when_its_worker_is_gone",
    ),
    "agent/standing_words.py StandingWords.has_others": Excluded(
        "asked by an agent that is signalled; decides nothing about words",
        "elastic/agent/test_standing_words.py::test_a_node_knows_whether_its_generation_has_members_elsewhere",
    ),
    "agent/standing_words.py StandingWords.shows": Excluded(
        "asked in jobs of so many agents that they say less; those here are small",
        "elastic/agent/test_standing_words.py::"
        "test_an_operation_that_was_completed_in_a_ring_shows_that_the_ring_is_up",
    ),
    "protocol/membership/formation.py elected: if (older := by_home.get(member.home)) is not None": Excluded(
        "needs a leader that ends between the join of a demoted worker's successor and the leaving of that worker",
        "elastic/protocol/test_membership.py::"
        "test_a_leader_that_finds_two_members_with_one_number_lets_the_older_one_leave",
    ),
    "protocol/recovery_plan.py smallest_cover: while links": Excluded(
        "five members of whom each pair is cut off",
        "elastic/protocol/test_recovery_plan.py::test_a_cover_touches_every_accused_link",
    ),
    "protocol/recovery_plan.py redo_shares: not if covered.isdisjoint(range(*node))": Excluded(
        _OVERLAP, "elastic/protocol/test_recovery_plan.py::test_a_redo_holds_each_unit_exactly_once"
    ),
    "protocol/worker_state/operation.py done: if not set(event.consumed) <= set(p.roots)": Excluded(
        _OVERLAP, "elastic/protocol/test_worker_state.py::test_scenario"
    ),
    "protocol/worker_state/generation_change.py quiesce: if order.up_to < p.entered": Excluded(
        "a leader knows of all records, an agent of all that it has passed on, and orders of older terms are refused; "
        "kept, because to obey would break a ring that is up",
        "elastic/protocol/test_worker_state.py::test_scenario",
    ),
    "protocol/failure_detector.py Detector.look: if pulse is None": Excluded(
        "only suspects are looked at, and they are watched",
        "elastic/protocol/test_failure_detector.py::test_only_watched_processes_are_judged",
    ),
    "protocol/membership/state_machine.py _asks_to_be_admitted: if worker not in g.workers": _STRANGER,
    "protocol/membership/planned_changes.py _neighbours: if worker not in g.workers": _STRANGER,
    "protocol/membership/closing.py finished: if worker not in g.workers or not g.lists(worker)": _STRANGER,
    "protocol/membership/formation.py announced: if g.lost and word.invited": Excluded(
        "needs a newcomer whose agent lost the leader before the state was lost, and finds the next one after that",
        "elastic/protocol/test_membership.py::test_scenario",
    ),
    "protocol/membership/formation.py announced: if seen.stage is Stage.REFUSED": Excluded(
        _NOT_LOST, "elastic/protocol/test_membership.py::test_scenario"
    ),
    "protocol/membership/state_machine.py _asks_to_be_admitted: not if not g.workers[worker].entered": Excluded(
        "a member asks for nothing",
        "elastic/protocol/test_ignored.py::test_a_member_that_asks_to_be_admitted_stays_a_member",
    ),
    "protocol/membership/loss.py lost: if g.state is State.CLOSED": Excluded(
        "needs all nodes silent while a job closes and a newcomer has just been admitted",
        "elastic/protocol/test_membership.py::test_scenario",
    ),
    "protocol/membership/planned_changes.py left: if g.state is not State.CLOSING and all_gone and lost": Excluded(
        "needs another leader between the death of all that stayed, newcomers of it, and the last word of who left",
        "elastic/protocol/test_membership.py::test_scenario",
    ),
    _NOBODY_STAYS: Excluded(
        "of a generation that is not in effect nobody says that he has left it",
        "elastic/protocol/test_ignored.py::test_a_late_word_of_one_that_was_to_leave_with_all_others_does_not_end_the_job",
    ),
    "protocol/membership/ring_reports.py heard_of_ring: if seen is None or record is None": Excluded(
        "whoever has slept through a loss is fenced before it can say that its ring broke",
        "elastic/protocol/test_membership.py::test_scenario",
    ),
    "protocol/membership/state_machine.py committed: if record is None or record.number != number": Excluded(
        "one record is committed at a time, and what came of it is said once",
        "elastic/protocol/test_ignored.py::test_what_came_of_another_record_than_the_one_awaited_is_no_answer",
    ),
    (
        "protocol/membership/newcomers.py hold_for: if worker in running.ids or worker not in g.coming "
        "or worker in g.turned_away"
    ): Excluded(
        "needs a third outdated copy in the moment in which its node drains",
        "elastic/protocol/test_ignored.py::test_who_waits_as_a_spare_or_has_to_go_does_not_hold_up_the_ring_with_its_copies",
    ),
    (
        "protocol/membership/newcomers.py hold_for: if (coming_next := g.coming_next) is None or "
        "(coming_next.member(worker) is None and g.places < 0)"
    ): Excluded(
        "needs a newcomer that copies too slowly, and whose place is taken meanwhile",
        "elastic/protocol/test_membership.py::test_scenario",
    ),
    "protocol/membership/newcomers.py stop_in_vain: for worker in late": Excluded(
        "a copy that takes longer than half of pause_limit_s while the ring stands still for it",
        "elastic/protocol/test_membership.py::test_scenario",
    ),
    "protocol/worker_slot.py step: case StopSlot() if not slot.lives": Excluded(
        "an agent that is signalled during a back-off",
        "elastic/protocol/test_worker_slot.py::test_stop_and_job_over_end_a_slot_that_waits",
    ),
    "protocol/worker_slot.py _due: if now_s < slot.deadline_s": Excluded(
        "timers here are exact", "elastic/protocol/test_worker_slot.py::test_nothing_starts_before_the_back_off_is_over"
    ),
    (
        "protocol/membership/loss.py reported: if g.state in "
        "(State.RUNNING, State.PAUSED, State.REBUILDING, State.FORMING) and word.worker_id in g"
    ): Excluded(
        "needs a leader that is replaced between its quiesce and the report, within milliseconds",
        "elastic/protocol/test_membership.py::test_scenario",
    ),
    (
        "protocol/membership/loss.py reported: not if g.state in "
        "(State.RUNNING, State.PAUSED, State.REBUILDING, State.FORMING) and word.worker_id "
    ): Excluded(
        "the same while the job ends",
        "elastic/protocol/test_ignored.py::test_a_report_while_the_job_ends_starts_nothing",
    ),
    (
        "protocol/recovery_plan.py decide_loss: if isinstance(outcome, LossPlan) and (not besides.waited_out) and "
        "set(besides.hung).issuperset(outco"
    ): Excluded(
        "whoever is ended dies before it can report",
        "elastic/protocol/test_recovery_plan.py::test_who_of_the_members_survives",
    ),
    "protocol/membership/hangs.py _end_all: if g.hung and now_s < g.hung_s + g.spec.timing.fence_grace_s": Excluded(
        "needs a beat between the order and the end of a process, which takes milliseconds",
        "elastic/protocol/test_membership.py::test_scenario",
    ),
    "protocol/membership/hangs.py _end_all: not if not g.hung": Excluded(
        "needs an agent that has not heard the order", "elastic/protocol/test_membership.py::test_scenario"
    ),
    (
        "protocol/recovery_plan.py decide_loss: if isinstance(outcome, LossPlan) and kept is not None and "
        "(0 <= outcome.copied_step < kept.step)"
    ): Excluded(
        "a copy here is seldom older than what is kept",
        "elastic/protocol/test_recovery_plan.py::test_what_survives_the_members",
    ),
    "protocol/membership/state_machine.py _apply: case messages.Unreadable()": _DAMAGED,
    "protocol/membership/restore.py unreadable": _DAMAGED,
    "protocol/membership/restore.py kept_badly": _DAMAGED,
    "protocol/membership/restore.py revive: if damaged": _DAMAGED,
}
"""Arm, or function or file with all its arms."""


def excluded(arm: str) -> Excluded | None:
    """Why this arm is not wanted; None if it is."""
    place, _, _ = arm.partition(" ")
    function, _, _ = arm.partition(":")
    return next((EXCLUDED[name] for name in (arm, function, place) if name in EXCLUDED), None)
