"""Durable checkpoints inside a worker: staged at a step boundary, written by a side thread, read when a run resumes.

coordinator.py        when this worker takes part in one, and what goes into it
content.py            what a checkpoint holds, divided among the members
stager.py             a copy of this member's share, made at a step boundary
saver.py              the side thread that writes it
safetensors_files.py  the data files
ledger_barrier.py     the ledger must not lack steps that a checkpoint has
memory_snapshots.py   checkpoints in this machine's memory
source.py             what a run goes on from
reader.py             a StorageReader of torch.distributed.checkpoint that checks every byte
"""
