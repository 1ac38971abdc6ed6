"""Attackers on the network of a fleet that trains: refused with a reason in a journal, and the job does not notice."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic.errors import ConfigError, ElasticError
from elastic.fleet.client import FleetClient
from elastic.security import certificate_authority, keyring
from elastic.security.certificate_authority import Authority
from elastic.security.channels import PLAIN, ChannelFactory
from elastic.security.roles import SERVER_NAME, Role
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import FleetStub
from runtime.allreduce.ring.ring import Peer
from runtime.allreduce.ring.tls import TlsContexts
from runtime.recovery.transfer.connection import CopyFailed, open_copy
from tests.live.conftest import Quiet
from tests.live.fleet import Fleet

pytestmark = pytest.mark.long

CALL_S = 20.0
HALF_OPEN = 10_000


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("attacked"), replicas=1, nodes=("a", "b"), certs=True) as made:
        yield made


def certs(fleet: Fleet, name: str) -> Path:
    return fleet.home / "certs" / name


def refused(fleet: Fleet, because: str, at: str) -> dict[str, Any]:
    def line() -> dict[str, Any] | None:
        found = [one for one in fleet.events("refused") if because in one["because"] and one["at"].endswith(at)]
        return found[0] if found else None

    return fleet.until(f"the journal to say {because!r} at {at}", line)


def ask(fleet: Fleet, door: ChannelFactory, question: pb.Question) -> None:
    """Raises grpc.RpcError."""
    with door.channel(fleet.client.replicas[0], ()) as channel:
        FleetStub(channel).Ask(question, timeout=CALL_S)


def listens_at(pid: int) -> list[tuple[str, int]]:
    """Where a process accepts TCP connections."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(entry))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            host, port = fields[1].split(":")
            found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def unchecked(directory: Path, role: Role, patch: pytest.MonkeyPatch) -> ChannelFactory:
    """As one who does not look first whether his certificate is any good."""
    with patch.context() as careless:
        careless.setattr(keyring, "check_time", lambda certificate: None)
        careless.setattr(keyring, "_issued", lambda cert, issuer: True)
        return ChannelFactory(keyring.of_role(directory, role))


def test_whoever_is_no_member_of_the_fleet_is_refused_with_a_reason(
    fleet: Fleet, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.pace(0.05)
    job = fleet.train("attacked", workers=2)
    before = fleet.await_members(job, "a.0.0", "b.0.0")
    look, stop = pb.Question(overview=pb.Overview()), pb.Question(stop=pb.Stop(job=job))
    issuer = Authority(certs(fleet, "ca"))

    # no certificate, a foreign one, one that is over
    roots = (certs(fleet, "ca") / "ca.pem").read_bytes()
    named = (("grpc.ssl_target_name_override", SERVER_NAME),)
    credentials = grpc.ssl_channel_credentials(roots)
    with (
        grpc.secure_channel(fleet.client.replicas[0], credentials, options=named) as channel,
        pytest.raises(grpc.RpcError),
    ):
        FleetStub(channel).Ask(look, timeout=CALL_S)
    refused(fleet, "no certificate", "handshake")
    certificate_authority.create(certs(fleet, "other-ca"))
    Authority(certs(fleet, "other-ca")).issue("eve", ["operator"], certs(fleet, "eve"))
    (certs(fleet, "eve") / "ca.pem").write_bytes(roots)
    with monkeypatch.context() as past:
        past.setattr(certificate_authority, "_now", lambda: datetime.now(UTC) - timedelta(days=3))
        Authority(certs(fleet, "ca")).issue("late", ["operator"], certs(fleet, "late"), days=1)
    for who, because in (("eve", "unable to get local issuer"), ("late", "has expired")):
        with pytest.raises(grpc.RpcError):
            ask(fleet, unchecked(certs(fleet, who), Role.OPERATOR, monkeypatch), look)
        refused(fleet, because, "handshake")
    with pytest.raises(ElasticError, match="give --certs"):
        FleetClient(fleet.client.replicas, wait_s=0.0, channels=PLAIN).overview()
    refused(fleet, "does not speak TLS", "handshake")

    # a good one of another role, and of another node
    issuer.issue("vic", ["viewer"], certs(fleet, "vic"))
    viewer = FleetClient(
        fleet.client.replicas, channels=ChannelFactory(keyring.of_role(certs(fleet, "vic"), Role.VIEWER))
    )
    assert viewer.job(job)["state"] == "placed"
    with pytest.raises(ConfigError, match="takes one with role operator"):
        viewer.stop(job, "for fun")
    refused(fleet, "viewer vic does not allow stop", "/Ask")
    agent = ChannelFactory(keyring.of_role(certs(fleet, "a"), Role.AGENT))
    with pytest.raises(grpc.RpcError, match="agent a does not allow"):
        ask(fleet, agent, stop)
    with agent.channel(fleet.client.replicas[0], ()) as channel:
        hello = pb.NodeWord(hello=pb.NodeHello(node="b", slots=1, address="127.0.0.1"))
        with pytest.raises(grpc.RpcError, match="that of node a, not of 'b'"):
            next(FleetStub(channel).Attend(iter([hello]), timeout=CALL_S))

    # a token of another generation, at each worker
    seal = TlsContexts(certs(fleet, "a"))
    pids = {member["worker_id"]: member["pid"] for member in before["members"]}
    ports = {worker: listens_at(pid) for worker, pid in pids.items()}
    assert all(ports.values())
    for worker, places in ports.items():
        about = {"job": job, "generation": before["generation"], "me": "a.0.0", "plan": "", "deadline_s": CALL_S}
        with pytest.raises(CopyFailed, match="the token is not the generation's"):
            open_copy(Peer(worker, *places[0]), token="of generation 0", seal=seal, **about)
    assert {line["who"] for line in fleet.events("refused", at="worker")} == set(pids)

    # noise on every port
    host, _, port = fleet.client.replicas[0].rpartition(":")
    for place in [(host, int(port)), *(place for places in ports.values() for place in places)]:
        with socket.create_connection(place, CALL_S) as noise, suppress(OSError):
            noise.sendall(bytes(range(1, 256)) * 20)
            while noise.recv(4096):
                pass
    refused(fleet, "the caller's TLS", "worker")

    assert {member["worker_id"]: member["pid"] for member in fleet.status(job)["members"]} == pids
    fleet.pace(0.0)
    ended = fleet.await_end(job)
    assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]
    assert ended["generation"] == before["generation"], "nobody was lost, and nobody noticed"
    secrets = [fleet.home.glob("*.log"), fleet.home.rglob("*.jsonl"), fleet.home.rglob("logs/*")]
    text = b"".join(path.read_bytes() for paths in secrets for path in paths if path.is_file())
    assert b"PRIVATE KEY" not in text


def test_floods_do_not_reach_the_job(fleet: Fleet, quiet: Quiet) -> None:
    """Ten thousand connections that say nothing, as far as this process may open files; large messages."""
    fleet.pace(0.02)
    job = fleet.train("flooded", workers=2)
    before = fleet.await_members(job, "a.0.0", "b.0.0")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = HALF_OPEN if hard == resource.RLIM_INFINITY else min(HALF_OPEN, hard - 500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 500), hard))
    host, _, port = fleet.client.replicas[0].rpartition(":")
    crowd: list[socket.socket] = []
    try:
        for number in range(count):
            sock = socket.socket()
            crowd.append(sock)
            sock.setblocking(False)
            sock.bind((f"127.99.{number // 5000}.1", 0))
            with suppress(BlockingIOError):
                sock.connect((host, int(port)))
        fleet.await_more_steps(job, 20)
        assert fleet.client.job(job)["state"] == "placed", "operators are served as well"
        for size, told, because in (
            (9 << 20, "larger than 8 MiB", "larger than 8 MiB"),
            (1 << 30, "larger than max", "its message has not come"),
        ):
            large = pb.Question(stop=pb.Stop(job=job, because="x" * size))
            with pytest.raises(grpc.RpcError, match=told):
                ask(fleet, ChannelFactory(keyring.of_role(certs(fleet, "ann"), Role.OPERATOR)), large)
            del large
            line = refused(fleet, because, "/Ask")
            assert (line["caller"], line["peer"].rpartition(":")[0]) == ("operator ann", "127.0.0.1")
    finally:
        for sock in crowd:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fleet.pace(0.0)
    ended = fleet.await_end(job)
    assert (ended["exit_code"], ended["digest"]) == (0, quiet.digest), ended["because"]
    assert ended["generation"] == before["generation"]
