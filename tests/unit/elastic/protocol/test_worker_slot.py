"""A slot's life as traces: at a time something happened, and what the agent is told to do then."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from typing import Any

import pytest

from elastic.config import JobSpec, Timing
from elastic.errors import ExitCode
from elastic.protocol import worker_slot as sv
from elastic.protocol.messages import SlotGivenUp, WorkerDead

KILLED = -signal.SIGKILL


def spec(**changes: Any) -> JobSpec:
    return JobSpec(**{"name": "job", "command": ("python", "train.py"), "workers": 2, **changes})


class Life:
    """A slot driven by hand. tell() returns what is to be done, as short words."""

    def __init__(self, job: JobSpec | None = None) -> None:
        self.slot = sv.Slot("a", 0, job or spec(), 0)
        self.said: list[SlotGivenUp | WorkerDead] = []
        self.told: list[sv.TellLeader] = []

    def tell(self, now_s: float, event: sv.Event) -> list[str]:
        self.slot, actions = sv.step(self.slot, event, now_s)
        self.told += [action for action in actions if isinstance(action, sv.TellLeader)]
        return [self._word(action) for action in actions if not isinstance(action, sv.TellLeader)]

    def _word(self, action: sv.Action) -> str:
        match action:
            case sv.Spawn(worker_id, restarted, device):
                return f"spawn {worker_id}{' again' if restarted else ''}{f' on {device}' if device else ''}"
            case sv.Signal(number):
                return number.name
            case sv.SayTo(word):
                assert isinstance(word, SlotGivenUp | WorkerDead)
                self.said.append(word)
                return type(word).__name__
            case _:
                raise AssertionError(action)

    def live(self, now_s: float, *, joined: bool = True, served: bool = True) -> None:
        """Start the worker that is due and let it come so far."""
        assert self.tell(now_s, sv.Due()), "no worker was due"
        self.tell(now_s, sv.Spawned(100 + self.slot.incarnation))
        if joined:
            self.tell(now_s, sv.WorkerJoined())
        if served:
            self.tell(now_s, sv.Served())

    @property
    def given_up(self) -> SlotGivenUp:
        word = self.said[-1]
        assert isinstance(word, SlotGivenUp)
        return word


def living() -> Life:
    life = Life()
    life.live(0.0)
    return life


def test_a_member_killed_from_outside_is_replaced_at_once_however_often() -> None:
    life = Life(spec(max_restarts=0))
    for round_ in range(30):
        life.live(float(round_))
        assert life.tell(round_ + 0.5, sv.Exited(KILLED)) == ["WorkerDead"]
        assert life.slot.deadline_s == round_ + 0.5
    assert life.tell(40.0, sv.Due()) == ["spawn a.0.30 again"]
    assert life.said[0] == WorkerDead("a.0.0", "killed by SIGKILL")


def test_a_death_is_said_when_it_begins_once_and_the_replacement_waits_for_its_end() -> None:
    life = living()
    assert life.tell(1.0, sv.Dying(KILLED)) == ["WorkerDead", "SIGKILL"]
    assert life.said == [WorkerDead("a.0.0", "killed by SIGKILL")]
    assert life.tell(1.0, sv.Dying(KILLED)) == []
    assert life.tell(1.05, sv.Due()) == []
    assert life.tell(1.1, sv.Exited(KILLED)) == []
    assert life.tell(1.1, sv.Due()) == ["spawn a.0.1 again"]
    life.tell(1.1, sv.Spawned(101))
    assert life.tell(2.0, sv.Exited(KILLED)) == ["WorkerDead"], "the next one has a death of its own"


@pytest.mark.parametrize("leaving", [sv.MayLeave(), sv.JobOver(complete=True), sv.StopSlot()])
def test_a_worker_that_may_go_dies_when_it_is_gone(leaving: sv.Event) -> None:
    life = living()
    life.tell(1.0, leaving)
    assert life.tell(2.0, sv.Dying(KILLED)) == []
    assert "WorkerDead" in life.tell(3.0, sv.Exited(KILLED))


def test_an_end_that_tells_nothing_yet_waits_for_the_exit() -> None:
    life = living()
    assert life.tell(1.0, sv.Dying(0)) == []
    assert life.tell(1.1, sv.Exited(1)) == ["WorkerDead"]


def test_the_first_worker_is_not_a_restart() -> None:
    assert Life().tell(0.0, sv.Due()) == ["spawn a.0.0"]


def test_back_off_grows_only_while_workers_die_before_they_took_part() -> None:
    life = Life()
    waits = []
    for _ in range(9):
        life.live(1000.0, served=False)
        life.tell(1000.0, sv.Exited(KILLED))
        waits.append(life.slot.deadline_s - 1000.0)
        life.slot = replace(life.slot, deadline_s=0.0)
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    life.live(2000.0)
    life.tell(2001.0, sv.Exited(KILLED))
    assert life.slot.deadline_s == 2001.0


def test_nothing_starts_before_the_back_off_is_over() -> None:
    life = living()
    life.tell(1.0, sv.Exited(1))
    assert life.tell(1.25, sv.Due()) == []
    assert life.tell(1.5, sv.Due()) == ["spawn a.0.1 again"]


def test_exits_by_the_script_are_forgiven_max_restarts_times() -> None:
    life = Life(spec(max_restarts=3))
    for incarnation in range(3):
        life.live(100.0 * incarnation)
        life.tell(100.0 * incarnation, sv.Raised(f"step {incarnation}", "Traceback"))
        assert life.tell(100.0 * incarnation + 1, sv.Exited(1)) == ["WorkerDead"]
    life.live(400.0)
    assert life.tell(401.0, sv.Exited(1)) == ["WorkerDead", "SlotGivenUp"]
    assert (life.given_up.exit_code, life.slot.phase) == (1, sv.SlotPhase.OVER)
    assert "max_restarts=3" in life.given_up.because


@pytest.mark.parametrize("status", [1, 3, 143, -signal.SIGSEGV, -signal.SIGABRT])
def test_a_fault_of_the_script_counts(status: int) -> None:
    life = Life(spec(max_restarts=0))
    life.live(0.0)
    assert life.tell(1.0, sv.Exited(status)) == ["WorkerDead", "SlotGivenUp"]
    assert sv.describe(status) in life.given_up.because


@pytest.mark.parametrize("status", [KILLED, -signal.SIGTERM, -signal.SIGHUP, -64, 75])
def test_a_signal_from_outside_and_a_fenced_exit_do_not_count(status: int) -> None:
    life = Life(spec(max_restarts=0))
    life.live(0.0)
    assert life.tell(1.0, sv.Exited(status)) == ["WorkerDead"]
    assert life.tell(1.0, sv.Due()) == ["spawn a.0.1 again"]


def test_the_same_exception_at_the_same_place_ends_the_slot_with_its_traceback() -> None:
    life = Life()
    for round_ in range(2):
        life.live(10.0 * round_)
        life.tell(10.0 * round_ + 1, sv.Raised("ValueError train.py:7 step 3 shard 1", "Traceback: boom"))
        actions = life.tell(10.0 * round_ + 2, sv.Exited(1))
    assert actions == ["WorkerDead", "SlotGivenUp"]
    assert "Traceback: boom" in life.given_up.because
    assert life.given_up.exit_code == 1


def test_of_each_worker_that_its_script_ends_and_that_is_replaced_it_is_told_where_and_with_which_words() -> None:
    life = Life(spec(max_restarts=2))
    life.live(0.0)
    life.tell(1.0, sv.Raised("ValueError train.py:7 step 3", "Traceback: boom"))
    assert life.told == []
    life.tell(2.0, sv.Exited(1, "the log"))
    life.live(10.0, joined=False, served=False)
    log = (
        'Traceback (most recent call last):\n  File "/home/a/train.py", line 5, in <module>\n    import tool\n'
        '  File "/v/lib/python3.11/site-packages/tool.py", line 1, in <module>\nImportError: no tool\n'
    )
    life.tell(11.0, sv.Exited(1, log))
    assert life.told == [
        sv.TellLeader("a.0.0", "exited with 1 at ValueError train.py:7 step 3", "Traceback: boom"),
        sv.TellLeader("a.0.1", "exited with 1 at /home/a/train.py:5", log),
    ]
    life.live(20.0)
    life.tell(21.0, sv.Exited(KILLED))
    life.live(30.0, joined=False, served=False)
    life.tell(31.0, sv.Exited(1, log))
    assert len(life.told) == 2, "a kill is no error of the script, and the end of the slot is told by itself"
    assert life.given_up.because.startswith("a.0.3 exited with 1 at /home/a/train.py:5; so did the one before it")
    life = Life(spec())
    life.live(0.0)
    life.tell(1.0, sv.Raised("KeyboardInterrupt train.py:7 step 3", "Traceback: stopped"))
    life.tell(2.0, sv.Exited(-signal.SIGINT))
    assert life.told == [
        sv.TellLeader("a.0.0", "killed by SIGINT at KeyboardInterrupt train.py:7 step 3", "Traceback: stopped")
    ], "it has raised, whatever ended it then"
    life = Life(spec())
    life.live(0.0)
    life.tell(1.0, sv.Exited(-signal.SIGABRT, "Fatal Python error"))
    assert life.told == [sv.TellLeader("a.0.0", "killed by SIGABRT", "Fatal Python error")]


def test_what_a_script_raises_behind_a_complete_job_is_told() -> None:
    log = 'Traceback (most recent call last):\n  File "/home/a/train.py", line 9, in <module>\nValueError: late\n'
    late = sv.TellLeader("a.0.0", "exited with 1 at /home/a/train.py:9", log, replaced=False)
    cases: list[tuple[list[sv.Event], list[sv.TellLeader]]] = [
        ([sv.MayLeave(), sv.JobOver(complete=True)], [late]),
        ([sv.JobOver(complete=False)], []),
        ([sv.MayLeave(), sv.JobOver(complete=True), sv.StopSlot()], []),
    ]
    for ends, told in cases:
        life = Life()
        life.live(0.0)
        for event in ends:
            life.tell(1.0, event)
        life.tell(2.0, sv.Exited(1, log))
        assert (life.told, life.slot.phase) == (told, sv.SlotPhase.OVER)


def test_a_kill_between_two_equal_exceptions_does_not_hide_them() -> None:
    life = Life()
    for round_, status in enumerate((1, KILLED, 1)):
        life.live(10.0 * round_)
        if status == 1:
            life.tell(10.0 * round_ + 1, sv.Raised("ValueError train.py:7 step 3 shard 1", "boom"))
        actions = life.tell(10.0 * round_ + 2, sv.Exited(status))
    assert actions == ["WorkerDead", "SlotGivenUp"]


def test_a_device_that_fails_at_one_place_again_and_again_ends_the_slot_after_max_restarts() -> None:
    life = Life(spec(max_restarts=3))
    place = "AcceleratorError train.py:7 step 3 shard 1"
    for round_ in range(4):
        life.live(100.0 * round_)
        life.tell(100.0 * round_ + 1, sv.Raised(place, "CUDA error: unspecified launch failure", of_device=True))
        actions = life.tell(100.0 * round_ + 2, sv.Exited(-signal.SIGABRT))
        assert actions == (["WorkerDead"] if round_ < 3 else ["WorkerDead", "SlotGivenUp"]), round_
    assert [said.because for said in life.told] == [f"killed by SIGABRT at {place}"] * 3
    assert "it was exit 4 by the script or its device, max_restarts=3" in life.given_up.because


def test_successors_in_a_slot_are_told_the_gpu_of_the_last_worker_that_has_joined() -> None:
    life = Life()
    assert life.tell(0.0, sv.Due()) == ["spawn a.0.0"]
    life.tell(0.0, sv.Spawned(1))
    life.tell(0.0, sv.WorkerJoined("GPU-a"))
    life.tell(1.0, sv.Exited(KILLED))
    assert life.tell(1.0, sv.Due()) == ["spawn a.0.1 again on GPU-a"]
    life.tell(1.0, sv.Spawned(2))
    life.tell(2.0, sv.Exited(KILLED))
    assert life.tell(90.0, sv.Due()) == ["spawn a.0.2 again on GPU-a"], "the one before it has not come so far"


def test_the_same_mistake_twice_is_found_although_a_device_failed_between_them() -> None:
    life = Life(spec(max_restarts=9))
    for round_, of_device in enumerate((False, True, False)):
        life.live(100.0 * round_)
        life.tell(100.0 * round_ + 1, sv.Raised("ValueError train.py:7 step 3", "boom", of_device=of_device))
        actions = life.tell(100.0 * round_ + 2, sv.Exited(1))
    assert actions == ["WorkerDead", "SlotGivenUp"]
    assert "so did the one before it, at the same place" in life.given_up.because


def test_newcomers_that_raise_beside_members_are_not_counted_and_wait_twice_as_long_each_time() -> None:
    life = Life(spec(max_restarts=0))
    place = "StateChanged train.py:7 step 3 shard 1"
    now_s, waits = 0.0, []
    for _ in range(9):
        life.live(now_s)
        life.tell(now_s + 1, sv.Raised(place, "Traceback", newcomer=True))
        assert life.tell(now_s + 2, sv.Exited(1)) == ["WorkerDead"]
        waits.append(life.slot.deadline_s - now_s - 2)
        now_s = life.slot.deadline_s
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert life.told[2].because == (
        f"exited with 1 at {place}, before its first step; members train on with this script, so the next one is tried "
        "in 2 s"
    )
    life.live(now_s)
    life.tell(now_s + 1, sv.Exited(KILLED))
    life.live(now_s + 2)
    life.tell(now_s + 3, sv.Raised(place, "Traceback", newcomer=True))
    life.tell(now_s + 4, sv.Exited(1))
    assert life.slot.deadline_s == now_s + 4.5, "one before it was a member"
    life.live(now_s + 5)
    life.tell(now_s + 6, sv.Raised(place, "Traceback"))
    assert life.tell(now_s + 7, sv.Exited(1)) == ["WorkerDead", "SlotGivenUp"], "this one was a member"


def test_a_script_that_breaks_before_join_twice_alike_is_not_tried_a_third_time() -> None:
    life = Life()
    log = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'tensorfoo'\n"
    life.live(0.0, joined=False, served=False)
    assert life.tell(1.0, sv.Exited(1, log)) == ["WorkerDead"]
    life.live(2.0, joined=False, served=False)
    assert life.tell(3.0, sv.Exited(1, log)) == ["WorkerDead", "SlotGivenUp"]
    assert "tensorfoo" in life.given_up.because


def test_equal_last_lines_after_join_are_not_taken_for_a_place() -> None:
    life = Life()
    for round_ in range(2):
        life.live(10.0 * round_)
        assert life.tell(10.0 * round_ + 1, sv.Exited(1, "epoch 1\n")) == ["WorkerDead"]


def test_a_script_that_never_joins_ends_the_slot_as_bad_input() -> None:
    life = Life()
    life.live(0.0, joined=False, served=False)
    assert life.tell(1.0, sv.Exited(0)) == ["WorkerDead", "SlotGivenUp"]
    assert "the script never called elastic.join()" in life.given_up.because
    assert life.given_up.exit_code == 2


def test_a_worker_that_leaves_with_0_in_the_middle_counts_as_the_scripts_doing() -> None:
    life = Life(spec(max_restarts=0))
    life.live(0.0)
    assert life.tell(1.0, sv.Exited(0)) == ["WorkerDead", "SlotGivenUp"]


def test_a_finished_or_released_worker_leaves_for_good() -> None:
    life = living()
    life.tell(1.0, sv.MayLeave())
    assert life.tell(2.0, sv.Exited(0)) == ["WorkerDead"]
    assert life.slot.phase is sv.SlotPhase.OVER
    assert life.slot.deadline_s == math.inf


def test_a_worker_killed_while_it_was_about_to_leave_is_replaced() -> None:
    life = living()
    life.tell(1.0, sv.MayLeave())
    assert life.tell(2.0, sv.Exited(KILLED)) == ["WorkerDead"]
    assert life.tell(2.0, sv.Due()) == ["spawn a.0.1 again"]


def test_without_replacing_a_killed_worker_ends_its_slot() -> None:
    life = Life(spec(replace=False))
    life.live(0.0)
    assert life.tell(1.0, sv.Exited(KILLED)) == ["WorkerDead", "SlotGivenUp"]
    assert life.given_up.exit_code == 3


def test_a_program_that_cannot_be_started_is_bad_input() -> None:
    life = Life()
    life.tell(0.0, sv.Due())
    assert life.tell(0.0, sv.SpawnFailed("No such file or directory: 'pyhton'")) == ["SlotGivenUp"]
    assert life.given_up.exit_code == 2


def test_the_leaders_kill_reaches_only_a_living_worker() -> None:
    life = Life()
    assert life.tell(0.0, sv.KillOrdered()) == []
    life.live(0.0)
    assert life.tell(1.0, sv.KillOrdered()) == ["SIGKILL"]
    assert life.tell(1.1, sv.Exited(KILLED)) == ["WorkerDead"]
    assert life.tell(1.1, sv.Due()) == ["spawn a.0.1 again"]


def test_a_frozen_newcomer_is_killed_by_its_agent_because_no_leader_waits_for_it() -> None:
    grace_s = Timing().fence_grace_s
    life = Life()
    life.live(0.0, served=False)
    life.tell(3.0, sv.FoundFrozen())
    assert life.tell(3.0 + grace_s - 0.1, sv.Due()) == []
    assert life.tell(3.0 + grace_s, sv.Due()) == ["SIGKILL"]


def test_a_thawed_newcomer_and_a_frozen_member_are_left_alone() -> None:
    newcomer = Life()
    newcomer.live(0.0, served=False)
    newcomer.tell(3.0, sv.FoundFrozen())
    newcomer.tell(4.0, sv.FoundAlive())
    assert newcomer.tell(60.0, sv.Due()) == []
    member = Life()
    member.live(0.0)
    member.tell(3.0, sv.FoundFrozen())
    assert member.slot.deadline_s == math.inf


def test_stop_asks_first_and_kills_after_the_grace() -> None:
    life = living()
    assert life.tell(10.0, sv.StopSlot()) == ["SIGTERM"]
    assert life.tell(12.9, sv.Due()) == []
    assert life.tell(13.0, sv.Due()) == ["SIGKILL"]
    assert life.tell(13.1, sv.Exited(KILLED)) == ["WorkerDead"]
    assert life.slot.phase is sv.SlotPhase.OVER


def test_stop_and_job_over_end_a_slot_that_waits() -> None:
    for event in (sv.StopSlot(), sv.JobOver(complete=True)):
        life = Life()
        assert life.tell(0.0, event) == []
        assert life.slot.phase is sv.SlotPhase.OVER
        assert life.tell(60.0, sv.Due()) == []


def test_after_the_job_a_members_script_has_its_own_time_and_a_newcomer_the_grace() -> None:
    member = Life()
    member.live(0.0)
    member.tell(2.0, sv.JobOver(complete=True))
    assert member.slot.deadline_s == math.inf
    newcomer = Life()
    newcomer.live(0.0, served=False)
    newcomer.tell(2.0, sv.JobOver(complete=True))
    assert newcomer.tell(5.0, sv.Due()) == ["SIGTERM"]
    assert newcomer.tell(8.0, sv.Due()) == ["SIGKILL"]


def test_after_the_job_a_frozen_member_is_not_waited_for() -> None:
    before = Life()
    before.live(0.0)
    before.tell(1.0, sv.FoundFrozen())
    before.tell(2.0, sv.JobOver(complete=True))
    assert before.tell(5.0, sv.Due()) == ["SIGTERM"]
    later = Life()
    later.live(0.0)
    later.tell(2.0, sv.JobOver(complete=True))
    assert later.tell(5.0, sv.FoundFrozen()) == ["SIGTERM"]
    assert later.tell(8.0, sv.Due()) == ["SIGKILL"]


def test_after_a_failed_job_nobody_has_longer_than_the_grace() -> None:
    life = living()
    life.tell(1.0, sv.MayLeave())
    life.tell(2.0, sv.JobOver(complete=False))
    assert life.tell(5.0, sv.Due()) == ["SIGTERM"]


def test_an_interrupt_reaches_a_finished_worker_that_takes_its_time() -> None:
    life = living()
    life.tell(1.0, sv.MayLeave())
    life.tell(2.0, sv.JobOver(complete=True))
    assert life.tell(9.0, sv.StopSlot()) == ["SIGTERM"]


def test_a_worker_of_a_node_that_leaves_is_not_replaced_until_the_node_stays() -> None:
    life = Life(spec(max_restarts=0))
    life.live(0.0)
    assert life.tell(1.0, sv.NodeLeaves()) == []
    life.tell(2.0, sv.WorkerReleased())
    assert life.tell(3.0, sv.Exited(0)) == ["WorkerDead"]
    assert life.slot.phase is sv.SlotPhase.AWAY and life.tell(100.0, sv.Due()) == []
    life.tell(200.0, sv.NodeStays())
    assert life.tell(200.0, sv.Due()) == ["spawn a.0.1 again"]


@pytest.mark.parametrize("status", [KILLED, 1, 0, 75])
def test_whatever_ends_a_worker_of_a_node_that_leaves_costs_no_restart(status: int) -> None:
    life = Life(spec(max_restarts=0, replace=False))
    life.live(0.0)
    life.tell(1.0, sv.NodeLeaves())
    assert life.tell(2.0, sv.Exited(status)) == ["WorkerDead"]
    assert (life.slot.phase, life.slot.script_exits) == (sv.SlotPhase.AWAY, 0)


def test_a_worker_that_was_released_for_nothing_is_replaced() -> None:
    life = Life(spec(replace=False))
    life.live(0.0)
    for event in (sv.NodeLeaves(), sv.WorkerReleased(), sv.NodeStays()):
        life.tell(1.0, event)
    assert life.tell(2.0, sv.Exited(0)) == ["WorkerDead"]
    assert life.tell(2.0, sv.Due()) == ["spawn a.0.1 again"]


def test_a_slot_that_waits_when_its_node_leaves_starts_nothing() -> None:
    life = Life()
    life.tell(0.0, sv.NodeLeaves())
    assert life.tell(0.0, sv.Due()) == [] and life.slot.deadline_s == math.inf
    life.tell(5.0, sv.JobOver(complete=True))
    assert life.slot.phase is sv.SlotPhase.OVER
    life.tell(6.0, sv.NodeStays())
    assert life.slot.phase is sv.SlotPhase.OVER


def test_a_slot_that_was_given_up_does_not_come_back_with_its_node() -> None:
    life = Life(spec(max_restarts=0))
    life.live(0.0)
    assert life.tell(1.0, sv.Exited(1, "boom")) == ["WorkerDead", "SlotGivenUp"]
    life.tell(2.0, sv.NodeLeaves())
    life.tell(3.0, sv.NodeStays())
    assert life.slot.phase is sv.SlotPhase.OVER


@pytest.mark.parametrize("end", [sv.StopSlot(), sv.JobOver(complete=True)])
def test_a_worker_that_comes_when_its_job_has_ended_is_killed(end: sv.Event) -> None:
    """A fork is asked for and answered later."""
    life = Life()
    assert life.tell(0, sv.Due()) == ["spawn a.0.0"]
    assert life.tell(1, end) == []
    assert life.tell(2, sv.Spawned(100)) == ["SIGKILL"]
    assert life.tell(3, sv.Exited(KILLED)) == ["WorkerDead"]
    assert life.slot.phase is sv.SlotPhase.OVER


def test_a_start_that_fails_when_its_job_has_ended_is_no_news() -> None:
    life = Life()
    life.tell(0, sv.Due())
    life.tell(1, sv.StopSlot())
    assert life.tell(2, sv.SpawnFailed("no program")) == []


@pytest.mark.parametrize("before", [None, sv.StopSlot(), sv.NodeLeaves(), sv.MayLeave()])
def test_a_process_that_has_ended_is_not_signalled_any_more(before: sv.Event | None) -> None:
    life = living()
    assert life.slot.pid == 100
    if before is not None:
        life.tell(0.5, before)
    life.tell(1.0, sv.Exited(KILLED))
    assert life.slot.pid == 0


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with 0"),
        (3, "exited with 3"),
        (int(ExitCode.FENCED), "found itself fenced"),
        (-9, "killed by SIGKILL"),
        (-120, "killed by signal 120"),
    ],
)
def test_how_a_process_ended_is_said_in_words(status: int, words: str) -> None:
    assert sv.describe(status) == words


def test_a_released_worker_that_leaves_with_the_code_of_a_job_which_stopped_in_order_has_not_failed() -> None:
    for code, told in ((ExitCode.DRAINED, 0), (ExitCode.SCRIPT_FAILED, 1)):
        life = Life()
        life.live(0.0)
        life.tell(1.0, sv.WorkerReleased())
        life.tell(1.0, sv.JobOver(complete=False))
        life.tell(1.1, sv.Exited(code))
        assert len(life.told) == told


@pytest.mark.parametrize(
    ("before", "end", "failure"),
    [
        ((), sv.Exited(-signal.SIGSEGV), "crash"),
        ((), sv.Exited(3, "words"), "crash"),
        ((), sv.Exited(-signal.SIGKILL, starved="no memory was left on the machine"), "memory"),
        ((), sv.Dying(-signal.SIGKILL, starved="no memory was left on the machine"), "memory"),
        ((), sv.Exited(-signal.SIGKILL), ""),
        ((), sv.Exited(ExitCode.FENCED), ""),
        ((), sv.Exited(-signal.SIGKILL, cause="mpirun has ended"), ""),
        ((sv.Raised("here", "Traceback"),), sv.Exited(1), ""),
        ((sv.MayLeave(),), sv.Exited(1), ""),
        ((sv.NodeLeaves(),), sv.Exited(-signal.SIGSEGV), ""),
        ((sv.JobOver(complete=False),), sv.Exited(1), ""),
    ],
)
def test_an_end_is_a_failure_if_its_cause_is_in_the_worker(
    before: tuple[sv.Event, ...], end: sv.Exited | sv.Dying, failure: str
) -> None:
    slot = sv.Slot("a", 0, JobSpec(name="job", command=("train",), workers=1), 0)
    for event in (sv.Due(), sv.Spawned(7), sv.WorkerJoined(), *before):
        slot, _ = sv.step(slot, event, 0.0)
    _, actions = sv.step(slot, end, 1.0)
    words = [action.word for action in actions if isinstance(action, sv.SayTo)]
    (dead,) = [word for word in words if isinstance(word, WorkerDead)]
    assert dead.failure == failure
    assert ("no memory was left" in dead.because) == (failure == "memory")
