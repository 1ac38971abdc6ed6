"""Somebody who attends a job as the agent of a node, and is none."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from elastic.doors.channels import PLAIN
from elastic.wire import elastic_pb2 as pb
from elastic.wire.elastic_pb2_grpc import RendezvousStub

ANSWER_S = 6.0
"""Seconds to wait for the answer of one replica; longer than REREAD_S of elastic/fleet/admission.py."""

ADMITTED, REFUSED = "welcome", grpc.StatusCode.UNAUTHENTICATED.name


def attend(replicas: Iterable[str], job: str, node: str, token: str) -> dict[str, str]:
    """What each replica, "host:port", of a cluster without TLS says first, or the code with which it ends the stream;
    "ended" if it says nothing."""
    answers: dict[str, str] = {}
    for replica in replicas:
        hello = pb.AgentHello(job=job, node=node, slots=1, token=token)
        with PLAIN.channel(replica, ()) as channel:
            call = RendezvousStub(channel).Attend(iter([pb.AgentWord(hello=hello)]), timeout=ANSWER_S)
            try:
                first = next(call, None)
                answers[replica] = str(first.WhichOneof("content")) if first is not None else "ended"
            except grpc.RpcError as error:
                answers[replica] = error.code().name
    return answers
