"""What a node does about notices: it leaves in time, at the latest with force, and returns if nobody came for it."""

from __future__ import annotations

import math

from elastic.preemption import policy
from elastic.preemption.notice import Notice, NoticeKind
from elastic.preemption.policy import (
    Action,
    Advise,
    BreakRing,
    EndWorkers,
    Heard,
    LeaveNode,
    Return,
    Stay,
    StayPhase,
    StayTick,
)

ENDED = Return("the notice was taken back")
UNTRUE = Return("the notice did not come true")


class Node:
    """Steps a Stay through time; a StayTick is posted when it is due."""

    def __init__(self) -> None:
        self.stay = Stay()
        self.now_s = 0.0

    def hears(
        self, source: str, left_s: float | None, because: str = "", kind: NoticeKind = NoticeKind.RECLAIM
    ) -> list[Action]:
        notice = None if left_s is None else Notice(kind, left_s, because or source)
        return self._step(Heard(source, notice))

    def until(self, now_s: float) -> list[tuple[float, Action]]:
        """What happens until then, and when."""
        told: list[tuple[float, Action]] = []
        while (due_s := self.stay.deadline_s) <= now_s:
            self.now_s = max(self.now_s, due_s)
            before = self.stay
            actions = self._step(StayTick())
            assert self.stay != before, "a tick that is due does something"
            told += [(self.now_s, action) for action in actions]
        self.now_s = now_s
        return told

    def _step(self, event: policy.Event) -> list[Action]:
        self.stay, actions = policy.step(self.stay, event, self.now_s)
        return list(actions)


def test_a_notice_runs_its_course_and_a_machine_that_is_not_taken_comes_back() -> None:
    node = Node()
    assert node.hears("EC2", 120) == [LeaveNode(120.0, "EC2")]
    assert node.until(300) == [(115.0, BreakRing("EC2")), (120.0, EndWorkers("EC2")), (180.0, UNTRUE)]
    assert node.stay == Stay()
    assert node.stay.deadline_s == math.inf


def test_of_a_small_budget_half_is_for_leaving_in_order() -> None:
    node = Node()
    node.hears("GCP", 6)
    assert node.until(10) == [(3.0, BreakRing("GCP")), (6.0, EndWorkers("GCP"))]


def test_no_time_at_all_is_a_budget_too() -> None:
    node = Node()
    assert node.hears("EC2", 0) == [LeaveNode(0.0, "EC2")]
    assert node.until(0) == [(0.0, BreakRing("EC2")), (0.0, EndWorkers("EC2"))]


def test_a_notice_that_is_taken_back_brings_the_node_back_at_once() -> None:
    for when_s in (1.0, 117.0, 130.0):
        node = Node()
        node.hears("Azure", 120)
        node.until(when_s)
        assert node.hears("Azure", None) == [ENDED]
        assert node.until(1000) == []


def test_what_was_asked_for_lasts_until_it_is_taken_back() -> None:
    node = Node()
    node.hears("operator", 30, kind=NoticeKind.ASKED)
    assert [action for _, action in node.until(10_000)] == [BreakRing("operator"), EndWorkers("operator")]
    assert node.hears("operator", None) == [ENDED]


def test_of_two_notices_the_earlier_end_counts_and_both_must_go_before_the_node_returns() -> None:
    node = Node()
    node.hears("slow", 100)
    assert node.hears("fast", 20) == [LeaveNode(20.0, "fast")]
    assert node.hears("later", 200) == []
    assert node.hears("fast", None) == [LeaveNode(100.0, "slow")]
    assert node.hears("slow", None) == [LeaveNode(200.0, "later")]
    assert node.hears("later", None) == [ENDED]


def test_an_end_that_comes_nearer_is_said_again() -> None:
    node = Node()
    node.hears("EC2", 100)
    node.until(10)
    assert node.hears("EC2", 20) == [LeaveNode(30.0, "EC2")]
    assert node.until(40) == [(25.0, BreakRing("EC2")), (30.0, EndWorkers("EC2"))]


def test_a_second_notice_after_the_end_of_the_first_keeps_the_node_away() -> None:
    node = Node()
    node.hears("EC2", 10)
    node.until(50)
    assert node.stay.phase is StayPhase.OUT
    assert node.hears("operator", 120, kind=NoticeKind.ASKED) == []
    assert node.until(1000) == []
    assert node.hears("operator", None) == [ENDED]


def test_advice_moves_nobody() -> None:
    node = Node()
    assert node.hears("EC2", math.inf, "rebalance", NoticeKind.ADVICE) == [Advise("rebalance")]
    assert node.stay == Stay()
    assert node.hears("EC2", None) == []


def test_a_notice_that_only_advice_is_left_of_is_taken_back() -> None:
    node = Node()
    node.hears("Kubernetes node", 60, "its node has the taint ToBeDeletedByClusterAutoscaler")
    cordoned = "its node has the taint node.kubernetes.io/unschedulable"
    assert node.hears("Kubernetes node", math.inf, cordoned, NoticeKind.ADVICE) == [ENDED, Advise(cordoned)]
    assert node.stay == Stay()


def test_advice_of_one_source_leaves_the_notice_of_another_one_standing() -> None:
    node = Node()
    node.hears("EC2", 120)
    assert node.hears("Kubernetes node", math.inf, "advice", NoticeKind.ADVICE) == [Advise("advice")]
    assert node.until(116) == [(115.0, BreakRing("EC2"))]


def test_taking_back_what_was_never_said_is_nothing() -> None:
    assert Node().hears("EC2", None) == []
