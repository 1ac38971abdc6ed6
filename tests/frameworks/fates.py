"""What happens to the jobs of the frameworks' tests: the same for each framework."""

from __future__ import annotations

from tests.live.jobs import Job

WITHOUT_LOADERS = {"LOADER_PROCESSES": "0"}
"""A script that has a process group has threads of it, which may hold a lock of CPython 3.11 while a DataLoader forks:
the child then waits for that lock for ever, and so does torchrun."""


def two_deaths_and_two_joins(job: Job, *steps: int) -> None:
    """Kill the first member of a job of three workers behind each of these steps, and await its replacement. Then the
    job runs at full speed."""
    job.pace(0.5)
    job.await_world(3)
    for count in steps:
        job.await_steps(count)
        first = job.members()[0]
        job.send(first)
        job.await_event("worker_exited", worker_id=first)
        job.await_world(3)
    job.pace(0)


def everything_killed(job: Job, steps: int) -> None:
    """Kill the command of a job behind this step. Nothing may be left of the job."""
    job.pace(0.1)
    job.await_steps(steps)
    job.command.process.kill()
    job.wait()
    assert job.left_behind() == {}
