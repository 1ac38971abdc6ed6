"""Single questions to the rendezvous, one call each.

Commands that only ask import this module and nothing that streams need: those imports would take most of their time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from elastic.errors import ConfigError, ElasticError
from elastic.security.channels import PLAIN, ChannelFactory
from elastic.wire import MESSAGE_LIMIT
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import RendezvousStub

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.enable_http_proxy", 0),
)

CONNECT = ("grpc.min_reconnect_backoff_ms", 1000)
"""Milliseconds in which a replica has to accept a connection. A machine that is gone does not even refuse it."""

NOBODY_THERE = "failed to connect to all addresses"
"""gRPC begins its message with these words, whatever the cause."""


def fetch_status(
    address: str | Sequence[str], timeout_s: float, job: str = "", channels: ChannelFactory = PLAIN
) -> dict[str, object]:
    """The job's status as `elastic status --json` prints it, from the rendezvous at one or several "host:port".

    job: needed if a rendezvous has several jobs. Raises ElasticError if none answers within timeout_s, or none leads.
    """
    request = pb.StatusRequest(job=job)
    reply: pb.StatusReply = ask_leader(
        address, lambda c: RendezvousStub(c).Status(request, timeout=timeout_s), channels
    )
    document: dict[str, object] = json.loads(reply.document)
    return document


def ask_to_drain(address: str, node: str, left_ms: int, because: str, *, over: bool, timeout_s: float) -> list[str]:
    """Have the agent of that node told that it shall be empty within left_ms; over: that it need not be any more.

    Returns the nodes whose agents attend: the node was told if it is one of them. Raises ElasticError as fetch_status.
    """
    request = pb.DrainRequest(node=node, drain_node=pb.DrainNode(left_ms=left_ms, because=because, over=over))
    reply: pb.DrainReply = ask_leader(address, lambda c: RendezvousStub(c).Drain(request, timeout=timeout_s))
    return list(reply.nodes)


def signal_worker(
    address: str | Sequence[str],
    worker_id: str,
    *,
    kill: bool,
    timeout_s: float,
    job: str = "",
    channels: ChannelFactory = PLAIN,
) -> None:
    """Have a worker write the stacks of its threads to its log; kill: have it killed by SIGKILL instead.

    job: needed if a rendezvous has several jobs. Raises ConfigError if no such worker lives, else as fetch_status.
    """
    asked = pb.WorkerSignal(worker_id=worker_id, kind=pb.WorkerSignal.KILL if kill else pb.WorkerSignal.STACKS)
    request = pb.SignalWorkerRequest(job=job, signal=asked)
    reply: pb.SignalWorkerReply = ask_leader(
        address, lambda c: RendezvousStub(c).SignalWorker(request, timeout=timeout_s), channels
    )
    if worker_id not in reply.workers:
        raise ConfigError(f"no worker {worker_id!r} lives; there are {', '.join(reply.workers) or 'none'}")


def ask_leader(
    addresses: str | Sequence[str], ask: Callable[[grpc.Channel], Any], channels: ChannelFactory = PLAIN
) -> Any:
    """The leader's answer: from the first replica that answers, the leader that it names, or the next replica.

    ask: one question over a channel; its answer says whether it is a leader's. Raises ElasticError if there is no
    answer, and ConfigError if this user may not ask.
    """
    waiting = [addresses] if isinstance(addresses, str) else list(addresses)
    asked: set[str] = set()
    because = ""
    while waiting:
        address = waiting.pop(0)
        if address in asked:
            continue
        asked.add(address)
        with channels.channel(address, (*CHANNEL_OPTIONS, CONNECT)) as channel:
            try:
                reply = ask(channel)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.PERMISSION_DENIED:
                    raise ConfigError(error.details()) from error
                said = said_by(error)
                because = because or f"the rendezvous at {address} does not answer: {said}{channels.hint(said)}"
                continue
        if reply.leading:
            return reply
        waiting[:0] = [reply.leader] if reply.leader else []
    raise ElasticError(because or "nobody leads the job at the moment: an election is going on, or etcd is away")


def plainly(code: grpc.StatusCode, details: str) -> str:
    """The text of a gRPC error; if nothing listens, only the cause, such as "Connection refused"."""
    if not details.startswith(NOBODY_THERE):
        return f"{code.name}: {details}"
    cause = details.removesuffix(": OK").rpartition(": ")[2]
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"its certificate is not believed here: {cause}"
    return "it listens without certificates" if "WRONG_VERSION_NUMBER" in details else cause


def said_by(error: grpc.RpcError) -> str:
    """The text of a gRPC error, as a sentence."""
    code, details = getattr(error, "code", None), getattr(error, "details", None)
    if not (callable(code) and callable(details)):
        return str(error)
    return plainly(code(), str(details()))
