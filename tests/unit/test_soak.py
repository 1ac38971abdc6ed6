"""What the soak sees and how it judges, without a job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.nemesis.membership_view import MembershipView
from chaos_tests.support import processes, resources
from tests.soak.held import HeldResources, held, least
from tests.soak.soak import SoakOutcome

BEFORE = HeldResources(fds=16, threads=13, rss_mb=300.0)


def outcome(after: HeldResources, *leftovers: str) -> SoakOutcome:
    return SoakOutcome(100, {"w": BEFORE}, {"w": after}, leftovers, 10, 1.0)


@pytest.mark.parametrize("after", [BEFORE, HeldResources(16, 15, 320.0), HeldResources(16, 5, 200.0)])
def test_a_soak_within_its_limits_has_no_faults(after: HeldResources) -> None:
    assert outcome(after).faults() == []


@pytest.mark.parametrize(
    ("after", "word"),
    [
        (HeldResources(17, 13, 300.0), "fds=+1"),
        (HeldResources(15, 13, 300.0), "fds=-1"),
        (HeldResources(16, 16, 300.0), "threads=+3"),
        (HeldResources(16, 13, 320.1), "rss_mb=+20.1"),
    ],
)
def test_a_leak_is_named_with_its_process(after: HeldResources, word: str) -> None:
    (fault,) = outcome(after).faults()
    assert fault.startswith(f"w: {word}")


def test_whatever_is_left_fails_a_soak() -> None:
    assert outcome(BEFORE, "port 1 is still listened on").faults() == ["port 1 is still listened on"]


def line(event: str, generation: int, worker: str = "", who: str = "", **fields: Any) -> dict[str, Any]:
    return {"event": event, "generation": generation, "worker_id": worker, "who": who or worker, "pid": 7, **fields}


def test_a_world_is_steady_once_all_members_have_its_first_result() -> None:
    """A newcomer says `joined`, the others `op_complete`."""
    world = MembershipView()
    world.feed([line("committed", 2, who="leader", members=["a", "b"]), line("op_complete", 2, "a")])
    assert not world.steady
    world.feed([line("joined", 2, "b")])
    assert world.steady
    assert (world.members, world.pids) == (("a", "b"), {"a": 7, "b": 7})


def test_a_world_with_a_lost_member_is_not_steady() -> None:
    world = MembershipView()
    world.feed([line("committed", 1, who="leader", members=["a"]), line("op_complete", 1, "a")])
    world.feed([line("member_lost", 0, "a", who="leader")])
    assert not world.steady


def test_results_of_an_earlier_generation_count_for_nothing() -> None:
    world = MembershipView()
    world.feed([line("committed", 3, who="leader", members=["a"]), line("op_complete", 2, "a")])
    assert not world.steady


def test_descriptors_are_counted() -> None:
    before = held(os.getpid())
    with socket.socket():
        assert held(os.getpid()).since(before).fds == 1


def test_the_least_of_several_looks_leaves_short_lived_needs_out() -> None:
    assert least([HeldResources(9, 2, 5.0), HeldResources(8, 3, 4.0)]) == HeldResources(8, 2, 4.0)


def test_a_port_is_seen_while_it_is_listened_on() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        port = server.getsockname()[1]
        seen = {found for found in resources.open_ports([os.getpid()]) if found.port == port}
        assert len(seen) == 1
        another = socket.create_server(("127.0.0.1", port), reuse_port=True)
        assert resources.still_open(seen) == seen
    with another:
        assert resources.still_open(seen) == set(), "the port is somebody else's now"


def test_a_segment_or_directory_that_nobody_uses_is_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not in /dev/shm: a chaos run beside this test would take them for what its job has left behind.
    monkeypatch.setattr(resources, "SHARED_MEMORY", tmp_path)
    made = [tmp_path / kind for kind in ("file", "directory")]
    names = {path.name for path in made}
    made[0].write_bytes(b"x")
    made[1].mkdir()
    assert names == resources.shared_memory()
    assert resources.abandoned({*names, "never-there"}) == names
    held = [os.open(path, os.O_RDONLY) for path in made]
    assert resources.abandoned(names) == set(), "another job's, which is still running"
    assert resources.in_use({*names, "never-there"}) == names
    assert resources.in_use(names, but_by={os.getpid()}) == set()
    for descriptor in held:
        os.close(descriptor)
    assert resources.abandoned(names) == names


def test_a_process_is_found_by_its_mark_until_it_ends() -> None:
    mark = processes.new_mark()
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=-1, env={processes.MARK: mark}) as process:
        # The mark is there once the child has become the new program.
        while processes.living(mark) != {process.pid}:
            assert process.poll() is None
        assert processes.await_exits([process.pid], within_s=0.0) == {process.pid}
        processes.kill_if_there(process.pid)
        assert processes.await_exits([process.pid], within_s=60.0) == set()
        assert processes.living(mark) == set()
