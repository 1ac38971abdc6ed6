"""How a cluster is reached: endpoints, certificates, and the options of the connection."""

from __future__ import annotations

import contextlib
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError
from elastic.store.etcd_messages import etcd3

ANSWER_BYTES = 64 * 2**20
"""The largest answer. etcd says as much at once as it is asked for; without this option gRPC accepts 4 MiB."""


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
        ("grpc.keepalive_permit_without_calls", 1),
        # A connection of its own: another store's backoff is not this one's.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
