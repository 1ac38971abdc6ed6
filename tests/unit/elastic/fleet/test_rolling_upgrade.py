"""Which agents `elastic upgrade` replaces, when it refuses to begin, and what is next for a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic.errors import ConfigError
from elastic.fleet.rolling_upgrade import (
    BECAUSE,
    AgentFacts,
    FleetView,
    NodeUpgrade,
    UpgradeAction,
    chosen,
    next_action,
    not_whole,
    objections,
)

OLD, NEW = AgentFacts("1", "p1", "elastic agent", is_service=True), AgentFacts("2", "p2", "elastic agent", True)


def fleet(
    jobs: dict[str, dict[str, int]],
    drained: dict[str, str] | None = None,
    away: str = "",
    slots: int = 1,
    workers: int = 3,
    least: int = 1,
    holds: Sequence[str] | None = (),
    **status: Any,
) -> FleetView:
    """Nodes a, b and c. jobs: job -> its slots on nodes, all of which have a member. status: what else their leaders
    say."""
    taken = {node: sum(placed.get(node, 0) for placed in jobs.values()) for node in "abc"}
    nodes = [
        {
            "node": node,
            "up": node not in away,
            "slots": slots,
            "jobs": {"x": taken[node]},
            "because": (drained or {}).get(node, ""),
            "holds": holds,
        }
        for node in "abc"
    ]
    entries = [
        {"job": job, "state": "placed", "workers": workers, "min_workers": least, "slots": placed}
        for job, placed in jobs.items()
    ]
    statuses = {
        job: {"state": "running", "members": [{"worker_id": f"{node}.0.0"} for node in placed], **status}
        for job, placed in jobs.items()
    }
    return FleetView.of({"nodes": nodes, "jobs": entries}, statuses)


WHOLE = {"train-1": {"a": 1, "b": 1, "c": 1}}


def test_all_with_another_version_are_chosen_and_first_what_an_earlier_command_has_drained() -> None:
    agents = {"a": NEW, "b": OLD, "c": OLD}
    assert chosen(fleet(WHOLE), agents, "2", ()) == ("b", "c")
    assert chosen(fleet(WHOLE), dict.fromkeys("abc", NEW), "2", ()) == ()
    assert chosen(fleet(WHOLE), agents, "2", ("c", "a")) == ("a", "c"), "whatever their version"
    assert chosen(fleet(WHOLE, {"c": BECAUSE}), agents, "2", ()) == ("c", "b")
    assert chosen(fleet(WHOLE, {"a": BECAUSE}), agents, "2", ()) == ("a", "b", "c"), "its drain is to be taken back"
    with pytest.raises(ConfigError, match="no node d in the fleet; there are a, b, c"):
        chosen(fleet(WHOLE), agents, "2", ("d",))


def test_a_whole_fleet_whose_jobs_have_other_nodes_is_begun_with() -> None:
    agents = dict.fromkeys("abc", OLD)
    assert objections(fleet(WHOLE), agents, "abc") == []
    assert objections(fleet({"train-1": {"a": 1}}, workers=1), agents, "abc") == [], "it moves to another node"
    assert objections(fleet({}), agents, "abc") == []


@pytest.mark.parametrize(
    ("seen", "agents", "because"),
    [
        (fleet(WHOLE, away="b"), "ac", "node b is away"),
        (fleet(WHOLE), "ab", "node c does not answer"),
        (fleet(WHOLE, members=[{"worker_id": "a.0.0"}]), "abc", "train-1 has 1 of 3 workers"),
        (fleet(WHOLE, state="forming"), "abc", "train-1 does not run at the moment"),
        (fleet(WHOLE, state="unknown", members=[]), "abc", "nobody leads train-1 at the moment"),
        (
            fleet({"train-1": {"a": 1}, "b": {"b": 1}, "c": {"c": 1}}, workers=1),
            "abc",
            "train-1 runs on node a alone: it stops after a step, with a checkpoint, and `elastic submit --resume "
            "train-1` goes on from there",
        ),
        (
            fleet({"train-1": {"a": 1}}, drained={"b": "for repair", "c": "for repair"}, workers=1),
            "abc",
            "train-1 runs on node a alone",
        ),
        (
            fleet(WHOLE, least=3),
            "abc",
            "train-1 needs 3 workers, and there are slots for 2 without node a: it waits until the node is back",
        ),
    ],
)
def test_what_speaks_against_beginning_is_said(seen: FleetView, agents: str, because: str) -> None:
    told = objections(seen, dict.fromkeys(agents, OLD), ["a"])
    assert len(told) == 1 and told[0].startswith(because)


def test_a_job_is_whole_again_with_the_slots_that_it_had_unless_others_have_taken_them() -> None:
    before = fleet(WHOLE).totals()
    two = {"train-1": {"a": 1, "b": 1}}
    assert not_whole(fleet(WHOLE), before) is None
    assert not_whole(fleet(two), before) == "train-1 has 2 slots, and had 3"
    assert not_whole(fleet({**two, "eval-2": {"c": 1}}, workers=2), before) is None
    assert not_whole(fleet(two, workers=2), {}) is None
    assert not_whole(fleet({"train-1": {"a": 3}}, slots=3, workers=1), {}) is None, "others are spares"
    assert not_whole(fleet({}), before) is None, "it is over"


def test_a_node_is_not_empty_before_the_last_worker_has_left() -> None:
    still: dict[str, Any] = {
        "members": [{"worker_id": "b.0.0"}],
        "draining": {"a.0.0": "drained"},
        "waiting": ["a.1.0"],
    }
    assert fleet({"train-1": {"b": 1}}, **still).left_on("a") == ["a.0.0", "a.1.0"]
    assert fleet(WHOLE).left_on("a") == ["train-1", "a.0.0"]
    assert fleet({"train-1": {"b": 1}}).left_on("a") == []
    assert fleet(WHOLE, state="unknown").left_on("a") == ["train-1", "perhaps some of train-1, which nobody leads"]
    assert fleet({}, holds=["train-1"]).left_on("a") == ["train-1"], "it is over, and its script still does something"
    assert fleet(WHOLE, holds=["train-1"]).left_on("a") == ["train-1", "a.0.0"]
    assert fleet({}, holds=None).left_on("a") == ["perhaps a job"], "its daemon has only just come"


SEEN = NodeUpgrade(
    before=OLD, agent=OLD, is_drained=False, keeps_drain=False, is_empty=False, is_whole=True, target="2"
)


def test_a_node_goes_through_its_replacement_by_what_is_seen_alone() -> None:
    drained = replace(SEEN, is_drained=True)
    empty = replace(drained, is_empty=True)
    back = replace(empty, agent=NEW)
    story = {
        UpgradeAction.DRAIN: SEEN,
        UpgradeAction.AWAIT_EMPTY: drained,
        UpgradeAction.END_AGENT: empty,
        UpgradeAction.AWAIT_RETURN: replace(empty, agent=None),
        UpgradeAction.UNDRAIN: back,
        UpgradeAction.AWAIT_WORKERS: replace(back, is_drained=False, is_whole=False),
        UpgradeAction.DONE: replace(back, is_drained=False),
    }
    assert {action: next_action(seen) for action, seen in story.items()} == {action: action for action in story}


def test_an_agent_without_a_service_manager_is_ended_by_a_person() -> None:
    by_hand = replace(OLD, is_service=False)
    empty = replace(SEEN, before=by_hand, agent=by_hand, is_drained=True, is_empty=True)
    assert next_action(empty) is UpgradeAction.AWAIT_OPERATOR
    assert next_action(replace(empty, agent=None)) is UpgradeAction.AWAIT_RETURN


def test_another_process_of_another_version_works_again_before_that_is_said() -> None:
    back = replace(SEEN, agent=AgentFacts("1", "p2"), is_drained=True, is_empty=True)
    assert next_action(back) is UpgradeAction.UNDRAIN
    assert next_action(replace(back, is_drained=False)) is UpgradeAction.OTHER_VERSION


def test_a_node_that_somebody_else_has_drained_stays_so() -> None:
    seen = replace(SEEN, is_drained=True, keeps_drain=True, is_empty=True)
    assert next_action(seen) is UpgradeAction.END_AGENT
    assert next_action(replace(seen, agent=NEW)) is UpgradeAction.DONE


def test_an_agent_of_a_version_that_says_less_is_known_by_its_version() -> None:
    assert AgentFacts.of({"version": "1", "torch": "2"}) == AgentFacts("1")
    told = {"process": "p1", "command": "elastic agent", "is_service": True, "of a later version": 1}
    assert AgentFacts.of({"version": "1", "agent": told}) == OLD
    old = replace(SEEN, before=AgentFacts("1"), is_drained=True, is_empty=True)
    assert next_action(replace(old, agent=AgentFacts("1"))) is UpgradeAction.AWAIT_OPERATOR
    assert next_action(replace(old, agent=NEW)) is UpgradeAction.UNDRAIN
