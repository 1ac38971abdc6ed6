"""What a pod answers to its kubelet, which has no certificate: a page of its metrics, asked from within."""

from __future__ import annotations

import socket
from enum import StrEnum
from pathlib import Path

from elastic.errors import ElasticError
from elastic.metrics.option import LOOPBACK
from elastic.security.keyring import FLEET_CA
from elastic.security.roles import NODE_NAME, SERVER_NAME, Role

TIMEOUT_S = 8.0


class Probed(StrEnum):
    """Whose pages."""

    AGENT = "agent"
    RENDEZVOUS = "rendezvous"


NAMES = {Probed.AGENT: NODE_NAME, Probed.RENDEZVOUS: SERVER_NAME}
"""In the certificates that they show."""


def ask(page: str, port: int, certs: Path, of: Probed) -> str:
    """Its text, if all is well. Raises ElasticError with what it says otherwise."""
    import ssl
    from http.client import HTTPException, HTTPResponse

    try:
        context = ssl.create_default_context(cafile=str(certs / FLEET_CA))
        # Python 3.13 asks for identifiers of keys, which certificates of older versions of elastic-ring do not have.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        context.load_cert_chain(certs / f"{Role.VIEWER}.pem")
        with (
            socket.create_connection((LOOPBACK, port), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=NAMES[of]) as sealed,
        ):
            sealed.sendall(f"GET /{page} HTTP/1.0\r\n\r\n".encode())
            answer = HTTPResponse(sealed)
            answer.begin()
            text = answer.read(4096).decode(errors="replace").strip()
    except (OSError, HTTPException) as error:
        raise ElasticError(f"/{page} of the {of}: {type(error).__name__} {error}") from error
    if answer.status != 200:
        raise ElasticError(f"/{page} of the {of}: {text}")
    return text
