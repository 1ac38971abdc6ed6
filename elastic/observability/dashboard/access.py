"""Access to the page, and to its actions.

The command prints an address with a random key. The page that it opens gets a cookie, which other sites cannot read and
browsers do not send for them (HttpOnly, SameSite=Strict), and a token, which every action has to show in a header. A
request has to name the address that the dashboard listens at (Host), so that no name of another site that is made to
lead to this machine will do; an action has to come from a page of that address (Origin). Pure.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

COOKIE = "elastic-dashboard"
TOKEN_HEADER = "x-elastic-token"
KEY_BYTES = 32

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""With every answer: nothing is loaded from elsewhere, no script or style stands in the page itself, and no other site
shows the page in a frame."""


@dataclass(frozen=True, slots=True)
class HttpRefusal:
    status: HTTPStatus
    because: str


@dataclass(frozen=True, slots=True)
class Access:
    """hosts: what the Host header may say. port: of the dashboard; cookies of one host are the same for all ports, so
    the name of the cookie has it."""

    hosts: frozenset[str]
    port: int
    key: str = field(default_factory=lambda: secrets.token_urlsafe(KEY_BYTES), repr=False)
    session: str = field(default_factory=lambda: secrets.token_urlsafe(KEY_BYTES), repr=False)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(KEY_BYTES), repr=False)

    @property
    def cookie(self) -> str:
        return f"{COOKIE}-{self.port}"

    def of_any(self, headers: Mapping[str, str]) -> HttpRefusal | None:
        """Why this request is not answered at all, or None. headers: names in lower case."""
        if headers.get("host", "") not in self.hosts:
            return HttpRefusal(HTTPStatus.MISDIRECTED_REQUEST, "this is not the address of the dashboard")
        return None

    def opens(self, key: str) -> bool:
        """Whether this is the key."""
        return secrets.compare_digest(key.encode(), self.key.encode())

    def of_reader(self, cookies: Mapping[str, str]) -> HttpRefusal | None:
        """Why this caller may not see the page, or None."""
        if secrets.compare_digest(cookies.get(self.cookie, "").encode(), self.session.encode()):
            return None
        return HttpRefusal(HTTPStatus.FORBIDDEN, "open the address with its key, as the command has printed it")

    def of_actor(self, headers: Mapping[str, str]) -> HttpRefusal | None:
        """Why this reader may not act with this request, or None."""
        origin = headers.get("origin", "")
        if origin.removeprefix("http://") not in self.hosts or not origin.startswith("http://"):
            return HttpRefusal(HTTPStatus.FORBIDDEN, "actions come from the dashboard's own page only")
        if not secrets.compare_digest(headers.get(TOKEN_HEADER, "").encode(), self.token.encode()):
            return HttpRefusal(HTTPStatus.FORBIDDEN, "the page is of an earlier dashboard; load it again")
        return None


def hosts_at(host: str, port: int) -> frozenset[str]:
    """What browsers may say in Host for a dashboard at this loopback address."""
    shown = f"[{host}]" if ":" in host else host
    names = {shown, "localhost"}
    return frozenset({f"{name}:{port}" for name in names} | (names if port == 80 else set()))  # which is not said then
