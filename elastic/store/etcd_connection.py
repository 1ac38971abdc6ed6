"""How a cluster is reached: endpoints, certificates, and the options of the connection."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError
from elastic.store.etcd_messages import etcd3, rpc
from elastic.store.etcd_requests import TRY_AGAIN

ANSWER_BYTES = 64 * 2**20
"""The largest answer. etcd says as much at once as it is asked for; without this option gRPC accepts 4 MiB."""

UNANSWERED = 2
"""After so many calls in a row that a member did not answer, another member is asked. gRPC keeps a connection for as
long as its pings are answered, and a member that is cut off from the others, or hangs, answers them."""

ANSWER_S = 2.0
"""How long a new connection has until it is answered."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files. A client certificate needs its key.

    server_name: what the servers' certificates say, where endpoints are addresses the certificates do not name.
    """

    ca: str
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("tls: a client certificate and its key go together; give both or neither")
        for path in (self.ca, self.cert, self.key):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"tls: {path} is not a file")

    def state(self) -> tuple[int, ...]:
        """Another one when a file is another one."""
        with contextlib.suppress(OSError):
            return tuple(Path(path).stat().st_mtime_ns for path in (self.ca, self.cert, self.key) if path)
        return ()


class _Successor:
    """A connection that takes the place of the present one as soon as etcd has answered a question over it, and, unless
    it is a renewal (with newer certificates), does not answer over the present one."""

    def __init__(self, client: Any, endpoints: tuple[str, ...], *, renewal: bool) -> None:
        self.client = client
        self.endpoints = endpoints
        self.renewal = renewal
        self.ask()

    def ask(self) -> None:
        """A read that needs a majority, of a key that need not exist."""
        self._answer = self.client.kvstub.Range.future(rpc.RangeRequest(key=b"health"), timeout=ANSWER_S)

    @property
    def answered(self) -> bool:
        return bool(self._answer.done()) and self._answer.code() not in TRY_AGAIN

    @property
    def failed(self) -> bool:
        return bool(self._answer.done()) and self._answer.code() in TRY_AGAIN

    def drop(self) -> None:
        self._answer.cancel()
        self.client.close()


class Connections:
    """The connection of a store, and what takes its place: one with newer certificates, or one that tries the endpoints
    in another order. Behind a single endpoint may be several members, too: a name, or an address that balances load.
    Calls and watches under way keep the connection that they have; it is closed with the last of them. Any thread.
    """

    def __init__(self, endpoints: Sequence[str], tls: Tls | None, keepalive_s: float) -> None:
        self._endpoints = tuple(endpoints)
        self._tls, self._keepalive_s = tls, keepalive_s
        self._lock = threading.Lock()
        self._files = tls.state() if tls else ()
        self._present = connected(target_of(endpoints), tls, keepalive_s)
        self._unanswered = 0
        self._successor: _Successor | None = None
        self._closed = False
        self._former: weakref.WeakSet[Any] = weakref.WeakSet()

    def present(self) -> Any:
        """With the newest certificates that etcd has accepted: it reads its authorities when it starts, and may not
        believe new certificates yet. A caller holds it for as long as its call lasts."""
        with self._lock:
            if self._tls is not None and not self._closed and (files := self._tls.state()) != self._files:
                with contextlib.suppress(OSError):  # being replaced at this moment: the next call looks again
                    self._connect(self._endpoints, renewal=True)
                    self._files = files
            self._succeed()
            return self._present

    def answered(self, client: Any) -> None:
        """It said something, be it that it refuses."""
        with self._lock:
            if client is self._present:
                self._unanswered = 0
                if self._successor is not None and not self._successor.renewal:
                    self._drop_successor()

    def unanswered(self, client: Any) -> None:
        """Its deadline has passed, or the member said that it reaches no majority."""
        with self._lock:
            of_one_process = self._endpoints[0].startswith("unix:")
            if client is not self._present or self._closed or of_one_process:
                return
            self._unanswered += 1
            successor = self._successor
            if successor is None or successor.failed:
                # Already at the first, so that it is there at the second.
                tried = self._endpoints if successor is None else successor.endpoints
                with contextlib.suppress(OSError):
                    self._connect(tried[1:] + tried[:1], renewal=successor is not None and successor.renewal)
            self._succeed()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop_successor()
            for client in [*self._former, self._present]:
                client.close()

    def _connect(self, endpoints: tuple[str, ...], *, renewal: bool) -> None:
        client = connected(target_of(endpoints), self._tls, self._keepalive_s)
        self._drop_successor()
        self._successor = _Successor(client, endpoints, renewal=renewal)

    def _succeed(self) -> None:
        successor = self._successor
        if successor is None:
            return
        if successor.failed and successor.renewal:
            successor.ask()
        elif successor.answered and (successor.renewal or self._unanswered >= UNANSWERED):
            self._former.add(self._present)
            self._present, self._endpoints = successor.client, successor.endpoints
            self._successor, self._unanswered = None, 0

    def _drop_successor(self) -> None:
        if self._successor is not None:
            self._successor.drop()
            self._successor = None


def connected(target: tuple[str, str], tls: Tls | None, keepalive_s: float) -> Any:
    """A connection, over which nothing is sent yet. Raises OSError for certificates that cannot be read."""
    host, port = target
    options = _channel_options(keepalive_s)
    if tls is not None and tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return etcd3.client(
        host=host,
        port=port,
        ca_cert=tls.ca if tls else None,
        cert_cert=tls.cert if tls else None,
        cert_key=tls.key if tls else None,
        grpc_options=options,
    )


def target_of(endpoints: Sequence[str]) -> tuple[str, str]:
    """Host and port whose "host:port" is the gRPC target for all endpoints."""
    if not endpoints:
        raise ConfigError("no etcd endpoint given; write host:port")
    parts = []
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535 or "/" in port:
            raise ConfigError(
                f"etcd endpoint {endpoint!r} must be host:port, without a scheme, for example 10.0.0.1:2379"
            )
        if "//" in host:
            raise ConfigError(f"etcd endpoint {endpoint!r} must be host:port; leave out the scheme before //")
        parts.append((host, port))
    if len(parts) == 1:
        return parts[0]
    families = {_address_family(host) for host, _ in parts}
    if families not in ({"ipv4"}, {"ipv6"}):
        raise ConfigError(
            f"several etcd endpoints must all be IPv4 or all IPv6 addresses, not {', '.join(endpoints)}; "
            "give the addresses, or one name that resolves to all of them"
        )
    joined = ",".join(f"{host}:{port}" for host, port in parts[:-1])
    last_host, last_port = parts[-1]
    return f"{families.pop()}:{joined},{last_host}", last_port


def _address_family(host: str) -> str:
    try:
        return f"ipv{ipaddress.ip_address(host.strip('[]')).version}"
    except ValueError:
        return "name"


def _channel_options(keepalive_s: float) -> list[tuple[str, object]]:
    service = {"methodConfig": [{"name": [{}], "waitForReady": True}]}
    return [
        ("grpc.max_receive_message_length", ANSWER_BYTES),
        # Without waitForReady calls fail at once, and watches spin, while the server restarts.
        ("grpc.service_config", json.dumps(service)),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", round(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", 1000),
        # The keepalive alone does not notice a frozen server.
        ("grpc.http2.ping_timeout_ms", 1000),
        ("grpc.http2.max_pings_without_data", 0),
        # Without calls etcd takes no probes: it closes the connection, and gRPC then probes half as often, each time.
        ("grpc.keepalive_permit_without_calls", 0),
        # A connection of its own: another store's backoff is not this one's.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
