"""The process of a dashboard: it listens on loopback, prints its address, and serves until it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from elastic.errors import ConfigError
from elastic.process import stop_signals
from elastic.rendezvous.endpoint import is_loopback, parse, split

if TYPE_CHECKING:
    from elastic.observability.dashboard.access import Access
    from elastic.observability.dashboard.app import Dashboard

Polls: TypeAlias = "Callable[[], Coroutine[Any, Any, None]]"
"""Polls the sources until it is cancelled."""

HOST = "127.0.0.1"
PORT = 7171

CLOSE_S = 2.0
"""Seconds for the last events to reach the pages."""


def listen(chosen: str | None) -> socket.socket:
    """A listening socket at [HOST:]PORT of loopback; None: at the default port, or a free one if that is taken. Raises
    ConfigError."""
    if chosen is None:
        try:
            return socket.create_server((HOST, PORT))
        except OSError:
            return socket.create_server((HOST, 0))
    address, *others = parse("--listen", f"{HOST}:{chosen}" if chosen.isdecimal() else chosen, any_port=True)
    host, port = split(address)
    if others or not is_loopback(host):
        raise ConfigError(
            f"--listen {chosen:.80}: the dashboard speaks plain HTTP, so it listens on loopback only; from another "
            f"machine, reach it by ssh -L {port}:{HOST}:{port}, or put a proxy with TLS before it"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"--listen {address}: {error.strerror}; give another port, or 0 for a free one") from error


def serve(
    listening: socket.socket, make: Callable[[Access], Dashboard], polls: Polls, say: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or SIGINT, or this process's parent asks for the end. make: the dashboard, on the event loop.
    polls: runs beside it. say: gets the address to open."""
    from elastic.observability.dashboard.access import Access, hosts_at

    host, port = listening.getsockname()[:2]
    access = Access(hosts_at(host, port), port)
    shown = f"[{host}]" if ":" in host else host
    asyncio.run(_serve(listening, access, make, polls, lambda: say(f"http://{shown}:{port}/?key={access.key}")))


async def _serve(
    listening: socket.socket,
    access: Access,
    make: Callable[[Access], Dashboard],
    polls: Polls,
    ready: Callable[[], None],
) -> None:
    import uvicorn

    from elastic.observability.dashboard import connections

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # this module has the handlers

    dashboard = make(access)
    server = Server(connections.config(dashboard.app(), CLOSE_S))
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for sent in stop_signals.obeyed():
        loop.add_signal_handler(sent, asked.set)
    stop_signals.begin()
    polling = asyncio.create_task(polls())
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    waiting = asyncio.create_task(asked.wait())
    ready()
    try:
        await asyncio.wait((polling, serving, waiting), return_when=asyncio.FIRST_COMPLETED)
        polling.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await dashboard.close()
        server.should_exit = True
        await serving
    finally:
        waiting.cancel()
        await asyncio.gather(polling, waiting, return_exceptions=True)
    if not polling.cancelled() and (error := polling.exception()) is not None:
        raise error
