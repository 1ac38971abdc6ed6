"""Hosts as network namespaces on one switch: links between them can be cut, also in one direction, and healed.

    this machine, "outside" --+
    host a -------------------+-- switch (a bridge in a namespace of its own)
    host b -------------------+

A namespace has no name: it lives as long as the process that holds it, which the kernel kills with this one. So nothing
is left behind, however this process ends.

A link a -> b is cut in a's table of neighbours: b gets a hardware address that nobody has, and the switch delivers
what a sends to nobody. That is silent, as in a network that loses packets: nobody is refused, no connection ends, and
whatever was sent meanwhile is sent again by TCP once the link is healed.

A host's cable can also be a bad one, which lossy_link.py carries between its port and the switch, or a narrow one, by
the kernel's token bucket at both ends.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from types import TracebackType
from typing import Self

from chaos_tests.cluster import lossy_link
from chaos_tests.cluster.hosts import PREFIX
from chaos_tests.cluster.lossy_link import Roughness

OUTSIDE = "outside"
"""The name of this machine among the hosts."""

NOWHERE = "02:00:00:00:ff:ff"
"""A hardware address that nobody has."""

TOOLS = ("ip", "nsenter", "setpriv", "unshare")

UP_S = 20.0

_CABLE = (sys.executable, "-S", lossy_link.__file__)


def why_not() -> str:
    """Why there can be no such network here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{missing[0]} is not installed (Debian: iproute2, util-linux)"
    try:
        with Network() as there:
            there.add("a")
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces with bridges here: {error.stderr.strip()}"


class Network:
    """Context manager, for the main thread: the kernel ends what holds the hosts when the thread that made it ends.

    Raises CalledProcessError, with what `ip` says, where this machine cannot do it; see `why_not`.
    """

    def __init__(self) -> None:
        source = random.SystemRandom()
        self._link = f"el{source.randrange(16**8):08x}"
        self._network = f"10.{source.randrange(200, 255)}.{source.randrange(1, 255)}"
        self._numbers = {OUTSIDE: 1}
        self._spaces: dict[str, _Space] = {}
        self._cut: set[tuple[str, str]] = set()
        self._rough: dict[str, subprocess.Popen[str]] = {}
        self._narrow: set[str] = set()

    def __enter__(self) -> Self:
        self._switch = _Space()
        try:
            self._switch.ip("link", "add", "switch", "type", "bridge")
            self._switch.ip("link", "set", "switch", "up")
            self._plug(OUTSIDE)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything. What still runs there goes on without a network."""
        _run("ip", "link", "del", self._link, check=False)
        for carrier in self._rough.values():
            carrier.kill()
            carrier.communicate()
        self._rough.clear()
        for space in (*self._spaces.values(), self._switch):
            space.close()

    # ----------------------------------------------------------------------------------------------------- hosts

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all hosts, this machine's among them."""
        return tuple(self._numbers)

    @property
    def outside(self) -> str:
        """This machine's address among them."""
        return self.address(OUTSIDE)

    def add(self, name: str) -> str:
        """Make a host, if there is none of that name. Returns its address.

        It reaches itself under that address; a 127.0.0.1, which no other one means, it does not have.
        """
        if name not in self._numbers:
            self._numbers[name] = 9 + len(self._numbers)
            space = self._spaces[name] = _Space()
            space.ip("link", "set", "lo", "up")
            space.ip("addr", "flush", "dev", "lo")
            self._plug(name)
        return self.address(name)

    def address(self, name: str) -> str:
        return f"{self._network}.{self._numbers[name]}"

    def within(self, name: str) -> tuple[str, ...]:
        """Put before a command to run it on that host."""
        return self._spaces[name].within

    # ----------------------------------------------------------------------------------------------------- links

    def cut(self, some: Iterable[str], others: Iterable[str], *, one_way: bool = False) -> None:
        """No packet of `some` reaches any of `others` from now on; nor the other way, unless one_way."""
        for a, b in _pairs(some, others, one_way):
            self._direct(a, b, NOWHERE)
            self._cut.add((a, b))

    def isolate(self, name: str) -> None:
        """Cut a host off from everybody, this machine too."""
        self.cut([name], [other for other in self._numbers if other != name])

    def heal(self) -> None:
        """Mend everything that was cut, and give everybody a good cable."""
        for a, b in sorted(self._cut):
            self._direct(a, b, self._hardware(b))
        self._cut.clear()
        for name in sorted(self._rough):
            self.smooth(name)
        for name in sorted(self._narrow):
            self.widen(name)

    def mend(self, some: Iterable[str], others: Iterable[str]) -> None:
        """These links alone, both ways."""
        for a, b in self._cut.intersection(_pairs(some, others, False)):
            self._direct(a, b, self._hardware(b))
            self._cut.discard((a, b))

    def roughen(self, name: str, how: Roughness) -> None:
        """Give a host, not this machine, a bad cable to the switch. While cables are changed its frames are lost, for a
        moment. Raises CalledProcessError, and then it has a good one."""
        if name in self._rough:
            self.smooth(name)
        port, plug, wire = (f"{part}{self._numbers[name]}" for part in ("port", "plug", "wire"))
        command = (*PREFIX, *self._switch.within, *_CABLE, "join", port, wire, json.dumps(asdict(how)))
        self._switch.ip("link", "add", plug, "type", "veth", "peer", "name", wire)
        carrier = self._rough[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            for device in (wire, plug):
                self._switch.ip("link", "set", device, "up")
            _run(*self._switch.within, *_CABLE, "plain", plug)
            _run(*self._spaces[name].within, *_CABLE, "plain", "eth0")
            self._switch.await_up(plug)
            _await_word(carrier)
            self._switch.ip("link", "set", port, "nomaster")
            self._switch.ip("link", "set", plug, "master", "switch")
            assert carrier.stdin is not None
            print("go", file=carrier.stdin, flush=True)
            _await_word(carrier)
        except BaseException:
            self.smooth(name)
            raise

    def smooth(self, name: str) -> None:
        """Give it a good one again."""
        carrier = self._rough.pop(name)
        carrier.kill()
        carrier.communicate()
        self._switch.ip("link", "del", f"plug{self._numbers[name]}")
        self._switch.ip("link", "set", f"port{self._numbers[name]}", "master", "switch")
        _run(*self._spaces[name].within, *_CABLE, "usual", "eth0")

    def narrow(self, name: str, kbit_s: int) -> None:
        """Let no more than that through the cable of a host, not this machine, in each direction. What waits longer
        than 400 ms for it is lost. Raises CalledProcessError, and then it is as wide as before."""
        bucket = ("root", "tbf", "rate", f"{kbit_s}kbit", "burst", "32kbit", "latency", "400ms")
        self._narrow.add(name)
        try:
            for within, device in self._ends(name):
                _run(*within, "tc", "qdisc", "replace", "dev", device, *bucket)
        except BaseException:
            self.widen(name)
            raise

    def widen(self, name: str) -> None:
        self._narrow.discard(name)
        for within, device in self._ends(name):
            _run(*within, "tc", "qdisc", "del", "dev", device, "root", check=False)

    def _ends(self, name: str) -> tuple[tuple[tuple[str, ...], str], ...]:
        """Both ends of a host's cable: where to run a command, and how the device is called there."""
        return (self._spaces[name].within, "eth0"), (self._switch.within, f"port{self._numbers[name]}")

    def _direct(self, a: str, b: str, hardware: str) -> None:
        """What a sends to b goes there. Permanent, so that nothing which b says changes it."""
        device = self._link if a == OUTSIDE else "eth0"
        self._ip(a, "neigh", "replace", self.address(b), "lladdr", hardware, "nud", "permanent", "dev", device)

    def _plug(self, name: str) -> None:
        """A cable from a host to the switch."""
        device = self._link if name == OUTSIDE else "eth0"
        there, switch = f"port{self._numbers[name]}", str(self._switch.pid)
        hardware = ("address", self._hardware(name))
        self._ip(name, "link", "add", device, *hardware, "type", "veth", "peer", "name", there, "netns", switch)
        self._switch.ip("link", "set", there, "master", "switch", "up")
        self._ip(name, "addr", "add", f"{self.address(name)}/24", "dev", device)
        self._ip(name, "link", "set", device, "up")

    def _hardware(self, name: str) -> str:
        return f"02:00:00:00:00:{self._numbers[name]:02x}"

    def _ip(self, name: str, *words: str) -> None:
        if name == OUTSIDE:
            _run("ip", *words)
        else:
            self._spaces[name].ip(*words)


class _Space:
    """A network namespace, and the process that holds it."""

    def __init__(self) -> None:
        hold = ("unshare", "--net", "sh", "-c", "echo held; exec sleep infinity")
        self._holder = subprocess.Popen(
            (*PREFIX, *hold),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.pid = self._holder.pid
        self.within = ("nsenter", f"--net=/proc/{self.pid}/ns/net")
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if not self._holder.stdout.readline():
            raise subprocess.CalledProcessError(self._holder.wait(), hold, stderr=self._holder.stderr.read())

    def ip(self, *words: str) -> None:
        _run(*self.within, "ip", *words)

    def await_up(self, device: str) -> None:
        """Until the kernel says that it carries. Raises CalledProcessError."""
        words = ("ip", "-o", "link", "show", device)
        until_s = time.monotonic() + UP_S
        while "state UP" not in (said := _run(*self.within, *words)):
            if time.monotonic() > until_s:
                raise subprocess.CalledProcessError(1, words, stderr=f"{device} does not come up: {said}")
            time.sleep(0.01)  # the kernel says so when it has the time

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


def _pairs(some: Iterable[str], others: Iterable[str], one_way: bool) -> set[tuple[str, str]]:
    there, back = list(some), list(others)
    pairs = {(a, b) for a in there for b in back if a != b}
    return pairs if one_way else pairs | {(b, a) for a, b in pairs}


def _await_word(carrier: subprocess.Popen[str]) -> None:
    """A line of the program that carries. Raises CalledProcessError where it has ended instead."""
    assert carrier.stdout is not None
    if not carrier.stdout.readline():
        raise subprocess.CalledProcessError(1, carrier.args, stderr=carrier.communicate()[1])


def _run(*words: str, check: bool = True) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=check).stdout
