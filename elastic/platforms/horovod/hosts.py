"""Lists of hosts and their slots: those of -H and --hostfile, and those that a discovery script prints. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from elastic.errors import ConfigError

LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names of this machine, besides its own."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_HOST_LINE = re.compile(r"(?P<host>\S+?)(?:\s+slots\s*=\s*|:)(?P<slots>\S+)|(?P<alone>\S+)")


def of_option(text: str) -> dict[str, int]:
    """ "host1:2,host2:4" -> host -> slots. Raises ConfigError."""
    return _checked(text.split(","), f"-H {text}", default=None)


def of_file(text: str, path: str) -> dict[str, int]:
    """A hostfile: lines "host slots=2" or "host:2"; empty lines and those that begin with # are left out."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return _checked([line for line in lines if line], f"--hostfile {path}", default=None)


def of_script(text: str, script: str, slots: int | None) -> dict[str, int]:
    """What a discovery script prints: lines "host:2", or "host" for the default, `--slots-per-host`. No line: there is
    no host. Raises ConfigError for anything else, and for a host twice."""
    return _checked([line.strip() for line in text.splitlines() if line.strip()], script, default=slots)


def _checked(entries: Sequence[str], source: str, default: int | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in entries:
        host, slots = _entry(entry.strip(), source, default)
        if host in found:
            raise ConfigError(f"{source}: {host} is there twice; name each host once, with all its slots")
        found[host] = slots
    return found


def _entry(entry: str, source: str, default: int | None) -> tuple[str, int]:
    match = _HOST_LINE.fullmatch(entry)
    host = "" if match is None else match["host"] or match["alone"]
    count = None if match is None else match["slots"]
    if not _NAME.fullmatch(host):
        raise ConfigError(f"{source}: {entry!r} is no host; write host:slots, as in gpu-1:4")
    if count is None:
        if default is None:
            raise ConfigError(f"{source}: {host} has no number of slots; write {host}:4, or give --slots-per-host")
        return host, default
    # Python refuses to read a number of thousands of digits.
    if not count.isdecimal() or len(count) > 9 or not 1 <= int(count) <= 1024:
        raise ConfigError(f"{source}: {entry!r} must have a number of slots from 1 to 1024; write {host}:4")
    return host, int(count)


def check_enough(hosts: Mapping[str, int], workers: int) -> None:
    """Raises ConfigError if the hosts have fewer slots than there are to be workers."""
    if (slots := sum(hosts.values())) < workers:
        raise ConfigError(f"-np {workers}, and the hosts have {slots} slots: give more hosts, or -np {slots}")


class Blacklist:
    """Hosts that are left for a while, because they have lost a worker."""

    def __init__(self, cooldown_s: tuple[float, float] | None) -> None:
        """cooldown_s: for how long at first, doubled with each loss of the host, and at most; None: hosts stay."""
        self._cooldown_s = cooldown_s
        self._losses: dict[str, int] = {}
        self._until_s: dict[str, float] = {}

    def lost(self, host: str, now_s: float) -> float:
        """A host has lost a worker. Returns for how many seconds it is left."""
        if self._cooldown_s is None:
            return 0.0
        first_s, most_s = self._cooldown_s
        wait_s = min(most_s, first_s * 2.0 ** min(self._losses.get(host, 0), 60))
        self._losses[host] = self._losses.get(host, 0) + 1
        self._until_s[host] = now_s + wait_s
        return wait_s

    def usable(self, listed: Mapping[str, int], now_s: float) -> dict[str, int]:
        """The hosts that are not left now."""
        return {host: slots for host, slots in listed.items() if now_s >= self._until_s.get(host, -math.inf)}

    def has_all(self, listed: Mapping[str, int]) -> bool:
        """Whether there are hosts, and all of them are left for ever."""
        return bool(listed) and all(self._until_s.get(host) == math.inf for host in listed)


def limited(
    hosts: Mapping[str, int], workers: int, present: Mapping[str, int] = MappingProxyType({}), least: int = 1
) -> dict[str, int]:
    """The first hosts, with as many slots as there are to be workers at most. present: those that have workers now, in
    the order in which they began, and with how many slots. They come first, whatever the order of the list is, and keep
    their slots: another number would begin them anew. Unless fewer workers than `least` would be left."""
    found: dict[str, int] = {}
    for host, slots in {**{host: slots for host, slots in present.items() if host in hosts}, **hosts}.items():
        if (left := workers - sum(found.values())) > 0:
            found[host] = min(slots, present.get(host, slots), left)
    if present and sum(found.values()) < least:
        return limited(hosts, workers)
    return found


@dataclass(frozen=True, slots=True)
class Changes:
    """From one list of hosts to the next. A host whose number of slots has changed is in both."""

    ends: tuple[str, ...]
    begins: tuple[str, ...]


def changes(before: Mapping[str, int], now: Mapping[str, int]) -> Changes:
    """What ends and what begins. Hosts that are in both lists, with the same slots, are left as they are."""
    return Changes(
        tuple(host for host, slots in before.items() if now.get(host) != slots),
        tuple(host for host, slots in now.items() if before.get(host) != slots),
    )
