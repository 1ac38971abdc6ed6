"""The roles of callers, and what each role may call and ask. Everything that is not listed here is forbidden."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """The rights that a certificate gives."""

    RENDEZVOUS = "rendezvous"
    """May be a replica; callers of a replica believe only such a certificate."""
    AGENT = "agent"
    """May offer the node that the certificate names, and run its jobs."""
    WORKER = "worker"
    """May speak with other workers, as a worker of the node that the certificate names; and may attend a job as the
    agent of that node, with the token of its place (elastic/fleet/documents.py)."""
    OPERATOR = "operator"
    """May do everything that the command line can."""
    VIEWER = "viewer"
    """May ask everything that changes nothing."""


SERVER_NAME = "rendezvous.elastic.internal"
"""The DNS name in every certificate of a replica, whatever its address: callers trust it as a replica of this fleet."""

NODE_NAME = "node.elastic.internal"
"""The DNS name in every certificate of a node's workers, for scrapers of its agent's metrics, which check names."""

ETCD_SERVER_NAME = "etcd.elastic.internal"

CERTS_VARIABLE = "ELASTIC_CERTS"
"""The environment variable with the directory of certificates: for the command line, and from an agent to its
workers."""

_SCHEME = "elastic://"

_LOOKING = frozenset({Role.OPERATOR, Role.VIEWER})
_ACTING = frozenset({Role.OPERATOR})
_NODES = frozenset({Role.AGENT})
_AGENTS = frozenset({Role.AGENT, Role.WORKER})

MAY_CALL: Mapping[str, frozenset[Role]] = {
    "/elastic.wire.Rendezvous/Attend": _AGENTS,
    "/elastic.wire.Rendezvous/Status": _LOOKING,
    "/elastic.wire.Rendezvous/Drain": _ACTING,
    "/elastic.wire.Rendezvous/SignalWorker": _ACTING,
    "/elastic.wire.Fleet/Attend": _NODES,
    "/elastic.wire.Fleet/Ask": _LOOKING,
}

MAY_BE_ASKED_BY_VIEWERS = frozenset({"overview", "log", "examine", "ports"})
"""Contents of a Question that change nothing; all others (submit, stop, scale, cordon, allow,
end_agent) are for operators."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller who asked for something. name, role: of its certificate, "" without one. address: where it called
    from."""

    name: str
    role: str
    address: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}" if self.role else "somebody without a certificate"


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity in a certificate. name: of the node, or of the person."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


def to_uri(identity: Identity) -> str:
    """The identity as an alternative name of a certificate."""
    return f"{_SCHEME}{identity.role}/{identity.name}"


def from_uris(names: Iterable[str]) -> Identity | None:
    """The identity among a certificate's alternative names; None unless there is exactly one."""
    found = []
    for name in names:
        role, slash, who = name.removeprefix(_SCHEME).partition("/")
        if name.startswith(_SCHEME) and slash and who and role in set(Role):
            found.append(Identity(Role(role), who))
    return found[0] if len(found) == 1 else None


def objection_to_call(identity: Identity | None, method: str) -> str:
    """Why this caller may not call that method, or ""."""
    if identity is None:
        return "the certificate names no role of this fleet; issue it with `elastic certs node`"
    allowed = MAY_CALL.get(method, frozenset())
    if identity.role in allowed:
        return ""
    return f"the certificate of {identity} does not allow {method.rpartition('/')[2]}; {_wanted(allowed)}"


def objection_to_question(identity: Identity, content: str | None) -> str:
    """Why this caller may not ask that question, or ""."""
    if identity.role is Role.OPERATOR or content in MAY_BE_ASKED_BY_VIEWERS:
        return ""
    return f"the certificate of {identity} does not allow {content or 'that'}; {_wanted(_ACTING)}"


def objection_to_scrape(identity: Identity | None) -> str:
    """Why this caller may not read the metrics of a process, or ""."""
    if identity is None:
        return "the certificate names no role of this fleet; issue it with `elastic certs node`"
    return "" if identity.role in _LOOKING else f"the certificate of {identity} does not allow it; {_wanted(_LOOKING)}"


def objection_to_name(identity: Identity, node: str) -> str:
    """Why this caller may not speak for that node, or ""."""
    if identity.name == node:
        return ""
    return f"the certificate is that of node {identity.name}, not of {node!r:.64}; start the agent with that --node"


def _wanted(roles: frozenset[Role]) -> str:
    return f"it takes one with role {' or '.join(sorted(roles))}" if roles else "no role does"
