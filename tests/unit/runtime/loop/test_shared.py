"""job.shared, the one call that belongs before the loop, and job.node_lock."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elastic.errors import ConfigError, Disagree, LeaderOnly, NotCarried, UsageError
from runtime.loop.job import Job
from runtime.loop.node_lock import node_lock
from runtime.session import Session
from tests.children import child
from tests.unit.elastic.checkpoints.test_checkpoints import Configure, Dies, configure, dying_at
from tests.unit.jobs import make_job, set_up, train
from tests.unit.worlds import FakeMember, Killed, World

__all__ = ["configure"]


class Sharing:
    """A script which says what each worker got, and counts who ran the function."""

    def __init__(self) -> None:
        self.got: dict[str, object] = {}
        self.ran: list[str] = []

    def __call__(self, session: Session) -> str:
        job = make_job(session)

        def make() -> dict[str, int]:
            self.ran.append(session.worker_id)
            return {"run": 7}

        first = job.shared("run", make)
        setup = set_up(job)
        self.got[session.worker_id] = [first, job.shared("seed", lambda: [1, 2])]
        return train(setup)


def test_everybody_has_the_leaders_value_and_newcomers_too() -> None:
    script = Sharing()
    world = World(2)
    world.run(script, newcomers=2, asked_at=0, admit_at=2)
    assert world.errors == {}
    assert script.got == {name: [{"run": 7}, [1, 2]] for name in ("w0", "w1", "n0", "n1")}
    assert script.ran == ["w0"]
    assert len(set(world.digests.values())) == 1


def test_a_newcomer_that_is_the_only_one_left_still_knows_it() -> None:
    """It learned it from a member, and a later newcomer learns it from the newcomer."""
    script = Sharing()
    world = World(1, kills={"w0": (6, 0)})
    world.run(script, newcomers=1, asked_at=0, admit_at=1)
    assert script.got["n0"] == [{"run": 7}, [1, 2]]
    assert world.asked is not None
    assert world.asked.shared == {"run": {"run": 7}, "seed": [1, 2]}
    assert set(world.digests) == {"n0"}


def test_the_next_leader_repeats_it_when_the_leader_dies() -> None:
    script = Sharing()
    world = World(3, kills={"w0": (0, 0)})
    world.run(script)
    assert {type(error) for error in world.errors.values()} == {Killed}
    assert script.ran == ["w1"]
    assert set(script.got) == {"w1", "w2"}


def test_a_newcomer_that_shares_something_else_is_told() -> None:
    def script(session: FakeMember) -> str:
        job = make_job(session)
        if session.script.at.joining:
            job.shared("other", lambda: 1)
        return train(set_up(job))

    world = World(1)
    world.run(script, newcomers=1, admit_at=99)
    assert type(world.errors["n0"]) is Disagree
    assert "not under `if job.restarted`" in str(world.errors["n0"])


def test_in_the_loop_known_values_are_given_and_new_names_refused() -> None:
    job = make_job()
    assert job.shared("a", lambda: 1) == 1
    set_up(job)
    for _ in job.epochs(1):
        assert job.shared("a", lambda: 2) == 1
        with pytest.raises(UsageError, match=r"Move it before the loop, or use job\.once"):
            job.shared("b", lambda: 2)
    job.close()


def test_a_run_that_goes_on_from_a_checkpoint_gets_the_value_of_the_run_before(configure: Configure) -> None:
    def script(job: Job, value: int, stop_at: int) -> tuple[int, int]:
        run, new = job.shared("run", lambda: value), -1
        if value > 1:
            new = job.shared("new", lambda: value)
        with pytest.raises(Dies):
            train(set_up(job), epochs=4, body=dying_at(stop_at))
        job._training.checkpoints.finish()
        job._detach()
        return run, new

    series = configure(every="4 steps")
    assert script(make_job(), 1, 6) == (1, -1)
    configure(every="4 steps", resume=str(series.names()[-1]))
    assert script(make_job(), 2, 9) == (1, 2), "and a name that the run before had not"
    assert series.names()[-1].step == 8
    configure(resume=str(series.names()[-1]))
    assert script(make_job(), 3, 9) == (1, 2)
    configure()
    assert script(make_job(), 4, 3) == (4, 4), "another job"


def test_what_json_cannot_carry_and_calls_inside_it_are_refused() -> None:
    job = make_job()
    with pytest.raises(NotCarried, match=r"job\.shared\(a\) returned a set"):
        job.shared("a", lambda: {1})
    job = make_job()
    with pytest.raises(LeaderOnly, match=r"job\.shared\(b\)"):
        job.shared("a", lambda: job.shared("b", lambda: 1))


# node_lock

PATIENCE_S = 60.0
HOLD = """
import sys, tempfile
from runtime.loop.node_lock import node_lock
tempfile.tempdir = sys.argv[1]
print("up", flush=True)
with node_lock("data"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def holder(locks: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine that wants the lock, says when it has it, and keeps it until it is told."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with child(sys.executable, "-c", HOLD, str(locks), **pipes) as process:
        assert said(process) == b"up\n"
        yield process


def said(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def release(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("killed", [False, True])
def test_one_process_at_a_time_and_a_dead_one_holds_nothing(locks: Path, killed: bool) -> None:
    with holder(locks) as other:
        assert said(other) == b"held\n"
        if killed:
            other.kill()
        else:
            release(other)
        with node_lock("data"), node_lock("other"):
            pass


def test_a_held_lock_is_waited_for(locks: Path) -> None:
    with ExitStack() as mine:
        mine.enter_context(node_lock("data"))
        with holder(locks) as other:
            assert other.stdout is not None
            assert not select.select([other.stdout], [], [], 0.1)[0]
            mine.close()
            assert said(other) == b"held\n"
            release(other)


@pytest.mark.parametrize("name", ["", "a/b", "../a", ".a", "a" * 101, 7])
def test_a_name_that_cannot_be_a_files_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="node_lock"), node_lock(name):
        pass


def test_a_directory_that_others_may_write_is_refused(locks: Path) -> None:
    directory = locks / f"elastic-locks-{os.getuid()}"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="TMPDIR"), node_lock("data"):
        pass
