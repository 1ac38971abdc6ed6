"""Every call to a replica of a fleet passes here: by the role and the name in the caller's certificate, and at a
bounded pace.

Without certificates everybody may do everything, as on one machine; the pace is bounded all the same. The replica of
one machine's job (elastic/rendezvous.py) has no guard: nobody but this machine reaches it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from elastic.doors import roles
from elastic.doors.refusals import Refusals
from elastic.doors.roles import Identity

MESSAGES_A_SECOND = 5000.0
"""Of one caller, over all its calls. Honest ones send a few per worker; more costs a replica its core."""

BURST = 10000.0
CALLERS_KEPT = 4096

_Behaviour = Callable[[Any, Any], Awaitable[Any]]


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic when it runs
    """asks_roles: whether callers have certificates. seen(identity, certificate): told of each call that is let in."""

    def __init__(
        self,
        refusals: Refusals,
        *,
        asks_roles: bool,
        seen: Callable[[Identity, bytes], None] = lambda identity, certificate: None,
    ) -> None:
        self._refusals = refusals
        self._asks_roles = asks_roles
        self._seen = seen
        self._paces: OrderedDict[str, Pace] = OrderedDict()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        if handler.unary_unary is not None:
            behaviour, make = self._one(method, handler.unary_unary), grpc.unary_unary_rpc_method_handler
        elif handler.stream_stream is not None:
            behaviour, make = self._many(method, handler.stream_stream), grpc.stream_stream_rpc_method_handler
        else:
            raise NotImplementedError(f"{method}: the guard knows calls of one message and of streams both ways")
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    def _one(self, method: str, behaviour: _Behaviour) -> _Behaviour:
        async def guarded(request: Any, context: Any) -> Any:
            identity = await self._admit(method, context)
            await self._pace_of(identity, context).take()
            await self._check(method, identity, request, context)
            return await behaviour(request, context)

        return guarded

    def _many(self, method: str, behaviour: _Behaviour) -> _Behaviour:
        async def guarded(requests: AsyncIterator[Any], context: Any) -> Any:
            identity = await self._admit(method, context)
            return await behaviour(self._paced(method, identity, requests, context), context)

        return guarded

    async def _paced(
        self, method: str, identity: Identity | None, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        """Who sends more is read more slowly, until his own buffers are full."""
        pace, first = self._pace_of(identity, context), True
        async for request in requests:
            await pace.take()
            if first:
                await self._check(method, identity, request, context)
                first = False
            yield request

    async def _admit(self, method: str, context: Any) -> Identity | None:
        if not self._asks_roles:
            return None
        shown = context.auth_context()
        names = [name.decode(errors="replace") for name in shown.get("x509_subject_alternative_name", ())]
        identity = roles.from_uris(names)
        if objection := roles.objection_to_call(identity, method):
            await self._refuse(method, identity, objection, context)
        assert identity is not None
        self._seen(identity, bytes(next(iter(shown.get("x509_pem_cert", ())), b"")))
        return identity

    async def _check(self, method: str, identity: Identity | None, request: Any, context: Any) -> None:
        """What only the first message tells."""
        if identity is None:
            return
        objection = ""
        if identity.role is roles.Role.AGENT and request.WhichOneof("content") == "hello":
            objection = roles.objection_to_name(identity, request.hello.node)
        elif method.endswith("/Ask"):
            objection = roles.objection_to_question(identity, request.WhichOneof("content"))
        if objection:
            await self._refuse(method, identity, objection, context)

    async def _refuse(self, method: str, identity: Identity | None, because: str, context: Any) -> None:
        caller = str(identity) if identity is not None else ""
        self._refusals.say(because, at=method, caller=caller, peer=_address(context))
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, because)

    def _pace_of(self, identity: Identity | None, context: Any) -> Pace:
        """One for each certificate, or else for each address."""
        caller = str(identity) if identity is not None else _address(context).rpartition(":")[0]
        pace = self._paces.setdefault(caller, Pace(MESSAGES_A_SECOND, BURST))
        self._paces.move_to_end(caller)
        if len(self._paces) > CALLERS_KEPT:
            self._paces.popitem(last=False)
        return pace


class Pace:
    """So many in a second, and `burst` at once after a rest."""

    def __init__(self, a_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._a_second, self._burst, self._clock = a_second, burst, clock
        self._left, self._at_s = burst, clock()

    def due_s(self) -> float:
        """Count one; how long to wait before it may pass."""
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._at_s) * self._a_second) - 1
        self._at_s = now_s
        return max(0.0, -self._left / self._a_second)

    async def take(self) -> None:
        if wait_s := self.due_s():
            await asyncio.sleep(wait_s)


def _address(context: Any) -> str:
    """ "10.0.0.7:51034" """
    return str(context.peer()).partition(":")[2]
