"""What a search has to reach, and what it cannot, with the reason.

Wanted are all arms of the machines (arms.py) but those in EXCLUDED, all changes of state in CHANGES, and the paths in
RARE. A change of state that is not listed here fails the search too: then the tables of the docs are not complete.
"""

from __future__ import annotations

from typing import TypeAlias

Change: TypeAlias = tuple[str, str, str, str]
"""machine, state, kind of event, state after it."""

RARE = (
    "a donor lost in mid-copy",
    "a double loss during SYNC",
    "a drain was taken back",
    "a leader change inside QUIESCING",
    "a newcomer copies anew",
    "a newcomer is the only one past k",
    "a newcomer joined a ring that waited for it",
    "a newcomer joined a ring that waited for its copy",
    "a newcomer joined after it had taken over results",
    "a newcomer took over a result that was kept for nobody",
    "a newcomer was too late for its epoch",
    "a newcomer whose set-up hung was replaced",
    "a planned change was voided by a loss",
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
    "shards by speed in a loss generation",
    "shards followed speed",
    "two halves that see no common member",
    "two pending generations, and the highest is not in all headers",
    "workers without any leader were parked",
)

_STATES = {
    "detector": {
        "alive": "suspect",
        "suspect": "alive frozen",
        "frozen": "alive suspect",
    },
    "membership": {
        "forming": "closed paused quiescing rebuilding running",
        "rebuilding": "closed closing paused quiescing running",
        "running": "closed closing paused quiescing",
        "paused": "closed closing quiescing running",
        "quiescing": "closed closing rebuilding",
        "closing": "closed",
    },
    "position": {
        "fresh": "ready",
        "ready": "collecting gone",
        "collecting": "ready gone",
    },
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
"""machine -> state -> those that may follow. From ALIVE nothing is FROZEN at once: a judge that has looked away for so
long begins anew."""

CHANGES = tuple(
    (machine, before, after)
    for machine, states in _STATES.items()
    for before, afters in states.items()
    for after in afters.split()
)

_FIRST_WORD = "an agent says of a worker first that it exists, to every leader"
_REVIVAL = "a simulated job keeps no snapshots and no checkpoints to go on from; unit scenarios"
_RESIZED = "nobody asks a simulated job for another number of workers; unit scenarios"
_OVERLAP = "needs two members that compute one operation alone, and lose whom they were behind before either is done"

EXCLUDED = {
    "position/state.py Position.known": ("where sockets find an address; decides nothing"),
    "standing.py Standing.has_others": ("asked by an agent that is signalled; decides nothing about words"),
    "plan.py smallest_cover: while links": ("five members of whom each pair is cut off; unit test"),
    "plan.py redo_shares: not if covered.isdisjoint(range(*node))": f"{_OVERLAP}; unit test draws them",
    "position/operations.py done: if not set(event.consumed) <= set(p.roots)": f"{_OVERLAP}; unit test",
    "position/generations.py quiesce: if order.up_to < p.entered": (
        "a leader knows of all records, an agent of all that it has passed on, and orders of older terms are "
        "refused; kept, because to obey would break a ring that is up"
    ),
    "detector.py Detector.look: if pulse is None": ("only suspects are looked at, and they are watched; unit test"),
    "membership/machine.py _apply: not if worker in g.workers": _FIRST_WORD,
    "membership/changes.py _neighbours: if worker not in g.workers": _FIRST_WORD,
    "membership/changes.py left: if g.state is not State.CLOSING and record.ids and all_lost": (
        "needs another leader between the death of all that stayed, newcomers of it, and the last word of who"
        " left; unit test"
    ),
    ("membership/changes.py close_if_all_left: if g.running is None or g.running.ids or g.state is State.CLOSED"): (
        "asked only when a member has left the generation without members, which is the running one then"
    ),
    "membership/fencing.py fence: if worker in g.dead or seen.finished": (
        "the dead are forgotten when a loss is committed, and once somebody has finished nothing is committed any more"
    ),
    "membership/rings.py heard_of_ring: if seen is None or record is None": (
        "whoever has slept through a loss is fenced before it can say that its ring broke; unit test"
    ),
    "membership/ending.py finished: if worker not in g.workers or worker not in g.listed": (
        "nobody leaves the loop before all members of its generation are at its end, and from there on no "
        "generation is committed"
    ),
    "membership/commits.py committed: if record is None or record.number != number": (
        "one record is committed at a time, and what came of it is said once"
    ),
    (
        "membership/invitations.py wait_for_slow: if worker in running.ids or worker in {*g.dead, *g.drains, "
        "*g.turned_away} or (not g.workers[worker]"
    ): ("needs a third outdated copy in the moment in which its node drains"),
    "membership/invitations.py stop_in_vain: for worker in late": (
        "a copy that takes longer than half of pause_limit_s while the ring stands still for it; unit test"
    ),
    "supervision.py step: case Stop() if not slot.lives": ("an agent that is signalled during a back-off; unit test"),
    "supervision.py _due: if now_s < slot.deadline_s": ("timers here are exact; unit test"),
    (
        "membership/losses.py reported: if g.state in "
        "(State.RUNNING, State.PAUSED, State.REBUILDING, State.FORMING) and word.worker_id in g"
    ): "needs a leader that is replaced between its quiesce and the report, within milliseconds; unit test",
    (
        "membership/losses.py reported: not if g.state in "
        "(State.RUNNING, State.PAUSED, State.REBUILDING, State.FORMING) and word.worker_id "
    ): "the same while the job ends",
    (
        "membership/losses.py decide: if isinstance(outcome, LossPlan) and "
        "(newer := newer_than_copies(g, outcome.copied_step))"
    ): _REVIVAL,
    "membership/losses.py decide: not if not go_back(g, said, now_s, do)": _REVIVAL,
    "membership/arrivals.py announced: if g.state is State.FORMING and word.entered and g.chain": _REVIVAL,
    "membership/arrivals.py form: if g.lost": _REVIVAL,
    "membership/ending.py slot_given_up: if g.state is State.FORMING and g.lost": _REVIVAL,
    "membership/machine.py _apply: case Unreadable()": _REVIVAL,
    "membership/stuck.py _end_all: if g.hung and now_s < g.hung_s + g.spec.timing.fence_grace_s": (
        "needs a beat between the order and the end of a process, which takes milliseconds; unit scenario"
    ),
    "membership/stuck.py _end_all: not if not g.hung": "needs an agent that has not heard the order; unit scenario",
    "membership/machine.py _apply: case PointerAt(entry)": _REVIVAL,
    "membership/machine.py _apply: case Resized(workers)": _RESIZED,
    "membership/machine.py _apply: if g.state is State.FORMING": _RESIZED,
    "membership/machine.py _apply: not if g.state is State.FORMING": _RESIZED,
    "membership/revival.py": _REVIVAL,
    "membership/surplus.py": _RESIZED,
    "plan.py newest_kept": _REVIVAL,
    "standing.py Standing.to_state": "an agent that becomes another program; unit test",
    "standing.py Standing.from_state": "the same",
}
"""Arm, or function or file with all its arms -> why it is not wanted."""


def excluded(arm: str) -> str:
    """Why this arm is not wanted; empty if it is."""
    place, _, _ = arm.partition(" ")
    function, _, _ = arm.partition(":")
    return next((EXCLUDED[name] for name in (arm, function, place) if name in EXCLUDED), "")
