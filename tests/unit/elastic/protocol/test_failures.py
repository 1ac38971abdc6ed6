"""What repeated failures prove; and that unrelated losses, however many, prove nothing."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from elastic.protocol.failures import (
    KEPT,
    NO_PROGRESS,
    NODE_FAILURES,
    SAME_SHARD,
    FailureKind,
    Failures,
    Ruling,
    WorkerFailure,
    judge,
    judge_node,
    last_shard,
    parse_place,
)
from elastic.protocol.messages import Failed
from tests.unit.thoroughness import EXAMPLES

WHERE = "shard 3 in pass 0 of step 5"


def crash(number: int, **more: object) -> WorkerFailure:
    about: dict[str, object] = {
        "worker_id": f"a.0.{number}", "node": "a", "kind": FailureKind.CRASHED, "because": "killed by SIGSEGV",
        "generation": number + 1, "done": 5, "member": True, "fruitful": True, **more,
    }  # fmt: skip
    return WorkerFailure(**about)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "parts"),
    [
        ("KeyError /a/train.py:7 step 3 shard 0", ("KeyError /a/train.py:7", 3, 0)),
        ("KeyError /a/train.py:7 step 3", ("KeyError /a/train.py:7", 3, -1)),
        ("exit status 3", ("exit status 3", -1, -1)),
        ("", ("", -1, -1)),
    ],
)
def test_a_place_has_an_exception_a_step_and_a_shard(place: str, parts: tuple[str, int, int]) -> None:
    assert parse_place(place) == parts


def test_a_shard_that_ends_one_worker_after_the_other_is_the_data() -> None:
    ends = [crash(number, where=WHERE + ": samples 1, 2" * (number == 1)) for number in range(SAME_SHARD)]
    assert judge(ends[:-1]) is None
    verdict = judge(ends)
    assert verdict is not None and verdict.ruling is Ruling.DATA and verdict == last_shard(ends)
    assert judge([*ends[:2], crash(99, where="shard 4 in pass 0 of step 5"), *ends[2:]]) is None
    assert judge([crash(number, where=WHERE, generation=1) for number in range(SAME_SHARD)]) is None, "one blow"
    assert verdict.because.startswith(f"the data of {WHERE} (samples 1, 2) ends worker after worker")


def test_a_shard_for_which_no_worker_has_the_memory() -> None:
    kinds = {"kind": FailureKind.STARVED, "because": "killed by SIGKILL: no memory was left, 0.5 GB", "where": WHERE}
    verdict = judge([crash(number, **kinds) for number in range(SAME_SHARD)])
    assert verdict is not None and verdict.ruling is Ruling.MEMORY and "0.5 GB" in verdict.because
    mixed = [crash(0, where=WHERE), *(crash(number, **kinds) for number in range(1, SAME_SHARD))]
    verdict = judge(mixed)
    assert verdict is not None and verdict.ruling is Ruling.DATA


def test_two_ends_in_one_shard_are_told_if_the_job_ends_anyway() -> None:
    assert last_shard([]) is None and last_shard([crash(0, where=WHERE)]) is None
    told = last_shard([crash(0, where="shard 4 in pass 0 of step 1", done=1), *(crash(n, where=WHERE) for n in (1, 2))])
    assert told is not None and told.because.startswith(f"the data of {WHERE} ends worker after worker")
    assert last_shard([crash(0, where=WHERE), crash(1)]) is None, "the last one was not in a shard"


def test_crashes_in_several_shards_or_outside_of_shards_are_no_data() -> None:
    ends = [crash(number, where=f"shard {number} in pass 0 of step 5") for number in range(8)]
    assert judge(ends) is None
    assert judge([crash(number, where="") for number in range(8)]) is None


def test_an_exception_in_one_step_is_the_script_after_the_loss_was_repaired() -> None:
    about = {"kind": FailureKind.RAISED, "error": "KeyError t.py:7", "step": 3, "because": "raised KeyError t.py:7"}
    first = crash(0, generation=1, **about)
    assert judge([first, crash(1, generation=1, **about)]) is None, "a file server may have been away"
    assert judge([first, crash(1, generation=2, **{**about, "step": 4})]) is None
    assert judge([first, crash(1, generation=2, **{**about, "error": "OSError t.py:7"})]) is None
    verdict = judge([first, crash(1, generation=2, **about)])
    assert verdict is not None and verdict.ruling is Ruling.SCRIPT
    assert "step 3" in verdict.because and "a.0.0" in verdict.because and "KeyError t.py:7" in verdict.because


def test_generations_without_a_step_end_the_job() -> None:
    ends = [crash(number) for number in range(NO_PROGRESS)]
    assert judge(ends[:-1]) is None
    verdict = judge(ends)
    assert verdict is not None and verdict.ruling is Ruling.NO_PROGRESS
    assert f"{NO_PROGRESS} workers killed by SIGSEGV" in verdict.because
    assert judge([*ends[:-1], crash(99, done=6)]) is None, "a step was taken"
    together = [crash(number, generation=1) for number in range(NO_PROGRESS)]
    assert judge(together) is None, "one blow to many workers is one generation"


def test_failures_of_devices_and_of_newcomers_end_no_job() -> None:
    for about in ({"kind": FailureKind.DEVICE}, {"member": False}):
        assert judge([crash(number, where=WHERE, **about) for number in range(2 * NO_PROGRESS)]) is None


def test_a_node_that_loses_all_its_workers_before_a_step() -> None:
    ends = [crash(number, fruitful=False, done=5 + number) for number in range(NODE_FAILURES)]
    verdict = judge_node(ends, others_train=True, one_is_fruitful=False)
    assert verdict is not None and verdict.ruling is Ruling.NODE and verdict.because.startswith("node a loses")
    assert judge_node(ends[:-1], True, False) is None
    assert judge_node(ends, others_train=False, one_is_fruitful=False) is None, "the only node"
    assert judge_node(ends, others_train=True, one_is_fruitful=True) is None, "a worker of it gets on"
    elsewhere = crash(77, node="b", fruitful=False)
    assert judge_node([*ends[:2], elsewhere, *ends[2:]], True, False) is None, "another node fails too"
    still = [crash(number, fruitful=False) for number in range(NODE_FAILURES)]
    assert judge_node(still, True, False) is None, "nobody got on meanwhile"
    one_got_on = [*ends[:2], crash(78, fruitful=True, done=7), *ends[2:]]
    assert judge_node(one_got_on, True, False) is None


def test_what_is_remembered_is_bounded_and_the_first_who_raised_stays() -> None:
    failures = Failures()
    for number in range(KEPT + 5):
        failures = failures.and_then(crash(number))
    assert len(failures.history) == KEPT and failures.knows(f"a.0.{KEPT}") and not failures.knows("a.0.0")
    for worker in "ab":
        failures = failures.and_raised("here", Failed(worker, 1, "here", "Traceback"), 5.0)
    assert failures.errors["here"].word.worker_id == "a"


def storm(random: Random, nodes: int, rate: float) -> Iterator[WorkerFailure]:
    """400 unrelated failures (faults of random workers, as a chaos test injects them): a worker of any node is struck,
    in whatever shard it computes; `rate` of them before the next operation was complete."""
    done = generation = 0
    for number in range(400):
        node = f"n{random.randrange(nodes)}"
        if random.random() > rate:
            done += random.randint(1, 20)
        generation += random.random() < 0.9
        shard, kind = random.randrange(8), random.choice([FailureKind.CRASHED, FailureKind.STARVED])
        yield WorkerFailure(
            f"{node}.0.{number}", node, kind, "killed by SIGSEGV", generation, done, member=random.random() < 0.7,
            fruitful=random.random() < 0.5, where=f"shard {shard} in pass 0 of step {done}",
        )  # fmt: skip


def test_storms_of_unrelated_failures_lead_to_no_verdict() -> None:
    """300 storms, or 2000, of 400 failures each, a tenth of which come before another operation is complete: harsher
    than the chaos tests. Kills from outside are no failures, so they are not even looked at."""
    for seed in range(2000 if EXAMPLES else 300):
        random = Random(seed)
        nodes = random.randint(2, 6)
        history: tuple[WorkerFailure, ...] = ()
        for failure in storm(random, nodes, rate=0.1):
            history = (*history, failure)[-KEPT:]
            assert judge(history) is None, seed
