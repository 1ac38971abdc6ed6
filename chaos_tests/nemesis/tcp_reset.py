"""TCP connections of another process, reset: the kernel sends a reset to the peer, and both ends are told of it.

No packet is forged. A descriptor of the process is borrowed (pidfd_getfd, Linux 5.6), and its socket is disconnected as
connect(2) says of AF_UNSPEC: which ends a connection at once, by a reset.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

from chaos_tests.nemesis.signals import Impossible

PIDFD_GETFD = 438
"""The same on all architectures."""
ESTABLISHED = "01"
"""A state, as /proc/net/tcp has it."""

_SOCKET = re.compile(r"socket:\[(\d+)]")
_UNSPECIFIED = bytes(16)
"""A struct sockaddr of AF_UNSPEC."""

_libc = ctypes.CDLL(None, use_errno=True)


def reset_connections(pid: int) -> int:
    """End every TCP connection of that process. Returns how many there were. Raises Impossible if this process may not,
    or if that one has ended."""
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        raise Impossible(f"process {pid} has just ended: {error}") from error
    try:
        return sum(_reset(process, number) for number in _connections(pid))
    except PermissionError as error:
        raise Impossible(f"this process may not look at the connections of {pid}: {error}") from error
    finally:
        os.close(process)


def _connections(pid: int) -> Iterator[int]:
    """Its descriptors of established connections."""
    established = set[str]()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
            established.update(words[9] for words in map(str.split, lines) if words[3] == ESTABLISHED)
    with contextlib.suppress(FileNotFoundError):  # it has just ended
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found = _SOCKET.fullmatch(os.readlink(path))
                if found is not None and found[1] in established:
                    yield int(path.name)


def _reset(process: int, number: int) -> bool:
    """False if it has ended already, or cannot be reset just now."""
    borrowed = _libc.syscall(PIDFD_GETFD, process, number, 0)
    if borrowed < 0:
        if (code := ctypes.get_errno()) in (errno.EBADF, errno.ESRCH):
            return False
        raise Impossible(f"a descriptor of another process cannot be borrowed: {os.strerror(code)}")
    try:
        if _libc.connect(borrowed, _UNSPECIFIED, len(_UNSPECIFIED)) == 0:
            return True
        if (code := ctypes.get_errno()) == errno.EBUSY:  # some kernels, while a thread waits in it
            return False
        raise Impossible(f"a connection cannot be reset: {os.strerror(code)}")
    finally:
        os.close(borrowed)
