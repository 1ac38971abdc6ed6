"""The Store on etcd, through the package etcd3.

Of etcd3 only the message classes, the stubs and the connection are used. Its watcher, its lock and its error handling
are not: docs/decisions/etcd3-behind-one-adapter.md says why.

    etcd.py           the Store                  etcd_connection.py  endpoints, certificates, options of the connection
    etcd_watch.py     one watch, on a thread     etcd_requests.py    values to requests, answers to values, errors
    etcd_messages.py  the only file that imports etcd3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from elastic.errors import LeaseExpired, StoreUnavailable
from elastic.store.base import (
    Compare,
    Delete,
    Item,
    Lease,
    Listing,
    Put,
    TxnResult,
    WatchEvent,
    check_from_revision,
    check_txn,
    whole_ttl_s,
)
from elastic.store.etcd_connection import Connections, Tls
from elastic.store.etcd_messages import rpc
from elastic.store.etcd_requests import (
    TRY_AGAIN,
    code_of,
    compare_request,
    delete_request,
    item_of,
    put_request,
    range_of,
    stuck,
    typed,
)
from elastic.store.etcd_watch import EtcdWatch


@dataclass(frozen=True, slots=True)
class EtcdHealth:
    """What one member of etcd says of itself. size: of its data, in bytes. alarms: such as NOSPACE, of the whole
    cluster."""

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
        self._connections = Connections(endpoints, tls, keepalive_s)
        self._watches: set[EtcdWatch] = set()
        self._closed = False

    def close(self) -> None:
        """End all watches and the connection. Calls under way raise StoreUnavailable."""
        self._closed = True
        for watch in list(self._watches):
            watch.cancel()
        self._connections.close()

    def __enter__(self) -> EtcdStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def health(self, *, timeout_s: float) -> EtcdHealth:
        """What the member that answers says of itself."""
        status = self._call(
            lambda to: rpc.MaintenanceStub(to.channel).Status, rpc.StatusRequest(), timeout_s, writes=False
        )
        alarms = self._call(
            lambda to: rpc.MaintenanceStub(to.channel).Alarm, rpc.AlarmRequest(), timeout_s, writes=False
        ).alarms
        names = sorted({rpc.AlarmType.Name(alarm.alarm) for alarm in alarms})
        return EtcdHealth(str(status.version), int(status.dbSize), tuple(names))

    def get(self, key: str, *, timeout_s: float) -> Item | None:
        check_txn((), (), (key,))
        reply = self._call(lambda to: to.kvstub.Range, rpc.RangeRequest(key=key.encode()), timeout_s, writes=False)
        return item_of(reply.kvs[0]) if reply.kvs else None

    def prefix(self, prefix: str, *, timeout_s: float) -> Listing:
        return self._list(*range_of(prefix), 0, timeout_s)

    def between(self, first: str, end: str, *, limit: int, timeout_s: float) -> Listing:
        check_txn((), (), (first, end))
        return self._list(first.encode(), end.encode(), limit, timeout_s)

    def _list(self, start: bytes, end: bytes, limit: int, timeout_s: float) -> Listing:
        """limit 0: all."""
        request = rpc.RangeRequest(
            key=start, range_end=end, limit=limit, sort_order=rpc.RangeRequest.ASCEND, sort_target=rpc.RangeRequest.KEY
        )
        reply = self._call(lambda to: to.kvstub.Range, request, timeout_s, writes=False)
        return Listing(tuple(item_of(kv) for kv in reply.kvs), reply.header.revision)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[Delete] = (), *, timeout_s: float
    ) -> TxnResult:
        check_txn(compares, puts, deletes)
        request = rpc.TxnRequest(
            compare=[compare_request(compare) for compare in compares],
            success=[
                *(rpc.RequestOp(request_put=put_request(put)) for put in puts),
                *(rpc.RequestOp(request_delete_range=delete_request(delete)) for delete in dict.fromkeys(deletes)),
            ],
        )
        reply = self._call(lambda to: to.kvstub.Txn, request, timeout_s, writes=True)
        return TxnResult(bool(reply.succeeded), int(reply.header.revision))

    def lease(self, ttl_s: float, *, timeout_s: float) -> Lease:
        request = rpc.LeaseGrantRequest(TTL=whole_ttl_s(ttl_s))
        reply = self._call(lambda to: to.leasestub.LeaseGrant, request, timeout_s, writes=True)
        return Lease(int(reply.ID), int(reply.TTL))

    def keep_alive(self, lease: Lease, *, timeout_s: float) -> int:
        # A stream in etcd's protocol; of one question and one answer it is a plain call on the wire. As a stream it
        # would need a thread of its own, and this one has to get through in a process that is busy.
        reply = self._call(_keep_alive, rpc.LeaseKeepAliveRequest(ID=lease.id), timeout_s, writes=True)
        return int(reply.TTL)

    def revoke(self, lease: Lease, *, timeout_s: float) -> None:
        try:
            self._call(lambda to: to.leasestub.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease.id), timeout_s, writes=True)
        except LeaseExpired:
            return

    def watch(
        self, prefix: str, from_revision: int, deliver: Callable[[WatchEvent], None], *, timeout_s: float
    ) -> EtcdWatch:
        check_from_revision(from_revision)
        if self._closed:
            raise StoreUnavailable("this store was closed")
        start, end = range_of(prefix)
        create = rpc.WatchCreateRequest(key=start, range_end=end, start_revision=from_revision)
        client = self._connections.present()
        stub = rpc.WatchStub(client.channel)
        watch = EtcdWatch(stub, rpc.WatchRequest(create_request=create), deliver, self._watches.discard)
        self._watches.add(watch)
        try:
            watch.start(timeout_s)
        except StoreUnavailable:
            self._connections.unanswered(client)
            raise
        return watch

    def _call(
        self, method: Callable[[Any], Callable[..., Any]], request: Any, timeout_s: float, *, writes: bool
    ) -> Any:
        """method: of a connection."""
        if self._closed:
            raise StoreUnavailable("this store was closed")
        client = self._connections.present()
        try:
            reply = method(client)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if stuck(error):
                self._connections.unanswered(client)
            elif code_of(error) not in TRY_AGAIN:
                self._connections.answered(client)
            raise typed(error, writes) from error
        self._connections.answered(client)
        return reply


def _keep_alive(client: Any) -> Any:
    return client.channel.unary_unary(
        "/etcdserverpb.Lease/LeaseKeepAlive",
        request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
        response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
    )


__all__ = ["EtcdHealth", "EtcdStore", "Tls"]
