"""What a worker says of its script's thread: where it is, for how long, and whether anything computes meanwhile."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from elastic.protocol.messages import Doing, Progress
from elastic.protocol.outer_round import Quorum
from elastic.protocol.worker_state import Phase, WorkerState
from runtime.session import Op, OpKind
from runtime.worker.activity import CPU_CHECK_S, PAUSE_S, RECENT, Activity, below, cpu_s
from runtime.worker.progress_report import ProgressReporter
from runtime.worker.speed import SPEED_STEPS_LEAST

GENEROUS_S = 60.0


class Machine:
    """Its clock and the processor time used."""

    now_s = 100.0
    cpu_s = 3.0

    def activity(self) -> Activity:
        return Activity(lambda: self.now_s, lambda: self.cpu_s)


def test_it_says_where_the_thread_is_and_for_how_long() -> None:
    machine = Machine()
    activity = machine.activity()
    activity.enter("shard 3 in pass 0 of step 7", Doing.SHARD)
    machine.now_s += 1.5
    seen = activity.see()
    assert (seen.what, seen.doing, seen.for_s) == ("shard 3 in pass 0 of step 7", Doing.SHARD, 1.5)


def test_usual_is_the_longest_shard_of_late() -> None:
    machine = Machine()
    activity = machine.activity()
    for took_s in (1.0, 4.0, *(2.0 for _ in range(RECENT - 1))):
        activity.enter("a shard", Doing.SHARD)
        machine.now_s += took_s
        activity.enter("the others", Doing.WAITING)
        machine.now_s += 50.0
    assert activity.see().usual_s == 4.0
    activity.enter("a shard", Doing.SHARD)
    machine.now_s += 1.0
    activity.enter("the others", Doing.WAITING)
    assert activity.see().usual_s == 2.0


@pytest.mark.parametrize(("share", "computes"), [(0.5, True), (0.01, False)])
def test_whether_anything_computes_is_measured_from_when_it_takes_long(share: float, computes: bool) -> None:
    machine = Machine()
    activity = machine.activity()
    activity.enter("a shard", Doing.SHARD)
    machine.cpu_s += 2.0  # before the first look, so it says nothing
    for seconds in (CPU_CHECK_S, CPU_CHECK_S / 2):
        machine.now_s += seconds
        machine.cpu_s += share * seconds
        assert activity.see().computes, "nobody can say yet"
    machine.now_s += CPU_CHECK_S
    machine.cpu_s += share * CPU_CHECK_S
    assert activity.see().computes is computes
    activity.enter("the next", Doing.SHARD)
    assert activity.see().computes


def test_the_time_in_which_the_process_itself_could_not_run_is_not_counted() -> None:
    """Stopped for an hour with everything around it, it has not been in its shard for an hour."""
    machine = Machine()
    activity = machine.activity()
    activity.enter("a shard", Doing.SHARD)
    for _ in range(8):
        machine.now_s += 1.0
        activity.see()
    machine.now_s += 3600.0
    thawed = activity.see()
    assert thawed.for_s == 0.0 and thawed.computes, "nobody can say yet"
    machine.now_s += 2.0
    assert activity.see().for_s == 2.0
    activity.enter("the others", Doing.WAITING)
    assert activity.see().usual_s == 2.0
    machine.now_s += PAUSE_S - 0.5
    assert activity.see().for_s == PAUSE_S - 0.5, "a beat that is late is no pause"


def test_parts_of_evaluations_have_a_usual_time_of_their_own() -> None:
    machine = Machine()
    activity = machine.activity()
    for doing, lasts_s in ((Doing.SHARD, 1.0), (Doing.EVALUATION, 20.0), (Doing.SHARD, 2.0)):
        activity.enter("it", doing)
        machine.now_s += lasts_s
    activity.enter("the others", Doing.WAITING)
    assert activity.see().usual_s == 2.0
    activity.enter("a part", Doing.EVALUATION)
    assert activity.see().usual_s == 20.0


def test_what_a_script_does_after_its_loop_may_take_as_long_as_it_likes() -> None:
    reporter = ProgressReporter(on_host=True, note=lambda moment, text="", unit=-1: None)

    def doing() -> Doing:
        return reporter.progress(WorkerState("me", phase=Phase.COLLECTING), 7, "", ("", "")).doing

    reporter.after(Op(OpKind.PASS, 4, step=6))
    assert doing() is Doing.ELSEWHERE
    reporter.handed_out(Op(OpKind.EVALUATE, 4, step=6, label="accuracy"), 1)
    assert doing() is Doing.EVALUATION
    reporter.loop_over()
    assert doing() is Doing.DECLARED
    reporter.handed_out(Op(OpKind.EVALUATE, 4, step=6, label="accuracy"), 1)
    assert doing() is Doing.DECLARED
    reporter.after(Op(OpKind.EVALUATE, 1, label="evaluate()"))
    assert doing() is Doing.DECLARED


def test_whoever_waits_outside_of_operations_keeps_nobody_waiting() -> None:
    reporter = ProgressReporter(on_host=True, note=lambda moment, text="", unit=-1: None)

    def word() -> Progress:
        return reporter.progress(WorkerState("me", phase=Phase.COLLECTING), 7, "", ("", ""))

    reporter.after(Op(OpKind.ALLREDUCE, 1, step=6))
    assert word().doing is Doing.ELSEWHERE
    reporter.waits_for("the end of phase 6")
    assert (word().doing, word().phase) == (Doing.WAITING, "the end of phase 6, waiting for the others")
    reporter.advanced()
    reporter.after(Op(OpKind.ALLREDUCE, 1, step=6))
    assert word().doing is Doing.ELSEWHERE


def test_shards_that_are_skipped_tell_of_no_speed() -> None:
    """As those of a pass without gradients: a worker that is slower in them is no straggler."""
    reporter = ProgressReporter(on_host=True, note=lambda moment, text="", unit=-1: None)

    def shard_us(counts: bool) -> int:
        for step in range(SPEED_STEPS_LEAST + 1):
            op = Op(OpKind.PASS, 4, step=step)
            reporter.begin(op)
            reporter.handed_out(op, 0)
            reporter.computed(counts=counts)
        return reporter.progress(WorkerState("me", phase=Phase.COLLECTING), 7, "", ("", "")).shard_us

    assert shard_us(counts=False) == 0
    assert shard_us(counts=True) > 0


def test_beats_tell_of_a_quorum_only_in_the_round_that_has_it() -> None:
    reporter = ProgressReporter(on_host=True, note=lambda moment, text="", unit=-1: None)
    reporter._speed.shard_us = 500

    def told() -> tuple[int, int, int, int]:
        word = reporter.progress(WorkerState("me", phase=Phase.COLLECTING), 7, "", ("", ""))
        return word.min_replicas, word.grace_ms, word.replicas, word.shard_us

    step = Op(OpKind.PASS, 4, step=6)
    reporter.begin(step)
    assert told() == (0, 0, 0, 500)
    reporter.seek(Quorum(2, 1.5))
    assert told() == (2, 1500, 0, 0), "and of no speed: nobody gets more shards than others"
    reporter.replica_done()
    assert told() == (2, 1500, 1, 0)
    reporter.begin(Op(OpKind.EVALUATE, 4, step=6, label="accuracy"))
    assert told() == (0, 0, 0, 0)


def test_children_compute_for_the_script_that_waits_for_them() -> None:
    before_s = cpu_s()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until(lambda: cpu_s() >= before_s + 0.2)
    finally:
        child.kill()
        child.wait()


def test_children_that_come_and_go_are_no_error() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            subprocess.run(["true"], check=True)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(300):
            assert cpu_s() >= 0
    finally:
        stop.set()
        thread.join()
    assert list(below(0x7FFFFFFF)) == [0x7FFFFFFF], "nobody has this number"


def test_a_unit_of_many_parts_is_judged_by_its_parts() -> None:
    machine = Machine()
    activity = machine.activity()
    activity.see()
    activity.enter("shard 0", Doing.SHARD)
    for _ in range(3):
        machine.now_s += 0.5 * PAUSE_S
        activity.see()
        activity.again()
    seen = activity.see()
    assert (seen.what, seen.doing, seen.for_s) == ("shard 0", Doing.SHARD, 0.0)
    assert seen.usual_s == pytest.approx(0.5 * PAUSE_S)


def until(reached: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + GENEROUS_S
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
