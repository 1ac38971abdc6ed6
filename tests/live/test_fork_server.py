"""Workers forked by the fork server, beside cold ones: nobody could tell them apart, and nothing depends on it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.live.jobs import ROOT
from tests.live.nodes import PATIENCE_S, Node

MIRROR = Path(__file__).parent / "programs" / "mirror.py"
COMMANDS = {
    "script": (sys.executable, str(MIRROR), "--lr", "1e-3"),
    "module": (sys.executable, "-m", "tests.live.programs.mirror", "--lr", "1e-3"),
}

T = TypeVar("T")
Do = Callable[[Awaitable[T]], T]


@pytest.fixture(scope="module")
def do() -> Iterator[Do[Any]]:
    """Run something on the loop that all nodes of this file live on."""
    with asyncio.Runner() as runner:

        async def awaited(what: Awaitable[T]) -> T:
            return await what

        yield lambda what: runner.run(awaited(what))


@contextmanager
def node_of(
    home: Path, command: tuple[str, ...], do: Do[Any], *, fork: bool = True, ranks: int = 0, cwd: Path = ROOT
) -> Iterator[Node]:
    async def make() -> Node:
        return Node(home, command, fork, ranks)

    home.mkdir(exist_ok=True)
    with chdir(cwd):
        node = do(make())
        try:
            yield node
        finally:
            do(node.close())


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, do: Do[Any]) -> Iterator[Node]:
    """One that forks the script."""
    with node_of(tmp_path_factory.mktemp("script"), COMMANDS["script"], do) as node:
        yield node


@pytest.mark.long
@pytest.mark.parametrize("kind", ["script", "module"])
def test_a_forked_worker_finds_itself_in_what_a_cold_one_does(kind: str, tmp_path: Path, do: Do[Any]) -> None:
    found = {}
    # A command that begins with another program than the interpreter is started as it is.
    ways = {"forked": ((), ""), "cold": ((), "forking is off"), "plain": (("env",), "forking is off")}
    for way, (before, cold) in ways.items():
        with node_of(tmp_path / way, (*before, *COMMANDS[kind]), do, fork=not cold) as node:
            worker = do(node.ended(MIRROR="facts", ELASTIC_SLOT="1", OWN="of the worker"))
            assert (worker.cold, worker.status.result()) == (cold, 0), worker.log.read_text()
            found[way] = json.loads(worker.lines[-1])
            if not cold:
                raised = do(node.ended(MIRROR="raise")).log.read_text().splitlines()
    assert found["forked"] == found["plain"]
    assert found["cold"] == found["plain"]
    first = {"script": f'  File "{MIRROR}", line ', "module": '  File "<frozen runpy>", line '}
    assert raised[0] == "Traceback (most recent call last):"
    assert raised[1].startswith(first[kind])
    assert raised[-1] == "ValueError: on purpose"


@pytest.mark.parametrize(
    ("way", "status", "words"),
    [
        ("raise", 1, "ValueError: on purpose\n"),
        ("exit", 7, ""),
        ("words", 1, "these are the last words\n"),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("fault", -signal.SIGSEGV, ""),
    ],
)
def test_the_end_of_a_forked_worker_is_seen_exactly(node: Node, do: Do[Any], way: str, status: int, words: str) -> None:
    worker = do(node.ended(MIRROR=way))
    assert (worker.cold, worker.status.result()) == ("", status)
    assert worker.log.read_text().endswith(words)


@pytest.mark.parametrize(
    ("way", "line"),
    [pytest.param("spawn", b"8\n", marks=pytest.mark.long), ("load", b"[0, 3, 6, 9, 12, 15, 18, 21]\n")],
)
def test_a_forked_worker_can_start_processes_of_its_own(node: Node, do: Do[Any], way: str, line: bytes) -> None:
    worker = do(node.ended(MIRROR=way))
    assert (worker.cold, worker.lines, worker.status.result()) == ("", [line], 0), worker.log.read_text()


def test_what_two_forked_workers_draw_by_chance_differs_as_in_cold_ones(node: Node, do: Do[Any]) -> None:
    one, other = (json.loads(do(node.ended(MIRROR="chance")).lines[-1]) for _ in range(2))
    assert all(mine != its for mine, its in zip(one, other, strict=True))


@pytest.mark.long
def test_a_killed_fork_server_takes_no_worker_along_and_is_made_anew(node: Node, do: Do[Any]) -> None:
    async def scenario() -> None:
        before = len(node.events("fork_server_ready"))
        old = node.start(MIRROR="wait")
        await asyncio.wait_for(old.spoke.wait(), PATIENCE_S)
        os.kill(await node.await_nurseries(before), signal.SIGKILL)
        while len(node.events("fork_server_unusable")) < 1:
            await asyncio.sleep(0.01)
        meanwhile = await node.ended(MIRROR="exit")
        assert meanwhile.cold == "the fork server is not ready yet"
        assert meanwhile.status.result() == 7
        await node.await_nurseries(before + 1)
        after = await node.ended(MIRROR="exit")
        assert (after.cold, after.status.result()) == ("", 7)
        assert not old.status.done()
        (await old.process).signal(signal.SIGKILL)
        assert await asyncio.wait_for(old.status, PATIENCE_S) == -signal.SIGKILL

    do(scenario())


@pytest.mark.long
def test_a_frozen_fork_server_delays_a_worker_but_does_not_lose_it(node: Node, do: Do[Any]) -> None:
    async def scenario() -> None:
        before = len(node.events("fork_server_ready"))
        os.kill(await node.await_nurseries(before), signal.SIGSTOP)
        worker = await node.ended(MIRROR="exit")
        assert "fork server" in worker.cold
        assert worker.status.result() == 7
        await node.await_nurseries(before + 1)

    do(scenario())


@pytest.mark.parametrize(
    ("command", "because"),
    [
        ((sys.executable, "train.py"), "train.py:2 may change the environment for an import after it"),
        (("sh", "-c", "exit 3"), "the command is neither `python SCRIPT` nor `python -m MODULE`"),
        (("sh", "exit.sh"), "sh is another interpreter than the agent's"),
    ],
)
def test_what_cannot_be_forked_starts_cold_and_says_why(
    command: tuple[str, ...], because: str, tmp_path: Path, do: Do[Any]
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\nos.environ['OMP_NUM_THREADS'] = '2'\nimport json\nsys.exit(3)\n"
    )
    (tmp_path / "exit.sh").write_text("exit 3")
    with node_of(tmp_path, command, do, cwd=tmp_path) as node:
        worker = do(node.ended())
    assert (worker.cold, worker.status.result()) == (because, 3)


@pytest.mark.long
def test_what_is_no_script_of_this_interpreter_is_refused_with_ranks(tmp_path: Path, do: Do[Any]) -> None:
    """It would begin without its ranks, and fail for want of RANK or train alone."""
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    with (
        node_of(tmp_path, ("sh", "-c", "exit 3"), do, ranks=4, cwd=tmp_path) as node,
        pytest.raises(AssertionError, match="sh runs no script of Python in the agent's interpreter"),
    ):
        do(node.ended())
    roundabout = str(Path(sys.executable).parent / ".." / "bin" / Path(sys.executable).name)
    with node_of(tmp_path, (roundabout, "train.py"), do, cwd=tmp_path) as node:
        assert do(node.ended()).cold == ""


@pytest.mark.long
def test_a_module_that_starts_a_thread_when_it_is_imported_is_left_to_the_workers(
    tmp_path: Path, do: Do[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUSERBASE", str(tmp_path))
    place = tmp_path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    place.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{place}")
    (place / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
    )
    (place / "calm.py").write_text("import os\nparent = os.getppid()\n")
    (tmp_path / "train.py").write_text(
        "import sys\nimport calm\nimport busy\nimport threading\n"
        "sys.exit(threading.active_count() + 10 * ('torch' in sys.modules))\n"
    )
    with node_of(tmp_path, (sys.executable, "train.py"), do, cwd=tmp_path) as node:
        worker = do(node.ended())
        (left_out,) = node.events("fork_server_without")
    assert (worker.cold, worker.status.result()) == ("", 12)
    assert (left_out["module"], left_out["because"]) == ("busy", "threads beside the main one: 1")


def test_a_process_with_threads_is_not_fit_to_be_forked() -> None:
    from runtime.forkserver.server import unfit

    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    assert unfit().startswith("threads beside the main one: ")
    release.set()
    thread.join()
