"""The training state: everything registered and job.state; read, written, compared, described.

training_state.py    everything registered, and job.state, as one copy
registered.py        the registered objects, and their parameters and buffers
object_copies.py     the state of one registered object: encoded, loaded, compared with a copy's
state_digests.py     digests over the whole state, fingerprints over a part of it
registrable.py       the objects that may be registered
script_state.py      job.state
encoding.py          values as typed JSON and raw bytes
host_bytes.py        the bytes of tensors, also of those on a GPU
small_values.py      values small enough for a header
verification.py      values that several workers have computed alike, compared bit by bit
change_detection.py  changes of registered state while it must not change
available_memory.py  how much memory a process can still get
"""
