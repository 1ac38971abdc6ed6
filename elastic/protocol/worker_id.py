"""The ids of workers, and the names of nodes."""

from __future__ import annotations


def node_of(worker_id: str) -> str:
    """The node in a worker id, which is `<node>.<slot>.<incarnation>`."""
    return worker_id.rsplit(".", 2)[0]


def node_name(host: str) -> str:
    """The name of a host, or of a user, as that of a node: without its domain."""
    return "".join(c if c.isalnum() else "-" for c in host.partition(".")[0].lower()).strip("-")[:63] or "node"
