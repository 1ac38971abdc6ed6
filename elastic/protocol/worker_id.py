"""The ids of workers."""

from __future__ import annotations


def node_of(worker_id: str) -> str:
    """The node in a worker id, which is `<node>.<slot>.<incarnation>`."""
    return worker_id.rsplit(".", 2)[0]
