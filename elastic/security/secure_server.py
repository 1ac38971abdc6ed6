"""The server of a replica, with the checks of its callers and the journal of refusals."""

from __future__ import annotations

import asyncio
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
    """The certificates of a replica; without keyring, calls are plain text. others: certificates that it shows
    elsewhere, whose end is announced too."""

    keyring: Keyring | None = None
    etcd: Tls | None = None
    others: tuple[Keyring, ...] = ()

    @property
    def keyrings(self) -> Sequence[Keyring]:
        return (*((self.keyring,) if self.keyring is not None else ()), *self.others)


class SecureServer:
    """Makes the server of a replica. A context manager, to be entered before gRPC is used."""

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
        self.refusals.flush(last=True)

    def server(self, options: Options) -> grpc.aio.Server:
        """A server whose calls all pass the interceptor."""
        guard = AuthInterceptor(self.refusals, asks_roles=self._lock.keyring is not None, seen=self._saw)
        return grpc.aio.server(options=(*options, *limits()), interceptors=(guard,))

    def bind(self, server: grpc.aio.Server, listen: str) -> str:
        """Listen, as channels.bind does."""
        return bind(server, listen, self._lock.keyring)

    async def watch(self) -> None:
        """Announce certificates that end, and write refusals that were only counted. Never returns."""
        await asyncio.gather(expiry.watch(self._journal, *self._lock.keyrings), self.refusals.watch())

    def _saw(self, identity: Identity, certificate: bytes) -> None:
        if identity.role is Role.AGENT:
            with suppress(ValueError):  # TLS has read it already; the call is let in all the same
                self.shown.saw(identity.name, until_of(certificate))
