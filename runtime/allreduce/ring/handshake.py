"""The messages between two workers before any data: who calls, for which job and generation, and the answer.

    called  -- challenge -->         a number that is used once
            <-- hello --------       who calls whom, the challenge, a number of the caller's own, a proof
            -- welcome -->           who was called, a proof; or why not

A message is a big-endian 4-byte length and that many bytes of JSON, at most MAX_BYTES. Both sides prove that they know
the generation's token, which is never sent: a proof is an HMAC of all messages so far, under that token. So an
overheard proof is useless in another connection. Nothing of a message is used before all of it is checked.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

VERSION = 2
MAX_BYTES = 64 * 1024
_LENGTH = struct.Struct(">I")
_MAX_TEXT = 4096

Purpose = Literal["ring", "copy"]


class HelloRefused(Exception):
    """One side has refused the other; the message is the reason, fit to be sent."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The caller's message. `to` is the worker that it wants: a port may have a new owner by now.

    plan: hash of the plan of that generation. challenge: the called worker's number. nonce: the caller's own number.
    """

    job: str
    generation: int
    worker_id: str
    to: str
    purpose: Purpose
    plan: str
    challenge: str = ""
    nonce: str = ""
    proof: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to a hello that was accepted.

    offer: rank 0's, which the transports of the others need to connect; else "".
    """

    generation: int
    worker_id: str
    plan: str
    offer: str = ""
    proof: str = ""


def new_challenge() -> str:
    return secrets.token_hex(16)


def proven_hello(hello: Hello, challenge: str, token: str) -> Hello:
    """The hello with its proof, in answer to a challenge."""
    answer = replace(hello, challenge=challenge, nonce=new_challenge(), proof="")
    return replace(answer, proof=_proof(token, "hello", _fields(answer)))


def is_proven(hello: Hello, token: str) -> bool:
    """Whether the caller knows the token. The sender of the challenge has to compare that itself."""
    return hmac.compare_digest(_proof(token, "hello", _fields(replace(hello, proof=""))), hello.proof)


def proven_welcome(welcome: Welcome, hello: Hello, token: str) -> Welcome:
    """The welcome with its proof, in answer to that hello."""
    return replace(welcome, proof=_welcome_proof(welcome, hello, token))


def _fields(message: Hello | Welcome) -> dict[str, object]:
    """By name. dataclasses.asdict copies each value deeply, which was half the CPU time of a handshake."""
    return {name: getattr(message, name) for name in message.__slots__}


def _welcome_proof(welcome: Welcome, hello: Hello, token: str) -> str:
    return _proof(token, "welcome", {**_fields(replace(welcome, proof="")), "hello": hello.proof})


def _proof(token: str, what: str, fields: dict[str, object]) -> str:
    said = json.dumps([what, VERSION, fields], sort_keys=True).encode()
    return hmac.new(token.encode(), said, hashlib.sha256).hexdigest()


def encode_challenge(challenge: str) -> bytes:
    return _encode({"v": VERSION, "challenge": challenge})


def decode_challenge(message: bytes) -> str:
    """Raises HelloRefused with the other side's reason, or for a malformed challenge."""
    return _text(_not_refused(message), "challenge")


def encode(message: Hello | Welcome) -> bytes:
    return _encode({"v": VERSION, **_fields(message)})


def encode_refusal(reason: str) -> bytes:
    return _encode({"v": VERSION, "refused": reason[:_MAX_TEXT]})


def decode_hello(message: bytes) -> Hello:
    """Raises HelloRefused for anything but a well-formed hello of this version."""
    hello = _parsed(Hello, _decode(message))
    if hello.purpose not in get_args(Purpose):
        raise HelloRefused(f"unknown purpose {hello.purpose!r}")
    return hello


def decode_answer(message: bytes) -> Welcome:
    """Raises HelloRefused with the other side's reason, or for a malformed answer."""
    return _parsed(Welcome, _not_refused(message))


def check_welcome(welcome: Welcome, hello: Hello, token: str) -> None:
    """Raise HelloRefused unless the answer is from the called worker, of the same plan, and proves the token."""
    if not hmac.compare_digest(_welcome_proof(welcome, hello, token), welcome.proof):
        raise HelloRefused("its token is not the generation's")
    if (welcome.worker_id, welcome.generation, welcome.plan) != (hello.to, hello.generation, hello.plan):
        raise HelloRefused(
            f"it answered as {welcome.worker_id}, generation {welcome.generation}, plan {welcome.plan!r}; "
            f"wanted {hello.to}, {hello.generation}, {hello.plan!r}"
        )


class Inbox:
    """Collects one message from a non-blocking socket, and reads no byte beyond it."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def read(self, sock: socket.socket) -> bytes | None:
        """The message once complete, None while the socket has no more.

        Raises EOFError if the other side closed first, OSError of the socket, HelloRefused for an excessive length.
        """
        while True:
            have = len(self._bytes)
            if have < _LENGTH.size:
                missing = _LENGTH.size - have
            else:
                (size,) = _LENGTH.unpack_from(self._bytes)
                if size > MAX_BYTES:
                    raise HelloRefused(f"message of {size} bytes, at most {MAX_BYTES} allowed")
                missing = _LENGTH.size + size - have
                if missing == 0:
                    return bytes(self._bytes[_LENGTH.size :])
            try:
                part = sock.recv(missing)
            except BlockingIOError:
                return None
            if not part:
                raise EOFError("closed before its message was complete")
            self._bytes += part


def _encode(fields: dict[str, object]) -> bytes:
    body = json.dumps(fields, separators=(",", ":")).encode()
    if len(body) > MAX_BYTES:
        raise ValueError(f"message of {len(body)} bytes, at most {MAX_BYTES} allowed")
    return _LENGTH.pack(len(body)) + body


def _decode(message: bytes) -> dict[str, object]:
    try:
        fields = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise HelloRefused("not a JSON message") from error
    if not isinstance(fields, dict) or fields.get("v") != VERSION:
        raise HelloRefused(f"not a message of version {VERSION}")
    return fields


def _not_refused(message: bytes) -> dict[str, object]:
    fields = _decode(message)
    if "refused" in fields:
        raise HelloRefused(_text(fields, "refused"))
    return fields


_Message = TypeVar("_Message", Hello, Welcome)


def _parsed(kind: type[_Message], fields: dict[str, object]) -> _Message:
    read: dict[str, Callable[[dict[str, object], str], object]] = {"generation": _number, "proof": _word}
    values: dict[str, Any] = {name: read.get(name, _text)(fields, name) for name in kind.__slots__}
    return kind(**values)


def _text(fields: dict[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise HelloRefused(f"{name} must be a string of at most {_MAX_TEXT} characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can contain lone surrogates
        raise HelloRefused(f"{name} is no text") from error
    return value


def _word(fields: dict[str, object], name: str) -> str:
    """A text field, ASCII only, because it is compared in constant time."""
    value = _text(fields, name)
    if not value.isascii():
        raise HelloRefused(f"{name} must be ASCII")
    return value


def _number(fields: dict[str, object], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise HelloRefused(f"{name} must be an integer from 0 to 2**63 - 1")
    return value
