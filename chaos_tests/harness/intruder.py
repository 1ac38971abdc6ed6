"""Somebody who attends a job as the agent of a node, and is none."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from elastic.doors.channels import PLAIN
from elastic.wire import elastic_pb2 as pb
from elastic.wire.elastic_pb2_grpc import RendezvousStub

ANSWER_S = 6.0
"""Of a replica; above elastic/fleet/admission.py, REREAD_S."""

ADMITTED, REFUSED = "welcome", "UNAUTHENTICATED"


def attend(replicas: Iterable[str], job: str, node: str, token: str) -> dict[str, str]:
    """What each replica, "host:port", says first, or the code with which it ends the stream."""
    answers: dict[str, str] = {}
    for replica in replicas:
        hello = pb.AgentHello(job=job, node=node, slots=1, token=token)
        with PLAIN.channel(replica, ()) as channel:
            call = RendezvousStub(channel).Attend(iter([pb.AgentWord(hello=hello)]), timeout=ANSWER_S)
            try:
                answers[replica] = str(next(call).WhichOneof("content"))
            except grpc.RpcError as error:
                answers[replica] = error.code().name
    return answers
