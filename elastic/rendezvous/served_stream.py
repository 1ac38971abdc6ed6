"""A stream that this process serves: orders are sent from its outbox, words are heard, and both end together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import grpc

from elastic.records.journal import Journal
from elastic.rendezvous.leader_stream import speak
from elastic.wire import codec

Order = TypeVar("Order")

OUTBOX_LIMIT = 4_096
"""Most orders that wait for one reader; a reader that is further behind is cut off, and connects again."""


@dataclass(eq=False, slots=True)
class ServedStream(Generic[Order]):
    """outbox: the orders that `serve` writes to the stream. refused_event, broke_event: events of the journal, for a
    word that cannot be read, and for a connection that fails."""

    refused_event: ClassVar[str]
    broke_event: ClassVar[str]
    outbox: asyncio.Queue[Order] = field(default_factory=lambda: asyncio.Queue(OUTBOX_LIMIT), kw_only=True)
    ended: asyncio.Event = field(default_factory=asyncio.Event, kw_only=True)
    """Set when this side ends the stream, when the other side says goodbye, and when the stream is over."""

    def post(self, order: Order) -> None:
        """Queue an order. A client that does not read is cut off."""
        try:
            self.outbox.put_nowait(order)
        except asyncio.QueueFull:
            self.ended.set()


async def serve(
    context: Any,
    stream: ServedStream[Any],
    hearing: Coroutine[Any, Any, None],
    leave: Callable[[], None],
    journal: Journal,
    **fields: Any,
) -> None:
    """Serve the stream until one side ends it. hearing: hears the words until there are no more; its WireError is sent
    to the other side. leave: takes the stream off its list. fields: the other side, for the journal."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(hearing), asyncio.create_task(stream.ended.wait())]
    try:
        # The metadata go with the first write. If `speak` were cancelled in it, gRPC would send them once more with the
        # status, and the call would never end on the other side (GRPC_CALL_ERROR_TOO_MANY_OPERATIONS).
        if stream.outbox.empty():
            await context.send_initial_metadata(())
        else:
            await context.write(stream.outbox.get_nowait())
        tasks.append(asyncio.create_task(speak(context, stream.outbox)))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leave()  # before anything is awaited: gRPC may cancel this call in the same moment
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, codec.WireError):
            journal.write(stream.refused_event, because=str(result), **fields)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(result))
        elif isinstance(result, Exception):
            journal.write(stream.broke_event, because=repr(result), **fields)
