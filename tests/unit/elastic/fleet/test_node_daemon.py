"""What a daemon does with what the leader tells it, with processes in the place of agents."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest

from elastic.agent.process import agent_process, worker_process
from elastic.agent.process.agent_process import record_of
from elastic.config import JobSpec
from elastic.errors import ConfigError
from elastic.fleet.documents import Result, Submission
from elastic.fleet.node import job_runner
from elastic.fleet.node.job_environment import NodeSettings
from elastic.fleet.node.job_runner import JobRunner
from elastic.fleet.node.leader_session import Offer
from elastic.fleet.node.node_daemon import Daemon, Reread
from elastic.fleet.node.notice_board import NoticeBoard
from elastic.preemption import relay
from elastic.preemption.notice import Notice, NoticeKind
from elastic.preemption.provider import NoticeSource, Unanswered
from elastic.records import host_memory
from elastic.records.files import read_job
from elastic.records.journal import Journal
from elastic.rendezvous.reach import Reach
from elastic.rendezvous.service import SERVER_OPTIONS
from elastic.security.channels import PLAIN
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import add_to_server

PATIENCE_S = 30.0

AGENT = """
import os, signal, sys, time
from pathlib import Path
job = Path(sys.argv[sys.argv.index("--job-dir") + 1])
gate = job.parent.parent / "gate"
if job.name.startswith("deaf"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if not sys.stdin.readline():
    sys.exit(3)
gate.with_suffix(".up").write_text(str(os.getpid()))
while not gate.exists():
    time.sleep(0.01)
"""
"""Begins when it is told to, and lives until the gate is open. That of a job `deaf` takes its time over SIGTERM."""

RESULT = codec.to_json(Result(0, "all members have finished")).decode()


class Node:
    """A daemon without a leader. gate: when that file exists, agents end by themselves. started: jobs, in order."""

    def __init__(self, home: Path, *replicas: str) -> None:
        self.home = home
        self.gate = home / "gate"
        self.started: list[str] = []
        self.site = NodeSettings(
            node="a", reach=Reach(replicas=replicas), jobs_dir=home / "jobs", notices="none", grace_s=PATIENCE_S
        )
        self.journal = Journal(home / "journal.jsonl", "", "daemon", "here")
        self.daemon = Daemon(self.site, Offer(2, (), "a lock"), self.journal, PLAIN)
        self.daemon._attendance._outbox = asyncio.Queue()

    def submission(self, name: str, env: tuple[str, ...] = (), env_from: str = "") -> Submission:
        spec = JobSpec(name=name, command=("train",), workers=1, min_workers=1, checkpoint_dir=str(self.home / "c"))
        return Submission(replace(spec, env=env, env_from=env_from), 1, name, f"identity of {name}")

    def duty(self, name: str, slots: int = 1, submission: Submission | None = None) -> pb.Duty:
        document = codec.to_json(submission or self.submission(name)).decode()
        return pb.Duty(job=name, slots=slots, document=document)

    def told(self, *duties: pb.Duty, over: tuple[str, ...] = ()) -> None:
        self.daemon._duties = {duty.job: duty for duty in duties}
        self.daemon._over = dict.fromkeys(over, RESULT)
        self.daemon._reconcile()

    def runner(self, job: str) -> JobRunner:
        return self.daemon._runners[job]

    def troubles(self) -> dict[str, str]:
        """The newest that the leader was told."""
        outbox, newest = self.daemon._attendance._outbox, pb.NodeTroubles()
        assert outbox is not None
        while not outbox.empty():
            newest = outbox.get_nowait().troubles
        return {trouble.job: trouble.because for trouble in newest.troubles}

    def ends(self) -> list[str]:
        """How each agent ended."""
        lines = [json.loads(line) for line in (self.home / "journal.jsonl").read_text().splitlines()]
        return [line["because"] for line in lines if line["event"] == "job_agent_ended"]

    async def until(self, reached: Callable[[], object]) -> None:
        while not reached():
            await asyncio.sleep(0.01)  # other processes and threads: there is nothing to wait on


@asynccontextmanager
async def play(home: Path) -> AsyncIterator[Node]:
    node = Node(home)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield node
    finally:
        node.gate.touch()
        for runner in node.daemon._runners.values():
            runner.stop()
            await runner.ended()
        node.journal.close()


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that know the gate only."""
    monkeypatch.setattr(agent_process, "COMMAND", ("-c", AGENT))


@pytest.mark.usefixtures("agents")
async def test_the_agent_of_a_job_that_is_over_ends_by_itself_and_is_not_started_again(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        node.told(node.duty("train-1"))
        runner = node.runner("train-1")
        await node.until((tmp_path / "gate.up").exists)
        node.told(over=("train-1",))
        node.told()  # forgotten, after many other jobs
        await asyncio.sleep(0)
        assert runner.finishing and not runner._leave.is_set()
        # Where an agent looks that nobody answers: replicas which were started again know nothing of the job.
        assert json.loads((runner.directory / "result.json").read_bytes())["exit_code"] == 0
        node.gate.touch()
        await runner.ended()
        assert node.ends() == ["the agent of the job exited with 0"], "no signal ended it"


@pytest.mark.usefixtures("agents")
async def test_a_job_waits_for_the_gpus_of_one_that_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    async with play(tmp_path) as node:
        node.told(node.duty("deaf-1", slots=2))
        old = node.runner("deaf-1")
        await node.until((tmp_path / "gate.up").exists)
        node.told(node.duty("next-2"))
        assert "next-2" not in node.daemon._runners
        assert "waits for the GPUs of deaf-1" in node.troubles()["next-2"]
        node.gate.touch()
        await old.ended()
        node.told(node.duty("next-2"))
        assert node.runner("next-2").devices == ("0",) and node.troubles() == {}


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize(("visible", "second"), [("0,1", "1"), ("0", "")])
async def test_the_variable_is_set_wherever_there_are_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, second: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    async with play(tmp_path) as node:
        node.told(node.duty("one-1"), node.duty("two-2"))
        assert node.runner("one-1")._how(b"").environment["CUDA_VISIBLE_DEVICES"] == "0"
        assert node.runner("two-2")._how(b"").environment["CUDA_VISIBLE_DEVICES"] == second


async def test_whatever_fails_before_the_start_is_the_trouble_of_the_job_and_tried_again_with_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoCredentials(Exception):
        """As of botocore: no OSError."""

    tries = 0

    def fails(url: str) -> None:
        nonlocal tries
        tries += 1
        raise NoCredentials("none found")

    monkeypatch.setattr(job_runner, "storage_at", fails)
    monkeypatch.setattr(job_runner, "BACKOFF_MIN_S", 2 * PATIENCE_S)
    async with play(tmp_path) as node:
        node.told(node.duty("train-1"))
        await node.until(lambda: node.runner("train-1").trouble)
        assert node.runner("train-1").trouble == "the job cannot be started here: NoCredentials: none found"
        for _ in range(10):
            node.told(node.duty("train-1"))
            await asyncio.sleep(0)
        assert tries == 1 and not node.runner("train-1").over


def test_an_agent_that_has_worked_is_started_again_at_once_and_one_that_cannot_work_ever_more_seldom() -> None:
    pauses, wait_s = [], 0.0
    for lived_s in (600.0, 11.0, 3.0, 3.0, 0.0, 60.0, 0.1, *[0.0] * 9):
        wait_s = job_runner.pause_s(lived_s, wait_s)
        pauses.append(wait_s)
    assert pauses == [0.0, 0.0, 0.5, 1.0, 2.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


async def test_the_directory_of_another_job_of_that_name_is_not_used(tmp_path: Path) -> None:
    directory = tmp_path / "jobs" / "train-1"
    directory.mkdir(parents=True)
    (directory / "id").write_text("another one")
    async with play(tmp_path) as node:
        node.told(node.duty("train-1"))
        await node.until(lambda: node.runner("train-1").trouble)
        assert f"{directory} belongs to another job of that name, another one; move" in node.runner("train-1").trouble


@pytest.mark.usefixtures("agents")
async def test_settings_and_the_nodes_own_environment_are_for_the_owners_eyes_and_in_no_journal(tmp_path: Path) -> None:
    file = tmp_path / "secrets.env"
    file.write_text("TOKEN=correct-horse")
    async with play(tmp_path) as node:
        given = node.submission("train-1", ("KEY=battery-staple",), str(file))
        node.told(node.duty("train-1", submission=given))
        await node.until((tmp_path / "gate.up").exists)
        directory = node.runner("train-1").directory
        assert read_job(directory).environment == {"KEY": "battery-staple", "TOKEN": "correct-horse"}
        for path in (directory, directory.parent, *directory.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path
        told = {path for path in tmp_path.rglob("*") if path.is_file() and "horse" in path.read_text(errors="replace")}
        assert told == {directory / "job.json", file}


async def test_a_file_of_environment_that_is_not_there_is_the_trouble_of_the_job(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        missing = tmp_path / "secrets.env"
        node.told(node.duty("train-1", submission=node.submission("train-1", env_from=str(missing))))
        await node.until(lambda: node.runner("train-1").trouble)
        because = f"env_from={missing} on a cannot be read: No such file or directory"
        assert node.runner("train-1").trouble == f"the job cannot be started here: {because}"


@pytest.mark.usefixtures("agents")
async def test_a_duty_that_cannot_be_read_is_the_trouble_of_its_job_alone(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        node.told(pb.Duty(job="newer-1", slots=1, document='{"unheard_of": 1}'), node.duty("train-2"))
        assert list(node.daemon._runners) == ["train-2"]
        assert "the job cannot be read here" in node.troubles()["newer-1"]
        node.told(node.duty("train-2"))
        assert node.troubles() == {}


async def test_a_log_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        query = pb.LogQuery(number=3, job="train-1", log="a.0.0", offset=5)
        answer = node.daemon._attendance._piece
        assert answer(query) == pb.LogPiece(number=3, end=5, size=-1), "there is no directory of jobs"
        (tmp_path / "jobs" / "train-1" / "logs" / "a.0.0.log").mkdir(parents=True)
        assert answer(query) == pb.LogPiece(number=3, end=5, size=-1), "a directory has no text"


@pytest.mark.usefixtures("agents")
async def test_an_agent_that_cannot_be_watched_is_ended_and_another_one_starts_with_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fails)
    monkeypatch.setattr(job_runner, "BACKOFF_MIN_S", 2 * PATIENCE_S)
    async with play(tmp_path) as node:
        node.told(node.duty("train-1"))
        runner = node.runner("train-1")
        await node.until(lambda: runner.trouble or runner.over)
        assert "because it cannot be watched: [Errno 24] Too many open files" in runner.trouble and not runner.over
        assert runner._keeper is not None and runner._keeper.poll() is not None and runner._memory is not None
        runner.stop()
        await runner.ended()
        assert not runner._memory.path.exists()


@pytest.mark.usefixtures("agents")
async def test_the_last_words_of_an_agent_are_the_end_of_its_log(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        node.told(node.duty("train-1"))
        runner = node.runner("train-1")
        await node.until(lambda: runner._keeper)
        with open(runner.directory / "logs" / "agent.log", "w") as log:
            log.truncate(1 << 40)  # as long as no memory is
            log.seek(0, os.SEEK_END)
            log.write("\none\ntwo\n")
        assert runner._last_words().endswith(" | one | two")


@pytest.mark.usefixtures("agents")
async def test_the_memory_of_a_job_outlives_its_agents_and_goes_with_the_job(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        node.told(node.duty("train-1"))
        runner = node.runner("train-1")
        await node.until((tmp_path / "gate.up").exists)
        memory = Path(json.loads((runner.directory / "checkpoints.json").read_bytes())["memory"])
        (memory / "state").write_text("state")
        (tmp_path / "gate.up").unlink()
        assert runner._keeper is not None
        runner._keeper.send_signal(signal.SIGKILL)
        await node.until((tmp_path / "gate.up").exists)
        host_memory.sweep()
        assert (memory / "state").exists(), "the next agent of the job is there"
        runner.stop()
        node.gate.touch()
        await runner.ended()
        assert not memory.exists()


class Standbys:
    """What stands by on a node, and what has become of it."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def of(self, job: str) -> int:
        """The pid of the one that a job has, or will have in a moment."""
        runner = self._node.runner(job)
        await self._node.until(lambda: runner._standby is not None)
        assert runner._standby is not None
        return runner._standby.process.pid

    async def death(self, job: str) -> int:
        """The agent of a job is killed. Returns the pid of the next one."""
        up = self._node.home / "gate.up"
        await self._node.until(up.exists)
        up.unlink()
        keeper = self._node.runner(job)._keeper
        assert keeper is not None
        keeper.send_signal(signal.SIGKILL)
        await self._node.until(lambda: up.exists() and up.read_text())
        return int(up.read_text())

    def events(self) -> list[str]:
        lines = [json.loads(line) for line in (self._node.home / "journal.jsonl").read_text().splitlines()]
        return [line["event"] for line in lines if line["event"].startswith("standby")]

    @staticmethod
    async def gone(pid: int) -> None:
        while worker_process.facts(pid) is not None:
            await asyncio.sleep(0.01)  # another process


@pytest.fixture
def standing_by(monkeypatch: pytest.MonkeyPatch, agents: None) -> None:
    monkeypatch.setattr(job_runner, "STANDBY_AFTER_S", 0.01)


@pytest.mark.usefixtures("standing_by")
async def test_the_standby_of_a_job_begins_when_its_agent_has_died_and_goes_with_the_job(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        standbys = Standbys(node)
        node.told(node.duty("train-1"))
        runner = node.runner("train-1")
        for _ in range(2):
            waits = await standbys.of("train-1")
            assert await standbys.death("train-1") == waits
            assert runner._keeper is not None and runner._keeper.pid == waits
        last = await standbys.of("train-1")
        record = record_of(node.site.jobs_dir, "a", "train-1")
        assert record.exists()
        node.gate.touch()
        runner.leave()
        await runner.ended()
        await standbys.gone(last)
        assert not record.exists(), "a daemon that starts now has nothing to expect"
        assert standbys.events() == [*["standby_started", "standby_begins"] * 2, "standby_started"]


@pytest.mark.usefixtures("standing_by")
@pytest.mark.parametrize(
    "how", ["another environment", "a job directory made anew", "another working directory", "it has died"]
)
async def test_a_standby_that_is_not_what_would_be_started_now_is_ended(tmp_path: Path, how: str) -> None:
    async with play(tmp_path) as node:
        (tmp_path / "here.env").write_text("KEY=old\n")
        (tmp_path / "v1").mkdir()
        (tmp_path / "v2").mkdir()
        (tmp_path / "now").symlink_to("v1")
        submission = node.submission("train-1", env_from=str(tmp_path / "here.env"))
        submission = replace(submission, spec=replace(submission.spec, directory=str(tmp_path / "now")))
        node.told(node.duty("train-1", submission=submission))
        standbys = Standbys(node)
        waits = await standbys.of("train-1")
        runner = node.runner("train-1")
        if how == "another environment":
            (tmp_path / "here.env").write_text("KEY=new\n")
        elif how == "a job directory made anew":
            runner.directory.rename(tmp_path / "aside")
        elif how == "another working directory":
            (tmp_path / "now").unlink()
            (tmp_path / "now").symlink_to("v2")
        else:
            os.kill(waits, signal.SIGKILL)
        assert await standbys.death("train-1") != waits
        await standbys.gone(waits)
        assert standbys.events()[0] == "standby_started"


@pytest.mark.usefixtures("standing_by")
async def test_a_job_whose_workers_are_not_forked_has_no_standby(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        submission = node.submission("train-1")
        node.told(
            node.duty("train-1", submission=replace(submission, spec=replace(submission.spec, fork=False))),
            node.duty("other-2"),
        )
        await Standbys(node).of("other-2")
        assert node.runner("train-1")._standby is None
        assert not record_of(node.site.jobs_dir, "a", "train-1").exists()


@pytest.mark.usefixtures("standing_by")
async def test_a_standby_that_has_died_is_replaced_and_a_log_that_is_no_file_stops_nobody(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        node.told(node.duty("train-1"))
        standbys, runner = Standbys(node), node.runner("train-1")
        first = await standbys.of("train-1")
        os.kill(first, signal.SIGKILL)
        await node.until(lambda: runner._standby is not None and runner._standby.process.pid != first)
        log = runner.directory / "logs" / "agent.log"
        log.unlink()
        os.mkfifo(log)
        os.kill(await standbys.of("train-1"), signal.SIGKILL)
        await node.until(lambda: "standby_refused" in standbys.events())
        assert standbys.events() == ["standby_started", "standby_started", "standby_refused"]


@pytest.mark.usefixtures("agents")
async def test_jobs_of_a_killed_daemon_have_standbys_when_the_next_one_starts(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        standbys = Standbys(node)
        for job in ("train-1", "moved-2"):
            node.told(node.duty("train-1"), node.duty(job))
        await node.until((tmp_path / "gate.up").exists)
        record = json.loads(record_of(node.site.jobs_dir, "a", "train-1").read_text())
        refused = {"list-3": [], "words-4": record | {"words": [1]}, "root-5": record | {"user": "somebody"}}
        for job, document in refused.items():
            record_of(node.site.jobs_dir, "a", job).write_text(json.dumps(document))
        (node.site.jobs_dir / "other-4.b.agent.json").write_text("that of another node with the same directory")
        await node.until(lambda: record_of(node.site.jobs_dir, "a", "moved-2").exists())
        waiting = agent_process.standbys(node.site.jobs_dir, "a", None, node.journal)
        assert set(waiting) == {"train-1", "moved-2"}
        assert standbys.events().count("standby_refused") == len(refused)
        assert not any(record_of(node.site.jobs_dir, "a", job).exists() for job in refused)
        pids = {job: standby.process.pid for job, standby in waiting.items()}
        # The daemon that begins now: of the same node, whose jobs are unknown to it.
        for runner in node.daemon._runners.values():
            assert runner._keeper is not None
            runner._task.cancel()
            await runner.ended()
            runner._keeper.send_signal(signal.SIGKILL)
            runner._keeper.wait()
        node.daemon = Daemon(node.site, Offer(2, (), "a lock"), node.journal, PLAIN, waiting)
        (tmp_path / "gate.up").unlink()
        node.told(node.duty("train-1"))
        up = tmp_path / "gate.up"
        await node.until(lambda: up.exists() and up.read_text())
        assert int(up.read_text()) == pids["train-1"]
        await node.daemon._end_standbys()  # STANDBYS_S later
        assert worker_process.facts(pids["moved-2"]) is None
        assert not record_of(node.site.jobs_dir, "a", "moved-2").exists()
        assert record_of(node.site.jobs_dir, "a", "train-1").exists()


class Provider(NoticeSource):
    """Says what it is told to say, and hears when the node is empty."""

    name = "provider"
    pause_s = 0.01

    def __init__(self) -> None:
        self.says: Notice | None = None
        self.empty = threading.Event()

    def look(self) -> Notice | None:
        return self.says

    def left(self) -> None:
        self.empty.set()


@pytest.mark.usefixtures("agents")
async def test_a_notice_reaches_the_agents_of_all_jobs_and_the_provider_hears_when_the_last_has_left(
    tmp_path: Path,
) -> None:
    async with play(tmp_path) as node:
        provider = Provider()
        node.daemon._board.watch([provider])
        jobs = [node.duty("one-1"), node.duty("two-2")]
        node.told(*jobs)
        dirs = [node.runner(job).directory for job in ("one-1", "two-2")]
        agents = [relay.NoticeRelay(directory) for directory in dirs]
        await node.until(lambda: all((directory / "notices.json").exists() for directory in dirs))
        assert [agent.look() for agent in agents] == [None, None]
        provider.says = Notice(NoticeKind.RECLAIM, 90.0, "taken back")
        await node.until(lambda: all([agent.look() for agent in agents]))
        for agent in agents:
            notice = agent.look()
            assert notice is not None and (notice.kind, notice.because) == (NoticeKind.RECLAIM, "taken back")
            assert 0 < notice.seconds_left <= 90.0
        node.told(*jobs, node.duty("late-3"))
        assert "begins nothing new: taken back" in node.troubles()["late-3"]
        agents[0].left()
        node.told(*jobs)
        assert not node.daemon._board.notices.told, "the other job is still there"
        agents[1].left()
        node.told(*jobs)
        assert await asyncio.to_thread(provider.empty.wait, PATIENCE_S)
        provider.says = None
        await node.until(lambda: not any([agent.look() for agent in agents]))
        provider.says = Notice(NoticeKind.RECLAIM, 90.0, "taken back")
        await node.until(lambda: all([agent.look() for agent in agents]))
        node.told(*jobs)
        assert not node.daemon._board.notices.told, "they had left because of an earlier notice, and came back"
        node.daemon._board.notices.close()


@pytest.mark.usefixtures("agents")
async def test_notices_are_written_by_one_thread_and_before_the_agent_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would write the same temporary file, and a notice of half a minute could be lost."""
    by: list[threading.Thread] = []
    show = NoticeBoard.show

    def shown(self: NoticeBoard, job_dir: Path) -> None:
        by.append(threading.current_thread())
        show(self, job_dir)

    monkeypatch.setattr(NoticeBoard, "show", shown)
    async with play(tmp_path) as node:
        node.told(node.duty("train-1"))
        await node.until((tmp_path / "gate.up").exists)
        assert by == [threading.current_thread()]
        assert (node.runner("train-1").directory / "notices.json").exists()


async def test_of_several_notices_agents_hear_the_most_urgent_and_the_leader_that_the_node_goes(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        board, outbox = node.daemon._board, node.daemon._attendance._outbox
        assert outbox is not None

        def heard() -> Notice | None:
            board.show(tmp_path)
            return relay.NoticeRelay(tmp_path).look()

        board.notices.heard("advice", Notice(NoticeKind.ADVICE, math.inf, "maybe"))
        assert heard() == Notice(NoticeKind.ADVICE, math.inf, "maybe", "advice") and board.because == ""
        board.notices.heard("slow", Notice(NoticeKind.MAINTENANCE, 900.0, "tonight"))
        board.notices.heard("fast", Notice(NoticeKind.RECLAIM, 30.0, "now"))
        assert (urgent := heard()) is not None and urgent.because == "now"
        board.notices.heard("fast", None)
        board.notices.heard("slow", None)
        told = [outbox.get_nowait().leaves for _ in range(outbox.qsize())]
        reasons = ["", "tonight", "tonight", "tonight", ""]
        assert [(word.because, word.notice) for word in told] == [(because, True) for because in reasons]
        (tmp_path / "notices.json").write_text("[]")
        with pytest.raises(Unanswered, match=r"notices.json"):
            relay.NoticeRelay(tmp_path).look()


class Leader:
    """Welcomes whoever comes, tells them to run something, and hears them out."""

    def __init__(self, *duties: pb.Duties) -> None:
        self.duties = duties
        self.heard: list[pb.NodeWord] = []

    async def Attend(self, words: AsyncIterator[pb.NodeWord], context: object) -> AsyncIterator[pb.NodeOrder]:
        yield pb.NodeOrder(welcome=pb.Welcome(term=1))
        for duties in self.duties:
            yield pb.NodeOrder(duties=duties)
        async for word in words:
            self.heard.append(word)


async def test_a_leader_that_comes_later_hears_why_the_node_goes(tmp_path: Path) -> None:
    leader, server = Leader(), grpc.aio.server(options=SERVER_OPTIONS)
    add_to_server("Fleet", leader, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    node = Node(tmp_path, f"127.0.0.1:{port}")
    node.daemon._board.notices.heard("cloud", Notice(NoticeKind.RECLAIM, 30.0, "taken back"))
    node.daemon._signalled(signal.SIGTERM)
    attending = asyncio.create_task(node.daemon._attendance.always())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await node.until(lambda: [word for word in leader.heard if word.HasField("troubles")])
    finally:
        attending.cancel()
        await server.stop(None)
        node.journal.close()
    told = [(word.leaves.because, word.leaves.notice) for word in leader.heard if word.HasField("leaves")]
    assert told == [("its daemon was asked to end", False), ("taken back", True)]


async def test_a_job_that_the_leader_cannot_read_goes_on_as_it_was_told_before(tmp_path: Path) -> None:
    node = Node(tmp_path, "nobody:1")
    jobs = [pb.Duty(job=name, slots=1) for name in ("train-1", "over-2")]
    unread = pb.Duties(term=1, duties=[pb.Duty(job="next-4", slots=1)], keeps=["train-1", "elsewhere-3"])
    leader, server = Leader(pb.Duties(term=1, duties=jobs), unread, unread), grpc.aio.server(options=SERVER_OPTIONS)
    add_to_server("Fleet", leader, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    attending = asyncio.create_task(node.daemon._attendance._attend(f"127.0.0.1:{port}"))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await node.until(lambda: "next-4" in node.daemon._duties)
    finally:
        attending.cancel()
        await server.stop(None)
        node.journal.close()
    assert node.daemon._duties == {"train-1": jobs[0], "next-4": unread.duties[0]}


class Recruiter:
    """Ends a stream when the node says goodbye, as a leader does. offers: (slots, labels) of each stream. admits: set
    when it welcomes nodes."""

    def __init__(self) -> None:
        self.offers: list[tuple[int, list[str]]] = []
        self.admits = asyncio.Event()

    async def Attend(self, words: AsyncIterator[pb.NodeWord], context: object) -> AsyncIterator[pb.NodeOrder]:
        hello = (await anext(words)).hello
        self.offers.append((hello.slots, list(hello.labels)))
        await self.admits.wait()
        yield pb.NodeOrder(welcome=pb.Welcome(term=1))
        async for word in words:
            if word.HasField("goodbye"):
                return


async def test_a_node_that_offers_something_else_says_so_on_a_new_stream(tmp_path: Path) -> None:
    """Also where the leader had not welcomed it yet: it has only heard the offer before."""
    leader, server = Recruiter(), grpc.aio.server(options=SERVER_OPTIONS)
    add_to_server("Fleet", leader, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    node = Node(tmp_path, f"127.0.0.1:{port}")
    session = node.daemon._attendance
    session._outbox = None
    session.offer(3, ("a=b",))  # nobody has to be told yet
    attending = asyncio.create_task(session.always())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await node.until(lambda: len(leader.offers) == 1)
            session.offer(4, ())
            leader.admits.set()
            await node.until(lambda: len(leader.offers) == 2 and session._outbox)
            session.offer(5, ("c=d",))
            await node.until(lambda: len(leader.offers) == 3 and session._outbox)
    finally:
        attending.cancel()
        await server.stop(None)
        node.journal.close()
    assert leader.offers == [(3, ["a=b"]), (4, []), (5, ["c=d"])]
    events = [json.loads(line)["event"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert events == ["attending_fleet"] * 3, "it has never been without a leader"


async def test_notices_of_a_source_that_is_not_watched_any_more_are_over(tmp_path: Path) -> None:
    async with play(tmp_path) as node:
        board, old, new = node.daemon._board, Provider(), Provider()
        old.says = Notice(NoticeKind.RECLAIM, 90.0, "taken back")
        board.watch([old])
        await node.until(lambda: board.because == "taken back")
        (watcher,) = board.notices._watchers
        board.watch([new])
        assert board.because == ""
        watcher._heard("provider", old.says)  # on its way when it was closed
        new.says = Notice(NoticeKind.RECLAIM, 90.0, "of the new source")
        await node.until(lambda: board.because)
        assert board.because == "of the new source"
        board.notices.close()


async def test_a_file_with_a_mistake_changes_nothing_and_a_daemon_that_ends_reads_none(tmp_path: Path) -> None:
    class File:
        read = 0

        def reread(self) -> Reread:
            self.read += 1
            raise ConfigError("agent.toml, line 1: --slots=0 must be >= 1")

    async with play(tmp_path) as node:
        file = node.daemon._settings = File()
        node.daemon._reload()
        assert file.read == 1
        lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
        assert [line["event"] for line in lines] == ["settings_unread"] and "line 1: --slots=0" in lines[0]["because"]
        node.daemon._signalled(signal.SIGTERM)
        node.daemon._reload()
        assert file.read == 1, "it ends"


class Upgrader(Leader):
    """Examines the node that comes, and tells two processes to end: the one before it, and this one."""

    async def Attend(self, words: AsyncIterator[pb.NodeWord], context: object) -> AsyncIterator[pb.NodeOrder]:
        yield pb.NodeOrder(welcome=pb.Welcome(term=1))
        yield pb.NodeOrder(examine=pb.ExamineNode(number=1))
        async for word in words:
            self.heard.append(word)
            if word.examined.number == 1:
                yield pb.NodeOrder(end=pb.EndAgent(node="a", process="the one before"))
                yield pb.NodeOrder(examine=pb.ExamineNode(number=2))
            if word.examined.number == 2:
                assert not [said for said in self.heard if said.leaves.because]
                process = json.loads(word.examined.document)["agent"]["process"]
                yield pb.NodeOrder(end=pb.EndAgent(node="a", process=process))
                yield pb.NodeOrder(end=pb.EndAgent(node="a", process=process))


async def test_a_daemon_that_is_told_to_end_leaves_in_order_and_that_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "@nobody")
    leader, server = Upgrader(), grpc.aio.server(options=SERVER_OPTIONS)
    add_to_server("Fleet", leader, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    node = Node(tmp_path, f"127.0.0.1:{port}")
    node.site.jobs_dir.mkdir()
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await node.daemon.run() == 128 + signal.SIGTERM
    finally:
        await server.stop(None)
        node.journal.close()
    told = [json.loads(word.examined.document) for word in leader.heard if word.HasField("examined")]
    assert [document["agent"]["is_service"] for document in told] == [True, True]
    leaves = [word.leaves.because for word in leader.heard if word.HasField("leaves")]
    assert leaves == ["its daemon was told to end"]
    events = [json.loads(line)["event"] for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert events == ["attending_fleet", "daemon_told_to_end"]


def test_a_daemon_reads_nothing_that_only_a_leader_needs() -> None:
    """Its imports are what a node that comes back is waited for."""
    heavy = {"elastic.store.etcd", "elastic.rendezvous.leader", "elastic.protocol.membership", "cryptography", "torch"}
    program = f"import sys, elastic.fleet.node.node_daemon; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
