"""How messages are serialised. The messages are generated from proto/elastic/wire; `make proto` writes them anew.

codec.py             the only translator between the frozen values of messages.py and bytes
generation_delta.py  a generation as what differs from one that its reader has
broadcast.py         orders to many agents, serialised once
services.py          clients and servers of the gRPC services
elastic_pb2.py       generated: messages and descriptors
"""

MESSAGE_LIMIT = 64 * 2**20
"""Bytes of one message on a stream; a generation of 65,536 members fits."""
