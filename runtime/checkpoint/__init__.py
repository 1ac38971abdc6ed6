"""Durable checkpoints inside a worker: staged at a step boundary, written by a side thread, read when a run resumes."""
