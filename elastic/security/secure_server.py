"""Everything that a replica needs at its door, put together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import grpc.aio

from elastic.records.journal import Journal
from elastic.security import expiry, rejection_log
from elastic.security.channels import Options, bind, limits
from elastic.security.expiry import SeenCertificates
from elastic.security.interceptor import AuthInterceptor
from elastic.security.keyring import Keyring, until_of
from elastic.security.rejection_log import RejectionLog
from elastic.security.roles import Identity, Role

if TYPE_CHECKING:
    from elastic.store.etcd import Tls


@dataclass(frozen=True, slots=True)
class ServerCertificates:
    """The certificates of a replica; without them everything is plain text. others: those it shows elsewhere, whose end
    is announced too."""

    keyring: Keyring | None = None
    etcd: Tls | None = None
    others: tuple[Keyring, ...] = ()

    @property
    def keyrings(self) -> Sequence[Keyring]:
        return (*((self.keyring,) if self.keyring is not None else ()), *self.others)


class SecureServer:
    """Context manager, to be entered before gRPC is used."""

    def __init__(self, lock: ServerCertificates, journal: Journal) -> None:
        self._lock = lock
        self._journal = journal
        self.refusals = RejectionLog(journal)
        self._stack = ExitStack()
        self.shown = SeenCertificates(*lock.keyrings)

    def __enter__(self) -> Self:
        if self._lock.keyring is not None:
            self._stack.enter_context(rejection_log.told(self.refusals))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def server(self, options: Options) -> grpc.aio.Server:
        """One whose callers all pass the guard."""
        guard = AuthInterceptor(self.refusals, asks_roles=self._lock.keyring is not None, seen=self._saw)
        return grpc.aio.server(options=(*options, *limits()), interceptors=(guard,))

    def bind(self, server: grpc.aio.Server, listen: str) -> str:
        """As channels.bind."""
        return bind(server, listen, self._lock.keyring)

    async def watch(self) -> None:
        """Announce certificates that end. Never returns."""
        await expiry.watch(self._journal, *self._lock.keyrings)

    def _saw(self, identity: Identity, certificate: bytes) -> None:
        if identity.role is Role.AGENT:
            with suppress(ValueError):  # TLS has read it, so it is one; whatever it is, the call is let in
                self.shown.saw(identity.name, until_of(certificate))
