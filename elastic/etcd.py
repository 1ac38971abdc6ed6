"""The Store on etcd, through the package etcd3; nothing else imports it.

Of etcd3 this file uses the message classes, the stubs and the connection. Its watcher, its lock and its error
handling are not used: docs/decisions/etcd3-behind-one-adapter.md says why.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import ipaddress
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

from elastic.errors import ConfigError, LeaseExpired, StoreError, StoreRefused, StoreUnavailable
from elastic.store import (
    Compare,
    CreateRevision,
    Delete,
    Item,
    KeyDeleted,
    KeyPut,
    Lease,
    Listing,
    ModRevision,
    Prefix,
    Put,
    TxnResult,
    WatchCompacted,
    WatchEvent,
    WatchLost,
    check_from_revision,
    check_txn,
    whole_ttl_s,
)

PROBE_S = 2.0
"""How often a watch asks etcd for a sign of life."""

CANCEL_S = 5.0
"""How long `cancel` waits for what is being delivered."""

PROBES_UNANSWERED = 3
"""A watch is lost when that many questions in a row had no answer. Counted, not timed: a process that was frozen
itself asks again before it blames etcd."""

_PROGRESS_REQUEST = b"\x1a\x00"
"""WatchRequest{progress_request{}}: field 3, which etcd has had since 3.4 and the messages of etcd3 do not know."""

_HAS_LEADER = (("hasleader", "true"),)
"""Makes a member that lost its quorum end a watch instead of keeping it silent. Not on other calls: those would fail
at once during an election, and a caller that gives a deadline wants them to wait."""


def _serialized_descriptor(path: Path) -> bytes:
    """The value of serialized_pb= in a module of protobuf's old generator, read without running it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            if isinstance(node.value, ast.Call):
                return bytes(ast.literal_eval(node.value.args[0]).encode("latin1"))
            return bytes(ast.literal_eval(node.value))
    raise ImportError(f"{path} holds no serialized_pb; elastic needs etcd3 0.12")


def _load_etcd3() -> ModuleType:
    """etcd3 0.12 under the compiled protobuf.

    The generated modules of that release build their descriptors in a way protobuf refuses since version 4. The
    same descriptors, read from those files as bytes, are put into a pool of their own and the message classes made
    from it; modules that hold these take the place of the generated ones before etcd3 is imported.
    """
    if "etcd3" in sys.modules:
        return sys.modules["etcd3"]
    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the package etcd3 is not installed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "etcdrpc"
    pool = descriptor_pool.DescriptorPool()
    for name in ("kv", "auth", "rpc"):  # rpc.proto imports the other two
        pool.AddSerializedFile(_serialized_descriptor(folder / f"{name}_pb2.py"))
        module = ModuleType(f"etcd3.etcdrpc.{name}_pb2")
        file = pool.FindFileByName(f"{name}.proto")
        for message_name, message in file.message_types_by_name.items():
            setattr(module, message_name, message_factory.GetMessageClass(message))
        for enum_name, enum in file.enum_types_by_name.items():
            setattr(module, enum_name, enum_type_wrapper.EnumTypeWrapper(enum))
        sys.modules[module.__name__] = module
    return importlib.import_module("etcd3")


_etcd3 = _load_etcd3()
_rpc: Any = importlib.import_module("etcd3.etcdrpc")


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


@dataclass(frozen=True, slots=True)
class Health:
    """Of one member. size: of its data, in bytes. alarms: such as NOSPACE, of the whole cluster."""

    version: str
    size: int
    alarms: tuple[str, ...]


class EtcdStore:
    """A Store on one etcd cluster. Safe to use from several threads.

    endpoints: "host:port" each, or one "unix:/path:1". Several must be IP addresses, because gRPC takes either one
    name or a list of addresses.
    keepalive_s: how often the connection is probed. etcd closes clients that probe more often than its
    --grpc-keepalive-min-time, 5 s unless the server says otherwise.
    Authentication by user and password is not offered: gRPC refuses it without TLS, and etcd3 does not renew tokens.
    Raises ConfigError for endpoints that cannot be meant. Nothing is sent before the first call.
    """

    def __init__(self, endpoints: Sequence[str], *, tls: Tls | None = None, keepalive_s: float = 6.0) -> None:
        self._target = _target(endpoints)
        self._tls, self._keepalive_s = tls, keepalive_s
        self._connecting = threading.Lock()
        self._files = tls.state() if tls else ()
        self._newest: Any = self._connected()
        self._watches: set[_EtcdWatch] = set()
        self._closed = False

    def _connected(self) -> Any:
        tls, (host, port) = self._tls, self._target
        options = _channel_options(self._keepalive_s)
        if tls is not None and tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", tls.server_name))
        return _etcd3.client(
            host=host,
            port=port,
            ca_cert=tls.ca if tls else None,
            cert_cert=tls.cert if tls else None,
            cert_key=tls.key if tls else None,
            grpc_options=options,
        )

    @property
    def _client(self) -> Any:
        """With the certificates that are there now. Calls and watches under way keep the connection that they have."""
        if self._tls is not None:
            with self._connecting:
                files = self._tls.state()
                if files != self._files:
                    with contextlib.suppress(OSError):  # being replaced at this moment: the next call looks again
                        self._newest, self._files = self._connected(), files
        return self._newest

    def close(self) -> None:
        """End all watches and the connection. Calls under way raise StoreUnavailable."""
        self._closed = True
        for watch in list(self._watches):
            watch.cancel()
        self._newest.close()

    def __enter__(self) -> EtcdStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def health(self, *, timeout_s: float) -> Health:
        """What the member that answers says of itself."""
        stub = _rpc.MaintenanceStub(self._client.channel)
        status = self._call(stub.Status, _rpc.StatusRequest(), timeout_s, writes=False)
        alarms = self._call(stub.Alarm, _rpc.AlarmRequest(), timeout_s, writes=False).alarms
        names = sorted({_rpc.AlarmType.Name(alarm.alarm) for alarm in alarms})
        return Health(str(status.version), int(status.dbSize), tuple(names))

    def get(self, key: str, *, timeout_s: float) -> Item | None:
        check_txn((), (), (key,))
        reply = self._call(self._client.kvstub.Range, _rpc.RangeRequest(key=key.encode()), timeout_s, writes=False)
        return _item(reply.kvs[0]) if reply.kvs else None

    def prefix(self, prefix: str, *, timeout_s: float) -> Listing:
        start, end = _range(prefix)
        request = _rpc.RangeRequest(
            key=start,
            range_end=end,
            sort_order=_rpc.RangeRequest.ASCEND,
            sort_target=_rpc.RangeRequest.KEY,
        )
        reply = self._call(self._client.kvstub.Range, request, timeout_s, writes=False)
        return Listing(tuple(_item(kv) for kv in reply.kvs), reply.header.revision)

    def put(self, key: str, value: bytes, *, lease: Lease | None = None, timeout_s: float) -> int:
        put = Put(key, value, lease)
        check_txn((), (put,), ())
        reply = self._call(self._client.kvstub.Put, _put_request(put), timeout_s, writes=True)
        return int(reply.header.revision)

    def delete(self, key: str, *, timeout_s: float) -> bool:
        check_txn((), (), (key,))
        request = _rpc.DeleteRangeRequest(key=key.encode())
        reply = self._call(self._client.kvstub.DeleteRange, request, timeout_s, writes=True)
        return bool(reply.deleted)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[Delete] = (), *, timeout_s: float
    ) -> TxnResult:
        check_txn(compares, puts, deletes)
        request = _rpc.TxnRequest(
            compare=[_compare(compare) for compare in compares],
            success=[
                *(_rpc.RequestOp(request_put=_put_request(put)) for put in puts),
                *(_rpc.RequestOp(request_delete_range=_delete_request(delete)) for delete in dict.fromkeys(deletes)),
            ],
        )
        reply = self._call(self._client.kvstub.Txn, request, timeout_s, writes=True)
        return TxnResult(bool(reply.succeeded), int(reply.header.revision))

    def lease(self, ttl_s: float, *, timeout_s: float) -> Lease:
        request = _rpc.LeaseGrantRequest(TTL=whole_ttl_s(ttl_s))
        reply = self._call(self._client.leasestub.LeaseGrant, request, timeout_s, writes=True)
        return Lease(int(reply.ID), int(reply.TTL))

    def keep_alive(self, lease: Lease, *, timeout_s: float) -> int:
        def once(request: Any, **options: Any) -> Any:
            # A stream in etcd's protocol; one question on it, one answer, then it is cancelled.
            stream = self._client.leasestub.LeaseKeepAlive(iter([request]), **options)
            try:
                return next(stream)
            finally:
                stream.cancel()

        try:
            reply = self._call(once, _rpc.LeaseKeepAliveRequest(ID=lease.id), timeout_s, writes=True)
        except StopIteration:
            raise StoreUnavailable("etcd ended the stream without an answer", ambiguous=True) from None
        return int(reply.TTL)

    def revoke(self, lease: Lease, *, timeout_s: float) -> None:
        try:
            self._call(self._client.leasestub.LeaseRevoke, _rpc.LeaseRevokeRequest(ID=lease.id), timeout_s, writes=True)
        except LeaseExpired:
            return

    def watch(
        self, prefix: str, from_revision: int, deliver: Callable[[WatchEvent], None], *, timeout_s: float
    ) -> _EtcdWatch:
        check_from_revision(from_revision)
        if self._closed:
            raise StoreUnavailable("this store was closed")
        start, end = _range(prefix)
        create = _rpc.WatchCreateRequest(key=start, range_end=end, start_revision=from_revision)
        stub = _rpc.WatchStub(self._client.channel)
        watch = _EtcdWatch(stub, _rpc.WatchRequest(create_request=create), deliver, self._watches.discard)
        self._watches.add(watch)
        watch.start(timeout_s)
        return watch

    def _call(self, method: Callable[..., Any], request: Any, timeout_s: float, *, writes: bool) -> Any:
        if self._closed:
            raise StoreUnavailable("this store was closed")
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise _typed(error, writes) from error


class _EtcdWatch:
    """One watch on a stream and a thread of its own, so that it can be ended without asking anybody."""

    def __init__(
        self,
        stub: Any,
        create: Any,
        deliver: Callable[[WatchEvent], None],
        forget: Callable[[_EtcdWatch], None],
    ) -> None:
        self._stub = stub
        self._create = create
        self._deliver = deliver
        self._forget = forget
        self._settled = threading.Event()
        self._refusal: StoreError | None = None
        self._cancelled = threading.Event()
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(create)
        self._unanswered = 0
        self._call = stub.Watch(self._questions(), metadata=_HAS_LEADER)
        self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Return once etcd has confirmed the watch."""
        self._thread.start()
        if not self._settled.wait(timeout_s):
            self.cancel()
            raise StoreUnavailable(f"etcd did not confirm the watch within {timeout_s} s")
        if self._refusal is not None:
            raise self._refusal

    def cancel(self) -> None:
        self._cancelled.set()
        self._requests.put(None)
        self._call.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(CANCEL_S)  # no longer: it may be in `deliver`, whose receiver is about to end

    def _questions(self) -> Iterator[Any]:
        """The requests of the stream: create the watch, then ask for progress for as long as it lasts."""
        while True:
            try:
                request = self._requests.get(timeout=PROBE_S)
            except queue.Empty:
                if self._unanswered >= PROBES_UNANSWERED:
                    self._call.cancel()
                    return
                self._unanswered += 1
                request = _rpc.WatchRequest.FromString(_PROGRESS_REQUEST)
            if request is None:
                return
            yield request

    def _run(self) -> None:
        try:
            last = self._follow()
        except grpc.RpcError as error:
            if not self._settled.is_set():
                self._refusal = _typed(error, writes=False)
            last = WatchLost(self._silence() or f"{_code(error).name}: {_details(error)}")
        finally:
            self._requests.put(None)
            self._call.cancel()
            self._forget(self)
            opened = self._settled.is_set()
            self._settled.set()
        if opened:
            self._say(last)

    def _follow(self) -> WatchLost | WatchCompacted:
        for reply in self._call:
            self._unanswered = 0
            if reply.compact_revision:
                self._settled.set()
                return WatchCompacted(int(reply.compact_revision))
            if reply.canceled:
                reason = f"etcd cancelled the watch: {reply.cancel_reason or 'no reason given'}"
                if not self._settled.is_set():
                    self._refusal = StoreRefused(reason)
                return WatchLost(reason)
            if reply.created:
                self._settled.set()
            self._deliver_events(reply)
        if not self._settled.is_set():
            self._refusal = StoreUnavailable("etcd ended the stream before it confirmed the watch")
        return WatchLost("etcd ended the stream")

    def _silence(self) -> str:
        return "etcd answers no more" if self._unanswered >= PROBES_UNANSWERED else ""

    def _deliver_events(self, reply: Any) -> None:
        for event in reply.events:
            if event.type == event.DELETE:
                self._say(KeyDeleted(event.kv.key.decode(errors="backslashreplace"), int(event.kv.mod_revision)))
            else:
                self._say(KeyPut(_item(event.kv)))

    def _say(self, event: WatchEvent) -> None:
        if not self._cancelled.is_set():
            self._deliver(event)


def _target(endpoints: Sequence[str]) -> tuple[str, str]:
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


def _range(prefix: str) -> tuple[bytes, bytes]:
    """First key and end of the range of keys with that prefix; UTF-8 never holds 0xff, so adding one is safe."""
    start = prefix.encode()
    if not start:
        return b"\0", b"\0"
    return start, start[:-1] + bytes([start[-1] + 1])


def _item(kv: Any) -> Item:
    return Item(
        kv.key.decode(errors="backslashreplace"), kv.value, int(kv.create_revision), int(kv.mod_revision), int(kv.lease)
    )


def _put_request(put: Put) -> Any:
    return _rpc.PutRequest(key=put.key.encode(), value=put.value, lease=put.lease.id if put.lease else 0)


def _delete_request(delete: Delete) -> Any:
    if isinstance(delete, Prefix):
        start, end = _range(delete.prefix)
        return _rpc.DeleteRangeRequest(key=start, range_end=end)
    return _rpc.DeleteRangeRequest(key=delete.encode())


def _compare(compare: Compare) -> Any:
    key = compare.key.encode()
    match compare:
        case CreateRevision():
            return _rpc.Compare(key=key, target=_rpc.Compare.CREATE, create_revision=compare.equals)
        case ModRevision():
            return _rpc.Compare(key=key, target=_rpc.Compare.MOD, mod_revision=compare.equals)
        case _:
            return _rpc.Compare(key=key, target=_rpc.Compare.VALUE, value=compare.equals)


_TRY_AGAIN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}


def _typed(error: grpc.RpcError, writes: bool) -> StoreError:
    """The error by what the caller does next. A write that was cut off may have happened."""
    code, details = _code(error), _details(error)
    text = f"etcd: {code.name}: {details}"
    if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
        return LeaseExpired(text)
    if code in _TRY_AGAIN:
        return StoreUnavailable(text, ambiguous=writes)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "too many requests" in details:
        return StoreUnavailable(text)
    return StoreRefused(text)


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    code: grpc.StatusCode = error.code()
    return code


def _details(error: grpc.RpcError) -> str:
    return error.details() or "no details"
