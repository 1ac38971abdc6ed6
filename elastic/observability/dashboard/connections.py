"""Connections to the dashboard.

Any user of this machine may open some, without the key. They are bounded in number, and one that asks nothing, or takes
nothing of an answer, is closed: else they would take all descriptors of the process, and each refused one would be a
traceback in its log.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS = 256
"""Most at once; a browser has up to 6."""

BACKLOG = 64
"""asyncio accepts so many before it looks at any of them."""

REQUEST_S = 15.0
"""Seconds in which a connection has to make its next request, or to take a part of its answer."""


class BoundedProtocol(H11Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            transport.abort()
        else:
            self.loop.call_later(REQUEST_S, self._look, None)

    def _look(self, before: Any, untaken: int = 0) -> None:
        """before: the request that it had answered, or was answering, at the last look. untaken: bytes of the answer
        that it had not taken then."""
        if self.transport.is_closing():
            return
        waits = self.transport.get_write_buffer_size()
        if self.cycle is before and (before is None or before.response_complete or 0 < waits == untaken):
            self.transport.abort()
        else:
            self.loop.call_later(REQUEST_S, self._look, self.cycle, waits)


def config(app: ASGIApp, close_s: float) -> uvicorn.Config:
    """close_s: seconds that answers, and pages that follow, get when the server ends."""
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        backlog=BACKLOG,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=round(close_s),
        h11_max_incomplete_event_size=1 << 15,
    )
