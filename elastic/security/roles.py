"""Roles of those who speak to each other, and what each may ask. What is not listed here, nobody may."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a certificate entitles to."""

    RENDEZVOUS = "rendezvous"
    """To be a replica; only such a certificate is believed by those who call one."""
    AGENT = "agent"
    """To offer the node that the certificate names, and to run its jobs."""
    WORKER = "worker"
    """To speak with other workers, as one of the node that the certificate names; and to attend a job as the agent of
    that node, by the token of its place (elastic/fleet/documents.py)."""
    OPERATOR = "operator"
    """To do everything that the command line can."""
    VIEWER = "viewer"
    """To look."""


SERVER_NAME = "rendezvous.elastic.internal"
"""In every certificate of a replica, whatever its address: it is as replicas of this fleet that they are trusted."""

ETCD_SERVER_NAME = "etcd.elastic.internal"

CERTS_VARIABLE = "ELASTIC_CERTS"
"""The directory of certificates: for the command line, and from an agent to its workers."""

_SCHEME = "elastic://"

_LOOKING = frozenset({Role.OPERATOR, Role.VIEWER})
_ACTING = frozenset({Role.OPERATOR})
_NODES = frozenset({Role.AGENT})
_AGENTS = frozenset({Role.AGENT, Role.WORKER})

MAY_CALL: Mapping[str, frozenset[Role]] = {
    "/elastic.wire.Rendezvous/Attend": _AGENTS,
    "/elastic.wire.Rendezvous/Status": _LOOKING,
    "/elastic.wire.Rendezvous/Drain": _ACTING,
    "/elastic.wire.Fleet/Attend": _NODES,
    "/elastic.wire.Fleet/Ask": _LOOKING,
}

MAY_BE_ASKED_BY_VIEWERS = frozenset({"overview", "log", "examine", "ports"})
"""Contents of a Question that change nothing; all others are for operators."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asked for something. name, role: of his certificate, "" where there are none; address: he called from."""

    name: str
    role: str
    address: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}" if self.role else "somebody without a certificate"


@dataclass(frozen=True, slots=True)
class Identity:
    """name: of the node, or of the person."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


def to_uri(identity: Identity) -> str:
    """As it stands among the alternative names of a certificate."""
    return f"{_SCHEME}{identity.role}/{identity.name}"


def from_uris(names: Iterable[str]) -> Identity | None:
    """The identity among a certificate's alternative names, if there is exactly one."""
    found = []
    for name in names:
        role, slash, who = name.removeprefix(_SCHEME).partition("/")
        if name.startswith(_SCHEME) and slash and who and role in set(Role):
            found.append(Identity(Role(role), who))
    return found[0] if len(found) == 1 else None


def objection_to_call(identity: Identity | None, method: str) -> str:
    """Why this caller may not call that, or nothing."""
    if identity is None:
        return "the certificate names no role of this fleet; issue it with `elastic certs node`"
    allowed = MAY_CALL.get(method, frozenset())
    if identity.role in allowed:
        return ""
    return f"the certificate of {identity} does not allow {method.rpartition('/')[2]}; {_wanted(allowed)}"


def objection_to_question(identity: Identity, content: str | None) -> str:
    """Why this caller may not ask that question, or nothing."""
    if identity.role is Role.OPERATOR or content in MAY_BE_ASKED_BY_VIEWERS:
        return ""
    return f"the certificate of {identity} does not allow {content or 'that'}; {_wanted(_ACTING)}"


def objection_to_name(identity: Identity, node: str) -> str:
    """Why this caller may not speak for that node, or nothing."""
    if identity.name == node:
        return ""
    return f"the certificate is that of node {identity.name}, not of {node!r:.64}; start the agent with that --node"


def _wanted(roles: frozenset[Role]) -> str:
    return f"it takes one with role {' or '.join(sorted(roles))}" if roles else "no role does"
