"""What Ray is asked for, and when an agent is started."""

from __future__ import annotations

import pytest

from elastic.errors import ConfigError
from elastic.platforms.ray.agent_actor import NO_DEADLINE_S, notice_of
from elastic.platforms.ray.bundles import GroupState, NextSteps, Seat, actor_options, bundle_of, next_steps, state_of


def test_an_agent_takes_what_its_workers_need_together() -> None:
    bundle = bundle_of({"CPU": 2, "GPU": 1, "TPU": 0, "fast": 0.5}, 4)
    assert bundle == {"CPU": 8, "GPU": 4, "fast": 2.0}
    assert actor_options(bundle) == {"num_cpus": 8, "num_gpus": 4, "resources": {"fast": 2.0}, "max_restarts": 0}
    assert actor_options({"memory": 1e9})["memory"] == 1e9


@pytest.mark.parametrize("resources", [{}, {"CPU": 0}, {"CPU": -1}, {"GPU": float("nan")}, {"CPU": True}, {"GPU": "1"}])
def test_what_ray_cannot_place_is_refused(resources: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="resources_per_worker"):
        bundle_of(resources, 1)


def test_groups_are_asked_for_where_there_is_none_and_agents_started_where_one_is_ready_and_due() -> None:
    seats = [
        Seat(0, None, serves=False, due=True),
        Seat(1, GroupState.WAITS, serves=False, due=True),
        Seat(2, GroupState.READY, serves=False, due=True),
        Seat(3, GroupState.READY, serves=False, due=False),
        Seat(4, GroupState.READY, serves=True, due=True),
        Seat(5, GroupState.AGAIN, serves=False, due=True),
        Seat(6, GroupState.GONE, serves=False, due=True),
    ]
    assert next_steps(seats) == NextSteps(ask=(0, 6), start=(2,))


@pytest.mark.parametrize(
    ("table", "state"),
    [
        ({"state": "CREATED"}, GroupState.READY),
        ({"state": "PENDING"}, GroupState.WAITS),
        ({"state": "PREPARED"}, GroupState.WAITS),
        ({"state": "RESCHEDULING"}, GroupState.AGAIN),
        ({"state": "REMOVED"}, GroupState.GONE),
        ({"state": "of a later release"}, GroupState.WAITS),
        ({}, GroupState.GONE),
    ],
)
def test_every_state_that_ray_has_for_a_group_is_known(table: dict[str, object], state: GroupState) -> None:
    assert state_of(table) is state


def test_a_drain_of_ray_is_a_notice_that_ends_at_its_deadline() -> None:
    assert notice_of(100_500, 40.0).seconds_left == 60.5
    assert notice_of(100_500, 400.0).seconds_left == 0.0
    assert notice_of(0, 40.0).seconds_left == NO_DEADLINE_S
