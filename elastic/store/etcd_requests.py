"""The store's values as etcd's requests, etcd's answers as the store's values, and its errors as ours."""

from __future__ import annotations

from typing import Any

import grpc

from elastic.errors import LeaseExpired, StoreError, StoreRefused, StoreUnavailable
from elastic.store.base import Compare, CreateRevision, Delete, Item, ModRevision, Prefix, Put
from elastic.store.etcd_messages import rpc


def range_of(prefix: str) -> tuple[bytes, bytes]:
    """First key and end of the range of keys with that prefix; UTF-8 never holds 0xff, so adding one is safe."""
    start = prefix.encode()
    if not start:
        return b"\0", b"\0"
    return start, start[:-1] + bytes([start[-1] + 1])


def item_of(kv: Any) -> Item:
    return Item(
        kv.key.decode(errors="backslashreplace"), kv.value, int(kv.create_revision), int(kv.mod_revision), int(kv.lease)
    )


def put_request(put: Put) -> Any:
    return rpc.PutRequest(key=put.key.encode(), value=put.value, lease=put.lease.id if put.lease else 0)


def delete_request(delete: Delete) -> Any:
    if isinstance(delete, Prefix):
        start, end = range_of(delete.prefix)
        return rpc.DeleteRangeRequest(key=start, range_end=end)
    return rpc.DeleteRangeRequest(key=delete.encode())


def compare_request(compare: Compare) -> Any:
    key = compare.key.encode()
    match compare:
        case CreateRevision():
            return rpc.Compare(key=key, target=rpc.Compare.CREATE, create_revision=compare.equals)
        case ModRevision():
            return rpc.Compare(key=key, target=rpc.Compare.MOD, mod_revision=compare.equals)


TRY_AGAIN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}


def typed(error: grpc.RpcError, writes: bool) -> StoreError:
    """The error by what the caller does next. A write that was cut off may have happened."""
    code, details = code_of(error), details_of(error)
    text = f"etcd: {code.name}: {details}"
    if code is grpc.StatusCode.NOT_FOUND and "lease" in details:
        return LeaseExpired(text)
    if code in TRY_AGAIN:
        return StoreUnavailable(text, ambiguous=writes)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "too many requests" in details:
        return StoreUnavailable(text)
    return StoreRefused(text)


def stuck(error: grpc.RpcError) -> bool:
    """The member did not answer in time, or answered that it waited in vain for the others."""
    code = code_of(error)
    return code is grpc.StatusCode.DEADLINE_EXCEEDED or (
        code is grpc.StatusCode.UNAVAILABLE and details_of(error).startswith("etcdserver: ")
    )


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    code: grpc.StatusCode = error.code()
    return code


def details_of(error: grpc.RpcError) -> str:
    return error.details() or "no details"
