"""How messages are serialised. The stubs are generated from proto/elastic/wire; `make proto` writes them anew.

    codec.py             the only translator between the frozen values of messages.py and bytes
    generation_delta.py  a generation as what differs from one that its reader has
    broadcast.py         orders to many agents, serialised once
    elastic_pb2.py       generated: messages
    elastic_pb2_grpc.py  generated: services
"""

MESSAGE_LIMIT = 64 * 2**20
"""Bytes of one message on a stream; a generation of 65,536 members fits."""
