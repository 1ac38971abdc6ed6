"""Clients and servers of the services of elastic.proto, by the descriptors that elastic_pb2.py has of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from elastic.wire import elastic_pb2 as pb


class Stub:
    """Calls the methods of one service on a channel: `stub.Status(request, timeout=1)`, as generated stubs do."""

    def __init__(self, service: str, channel: grpc.Channel | grpc.aio.Channel) -> None:
        self._service = service
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        service = pb.DESCRIPTOR.services_by_name[self._service]
        if (method := service.methods_by_name.get(name)) is None:
            raise AttributeError(f"the service {self._service} has no method {name!r}")
        return getattr(self._channel, _kind(method))(
            f"/{service.full_name}/{name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )


RendezvousStub = partial(Stub, "Rendezvous")
FleetStub = partial(Stub, "Fleet")
AgentStub = partial(Stub, "Agent")


def add_to_server(service: str, servicer: object, server: grpc.Server | grpc.aio.Server) -> None:
    """Have the server answer the calls of that service by the servicer's methods of the same names. A method that the
    servicer lacks is answered with UNIMPLEMENTED."""
    found = pb.DESCRIPTOR.services_by_name[service]
    handlers = {
        method.name: getattr(grpc, f"{_kind(method)}_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in found.methods
        if hasattr(servicer, method.name)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(found.full_name, handlers),))


def _kind(method: MethodDescriptor) -> str:
    """As grpc's functions for such methods are called: "unary_unary" or "stream_stream"."""
    return "stream_stream" if method.client_streaming else "unary_unary"
