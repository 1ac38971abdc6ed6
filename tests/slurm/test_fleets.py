"""Fleets on the nodes of a real Slurm, started by the scripts of `elastic slurm`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.errors import ExitCode
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet
from tests.slurm.allocation import Allocation
from tests.slurm.cluster import GRACE_S, Slurm
from tests.slurm.training import ENVIRONMENT


def submit_agents(slurm: Slurm, fleet: Fleet, nodes: int, *options: str) -> list[str]:
    """Returns Slurm's ids of the tasks."""
    words = ("agents", "--nodes", str(nodes), "--rendezvous", ",".join(fleet.client.replicas), "--slots", "1")
    how = ("--grace", str(GRACE_S - 5), "--dir", str(fleet.home), "--submit")
    array = slurm.run("elastic", "slurm", *words, *how, *options, environment=ENVIRONMENT)
    return [f"{array}_{number}" for number in range(1, nodes + 1)]


AGENT = "agent\0--"
"""`elastic agent` in a command line."""


def slots(*nodes: str) -> list[str]:
    return [f"{node}.0" for node in nodes]


def test_an_array_grows_from_two_nodes_to_four_and_shrinks_to_one(home: Path, quiet: Quiet) -> None:
    with Slurm(home, 4) as slurm, Fleet(home, replicas=1) as fleet:
        tasks = submit_agents(slurm, fleet, 2)
        nodes = {task: slurm.node_of(task) for task in tasks}
        fleet.await_nodes(*nodes.values())
        job = fleet.train("together", workers=4, min_workers=1, timing={"join_window_s": 5.0})
        fleet.pace(0.1)
        fleet.await_slots(job, *slots(*nodes.values()))
        nodes |= {task: slurm.node_of(task) for task in submit_agents(slurm, fleet, 2)}
        assert sorted(nodes.values()) == slurm.nodes
        fleet.await_slots(job, *slots(*nodes.values()))
        missed = fleet.events("member_lost")  # a newcomer may have come too late, and another one in its place
        *leaving, last = nodes
        slurm.run("scancel", *leaving)
        fleet.await_slots(job, *slots(nodes[last]))
        assert fleet.events("member_lost") == missed
        fleet.finish(job, quiet.digest, quiet.steps)


def test_an_agent_of_an_array_is_preempted_and_comes_back(home: Path, quiet: Quiet) -> None:
    with Slurm(home, 3) as slurm, Fleet(home, replicas=1) as fleet:
        tasks = submit_agents(slurm, fleet, 3)
        fleet.await_nodes(*slurm.nodes)
        job = fleet.train("together")
        fleet.pace(0.1)
        fleet.await_slots(job, *slots(*slurm.nodes))
        urgent = slurm.submit("sleep 3", "--partition=prod", "--exclusive")
        left = slurm.node_of(urgent)
        fleet.await_slots(job, *slots(*(node for node in slurm.nodes if node != left)))
        (requeued,) = [task for task in tasks if slurm.job(task)["JobState"] != "RUNNING"]
        slurm.run_again(requeued)
        fleet.await_slots(job, *slots(*slurm.nodes))
        assert fleet.events("member_lost") == []
        fleet.finish(job, quiet.digest, quiet.steps)


def test_all_agents_are_preempted_at_once_and_no_step_is_done_again(home: Path, quiet: Quiet) -> None:
    with Slurm(home, 2) as slurm, Fleet(home, replicas=1) as fleet:
        tasks = submit_agents(slurm, fleet, 2)
        fleet.await_nodes(*slurm.nodes)
        first = fleet.train("together", workers=2)
        fleet.pace(0.1)
        fleet.await_slots(first, *slots(*slurm.nodes))
        slurm.submit("sleep 3", "--partition=prod", "--nodes=2", "--exclusive")
        ended = fleet.await_end(first)
        assert ended["exit_code"] == ExitCode.DRAINED, ended["because"]
        done = len(fleet.steps(first))
        for task in tasks:
            slurm.run_again(task)
        fleet.await_nodes(*slurm.nodes)
        fleet.pace(0.0)
        second = fleet.train("together", "--resume", first, workers=2)
        fleet.pace(0.0)
        ended = fleet.await_end(second)
        assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]
        assert [line["step"] for line in fleet.steps(second)] == list(range(done, len(quiet.steps)))
        assert {line["step"] for line in fleet.events("state_restored")} == {done}


def test_a_node_slurms_daemons_and_an_agent_of_an_array_die(home: Path, quiet: Quiet) -> None:
    with Slurm(home, 3) as slurm, Fleet(home, replicas=1) as fleet:
        nodes = {task: slurm.node_of(task) for task in submit_agents(slurm, fleet, 2)}
        (task, lost), (_, other) = nodes.items()
        (spare,) = {*slurm.nodes} - {lost, other}
        fleet.await_nodes(lost, other)
        job = fleet.train("together", workers=2, min_workers=1)
        fleet.pace(0.1)
        fleet.await_slots(job, *slots(lost, other))
        slurm.switch_off(lost)
        slurm.run_again(task)
        fleet.await_slots(job, *slots(other, spare))
        slurm.await_saved(task)
        for name in ("slurmctld", spare):
            slurm.kill(name)
        fleet.await_more_steps(job, 3)
        slurm.start_controller()
        slurm.switch_on(spare)
        assert {line["worker_id"] for line in fleet.events("member_lost")} == {f"{lost}.0.0"}
        slurm.until("Slurm answers", slurm.states)
        slurm.kill_program(AGENT, spare)
        assert slurm.end(task) == "FAILED"
        fleet.await_slots(job, *slots(other))
        (another,) = submit_agents(slurm, fleet, 1)
        fleet.await_slots(job, *slots(other, slurm.node_of(another)))
        fleet.finish(job, quiet.digest, quiet.steps)


def test_a_time_limit_that_is_raised_behind_the_signal_brings_the_node_back(home: Path, quiet: Quiet) -> None:
    """Slurm gives the signal at most 60 s before the time that was asked for, and no second one."""
    with Slurm(home, 2) as slurm, Fleet(home, replicas=1) as fleet:
        stays = (
            f"exec elastic agent --rendezvous {','.join(fleet.client.replicas)} --slots 1 --notices slurm --jobs-dir"
        )
        script = f"{stays} {fleet.home}/$SLURMD_NODENAME"
        limited = slurm.submit(script, "--exclusive", "--time=2", "--signal=B:USR1@50", environment=ENVIRONMENT)
        goes = slurm.node_of(limited)
        slurm.submit(script, "--exclusive", environment=ENVIRONMENT)
        fleet.await_nodes(*slurm.nodes)
        job = fleet.train("together", workers=2)
        fleet.pace(0.3)
        (other,) = {*slurm.nodes} - {goes}
        fleet.await_slots(job, *slots(other))
        (notice, *_) = fleet.events("notice", node=goes)
        assert 40.0 < notice["seconds_left"] < 120.0, "as Slurm says it"
        slurm.run("scontrol", "update", f"JobId={limited}", "TimeLimit=10")
        fleet.await_slots(job, *slots(*slurm.nodes))
        assert fleet.events("member_lost") == []
        fleet.finish(job, quiet.digest, quiet.steps)


@contextmanager
def allocation(home: Path, nodes: int, workers: int, **timing: float) -> Iterator[tuple[Slurm, Allocation]]:
    with Slurm(home, nodes) as slurm:
        allocated = Allocation(slurm, workers, timing)
        try:
            yield slurm, allocated
        except BaseException as error:
            error.add_note(allocated.story())
            raise


def test_a_node_of_an_allocation_is_switched_off(home: Path, quiet: Quiet) -> None:
    with allocation(home, 3, 3) as (slurm, allocated):
        allocated.submit_as_on_the_page()
        allocated.await_nodes(*slurm.nodes)
        first = slurm.job(allocated.job)["BatchHost"]
        lost = next(node for node in slurm.nodes if node != first)
        slurm.switch_off(lost)
        allocated.await_nodes(*(node for node in slurm.nodes if node != lost))
        slurm.until("Slurm knows", lambda: slurm.states()[lost].startswith("down"))
        allocated.await_more_steps(3)
        allocated.check(quiet)


def test_daemons_of_slurm_and_of_the_fleet_die_and_training_goes_on(home: Path, quiet: Quiet) -> None:
    with allocation(home, 2, 2) as (slurm, allocated):
        allocated.submit()
        allocated.await_nodes(*slurm.nodes)
        slurm.await_saved(allocated.job)
        for name in ("slurmctld", "n2"):
            slurm.kill(name)
        allocated.await_more_steps(3)
        slurm.start_controller()
        slurm.switch_on("n2")
        for program in ("etcd", "rendezvous"):
            allocated.kill(program)
            allocated.await_more_steps(3)
        allocated.kill("worker")
        allocated.await_nodes(*slurm.nodes)
        slurm.kill_program(AGENT, "n2")
        allocated.await_nodes("n1")
        allocated.check(quiet)


def test_the_first_node_of_an_allocation_is_switched_off_and_the_others_requeue_it(home: Path, quiet: Quiet) -> None:
    soon = {"control_silence_s": 8.0, "orphan_limit_s": 10.0, "orphan_margin_s": 5.0}
    with allocation(home, 3, 2, **soon) as (slurm, allocated):
        allocated.submit()
        slurm.until("it runs", lambda: slurm.job(allocated.job)["JobState"] == "RUNNING")
        allocated.await_nodes("n1", "n2")
        allocated.await_more_steps(5)
        slurm.switch_off(slurm.job(allocated.job)["BatchHost"])
        slurm.run_again(allocated.job)
        allocated.await_nodes("n2", "n3")
        allocated.check(quiet)


def test_a_preempted_allocation_goes_on_from_the_very_step(home: Path, quiet: Quiet) -> None:
    with allocation(home, 2, 2) as (slurm, allocated):
        allocated.submit()
        allocated.await_nodes(*slurm.nodes)
        asked_unix_s = time.time()
        slurm.submit("sleep 3", "--partition=prod", "--nodes=2", "--exclusive")
        slurm.run_again(allocated.job)
        assert "train-1 is over, exit 6" in allocated.output
        told = [line["t_wall"] - asked_unix_s for line in allocated.events("daemon_signalled")]
        assert max(told[:2]) < GRACE_S - 1, "tasks of srun are told at the start of GraceTime"
        done = len(allocated.steps())
        allocated.await_nodes(*slurm.nodes)
        assert f"goes on from step {done}," in allocated.output
        allocated.check(quiet)


def test_an_allocation_at_its_time_limit_requeues_itself(home: Path, quiet: Quiet) -> None:
    with allocation(home, 2, 2) as (slurm, allocated):
        allocated.submit("--time=2", "--signal=B:USR1@60")
        allocated.await_nodes(*slurm.nodes)
        allocated.pace(0.2)  # a step of more than 2.5 s, of one worker, may be done again
        slurm.run_again(allocated.job)
        assert "train-1 is over, exit 6" in allocated.output
        done = len(allocated.steps())
        slurm.run("scontrol", "update", f"JobId={allocated.job}", "TimeLimit=30")
        allocated.await_nodes(*slurm.nodes)
        assert f"goes on from step {done}," in allocated.output
        allocated.check(quiet)


def test_an_allocation_with_the_checkpoints_of_an_earlier_one_ends_and_says_so(home: Path, quiet: Quiet) -> None:
    with allocation(home, 1, 1) as (slurm, allocated):
        allocated.submit()
        allocated.await_nodes(*slurm.nodes)
        allocated.check(quiet)
        anew = ("fleet", "job.toml", "--nodes", "1", "--slots", "1", "--submit")
        allocated.job = slurm.run("elastic", "slurm", *anew, environment=ENVIRONMENT)
        assert slurm.end(allocated.job) == "FAILED"
        assert "train-1 is over, exit 2: " in allocated.output
        assert f"{home}/checkpoints/train-1 holds the checkpoints of another job, train-1 (" in allocated.output


def test_a_cancelled_allocation_is_gone_on_with_by_another_one(home: Path, quiet: Quiet) -> None:
    with allocation(home, 2, 2) as (slurm, allocated):
        allocated.submit()
        allocated.await_nodes(*slurm.nodes)
        slurm.run("scancel", allocated.job)
        assert slurm.end(allocated.job) == "CANCELLED"
        done = len(allocated.steps())
        allocated.submit()
        allocated.await_nodes(*slurm.nodes)
        assert f"goes on from step {done}," in allocated.output
        allocated.check(quiet)
