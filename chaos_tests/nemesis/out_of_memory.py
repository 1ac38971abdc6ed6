"""A process that the kernel ends because there is no memory for it: in a memory cgroup of its own, without any room.

What it holds stays charged to the cgroup it was in; the next page that it asks for is one too many. Tried with cgroups
of version 1; those of version 2 have other names for the same.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chaos_tests.nemesis import signals
from chaos_tests.nemesis.signals import Impossible

ROOT = Path("/sys/fs/cgroup")
ROOM_BYTES = 64 << 10
"""A few pages, so that the kernel can deliver what it has begun."""
WAIT_S = 10.0
"""For a worker that waits for others and asks for nothing meanwhile."""


@dataclass(frozen=True, slots=True)
class _Names:
    hierarchy: str
    limit: str


VERSIONS = (_Names("memory", "memory.limit_in_bytes"), _Names("", "memory.max"))


def starve(pid: int, root: Path = ROOT) -> int:
    """Returns a moment of time.monotonic_ns() at which it was still there, just before it was killed. Raises Impossible
    if there can be no such cgroup, or it asks for no memory; then it goes on as before."""
    hierarchy, names = _hierarchy(root)
    home = hierarchy / _where(pid, names).lstrip("/")
    cell = _cell(hierarchy, names)
    try:
        (cell / names.limit).write_text(str(ROOM_BYTES))
        (cell / "cgroup.procs").write_text(str(pid))
        return _until_killed(pid)
    except OSError as error:
        raise Impossible(f"process {pid} cannot be put into a memory cgroup: {error.strerror}") from error
    except BaseException:  # an interrupt too: a cgroup with a process in it cannot be removed
        with contextlib.suppress(OSError):  # it may have ended just now
            (home / "cgroup.procs").write_text(str(pid))
        raise
    finally:
        _remove(cell)


@contextlib.contextmanager
def limited(limit_bytes: int, root: Path = ROOT) -> Iterator[Path]:
    """A memory cgroup with this limit, whose file cgroup.procs takes processes; all in it have ended afterwards. Raises
    Impossible."""
    hierarchy, names = _hierarchy(root)
    cell = _cell(hierarchy, names)
    try:
        (cell / names.limit).write_text(str(limit_bytes))
        yield cell
    finally:
        _remove(cell)


def why_not(root: Path = ROOT) -> str:
    """Why no process can be starved here, or nothing."""
    try:
        _remove(_cell(*_hierarchy(root)))
    except Impossible as error:
        return str(error)
    return ""


def _hierarchy(root: Path) -> tuple[Path, _Names]:
    """Where the memory cgroups are, and how they call things. Raises Impossible."""
    for names in VERSIONS:
        hierarchy = root / names.hierarchy
        if any((hierarchy / directory / names.limit).exists() for directory in ("", _where(os.getpid(), names)[1:])):
            return hierarchy, names
    raise Impossible(f"no memory cgroups below {root}")


def _cell(hierarchy: Path, names: _Names) -> Path:
    """A new one, beside all others. Raises Impossible."""
    cell = hierarchy / f"chaos-{secrets.token_hex(4)}"
    try:
        cell.mkdir()
    except OSError as error:
        raise Impossible(f"no memory cgroup can be made in {hierarchy}: {error.strerror} (it needs root)") from error
    if not (cell / names.limit).exists():
        _remove(cell)
        raise Impossible(f"cgroups in {hierarchy} do not limit memory")
    return cell


def _where(pid: int, names: _Names) -> str:
    """In which cgroup a process is; "/" is the outermost."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError as error:
        raise Impossible(f"process {pid} has just ended") from error
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if names.hierarchy in controllers.split(","):
            return path
    return "/"


def _until_killed(pid: int) -> int:
    until_s = time.monotonic() + WAIT_S
    while True:
        alive_ns = time.monotonic_ns()
        if signals.state(pid) in ("", "Z", "X"):
            return alive_ns
        if time.monotonic() > until_s:
            raise Impossible(f"process {pid} asked for no memory for {WAIT_S:.0f} s")
        time.sleep(signals.PROCESS_STATE_POLL_S)  # the kernel tells nobody but the parent


def _remove(cell: Path) -> None:
    """Once the kernel has let go of who was in it."""
    until_s = time.monotonic() + signals.SEEN_S
    while True:
        try:
            cell.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(signals.PROCESS_STATE_POLL_S)  # the kernel tells nobody
