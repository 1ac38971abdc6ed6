"""How a process reaches a replica, and how a replica listens: with certificates, or in plain text."""

from __future__ import annotations

import resource
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from elastic.errors import ConfigError
from elastic.security.roles import SERVER_NAME

if TYPE_CHECKING:
    from elastic.security.keyring import Keyring  # processes without certificates need no cryptography

Options = Sequence[tuple[str, object]]

HANDSHAKE_MS = 5000
"""Milliseconds after which a caller that has not shown its certificate is dropped. gRPC's own limit is two minutes."""

FILES_LIMIT = 1 << 20

STREAMS_LIMIT = 128
"""Most calls at once over one connection."""


class ChannelFactory:
    """Opens channels to replicas. keyring: has our certificate, and the authorities to believe; None: plain text.
    Certificates are read anew for each channel."""

    def __init__(self, keyring: Keyring | None = None) -> None:
        self._keyring = keyring

    def channel(self, address: str, options: Options) -> grpc.Channel:
        if self._keyring is None:
            return grpc.insecure_channel(address, options=tuple(options))
        return grpc.secure_channel(address, _shown(self._keyring), options=_named(options))

    def aio_channel(self, address: str, options: Options) -> grpc.aio.Channel:
        if self._keyring is None:
            return grpc.aio.insecure_channel(address, options=tuple(options))
        return grpc.aio.secure_channel(address, _shown(self._keyring), options=_named(options))

    def hint(self, problem: str) -> str:
        """A likely reason behind an unclear error, or "": TLS tells no reason to a caller whom it does not believe."""
        if "Socket closed" not in problem:
            return ""
        if self._keyring is None:
            return "; if it listens with certificates, give --certs"
        return "; perhaps it does not believe our certificate: its journal says so"


PLAIN = ChannelFactory()


def bind(server: grpc.aio.Server, listen: str, keyring: Keyring | None) -> str:
    """Listen at that address. Returns the address with the real port. Raises ConfigError if that is not possible."""
    host = listen.rpartition(":")[0]
    _check_free(listen)
    try:
        if keyring is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, _renewed(keyring))
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {listen}: {error}; choose another port, or 0 for any") from error
    return f"{host}:{port}"


def _check_free(listen: str) -> None:
    """Raise ConfigError if nothing can listen there: gRPC tells the reason only in a line on stderr."""
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {listen}: {error.strerror}; give an address of this machine, and a port that is free, "
            "or 0 for any"
        ) from error


def limits() -> Options:
    """The options that limit strangers' use of a server. Raises this process's limit of open files as far as is
    allowed.

    A quarter of the files is kept free, so that no number of connections keeps a replica from writing its journals.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = FILES_LIMIT if hard == resource.RLIM_INFINITY else min(hard, FILES_LIMIT)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return (
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", files * 3 // 4),
        ("grpc.max_concurrent_streams", STREAMS_LIMIT),
    )


def _shown(keyring: Keyring) -> grpc.ChannelCredentials:
    current = keyring.current()
    return grpc.ssl_channel_credentials(current.roots, current.key, current.chain)


def _named(options: Options) -> Options:
    return (*options, ("grpc.ssl_target_name_override", SERVER_NAME))


def _renewed(keyring: Keyring) -> grpc.ServerCredentials:
    """Server credentials that follow the keyring: gRPC asks at every handshake whether there is a new certificate."""
    shown = keyring.current()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(shown.key, shown.chain)], root_certificates=shown.roots)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        current = keyring.current()
        if current is shown:
            return None
        shown = current
        return configuration()

    # The stubs say that fetch never returns None; gRPC says that None means no change.
    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        fetch,  # type: ignore[arg-type]
        require_client_authentication=True,
    )
