"""The end of a job on Ray; a fake takes the place of Ray."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from elastic.platforms.common.job_driver import NodeTask
from elastic.platforms.common.node_task import TaskOutcome
from elastic.platforms.ray import trainer
from elastic.platforms.ray.trainer import _Seats


class FakeRay(ModuleType):
    """groups: each group, which is named as the call of its actor, and what Ray says of it. ended: calls that have an
    outcome. waits: how often it was asked for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, groups: dict[str, str]) -> None:
        super().__init__("ray")
        self.groups, self.ended, self.waits = groups, set[str](), 0
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        table, self.util = ModuleType("ray.util.placement_group"), ModuleType("ray.util")
        vars(table).update(
            placement_group_table=lambda group: {"state": groups[group]}, remove_placement_group=groups.pop
        )
        for module in (self, self.util, table):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def remote(self, **_: object) -> Any:
        return lambda actor: actor

    def wait(self, calls: list[str], **_: object) -> tuple[list[str], list[str]]:
        self.waits += 1
        assert self.waits < 99, f"it waits for {calls}"
        return [call for call in calls if call in self.ended], []

    def get(self, call: str) -> TaskOutcome:
        return TaskOutcome(True, {}, {})


def test_an_actor_without_a_place_is_given_up_when_the_job_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "PLACE_S", 0.0, raising=False)
    ray = FakeRay(monkeypatch, {"serves": "CREATED", "lost": "RESCHEDULING"})
    outcomes: dict[int, TaskOutcome | Exception] = {}

    def ended(task: NodeTask, outcome: TaskOutcome | Exception) -> None:
        outcomes[task.number] = outcome
        ray.ended.add("serves")

    driver: Any = SimpleNamespace(request=SimpleNamespace(nodes=2), ended=ended)
    seats = _Seats(driver, {"CPU": 1})
    seats._groups |= {0: "serves", 1: "lost"}
    seats._serving |= {0: "serves", 1: "lost"}
    seats.finish()
    assert isinstance(outcomes[0], TaskOutcome) and "no place" in str(outcomes[1])
    assert ray.groups == {}
