"""Who makes a call, as its certificate and its connection say."""

from __future__ import annotations

from typing import Any

from elastic.doors import roles
from elastic.fleet.documents import Caller


def identity_of(context: Any) -> roles.Identity | None:
    """None without a certificate that names a role."""
    shown = context.auth_context().get("x509_subject_alternative_name", ())
    return roles.from_uris([name.decode(errors="replace") for name in shown])


def caller_of(context: Any) -> Caller:
    """context: of the call, in gRPC."""
    identity, address = identity_of(context), str(context.peer()).partition(":")[2]
    return Caller(identity.name, str(identity.role), address) if identity is not None else Caller("", "", address)
