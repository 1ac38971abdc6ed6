"""A job on an engine whose tasks are processes of the test: its driver, its fleet, and nodes that leave or are lost."""

from __future__ import annotations

import json
import multiprocessing
import time
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from chaos_tests.support.processes import await_exits, command_line, descendants, kill_if_there
from elastic.errors import ElasticError
from elastic.platforms.common.job_driver import JobDriver, NodeTask
from elastic.platforms.common.job_request import JobRequest
from elastic.platforms.common.node_task import AgentEnded, TaskOutcome, Ticket, serve
from elastic.preemption.notice import Notice, NoticeKind
from elastic.protocol.worker_id import node_of
from tests.live.conftest import Quiet
from tests.live.jobs import DEADLINE_S, POLL_S, TRAINER

SPAWN = multiprocessing.get_context("spawn")
Outcomes = SimpleQueue[tuple[int, TaskOutcome | Exception]]


def be_a_task(number: int, ticket: Ticket, goes: Path, outcomes: Outcomes) -> None:
    """goes: a file that is there while the node has to go."""

    def notice() -> Notice | None:
        return Notice(NoticeKind.RECLAIM, 60.0, "the engine wants the node") if goes.exists() else None

    try:
        outcomes.put((number, serve(ticket, notice)))
    except ElasticError as error:
        outcomes.put((number, error))


class Engine:
    """Starts the tasks that the driver of a job misses, as the drivers of Ray and Spark do."""

    def __init__(self, home: Path, driver: JobDriver) -> None:
        self.driver = driver
        self.tasks = {number: NodeTask(number) for number in range(driver.request.nodes)}
        self.processes: dict[int, BaseProcess] = {}
        self.ended: list[tuple[str, TaskOutcome | Exception]] = []
        self._home = home
        self._outcomes: Outcomes = SPAWN.SimpleQueue()

    def goes(self, number: int) -> Path:
        return self._home / f"goes-{number}"

    def step(self) -> bool:
        """Whether the job is over."""
        if self.driver.poll():
            return True
        self.take_in()
        for number, task in self.tasks.items():
            if number not in self.processes and task.due_s <= time.monotonic():
                words = (number, self.driver.ticket(task), self.goes(number), self._outcomes)
                self.processes[number] = SPAWN.Process(target=be_a_task, args=words)
                self.processes[number].start()
        time.sleep(POLL_S)  # other processes: there is nothing to wait on
        return False

    def take_in(self) -> None:
        while not self._outcomes.empty():
            number, outcome = self._outcomes.get()
            self.processes.pop(number).join()
            self.goes(number).unlink(missing_ok=True)
            self._end(number, outcome)
        for number, process in list(self.processes.items()):
            if not process.is_alive() and self._outcomes.empty():
                del self.processes[number]
                self._end(number, ElasticError("the engine has lost it"))

    def _end(self, number: int, outcome: TaskOutcome | Exception) -> None:
        self.ended.append((self.tasks[number].node, outcome))
        self.driver.ended(self.tasks[number], outcome)

    def until(self, ended: int) -> None:
        """Until so many tasks have ended, and a worker of each of the others is a member that has applied a step."""
        deadline_s = time.monotonic() + DEADLINE_S
        while len(self.ended) < ended or self._members() != {task.node for task in self.tasks.values()}:
            assert not self.step() and time.monotonic() < deadline_s, self.ended

    def _members(self) -> set[str]:
        try:
            members = self.driver.fleet.client.status(self.driver.job)["members"]
        except ElasticError:
            return set()
        return {node_of(member["worker_id"]) for member in members if member["applied"]}

    def finish(self) -> None:
        while self.processes:
            self.take_in()
            time.sleep(POLL_S)


@pytest.mark.long
def test_a_job_ends_as_the_quiet_run_though_one_task_leaves_one_is_killed_and_the_agent_of_one_dies(
    tmp_path: Path, quiet: Quiet, capfd: pytest.CaptureFixture[str]
) -> None:
    gates = tmp_path / "gates"
    gates.mkdir()
    (gates / "end").touch()
    (gates / "pace").write_text("0.05")
    request = JobRequest(
        what=[str(TRAINER)],
        workers=(1, 2),
        checkpoint_dir=str(tmp_path / "checkpoints"),
        options={"env": {"LIVE_GATES": str(gates), "OMP_NUM_THREADS": "1"}},
    )
    with JobDriver(request, "127.0.0.1", "ray") as driver:
        engine = Engine(tmp_path, driver)
        engine.until(ended=0)
        engine.goes(0).touch()
        engine.until(ended=1)
        (left,) = engine.ended
        assert isinstance(left[1], TaskOutcome) and not left[1].over and left[0] == "node-0-1"
        serving = engine.processes[1]
        below = descendants(serving.pid or 0)
        serving.kill()
        engine.until(ended=2)
        assert not await_exits(below, 30.0), "the kernel ends an agent with its task"
        below = descendants(engine.processes[0].pid or 0)
        (agent,) = (pid for pid in below if " elastic.cli agent " in command_line(pid))
        kill_if_there(agent)
        engine.until(ended=3)
        assert isinstance(engine.ended[-1][1], AgentEnded)
        (gates / "pace").write_text("0")
        (gates / "end").unlink()
        while not engine.step():
            continue
        engine.finish()
        result = driver.result()
        processes = descendants(driver.fleet._process.pid)
        assert processes, "etcd"
    assert not await_exits(processes, 30.0) and not driver.fleet.directory.exists()
    assert result.digest == quiet.digest and result.steps == len(quiet.steps)
    assert json.loads(json.dumps(dict(result.metrics))) == quiet.steps[-1]["scalars"]
    told = capfd.readouterr().err
    assert "node-0-1 has left the job, as its machine has to go" in told
    assert "node-1-1 is lost: the engine has lost it" in told and "is lost: the agent of node" in told
