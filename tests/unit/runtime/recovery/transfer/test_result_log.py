"""Which results are held for whom."""

from __future__ import annotations

import torch

from runtime.allreduce.reduction.partial_sum import Partial
from runtime.recovery.transfer.result_log import ENTRY_BYTES, LoggedResult, ResultLog
from runtime.session import Op, OpKind

TENSOR_BYTES = 400
ALL = 1 << 30
OF_ONE = ENTRY_BYTES + TENSOR_BYTES


def entry(number: int) -> LoggedResult:
    return LoggedResult(number, Op(OpKind.PASS, 1, step=number), {}, Partial(0, 1, {"float32": torch.zeros(100)}))


def log(follower: str = "", number: int = 0, limit_bytes: int = ALL, upto: int = 0) -> ResultLog:
    made = ResultLog()
    if follower:
        made.follow(follower, number, limit_bytes)
    for op in range(number, upto):
        made.append(entry(op))
    return made


def numbers(entries: list[LoggedResult]) -> list[int]:
    return [entry.number for entry in entries]


def test_nothing_is_held_while_nobody_follows() -> None:
    assert not log().append(entry(0))


def test_a_follower_gets_what_it_needs_and_what_lies_before_is_freed() -> None:
    kept = log("c", 3, upto=7)
    assert numbers(kept.since("c", 3, ALL)) == [3, 4, 5, 6]
    assert numbers(kept.since("c", 5, ALL)) == [5, 6]
    assert kept.since("c", 4, ALL) == []


def test_an_answer_holds_one_result_at_least_and_no_more_than_asked_for() -> None:
    kept = log("c", upto=4)
    assert numbers(kept.since("c", 0, 0)) == [0]
    assert numbers(kept.since("c", 0, 2 * OF_ONE)) == [0, 1]


def test_what_the_slower_of_two_needs_stays() -> None:
    kept = log("c", upto=2)
    assert kept.holds_all_since(0)
    kept.follow("d", 0, ALL)
    kept.since("d", 2, ALL)
    assert numbers(kept.since("c", 0, ALL)) == [0, 1]
    kept.leave("c")
    kept.append(entry(2))
    assert not kept.holds_all_since(0) and numbers(kept.since("d", 2, ALL)) == [2]
    kept.leave("d")
    assert not kept.append(entry(3))


def test_beyond_the_limit_everything_is_dropped_and_whoever_follows_begins_anew() -> None:
    kept = log("c", limit_bytes=2 * OF_ONE, upto=2)
    assert not kept.append(entry(2))
    assert kept.since("c", 0, ALL) == [] and kept.since("c", 2, ALL) == []
    kept.follow("c", 3, 2 * OF_ONE)
    assert kept.append(entry(3)) and numbers(kept.since("c", 3, ALL)) == [3]


def test_who_does_not_follow_gets_nothing() -> None:
    assert log("c", upto=2).since("d", 0, ALL) == []
