"""Where the processes of a cluster run: each of its hosts has an address of its own."""

from __future__ import annotations

import random
from typing import Protocol

PREFIX = ("setpriv", "--pdeathsig", "KILL")
"""Before each command: its process ends with the thread that started it, whatever ends that."""


class Hosts(Protocol):
    """Hosts that are made one after the other, by name, and stay for as long as all of them do."""

    @property
    def outside(self) -> str:
        """The address of the harness, and of an operator, on the network of these hosts."""

    def add(self, name: str) -> str:
        """Make a host. Returns its address."""

    def address(self, name: str) -> str: ...

    def within(self, name: str) -> tuple[str, ...]:
        """Put before a command to run it on that host."""


class Loopback:
    """Hosts in name only: loopback addresses of this machine, which need no rights and cannot be cut off."""

    outside = "127.0.0.1"

    def __init__(self) -> None:
        source = random.SystemRandom()
        self._network = f"127.{source.randrange(1, 255)}.{source.randrange(1, 255)}"
        self._names: list[str] = []

    def add(self, name: str) -> str:
        if name not in self._names:
            self._names.append(name)
        return self.address(name)

    def address(self, name: str) -> str:
        return f"{self._network}.{self._names.index(name) + 1}"

    def within(self, name: str) -> tuple[str, ...]:
        return ()
