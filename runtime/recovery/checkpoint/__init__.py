"""Durable checkpoints in a worker: staged at a step boundary, written by a side thread, read by a resumed run.

coordinator.py        when this worker takes part in a checkpoint, and with what
content.py            the content of a checkpoint, divided among the members
stager.py             a copy of this member's share, made at a step boundary
saver.py              the side thread that writes it
safetensors_files.py  the data files
ledger_barrier.py     waits until the ledger has the steps before a checkpoint
memory_snapshots.py   checkpoints in this machine's memory
source.py             the checkpoint or snapshot from which a run goes on
reader.py             reads a checkpoint into memory, and checks every byte
"""
