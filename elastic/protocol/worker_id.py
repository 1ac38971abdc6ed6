"""The ids of workers."""

from __future__ import annotations


def node_of(worker_id: str) -> str:
    """`<node>.<slot>.<incarnation>` -> node."""
    return worker_id.rsplit(".", 2)[0]
