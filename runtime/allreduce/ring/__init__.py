"""Connections between the members of a generation, and what carries tensors over them.

ring.py              the communicator of one generation: a connection between every two members
ring_builder.py      connecting the members of a generation, over connections that were kept and new ones
ring_set.py          the rings of one worker: being built, in use, not closed yet
link_poller.py       which connections of a ring can do something now
frames.py            one connection: typed frames without a copy of the payload
listener.py          the listening port of a worker
dialer.py            connecting to one peer
handshake.py         the messages between two workers before any data
tls.py               TLS between workers of different hosts
unix_socket.py       the unix socket for peers on the same host
tcp_liveness.py      whether a peer's host can still be reached, by the kernel's counters
abandonable_call.py  waiting for a call that cannot be interrupted
transport.py         the interface of transports, which carry tensors instead of the mesh
process_group.py     a transport over torch.distributed
nccl.py              NCCL between the GPUs of a generation
mpi.py               a transport over MPI
"""
