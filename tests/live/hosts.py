"""Hosts with addresses of their own on this machine: network namespaces on one bridge, with no loopback inside."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from types import TracebackType
from typing import Self


def why_not() -> str:
    """Why there can be none here, or nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "`ip` is not installed"
    try:
        with Hosts("a"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces with bridges here: {error.stderr.strip()}"


class Hosts:
    """Context manager. gateway: this machine's address among them."""

    def __init__(self, *names: str) -> None:
        source = random.SystemRandom()
        self._tag = f"el{source.randrange(16**6):06x}"
        self._network = f"10.{source.randrange(200, 255)}.{source.randrange(1, 255)}"
        self._names = names
        self.gateway = f"{self._network}.1"

    def __enter__(self) -> Self:
        try:
            bridge = f"{self._tag}b"
            _ip("link", "add", bridge, "type", "bridge")
            _ip("addr", "add", f"{self.gateway}/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            for name in self._names:
                space, ours, theirs = self._space(name), self._link(name), f"{self._link(name)}p"
                _ip("netns", "add", space)
                _ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
                _ip("link", "set", theirs, "netns", space)
                _ip("link", "set", ours, "master", bridge, "up")
                _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", theirs)
                _ip("-n", space, "link", "set", theirs, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._remove()

    def address(self, name: str) -> str:
        return f"{self._network}.{10 + self._names.index(name)}"

    @property
    def nobody(self) -> str:
        """An address among them that no host has."""
        return f"{self._network}.99"

    def within(self, name: str) -> tuple[str, ...]:
        """Put before a command to run it on that host."""
        return ("ip", "netns", "exec", self._space(name))

    def cut(self, name: str) -> None:
        """Unplug that host."""
        _ip("link", "set", self._link(name), "down")

    def heal(self, name: str) -> None:
        _ip("link", "set", self._link(name), "up")

    def _space(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _link(self, name: str) -> str:
        return f"{self._tag}{self._names.index(name)}"

    def _remove(self) -> None:
        for name in self._names:
            subprocess.run(("ip", "netns", "del", self._space(name)), stderr=subprocess.DEVNULL, check=False)
            subprocess.run(("ip", "link", "del", self._link(name)), stderr=subprocess.DEVNULL, check=False)
        subprocess.run(("ip", "link", "del", f"{self._tag}b"), stderr=subprocess.DEVNULL, check=False)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), capture_output=True, text=True, check=True)
