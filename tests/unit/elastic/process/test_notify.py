"""What a service manager hears, on a real socket."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.process import children, notify


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        if request.param == "path":
            bound.bind("n.sock")  # a path in full may be longer than a socket may be named
            monkeypatch.setenv(notify.SOCKET, f"/proc/self/cwd/{bound.getsockname()}")
        else:
            bound.bind("")
            monkeypatch.setenv(notify.SOCKET, "@" + bound.getsockname()[1:].decode())
        bound.setblocking(False)
        yield bound


@pytest.mark.parametrize(
    ("tell", "words"),
    [
        (lambda: notify.ready("it\nserves"), r"READY=1\nSTATUS=it serves"),
        (notify.reloading, r"RELOADING=1\nMONOTONIC_USEC=\d+"),
        (lambda: notify.stopping("ends", 57.5), r"STOPPING=1\nSTATUS=ends\nEXTEND_TIMEOUT_USEC=57500000"),
        (lambda: notify.status("waits"), r"STATUS=waits"),
    ],
)
def test_the_manager_hears_it(manager: socket.socket, tell: Callable[[], None], words: str) -> None:
    tell()
    assert re.fullmatch(words, manager.recv(4096).decode())


def test_the_watchdog_hears_a_loop_that_turns(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    async def turn() -> None:
        speaking = asyncio.create_task(notify.keep_alive())
        loop = asyncio.get_running_loop()
        try:
            for _ in range(3):
                assert await asyncio.wait_for(loop.sock_recv(manager, 4096), 60) == b"WATCHDOG=1"
        finally:
            speaking.cancel()

    monkeypatch.setenv(notify.WATCHDOG, "20000")
    asyncio.run(turn())
    monkeypatch.setenv(notify.WATCHDOG_PID, "1")  # it is meant for another process
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(notify.keep_alive(), 0.1))
    monkeypatch.setenv(notify.WATCHDOG_PID, str(os.getpid()))
    monkeypatch.setenv(notify.WATCHDOG, "soon")
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(notify.keep_alive(), 0.1))
    with pytest.raises(BlockingIOError):
        manager.recv(4096)


def test_a_manager_that_is_gone_or_does_not_read_costs_a_line_of_the_log(
    manager: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    told = 0
    while "is not told STATUS=" not in caplog.text:
        notify.status("x" * 1000)
        assert (told := told + 1) < 5000
    manager.close()
    caplog.clear()
    notify.ready("serves")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_without_a_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(notify.SOCKET, raising=False)
    notify.ready("serves")
    monkeypatch.setenv(notify.SOCKET, "vsock:2:1234")
    notify.ready("serves")
    assert caplog.text == ""


def test_what_a_daemon_starts_cannot_speak_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in notify.VARIABLES:
        monkeypatch.setenv(name, "1")
    assert not children.own_environment().keys() & set(notify.VARIABLES)
