"""What one program hands to another, read back; and what is refused before anything is given up."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from elastic.agent import handover, options, upgrade_state, workers
from elastic.agent.handover import (
    Handed,
    RunningProgram,
    Trial,
    UpgradeRefused,
    UpgradeRequest,
    UpgradeRequestFiles,
    check,
    of_this_program,
)
from elastic.agent.process.process_start import Outlets
from elastic.agent.process.worker_processes import AdoptedWorker
from elastic.agent.standing_words import StandingWords
from elastic.agent.upgrade_state import AgentUpgradeState
from elastic.agent.worker_socket import WorkerSocket
from elastic.agent.workers import WorkerManager
from elastic.cli.fleet import daemons
from elastic.cli.fleet.upgrade import upgrade
from elastic.config import JobSpec
from elastic.errors import ConfigError
from elastic.fleet import upgrade_state as fleet_upgrade
from elastic.fleet.documents import Submission
from elastic.fleet.upgrade_state import DaemonUpgradeState, JobUpgradeState
from elastic.protocol import worker_slot
from elastic.protocol.messages import (
    Announce,
    Failed,
    Finished,
    Generation,
    Kind,
    Member,
    Plan,
    SlotGivenUp,
    WorkerDead,
)
from elastic.records import temp_dirs
from elastic.records.journal import Journal
from elastic.wire import elastic_pb2 as pb
from elastic.wire.codec import to_json

SPEC = JobSpec(name="job", command=("train",), workers=2)
RUNNING = replace(worker_slot.Slot("a", 0, SPEC, 3), phase=worker_slot.SlotPhase.RUNNING, pid=7, joined=True)
WAITING = replace(worker_slot.Slot("a", 1, SPEC, 0), deadline_s=12.5)
EMPLOYED = AdoptedWorker(0, "a.0.3", 7, out=11, begun="half a l\xfcne", lifeline=12, announced=8)
REQUEST = UpgradeRequest("/bin/python", "/site", "token")


def standing() -> StandingWords:
    made = StandingWords()
    made.heard(Announce("a.0.3", "a", 0, 8, "127.0.0.1", 5000, "numerics", entered=2))
    made.heard(Announce("a.1.0", "a", 1, 9, "127.0.0.1", 5001, "numerics", entered=2))
    made.heard(Finished("a.1.0", 2, "digest"))
    made.heard(WorkerDead("a.1.0", "exited with 0"))
    made.heard(Failed("a.0.3", 2, "ValueError train.py:3 step 4", "words"))
    made.heard(SlotGivenUp("a", 1, "too many restarts"))
    made.published(Generation(2, Kind.FORM, 2, (Member("b.0.0", "b", "h", 1, 0),), Plan(), "because"))
    return made


def test_what_an_agent_hands_over_is_read_as_it_was() -> None:
    known = standing()
    orders, frozen = {"a.0.3": ("00ff",)}, frozenset({"a.0.3"})
    state = upgrade_state.write(
        AgentUpgradeState((RUNNING, WAITING), (EMPLOYED,), orders, known, frozen, 41, "/a.sock")
    )
    read = upgrade_state.read(json.loads(json.dumps(state)))
    assert read.slots == (RUNNING, WAITING)
    assert (read.workers, read.orders) == ((EMPLOYED,), {"a.0.3": ("00ff",)})
    assert (set(read.frozen), read.term, read.socket) == ({"a.0.3"}, 41, "/a.sock")
    assert read.standing.words() == known.words()
    assert read.standing.leader == known.leader == "b.0.0"


def test_what_a_daemon_hands_over_is_read_as_it_was() -> None:
    submission = Submission(SPEC, 1, "job", "identity")
    holding = JobUpgradeState(
        submission, 2, ("0", "1"), keeper=(7, 11), memory=("/dev/shm/x", 12), finishing=False, token="t"
    )
    bare = JobUpgradeState(submission, 1, None, keeper=None, memory=None, finishing=True, token="")
    duty = pb.Duty(job="job", slots=2, document=to_json(submission).decode())
    state = DaemonUpgradeState(41, (duty.SerializeToString(),), {"other": "{}"}, (holding, bare))
    assert fleet_upgrade.read(json.loads(json.dumps(fleet_upgrade.write(state)))) == state


@pytest.mark.parametrize("reader", [upgrade_state.read, fleet_upgrade.read])
def test_a_state_of_another_format_is_named(reader: object) -> None:
    assert callable(reader)
    with pytest.raises(ValueError, match="is of format 0, and this program reads 1"):
        reader({"format": 0})


def test_the_files_are_this_users_and_an_answer_is_to_one_request(tmp_path: Path) -> None:
    place = UpgradeRequestFiles(tmp_path, "a")
    assert place.running() is None
    place.ready()
    running = place.running()
    assert running is not None and running.pid == os.getpid()
    place.say(REQUEST, refused="because")
    answer = place.answer(REQUEST)
    assert answer is not None and answer["refused"] == "because"
    assert place.answer(replace(REQUEST, token="another")) is None
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    (tmp_path / "a.process.json").write_text(json.dumps({"pid": os.getpid(), "started": 1, "version": "1"}))
    assert place.running() is None, "its pid is another process's by now"
    place.end()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_or_written_is_refused_by_both_sides(tmp_path: Path) -> None:
    place, running = UpgradeRequestFiles(tmp_path, "a"), RunningProgram(os.getpid(), "1")
    for what in ("process", "upgrade"):
        (tmp_path / f"a.{what}.json").mkdir()  # no file: an error of the system, also for root
    with pytest.raises(UpgradeRefused, match=r"a\.process\.json cannot be read: this is no file"):
        place.running()
    with pytest.raises(ConfigError, match=r"node a cannot be asked: .*process\.json cannot be read"):
        upgrade(tmp_path, "a", as_json=False)
    with pytest.raises(UpgradeRefused, match=r"a\.upgrade\.json cannot be read: this is no file"):
        place.request()
    with pytest.raises(UpgradeRefused, match=r"cannot be asked: .*Is a directory"):
        place.ask(running, REQUEST)


def test_the_process_of_another_user_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(UpgradeRefused, match=f"is of the user with id {owner}; ask as that user"):
        UpgradeRequestFiles(tmp_path, "a").ask(RunningProgram(os.getpid(), "1"), REQUEST)
    assert list(tmp_path.iterdir()) == [], "nothing is left that the process could not read"


PROBE = """
import os, sys
from elastic.agent.handover import Handed, hear
handed = Handed.read(int(sys.argv[-1]))
print(handed.state, handed.refused or "as asked", sys.argv[1:3], os.getpid(), flush=True)
hear()
"""

GO = """
import sys
from elastic.agent.handover import UpgradeRequest, go
go(UpgradeRequest(sys.argv[1], sys.argv[2], ""), ["probe", "a", "--handover", "9"], {"of": "it"}, [15])
"""


@pytest.mark.parametrize("exists", [True, False])
def test_what_is_handed_over_reaches_the_new_program_or_the_old_one_anew(tmp_path: Path, exists: bool) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    path = os.pathsep.join((str(tmp_path), str(Path(handover.__file__).parents[3])))
    python = sys.executable if exists else "/no/python"
    ended = subprocess.Popen(
        [sys.executable, "-c", GO, python, path],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    said, _ = ended.communicate(timeout=60)
    because = "as asked" if exists else "the new program does not start any more: /no/python: No such file or directory"
    assert said == f"{{'of': 'it'}} {because} ['a', '--handover'] {ended.pid}\n"
    assert ended.returncode == -signal.SIGTERM, "a signal that came meanwhile is the new program's"


def test_what_was_handed_over_is_read_once() -> None:
    descriptor = os.memfd_create("test")
    os.write(descriptor, b"{}")
    with pytest.raises(ConfigError, match=f"--handover {descriptor} cannot be read"):
        Handed.read(descriptor)
    with pytest.raises(ConfigError, match=f"--handover {descriptor} cannot be read: .*Bad file descriptor"):
        Handed.read(descriptor)


def test_a_full_disk_does_not_end_a_program_that_takes_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", "", "agent", "here")
    handover.begin(UpgradeRequestFiles(tmp_path / "absent", "a"), journal, Handed(REQUEST, {}))
    journal.close()
    assert "handover_not_answered" in (tmp_path / "journal.jsonl").read_text()


def test_the_workers_find_the_new_program_where_the_path_is_too_long(tmp_path: Path) -> None:
    """They know only the path of the program that has started them."""
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    journal = Journal(tmp_path / "journal.jsonl", "", "agent", "here")

    async def story() -> None:
        old = WorkerSocket("job", deep, "a", journal, cast(Any, None), cast(Any, None))
        await old.listen()
        assert len(old.path) < 100
        await old.hand_over(1.0)
        await old.close()
        temp_dirs.sweep(Path(old.path).parents[1], temp_dirs.AGENT_PREFIX)  # as another agent that starts just now
        new = WorkerSocket("job", deep, "a", journal, cast(Any, None), cast(Any, None), old.kept, old.path)
        await new.listen()
        assert new.path == old.path and Path(new.path).is_socket()
        await new.close()
        assert not Path(new.path).parent.exists()

    asyncio.run(story())
    journal.close()


def test_the_directory_of_a_killed_agent_goes_when_the_next_one_starts_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    program = f"""
import sys, time
from pathlib import Path
from elastic.agent.worker_socket import WorkerSocket
from elastic.agent.workers import WorkerManager
print(WorkerSocket("job", Path({str(deep)!r}), "a", None, None, None).path, flush=True)
time.sleep(600)
"""
    short = Path(tempfile.mkdtemp(prefix="sock"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    environment = {**os.environ, "TMPDIR": str(short)}
    command = [sys.executable, "-P", "-c", program]
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    living = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        with killed, living:
            first, other = (Path(one.stdout.readline().strip()).parent for one in (killed, living) if one.stdout)
            assert first.parent == short and first.exists() and other.exists() and first != other
            killed.kill()
            killed.wait()
            journal = Journal(tmp_path / "journal.jsonl", "", "agent", "here")
            WorkerSocket("job", deep, "a", journal, cast(Any, None), cast(Any, None))
            journal.close()
            assert not first.exists() and other.exists()
            living.kill()
    finally:
        shutil.rmtree(short)


@pytest.mark.parametrize("name", ["absent", "x" * 100])
def test_where_there_is_no_room_for_temporary_files_the_socket_is_in_the_directory_of_the_job(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    if name != "absent":
        (tmp_path / name).mkdir()
    job_dir = Path("/job")  # which nobody makes here
    assert WorkerSocket("job", job_dir, "a", cast(Any, None), cast(Any, None), cast(Any, None)).path == "/job/a.sock"
    assert name == "absent" or not list((tmp_path / name).iterdir())


def test_a_program_is_tried_before_anything_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(to_json(SPEC))
    words = ["--job-dir", str(tmp_path), "--node", "a", "--slots", "1", "--handover", "9"]
    trial = Trial(options.TRIAL, words)
    state = upgrade_state.write(AgentUpgradeState((RUNNING,), (EMPLOYED,), {}, standing(), frozenset(), 1, "/a.sock"))
    asyncio.run(check(of_this_program(), trial, state))
    with pytest.raises(UpgradeRefused, match="ValueError: the agent's state is of format 2"):
        asyncio.run(check(of_this_program(), trial, {**state, "format": 2}))
    with pytest.raises(UpgradeRefused, match="does not start: /no/python: No such file"):
        asyncio.run(check(replace(of_this_program(), python="/no/python"), trial, state))
    gone = Trial(options.TRIAL, [*words, "--certs", str(tmp_path / "gone")])
    with pytest.raises(UpgradeRefused, match=r"ConfigError: .*/gone has no agent\.pem"):
        asyncio.run(check(of_this_program(), gone, state))
    unknown = Trial(options.TRIAL, [*words, "--of-a-later-version"])
    with pytest.raises(UpgradeRefused, match="unrecognized arguments: --of-a-later-version"):
        asyncio.run(check(of_this_program(), unknown, state))


def test_a_daemon_is_tried_on_its_own_options(tmp_path: Path) -> None:
    """What a daemon that runs can bear, a certificate that is over or gone, ends one that starts."""
    words = ["agent", "--rendezvous", "127.0.0.1:1", "--node", "a", "--jobs-dir", str(tmp_path / "jobs")]
    state = fleet_upgrade.write(DaemonUpgradeState(1, (), {}, ()))
    daemons.trial(words, state)
    with pytest.raises(ConfigError, match=r"/gone has no agent\.pem"):
        daemons.trial([*words, "--certs", str(tmp_path / "gone")], state)
    with pytest.raises(ValueError, match="is of format 0"):
        daemons.trial(words, {**state, "format": 0})


def test_the_option_of_an_earlier_handover_is_not_handed_on() -> None:
    assert handover.without_option(["m", "--a", "1", "--handover", "x", "--b"]) == ["m", "--a", "1", "--b"]


def test_the_output_of_a_worker_is_read_on_where_it_was_left(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    outlets = Outlets.of_running(tmp_path / "log", reader)
    os.write(writer, b"x")
    assert os.read(outlets.reader, 8) == b"x" and not os.get_inheritable(reader)
    outlets.close()
    os.close(writer)


def test_no_worker_is_begun_by_a_program_that_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next program would wait for it for ever: the slot would have no worker any more."""

    begun: list[str] = []

    async def play() -> None:
        manager = WorkerManager.__new__(WorkerManager)
        due = replace(WAITING, deadline_s=time.monotonic() + 0.05)
        manager.slots, manager._timers, manager._hands_over = [due], {}, False
        manager._frozen, manager._standing, manager._stdout, manager._events = set(), standing(), Mock(), Mock()

        async def slow(within_s: float) -> None:
            await asyncio.sleep(0.3)

        manager.socket = Mock(hand_over=slow, close=AsyncMock(), kept={}, path="/a.sock")
        manager.processes = Mock(end_starting=AsyncMock(), hand_over=list)
        monkeypatch.setattr(workers, "SPAWN_PAUSE_S", 0.0)
        # The answer of the fork server comes when this program has ended.
        monkeypatch.setattr(manager, "_spawn", lambda number, worker_id, restarted: begun.append(worker_id))
        manager._arm(0)
        state = await manager.hand_over(7)
        assert (begun, state.slots) == ([], (due,))

    asyncio.run(play())
