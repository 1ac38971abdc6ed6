"""The check of every call to a replica of a fleet, and to an agent: the role and the name in the caller's certificate,
the number and rate of its calls and messages, and their size.

Without certificates every caller may call every method, as on one machine; numbers and sizes are limited all the same.
A caller over an agent's socket has no name, as only processes of the agent's own user can call: there each call has a
limit of its own.

gRPC reads the single message of a call before it tells the server of the call. So such calls are taken as streams of
one message here, and a caller that may not call at all is refused before its message is read. gRPC's own limit of a
message ends the call without telling this side, so there is a lower limit (codec.WORD_LIMIT), which can name the
caller.

The replica of one machine's job (elastic/rendezvous/server.py) has no such check: only this machine reaches it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from elastic.security import roles
from elastic.security.rate_limit import BURST, CALLS_AT_ONCE, WORDS_A_SECOND, CallerLimits, CallRate
from elastic.security.rejection_log import RejectionLog
from elastic.security.roles import Caller, Identity
from elastic.wire import codec

_Behaviour = Callable[[Any, Any], Awaitable[Any]]
_Reader = Callable[[bytes], Any]

_TOO_MANY = grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True, slots=True)
class _Call:
    """One call. peer: the caller's address, such as "10.0.0.7:51034"; "" over a socket of this machine."""

    method: str
    identity: Identity | None
    peer: str
    context: Any
    pace: CallRate


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic when it runs
    """Checks calls. asks_roles: callers must have certificates. seen(identity, certificate): called for each call that
    is let in."""

    def __init__(
        self,
        refusals: RejectionLog,
        *,
        asks_roles: bool,
        seen: Callable[[Identity, bytes], None] = lambda identity, certificate: None,
    ) -> None:
        self._refusals = refusals
        self._asks_roles = asks_roles
        self._seen = seen
        self._callers = CallerLimits()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method, read = str(handler_call_details.method), handler.request_deserializer
        if handler.unary_unary is not None:
            behaviour, make = self._one(method, handler.unary_unary, read), grpc.stream_unary_rpc_method_handler
        elif handler.stream_stream is not None:
            behaviour, make = self._many(method, handler.stream_stream, read), grpc.stream_stream_rpc_method_handler
        else:
            raise NotImplementedError(f"{method}: the guard knows calls of one message and of streams both ways")
        return make(behaviour, None, handler.response_serializer)

    def _one(self, method: str, behaviour: _Behaviour, read: _Reader) -> _Behaviour:
        async def guarded(messages: AsyncIterator[bytes], context: Any) -> Any:
            async with self._let_in(method, context) as call:
                if not call.pace.allows():
                    await self._refuse(
                        call, f"more than {WORDS_A_SECOND:.0f} calls a second; ask less often", _TOO_MANY
                    )
                async for message in self._whole(call, messages):
                    request = await self._read(call, message, read)
                    await self._check(call, request)
                    return await behaviour(request, context)
                await context.abort(grpc.StatusCode.CANCELLED, "there was no message")

        return guarded

    def _many(self, method: str, behaviour: _Behaviour, read: _Reader) -> _Behaviour:
        async def guarded(messages: AsyncIterator[bytes], context: Any) -> Any:
            async with self._let_in(method, context) as call:
                return await behaviour(self._words(call, messages, read), context)

        return guarded

    async def _words(self, call: _Call, messages: AsyncIterator[bytes], read: _Reader) -> AsyncIterator[Any]:
        """Yield the messages of a stream. A caller that sends too many is read more slowly, until its own buffers are
        full."""
        first = True
        async for message in self._whole(call, messages):
            if wait_s := call.pace.due_s():
                self._say(call, f"more than {WORDS_A_SECOND:.0f} words a second; it is read more slowly", "slowed")
                await asyncio.sleep(wait_s)
            word = await self._read(call, message, read)
            if first:
                await self._check(call, word)
                first = False
            yield word

    async def _whole(self, call: _Call, messages: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the messages; if there is none, write the likely reason to the journal."""
        some = False
        try:
            async for message in messages:
                some = True
                yield message
        finally:
            if not some:
                limit = codec.MESSAGE_LIMIT >> 20
                self._say(call, f"its message has not come: the caller has left, or it is larger than {limit} MiB")

    @asynccontextmanager
    async def _let_in(self, method: str, context: Any) -> AsyncIterator[_Call]:
        peer = str(context.peer()).partition(":")[2]
        identity = identity_of(context) if self._asks_roles else None
        call = _Call(method, identity, peer, context, CallRate(WORDS_A_SECOND, BURST))
        if self._asks_roles:
            if objection := roles.objection_to_call(identity, method):
                await self._refuse(call, objection)
            assert identity is not None
            self._seen(identity, bytes(next(iter(context.auth_context().get("x509_pem_cert", ())), b"")))
        name = str(identity or peer.rpartition(":")[0])
        with self._callers.call(name) as caller:
            if caller is None:
                await self._refuse(call, f"more than {CALLS_AT_ONCE} calls at once; end some first", _TOO_MANY)
            elif name:
                call = _Call(method, identity, peer, context, caller.pace)
            yield call

    async def _read(self, call: _Call, message: bytes, read: _Reader) -> Any:
        if len(message) > codec.WORD_LIMIT:
            await self._refuse(call, f"a message larger than {codec.WORD_LIMIT >> 20} MiB", _TOO_MANY)
        try:
            return read(message)
        except DecodeError:
            await self._refuse(call, "a message that cannot be read", grpc.StatusCode.INVALID_ARGUMENT)

    async def _check(self, call: _Call, request: Any) -> None:
        """Check what only the first message tells: the node's name, or the question."""
        identity, objection = call.identity, ""
        if identity is None:
            return
        if identity.role in (roles.Role.AGENT, roles.Role.WORKER) and request.WhichOneof("content") == "hello":
            objection = roles.objection_to_name(identity, request.hello.node)
        elif call.method.endswith("/Ask"):
            objection = roles.objection_to_question(identity, request.WhichOneof("content"))
        if objection:
            await self._refuse(call, objection)

    async def _refuse(
        self, call: _Call, because: str, code: grpc.StatusCode = grpc.StatusCode.PERMISSION_DENIED
    ) -> None:
        """Refuse the call. Raises what ends it."""
        self._say(call, because)
        await call.context.abort(code, because)

    def _say(self, call: _Call, because: str, event: str = "refused") -> None:
        caller = str(call.identity) if call.identity is not None else ""
        self._refusals.say(because, at=call.method, caller=caller, peer=call.peer, event=event)


def identity_of(context: Any) -> roles.Identity | None:
    """The caller's identity; None without a certificate that names a role."""
    shown = context.auth_context().get("x509_subject_alternative_name", ())
    return roles.from_uris([name.decode(errors="replace") for name in shown])


def caller_of(context: Any) -> Caller:
    """The caller of a gRPC call. context: the call's."""
    identity, address = identity_of(context), str(context.peer()).partition(":")[2]
    return Caller(identity.name, str(identity.role), address) if identity is not None else Caller("", "", address)
