"""elastic.launch() without a job: the files between it and the workers, and what a cell shows."""

from __future__ import annotations

import io
import linecache
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import elastic
from elastic.agent.worker import function_file
from elastic.errors import ConfigError, ExitCode, LaunchFailed
from elastic.platforms.local import launcher
from elastic.platforms.local.cell_output import CellStream, table_text
from elastic.platforms.local.launcher import _words
from elastic.platforms.local.live import LiveView


@pytest.fixture
def own(tmp_path: Path) -> Path:
    directory = tmp_path / "own"
    directory.mkdir(0o700)
    return directory


@pytest.fixture
def path_of_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield


def test_a_function_of_no_module_comes_with_what_it_uses(own: Path, path_of_modules: None) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec("factor = 3\ndef times(x): return factor * x\nclass A: pass\ndef f(x): return times(x), A", names)
    path = function_file.write_function(own, names["f"], [5])  # type: ignore[arg-type]
    names["factor"] = 0
    function, arguments = function_file.read_function(path)
    value, kind = function(*arguments)
    assert value == 15 and kind is names["A"], "a class is the one that this process has defined"
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(file.name for file in own.iterdir()) == ["function"]


def test_workers_find_modules_and_the_source_of_cells_where_the_notebook_does(
    own: Path, path_of_modules: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(linecache.cache, "/cell/1.py", (8, None, ["raise 1\n"], "/cell/1.py"))
    sys.path.append("/here/only")
    path = function_file.write_function(own, len, ["abc"])
    sys.path.remove("/here/only")
    linecache.cache.clear()
    function, arguments = function_file.read_function(path)
    assert function(*arguments) == 3
    assert sys.path[-1] == "/here/only"
    assert linecache.getline("/cell/1.py", 1) == "raise 1\n"


@pytest.mark.parametrize("lock", [threading.Lock, multiprocessing.Lock])
def test_what_cannot_be_pickled_is_said_and_leaves_nothing(lock: Callable[[], object], own: Path) -> None:
    with pytest.raises(ConfigError, match=r"the function, or something that it uses, cannot be pickled: .*[lL]ock"):
        function_file.write_function(own, len, [lock()])
    with pytest.raises(ConfigError, match="the value of the function cannot be pickled"):
        function_file.write_value(own, 0, threading.Lock())
    assert list(own.iterdir()) == []


def test_of_a_file_open_for_reading_workers_get_the_content_and_one_open_for_writing_is_refused(
    own: Path, tmp_path: Path
) -> None:
    words = tmp_path / "words"
    words.write_text("abc")
    with words.open() as file:
        path = function_file.write_function(own, lambda: file.read(), [])
    words.unlink()
    function, arguments = function_file.read_function(path)
    assert function(*arguments) == "abc"
    with words.open("w") as file, pytest.raises(ConfigError, match=r"cannot be pickled: .*open files"):
        function_file.write_function(own, lambda: file.write("x"), [])


def test_the_value_is_that_of_the_lowest_rank_that_has_returned(own: Path) -> None:
    with pytest.raises(ConfigError, match="no worker has returned"):
        function_file.read_values(own)
    for rank in (10, 2, 9):
        function_file.write_value(own, rank, f"of {rank}")
    assert function_file.read_values(own)[0] == "of 2"


def test_a_value_whose_worker_died_while_it_wrote_is_none(own: Path) -> None:
    pid = os.fork()
    if pid == 0:

        class Fatal:
            def __reduce__(self) -> str:
                os._exit(9)

        function_file.write_value(own, 0, Fatal())
    os.waitpid(pid, 0)
    assert len(list(own.iterdir())) == 1, "what it has begun"
    function_file.write_value(own, 1, "of 1")
    assert function_file.read_values(own)[0] == "of 1"
    assert list(function_file.values(own)) == [1]


@pytest.mark.parametrize(("what", "mode"), [("file", 0o620), ("file", 0o644), ("directory", 0o750)])
def test_what_others_could_have_written_is_not_unpickled(what: str, mode: int, own: Path) -> None:
    path = function_file.write_function(own, len, ["abc"])
    (path if what == "file" else own).chmod(mode)
    with pytest.raises(ConfigError, match="may be somebody else's"):
        function_file.read_function(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_somebody_else_is_not_unpickled(own: Path) -> None:
    path = function_file.write_function(own, len, ["abc"])
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="may be somebody else's"):
        function_file.read_function(path)


def test_a_link_is_not_followed(own: Path, tmp_path: Path) -> None:
    path = function_file.write_function(own, len, ["abc"])
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        function_file.read_function(tmp_path / "link")


def test_options_become_words() -> None:
    options: dict[str, str | int | float | bool] = {
        "workers": 4,
        "checkpoint_every": "5 steps",
        "fresh": True,
        "quiet": False,
        "grace": 1.5,
        "name": "-x",
    }
    assert _words(options) == ["--workers=4", "--checkpoint-every=5 steps", "--fresh", "--grace=1.5", "--name=-x"]


def test_a_worker_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_SOCKET", "/run/x")
    with pytest.raises(ConfigError, match="called in a worker"):
        elastic.launch(len, "abc")


def test_without_its_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match=r"pip install 'elastic-ring\[notebook\]'"):
        elastic.launch(len, "abc")


def test_why_a_job_could_not_begin_comes_back_whole(tmp_path: Path) -> None:
    reason = tmp_path / "reason"
    reason.write_text("no etcd found: install one")
    (tmp_path / "result.json").write_text('{"because": "of an earlier run"}')
    refused = launcher._failure(ExitCode.BELOW_QUORUM, tmp_path, reason)
    assert isinstance(refused, LaunchFailed) and refused.exit_code == ExitCode.BELOW_QUORUM
    assert str(refused) == "no etcd found: install one"
    assert isinstance(launcher._failure(ExitCode.BAD_INPUT, tmp_path, reason), ConfigError)


def test_a_command_that_prints_much_is_stopped_as_one_that_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, lambda *_: stopped.append(1))\n"
        "stopped = []\n"
        "while not stopped: os.write(1, b'x' * 100_000); os.write(2, b'x' * 100_000)\n"
        "sys.exit(130)"
    )
    monkeypatch.setattr(launcher, "STOP_S", 5.0)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.read(1)
        launcher._stop(process)
        assert process.returncode == 130


def test_the_table_of_a_cell_is_plain_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a kernel sets it
    facts = LiveView(tmp_path).facts() | {"step": 7, "total": 9, "epoch": 0, "scalars": {"loss": 0.25}}
    lines = table_text(facts | {"members": ["local.0.0"], "waits_for": ""}).splitlines()
    assert ["step", "7", "of", "9", "(epoch", "0)"] in [line.split() for line in lines]
    assert ["members", "1:", "local.0.0"] in [line.split() for line in lines] and "\x1b" not in "".join(lines)


def test_text_of_a_pipe_comes_whole_however_it_is_cut() -> None:
    said = io.StringIO()
    stream = CellStream(said)
    for data in (b"a\nb", b"\xc3", b"\xa9", b"\n\xff"):
        stream.write(data)
    assert said.getvalue() == "a\nb\u00e9\n"
    stream.write(b"", final=True)
    assert said.getvalue() == "a\nb\u00e9\n\ufffd"


def test_sentences_are_shown_at_once_and_tracebacks_are_kept() -> None:
    said = io.StringIO()
    stream = CellStream(said, sorts=True)
    stream.write(b"elastic: lost\nTraceback (most recent call last):\n  x\nelastic: on\nTail")
    stream.write(b"", final=True)
    assert said.getvalue() == "elastic: lost\nelastic: on\n"
    assert stream.kept == "Traceback (most recent call last):\n  x\nTail"
