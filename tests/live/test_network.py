"""The network of a cluster: what a cut link lets through, what healing brings back, and that nothing is left."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from chaos_tests.cluster import OUTSIDE, Network, Roughness, why_not
from chaos_tests.cluster.hosts import PREFIX
from runtime.allreduce.ring import tcp_liveness
from runtime.allreduce.ring.frames import PeerLink
from tests.live.jobs import ROOT

pytestmark = pytest.mark.skipif(bool(why := why_not()), reason=why)

PATIENCE_S = 100.0

TALKER = """
import select, socket, sys
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind((sys.argv[1], 7))
print("ready", flush=True)
while True:
    ready, _, _ = select.select([own, sys.stdin], [], [])
    if own in ready:
        print("heard", own.recv(64).decode(), flush=True)
    if sys.stdin in ready:
        if not (line := sys.stdin.readline().split()):
            break
        own.sendto(line[1].encode(), (line[0], 7))
        print("sent", flush=True)
"""


class Talker:
    """Sends datagrams, and hears them in the order in which they arrive."""

    def __init__(self, network: Network, name: str) -> None:
        within = network.within(name) if name != OUTSIDE else ()
        self.address = network.address(name)
        command = [*PREFIX, *within, sys.executable, "-c", TALKER, self.address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._heard: list[str] = []
        assert self._line() == "ready"

    def say(self, to: Talker, what: str) -> None:
        """Returns when it has been sent."""
        assert self._process.stdin is not None
        print(to.address, what, file=self._process.stdin, flush=True)
        while (line := self._line()) != "sent":
            self._heard.append(line)

    def heard(self) -> str:
        return self._heard.pop(0) if self._heard else self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "it has ended"
        return line.strip()

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network() as made:
        for name in ("a", "b", "c"):
            made.add(name)
        yield made


@pytest.fixture
def talkers(network: Network) -> Iterator[dict[str, Talker]]:
    made = {name: Talker(network, name) for name in ("a", "b", "c", OUTSIDE)}
    yield made
    for one in made.values():
        one.close()


def test_a_cut_link_loses_what_is_sent_that_way_and_nothing_else(network: Network, talkers: dict[str, Talker]) -> None:
    """Each receiver hears in order, so what it hears first says that the words before were lost, and nobody waits."""
    a, b, c, outside = talkers["a"], talkers["b"], talkers["c"], talkers[OUTSIDE]
    network.cut(["a"], ["b"], one_way=True)
    a.say(b, "lost")
    b.say(a, "against")
    assert a.heard() == "heard against"
    c.say(b, "beside")
    assert b.heard() == "heard beside"
    network.cut(["a"], [OUTSIDE])
    a.say(outside, "lost")
    outside.say(a, "lost")
    a.say(c, "ahead")
    assert c.heard() == "heard ahead"
    network.mend(["b"], ["a"])
    a.say(b, "mended")
    assert b.heard() == "heard mended"
    network.heal()
    a.say(outside, "healed")
    outside.say(a, "healed")
    assert (outside.heard(), a.heard()) == ("heard healed", "heard healed")


def test_a_host_that_is_isolated_reaches_itself_only(network: Network, talkers: dict[str, Talker]) -> None:
    a, c, outside = talkers["a"], talkers["c"], talkers[OUTSIDE]
    network.isolate("c")
    for other in (a, outside):
        c.say(other, "lost")
        other.say(c, "lost")
    c.say(c, "alone")
    assert c.heard() == "heard alone"
    a.say(outside, "others")
    assert outside.heard() == "heard others"
    network.heal()
    c.say(a, "back")
    assert a.heard() == "heard back"


def test_a_rough_cable_loses_doubles_and_damages_what_goes_through_it(
    network: Network, talkers: dict[str, Talker]
) -> None:
    """Whoever gets a damaged datagram drops it, so what comes next says that it came, and nobody waits."""
    a, b, c = talkers["a"], talkers["b"], talkers["c"]
    for one, other in ((a, b), (b, c)):  # they know each other's hardware: questions for that would be lost too
        one.say(other, "there")
        other.say(one, "here")
        assert (other.heard(), one.heard()) == ("heard there", "heard here")
    for how in (Roughness(lost=1.0), Roughness(damaged=1.0)):
        network.roughen("a", how)
        a.say(b, "lost")
        b.say(a, "lost")
        c.say(b, "beside")
        assert b.heard() == "heard beside"
    network.smooth("a")
    a.say(b, "smooth")
    b.say(a, "smooth")
    assert (a.heard(), b.heard()) == ("heard smooth", "heard smooth")
    network.roughen("a", Roughness(doubled=1.0))
    a.say(b, "twice")
    b.say(a, "twice")
    assert [a.heard(), a.heard(), b.heard(), b.heard()] == ["heard twice"] * 4
    network.heal()
    a.say(b, "healed")
    assert b.heard() == "heard healed"


STREAM_BYTES = 1 << 20

READER = """
import hashlib, socket, sys
door = socket.create_server((sys.argv[1], 9))
print("ready", flush=True)
connection, _ = door.accept()
read = hashlib.sha256()
while piece := connection.recv(1 << 16):
    read.update(piece)
connection.sendall(read.digest())
"""


def streamed(network: Network) -> float:
    """To a, which has to get every byte as it was sent. Returns how long it took, in seconds."""
    command = [*PREFIX, *network.within("a"), sys.executable, "-c", READER, network.address("a")]
    content = random.Random(1).randbytes(STREAM_BYTES)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stdout.readline()
        begun_s = time.monotonic()
        with socket.create_connection((network.address("a"), 9), timeout=PATIENCE_S) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(64) == hashlib.sha256(content).digest()
    return time.monotonic() - begun_s


def test_a_stream_gets_through_a_rough_cable_whole(network: Network) -> None:
    network.roughen("a", Roughness(delay_s=0.02, jitter_s=0.01, lost=0.02, doubled=0.02, damaged=0.02))
    assert streamed(network) > 4 * 0.01, "there and back, twice at least"
    network.heal()
    streamed(network)


def test_no_more_gets_through_a_narrow_cable_than_fits(network: Network) -> None:
    network.narrow("a", 8000)
    assert streamed(network) > 0.8 * STREAM_BYTES / 1e6
    network.widen("a")
    streamed(network)


ANSWERER = """
import signal, socket, sys
door = socket.create_server((sys.argv[1], 7))
print("ready", flush=True)
connection, _ = door.accept()
signal.pause()
"""


def test_a_host_that_is_cut_off_is_told_from_one_whose_process_reads_nothing(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are silent to whoever waits; only for the first the kernel over there gives no answer either."""
    monkeypatch.setattr(tcp_liveness, "KERNEL_CHECK_S", 0.1)
    monkeypatch.setattr(tcp_liveness, "SILENT_S", 0.5)
    answerers, connections = [], {}
    for name in ("a", "b"):
        command = [*PREFIX, *network.within(name), sys.executable, "-c", ANSWERER, network.address(name)]
        answerers.append(process := subprocess.Popen(command, stdout=subprocess.PIPE))
        assert process.stdout is not None and process.stdout.readline()
        sock = connections[name] = socket.create_connection((network.address(name), 7), timeout=PATIENCE_S)
        tcp_liveness.probe(sock)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # both have taken all that they take
            while True:
                sock.send(bytes(1 << 16))
    cut = connections["b"]
    network.cut([OUTSIDE], ["b"])
    busy, gone = (PeerLink(name, sock, 1) for name, sock in connections.items())
    deadline_s = time.monotonic() + PATIENCE_S
    with tcp_liveness.PeerWatch({"b": gone}) as lookout, tcp_liveness.PeerWatch({"a": busy}) as other:
        while not lookout.lost([gone])[0]:
            assert time.monotonic() < deadline_s, tcp_liveness.counters(cut)
            time.sleep(0.05)
        # What is full is asked ever more rarely, so it answers rarely, too.
        while tcp_liveness.counters(connections["a"]).answered_ms < 3 * 1000 * tcp_liveness.SILENT_S:
            assert not other.lost([busy])[0]
            assert time.monotonic() < deadline_s, tcp_liveness.counters(connections["a"])
            time.sleep(0.05)
    network.heal()
    while tcp_liveness.counters(cut).insists:
        assert time.monotonic() < deadline_s, tcp_liveness.counters(cut)
        time.sleep(0.05)
    for process, sock in zip(answerers, connections.values(), strict=True):
        sock.close()
        process.kill()
        process.communicate()


DOUBTS = 3

SWALLOWER = """
import socket, sys
door = socket.create_server((sys.argv[1], 7))
print("ready", flush=True)
connection, _ = door.accept()
while connection.recv(1 << 16):
    pass
"""


def test_a_host_behind_a_full_cable_that_loses_packets_is_not_taken_for_one_that_is_cut_off(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own connection alone looks lost again and again: TCP waits longer with each packet that is lost twice."""
    monkeypatch.setattr(tcp_liveness, "KERNEL_CHECK_S", 0.1)
    monkeypatch.setattr(tcp_liveness, "SILENT_S", 1.0)
    command = [*PREFIX, *network.within("a"), sys.executable, "-c", SWALLOWER, network.address("a")]
    with contextlib.ExitStack() as undone:
        undone.callback(network.heal)
        reader = undone.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        undone.callback(reader.kill)
        assert reader.stdout is not None and reader.stdout.readline()
        sock = undone.enter_context(socket.create_connection((network.address("a"), 7), timeout=PATIENCE_S))
        sock.setblocking(False)
        network.narrow("a", 2000)
        network.roughen("a", Roughness(lost=0.3))
        link, doubts, deadline_s = PeerLink("a", sock, 1), 0, time.monotonic() + PATIENCE_S
        with tcp_liveness.PeerWatch({"a": link}) as lookout:
            while doubts < DOUBTS:
                assert time.monotonic() < deadline_s, tcp_liveness.counters(sock)
                with contextlib.suppress(BlockingIOError):
                    sock.send(bytes(1 << 16))
                now = link.counters()
                doubts += now.insists and now.answered_ms >= 1000 * tcp_liveness.SILENT_S
                lost, because = lookout.lost([link])
                assert not lost, because
                time.sleep(0.1)


HOLDER = """
import sys, time
from chaos_tests.cluster import Network
with Network() as there:
    there.add("a")
    print(there.outside, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_network_whose_process_ends(number: signal.Signals) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert holder.stdout is not None
    outside, *_ = holder.stdout.readline().split()
    assert outside in _addresses()
    holder.send_signal(number)
    holder.communicate()
    deadline_s = time.monotonic() + PATIENCE_S
    while outside in _addresses():
        assert time.monotonic() < deadline_s, "the kernel has not taken it apart"
        time.sleep(0.05)  # it does so when it has the time: there is nothing to wait on


def _addresses() -> str:
    return subprocess.run(["ip", "-4", "addr"], capture_output=True, text=True, check=True).stdout
