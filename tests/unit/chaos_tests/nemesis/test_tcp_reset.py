"""Connections of another process that are reset: both ends hear of it, and nothing else is touched."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from chaos_tests.nemesis.signals import Impossible
from chaos_tests.nemesis.tcp_reset import reset_connections

PEER = """
import select, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
made = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
made.setblocking(False)
print(listener.getsockname()[1], flush=True)
select.select([made], [], [])
try:
    print("read", len(made.recv(1)), flush=True)
except ConnectionResetError:
    print("reset", flush=True)
listener.accept()
print("accepted", flush=True)
"""
PATIENCE_S = 100.0


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(PATIENCE_S)
        yield made


def test_both_ends_of_a_connection_are_told_and_a_listener_goes_on(listener: socket.socket) -> None:
    words = [sys.executable, "-S", "-c", PEER, str(listener.getsockname()[1])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        try:
            connection, _ = listener.accept()
            connection.settimeout(PATIENCE_S)
            port = int(peer.stdout.readline())
            try:
                count = reset_connections(peer.pid)
            except Impossible as forbidden:
                if "borrowed" in str(forbidden):
                    pytest.skip(str(forbidden))
                raise
            assert count == 1
            with connection, pytest.raises(ConnectionResetError):
                connection.recv(1)
            assert peer.stdout.readline().strip() == "reset"
            assert reset_connections(peer.pid) == 0
            socket.create_connection(("127.0.0.1", port), PATIENCE_S).close()
            assert peer.stdout.readline().strip() == "accepted"
        finally:
            peer.kill()


def test_a_process_that_has_ended_has_no_connections() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as ended:
        ended.wait()
    with pytest.raises(Impossible, match="just ended"):
        reset_connections(ended.pid)
