"""What a service manager is told of this process: sd_notify(3), the protocol of systemd's `Type=notify`.

A datagram of NAME=VALUE lines goes to the unix socket that NOTIFY_SOCKET names. Without the variable nobody is told,
and nothing fails. A manager that does not read is not waited for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time

SOCKET = "NOTIFY_SOCKET"
WATCHDOG = "WATCHDOG_USEC"
WATCHDOG_PID = "WATCHDOG_PID"

VARIABLES = (SOCKET, WATCHDOG, WATCHDOG_PID)
"""Set for one process: what it starts must not have them, or it could speak for it."""

_log = logging.getLogger(__name__)


def ready(status: str) -> None:
    """It serves, or serves again with other settings. status: a sentence for `systemctl status`."""
    _tell("READY=1", f"STATUS={status}")


def status(sentence: str) -> None:
    """What `systemctl status` shows from now on."""
    _tell(f"STATUS={sentence}")


def reloading() -> None:
    """It reads its settings again; `ready` ends that."""
    _tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def stopping(status: str, within_s: float) -> None:
    """It ends. within_s: seconds that it may take; a shorter TimeoutStopSec is extended to that."""
    _tell("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={round(within_s * 1e6)}")


async def keep_alive() -> None:
    """Tell the watchdog that the event loop turns, twice as often as it asks for. Never returns."""
    wanted_s = _watchdog_s()
    while wanted_s:
        _tell("WATCHDOG=1")
        await asyncio.sleep(wanted_s / 2)
    await asyncio.Event().wait()


def has_manager() -> bool:
    """Whether a service manager has started this process, and wants to be told."""
    return bool(os.environ.get(SOCKET))


def _watchdog_s() -> float:
    """Seconds of silence after which the manager ends this process; 0: it never does."""
    if os.environ.get(WATCHDOG_PID, str(os.getpid())) != str(os.getpid()):
        return 0.0
    try:
        return max(0.0, int(os.environ.get(WATCHDOG, "0")) / 1e6)
    except ValueError:
        return 0.0


def _tell(*lines: str) -> None:
    address = os.environ.get(SOCKET, "")
    if address[:1] not in ("/", "@"):  # "@": in the abstract namespace
        return
    data = "\n".join(line.replace("\n", " ") for line in lines)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as manager:
            manager.connect(f"\0{address[1:]}" if address.startswith("@") else address)
            manager.sendall(data.encode(errors="replace"))
    except OSError as error:
        _log.warning("%s %s is not told %s: %s", SOCKET, address, lines[0], error)
