"""Certificates that are about to end: a line of the journal, and a trouble in `elastic jobs` and `status`."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from datetime import UTC, datetime, timedelta

from elastic.records.journal import Journal
from elastic.security.keyring import Certificate, Keyring

WARN = timedelta(days=14)
EXPIRY_CHECK_S = 3600.0

ADVICE = "issue another one with `elastic certs node` and put it in its place; it is used without a restart"


def sentence(what: str, until: datetime, now: datetime) -> str:
    """A sentence that the certificate ends soon or has ended, or ""."""
    if until - now > WARN:
        return ""
    verb = "ended" if until <= now else "ends"
    return f"the certificate of {what} {verb} on {until:%Y-%m-%d at %H:%M} UTC"


async def watch(journal: Journal, *keyrings: Keyring) -> None:
    """Write to the journal, once for each certificate, that it ends soon, and why a new one is not used. Never
    returns."""
    said: set[str] = set()
    while True:
        for because in (line for keyring in keyrings for line in _lines(keyring)):
            if because not in said:
                said.add(because)
                journal.write("certificate_trouble", because=because, advice=ADVICE)
        await asyncio.sleep(EXPIRY_CHECK_S)


def _lines(keyring: Keyring) -> list[str]:
    current = keyring.current()
    lines = [sentence(_named(current), current.until, datetime.now(UTC)), keyring.problem]
    return [line for line in lines if line]


def _named(certificate: Certificate) -> str:
    return str(certificate.identity or certificate.path.name)


class SeenCertificates:
    """When the certificates end that nodes have shown to this replica, and its own."""

    def __init__(self, *own: Keyring) -> None:
        self._own = own
        self._until: dict[str, datetime] = {}

    def saw(self, node: str, until: datetime) -> None:
        self._until[node] = until

    def troubles(self, nodes: Set[str]) -> list[dict[str, str]]:
        """The troubles of this replica's certificates and of those nodes, as `elastic jobs --json` shows troubles."""
        now = datetime.now(UTC)
        found = [("", line) for keyring in self._own for line in _lines(keyring)]
        found += [
            (node, line)
            for node in sorted(nodes & self._until.keys())
            if (line := sentence(f"agent {node}", self._until[node], now))
        ]
        return [
            {"about": "certificate", "where": where, "because": because, "advice": ADVICE} for where, because in found
        ]
