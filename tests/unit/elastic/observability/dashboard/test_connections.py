"""Connections of strangers, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from elastic.observability.dashboard import connections, server

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def answered(port: int) -> bool:
    """Whether a new connection gets an answer; else it is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(REQUEST)
        return (await reader.readline()).startswith(b"HTTP/1.1 200")
    except ConnectionError:
        return False
    finally:
        writer.close()


async def test_who_asks_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 3)
    monkeypatch.setattr(connections, "REQUEST_S", 0.5)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("here")(scope, receive, send)

    listening = server.listen("0")
    port = listening.getsockname()[1]
    serving = uvicorn.Server(connections.config(app, 2.0))
    task = asyncio.create_task(serving.serve(sockets=[listening]))
    while not serving.started:
        await asyncio.sleep(0.01)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    for at, begun in enumerate((b"", b"GET / HT", REQUEST)):
        held[at][1].write(begun)
    assert (await held[2][0].readline()).startswith(b"HTTP/1.1 200")
    assert not await answered(port)
    for reader, _ in held:
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(reader.read(), 30)
            raise ConnectionError  # closed in order
    assert await answered(port)
    serving.should_exit = True
    await task
    for _, writer in held:
        writer.close()


async def test_who_asks_much_and_takes_no_answer_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 1)
    monkeypatch.setattr(connections, "REQUEST_S", 0.3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("x" * (1 << 20))(scope, receive, send)

    listening = server.listen("0")
    port = listening.getsockname()[1]
    serving = uvicorn.Server(connections.config(app, 2.0))
    task = asyncio.create_task(serving.serve(sockets=[listening]))
    while not serving.started:
        await asyncio.sleep(0.01)
    with socket.create_connection(("127.0.0.1", port)) as held:
        held.sendall(REQUEST * 100)
        async with asyncio.timeout(30):
            while not await answered(port):
                await asyncio.sleep(0.05)
    serving.should_exit = True
    await task
