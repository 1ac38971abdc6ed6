"""Connections between the members of a generation, and what carries tensors over them.

ring.py              the communicator of one generation: a connection between every two members
ring_set.py          the rings of one worker: being built, in use, not yet closed
frames.py            one connection: typed frames without a copy of the payload
listener.py          the listening port of a worker
dialer.py            calling one peer
handshake.py         what two workers say to each other before any data
tls.py               TLS between workers of different hosts
unix_socket.py       the unix socket for peers on the same host
tcp_liveness.py      whether a peer's host can still be reached, as the kernel knows
abandonable_call.py  waiting for what cannot be interrupted
transport.py         what carries tensors beside the mesh
process_group.py     a transport over torch.distributed
nccl.py              NCCL between the GPUs of a generation
mpi.py               a transport over MPI
"""
