"""Who is let in by a replica, with real certificates over real connections."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from elastic.errors import ConfigError
from elastic.fleet.replica.service import FleetService
from elastic.records.journal import Journal
from elastic.rendezvous import service as service_module
from elastic.rendezvous.operator_client import plainly
from elastic.rendezvous.service import RendezvousService
from elastic.security import certificate_authority, expiry, keyring, rejection_log, roles
from elastic.security.certificate_authority import Authority
from elastic.security.channels import ChannelFactory, Options
from elastic.security.expiry import SeenCertificates
from elastic.security.keyring import Keyring, of_role
from elastic.security.rate_limit import CallRate
from elastic.security.rejection_log import AGAIN_S, RejectionLog
from elastic.security.roles import Identity, Role
from elastic.security.secure_server import SecureServer, ServerCertificates
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import FleetStub, RendezvousStub, add_to_server

PATIENCE_S = 90.0
CALL_S = 60.0

PATIENT: Options = ()
"""Without the probes that end a connection whose other side is silent for a second: this machine pauses longer."""


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory each: of node a, an operator, a viewer, of one whose time is over, of another authority."""
    home = tmp_path_factory.mktemp("certs")
    certificate_authority.create(home / "ca")
    issuer = Authority(home / "ca")
    issuer.issue("a", ["rendezvous", "agent"], home / "a")
    issuer.issue("ann", ["operator"], home / "ann")
    issuer.issue("vic", ["viewer"], home / "vic")
    certificate_authority.create(home / "other-ca")
    Authority(home / "other-ca").issue("eve", ["operator"], home / "eve")
    shutil.copy(home / "ca" / "ca.pem", home / "eve" / "ca.pem")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate_authority, "_now", lambda: datetime.now(UTC) - timedelta(days=2))
        certificate_authority.Authority(home / "ca").issue("late", ["operator"], home / "late", days=1)
    return home


class At:
    """A replica, and what its journal says. lead: nobody has it; that is an answer too."""

    def __init__(self, home: Path, path: Path) -> None:
        self.home, self._path = home, path
        self.address = ""

    def channels(self, who: str, role: Role) -> ChannelFactory:
        return ChannelFactory(of_role(self.home / who, role))

    async def ask(self, channels: ChannelFactory, question: pb.Question) -> pb.Answer:
        async with channels.aio_channel(self.address, PATIENT) as channel:
            answer: pb.Answer = await FleetStub(channel).Ask(question, timeout=CALL_S)
            return answer

    async def attend(self, channels: ChannelFactory, node: str) -> str:
        """The reason that the first answer of a stream gives, which must be one."""

        async def words() -> AsyncIterator[pb.AgentWord]:  # who is refused is told so before it has spoken
            yield pb.AgentWord(hello=pb.AgentHello(job="none", node=node, slots=1))
            await asyncio.Event().wait()

        async with channels.aio_channel(self.address, PATIENT) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await RendezvousStub(channel).Attend(words()).read()
            return f"{caught.value.code().name} {caught.value.details()}"

    async def refused(self, because: str) -> dict[str, Any]:
        """The line of the journal that says so; waited for."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                lines = [json.loads(line) for line in self._path.read_text().splitlines()]
                found = [line for line in lines if line["event"] == "refused" and because in line["because"]]
                if found:
                    line: dict[str, Any] = found[0]
                    return line
                await asyncio.sleep(0.02)  # another thread writes it


@asynccontextmanager
async def play(certs: Path, tmp_path: Path) -> AsyncIterator[At]:
    at = At(certs, tmp_path / "journal.jsonl")
    lock = ServerCertificates(of_role(certs / "a", Role.RENDEZVOUS))
    with Journal(tmp_path / "journal.jsonl", "", "r", "here") as journal, SecureServer(lock, journal) as secure:
        server = secure.server(PATIENT)
        service = RendezvousService()
        add_to_server("Rendezvous", service, server)
        add_to_server("Fleet", FleetService(service, journal, secure.shown, tmp_path, dict), server)
        at.address = secure.bind(server, "127.0.0.1:0")
        await server.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield at
        finally:
            await server.stop(grace=None)


LOOK, STOP = pb.Question(overview=pb.Overview()), pb.Question(stop=pb.Stop(job="j"))


async def test_a_role_may_do_what_is_listed_for_it_and_nothing_else(certs: Path, tmp_path: Path) -> None:
    async with play(certs, tmp_path) as at:
        for who, role in (("ann", Role.OPERATOR), ("vic", Role.VIEWER)):
            assert not (await at.ask(at.channels(who, role), LOOK)).leading
        assert not (await at.ask(at.channels("ann", Role.OPERATOR), STOP)).leading
        for who, role in (("vic", Role.VIEWER), ("a", Role.AGENT)):
            with pytest.raises(grpc.aio.AioRpcError, match="role operator") as caught:
                await at.ask(at.channels(who, role), STOP)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert (await at.refused("viewer vic does not allow stop"))["caller"] == "viewer vic"
        assert (await at.refused("agent a does not allow Ask"))["peer"].startswith("127.0.0.1:")
        own = await at.attend(at.channels("a", Role.AGENT), "a")
        assert own.startswith("INVALID_ARGUMENT no job 'none' here"), "it got as far as the service"
        assert "certificate is that of node a, not of 'b'" in await at.attend(at.channels("a", Role.AGENT), "b")
        assert "role agent" in await at.attend(at.channels("ann", Role.OPERATOR), "a")


async def test_a_stream_that_does_not_begin_is_ended(
    certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a job which can show its node's certificate does not keep all calls of its node open for good."""
    monkeypatch.setattr(service_module, "HELLO_S", 0.05)
    async with play(certs, tmp_path) as at:

        async def nothing() -> AsyncIterator[pb.AgentWord]:
            await asyncio.Event().wait()
            yield pb.AgentWord()

        async with at.channels("a", Role.AGENT).aio_channel(at.address, PATIENT) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match=r"no hello within 0\.05 s"):
                await RendezvousStub(channel).Attend(nothing(), timeout=CALL_S).read()
        await at.refused("its message has not come")


async def test_who_is_not_believed_gets_no_answer(certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the journal says why is tested with a replica in a process of its own, tests/live/test_attacks.py."""

    def unchecked(who: str) -> ChannelFactory:
        """As an attacker, who does not look first whether his own certificate is good."""
        monkeypatch.setattr(keyring, "check_time", lambda certificate: None)
        monkeypatch.setattr(keyring, "_issued", lambda cert, authority: True)
        return ChannelFactory(of_role(certs / who, Role.OPERATOR))

    async with play(certs, tmp_path) as at:
        roots = (certs / "ca" / "ca.pem").read_bytes()
        nameless = grpc.ssl_channel_credentials(roots)
        named = (("grpc.ssl_target_name_override", roles.SERVER_NAME),)
        async with grpc.aio.secure_channel(at.address, nameless, options=named) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="Socket closed"):
                await FleetStub(channel).Ask(LOOK, timeout=CALL_S)
        for who in ("eve", "late"):
            with pytest.raises(grpc.aio.AioRpcError, match="Socket closed"):
                await at.ask(unchecked(who), LOOK)
        with pytest.raises(grpc.aio.AioRpcError, match="Socket closed"):
            await at.ask(ChannelFactory(), LOOK)
        host, _, port = at.address.rpartition(":")
        with socket.create_connection((host, int(port))) as noise:
            noise.sendall(b"\x00" + os.urandom(512))
            noise.settimeout(CALL_S)
            assert await asyncio.to_thread(noise.recv, 1) == b""
        assert not (await at.ask(at.channels("ann", Role.OPERATOR), LOOK)).leading, "and others are served"


async def test_only_a_replica_is_believed_to_be_one(certs: Path, tmp_path: Path) -> None:
    """A node that has taken the address of a replica shows a certificate of the fleet, but not of that role."""
    worker = of_role(certs / "a", Role.WORKER).current()
    server = grpc.aio.server()
    pair = [(worker.key, worker.chain)]
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair))
    await server.start()
    channels = ChannelFactory(of_role(certs / "ann", Role.OPERATOR))
    async with channels.aio_channel(f"127.0.0.1:{port}", PATIENT) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="verif"):
            await FleetStub(channel).Ask(LOOK, timeout=CALL_S)
    await server.stop(grace=None)


async def test_certificates_are_replaced_while_a_replica_runs(tmp_path: Path) -> None:
    """By those of another authority: first both are believed, then each side gets new ones."""
    home = tmp_path / "certs"
    for name in ("ca", "new-ca"):
        certificate_authority.create(home / name)
    old, new = Authority(home / "ca"), Authority(home / "new-ca")
    old.issue("a", ["rendezvous"], home / "a")
    old.issue("ann", ["operator"], home / "ann")
    new.issue("ben", ["operator"], home / "ben")
    async with play(home, tmp_path) as at:
        ann, ben = at.channels("ann", Role.OPERATOR), at.channels("ben", Role.OPERATOR)
        await at.ask(ann, LOOK)
        with pytest.raises(grpc.aio.AioRpcError):
            await at.ask(ben, LOOK)
        new.issue("a", ["rendezvous"], home / "a")  # adds the new authority to those that are believed
        await at.ask(ben, LOOK)
        with pytest.raises(grpc.aio.AioRpcError):
            await at.ask(ann, LOOK)
        new.issue("ann", ["operator"], home / "ann")
        await at.ask(ann, LOOK)


def test_what_cannot_be_used_is_said_with_what_to_do(certs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--role operator"):
        of_role(tmp_path, Role.OPERATOR, Role.VIEWER)
    with pytest.raises(ConfigError, match="not issued by the authority"):
        of_role(certs / "eve", Role.OPERATOR)
    with pytest.raises(ConfigError, match=r"ended at .* issue another one"):
        of_role(certs / "late", Role.OPERATOR)
    mine = tmp_path / "mine"
    shutil.copytree(certs / "ann", mine)
    (mine / "operator.pem").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        of_role(mine, Role.OPERATOR)
    shutil.copy(certs / "vic" / "viewer.pem", mine / "operator.pem")
    (mine / "operator.pem").chmod(0o600)
    with pytest.raises(ConfigError, match="is the certificate of viewer vic"):
        of_role(mine, Role.OPERATOR)
    (mine / "operator.pem").write_text("-----BEGIN NOTHING-----")
    with pytest.raises(ConfigError, match="no certificate together with its key"):
        of_role(mine, Role.OPERATOR)
    with pytest.raises(ConfigError, match="which may have issued certificates"):
        certificate_authority.create(certs / "ca")
    with pytest.raises(ConfigError, match="elastic certs init"):
        Authority(certs / "ann")
    for addresses, wanted in (([], "--role etcd"), (["no_address:1"], "neither an IP address nor a name of DNS")):
        with pytest.raises(ConfigError, match=wanted):
            Authority(certs / "ca").issue("a", ["etcd"], tmp_path / "etcd", addresses)


def test_a_member_of_etcd_may_be_named_by_its_name_of_dns(certs: Path, tmp_path: Path) -> None:
    Authority(certs / "ca").issue("a", ["etcd"], tmp_path / "etcd", ["10.0.0.1", "etcd-0.etcd"])
    cert = x509.load_pem_x509_certificate((tmp_path / "etcd" / "etcd.pem").read_bytes())
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "etcd-0.etcd" in names.get_values_for_type(x509.DNSName)
    assert [str(host) for host in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]


def test_keys_are_for_their_owner_only(certs: Path) -> None:
    secrets = [path for path in certs.rglob("*.pem") if b"PRIVATE KEY" in path.read_bytes()]
    assert len(secrets) > 8 and all(path.stat().st_mode & 0o777 == 0o600 for path in secrets)


def test_a_certificate_that_cannot_be_used_leaves_the_one_before_in_use(certs: Path, tmp_path: Path) -> None:
    shutil.copytree(certs / "a", tmp_path / "a")
    own = of_role(tmp_path / "a", Role.AGENT)
    before = own.current()
    (tmp_path / "a" / "agent.pem").write_bytes(b"half a")
    assert own.current() is before and "agent.pem" in own.problem
    [trouble] = SeenCertificates(own).troubles(set())
    assert trouble["because"] == own.problem
    Authority(certs / "ca").issue("a", ["agent"], tmp_path / "a")
    assert own.current().until >= before.until and own.current() is not before and own.problem == ""
    (tmp_path / "a").rename(tmp_path / "away")  # as of a file system that was not mounted for a moment
    assert own.current() and "cannot be read" in own.problem
    (tmp_path / "away").rename(tmp_path / "a")
    assert own.current() and own.problem == ""


@pytest.mark.parametrize("days", [0, -1, 36501])
def test_certificates_are_good_for_a_day_at_least(certs: Path, tmp_path: Path, days: int) -> None:
    with pytest.raises(ConfigError, match=f"--days={days} must be 1 to 36500"):
        Authority(certs / "ca").issue("none", ["agent"], tmp_path / "none", days=days)
    with pytest.raises(ConfigError, match=f"--days={days} must be 1 to 36500"):
        certificate_authority.create(tmp_path / "ca", days=days)


async def test_an_end_that_is_near_is_announced_in_the_journal_and_among_the_troubles(
    certs: Path, tmp_path: Path
) -> None:
    Authority(certs / "ca").issue("soon", ["agent"], tmp_path / "soon", days=3)
    soon, far = of_role(tmp_path / "soon", Role.AGENT), of_role(certs / "a", Role.AGENT)
    with Journal(tmp_path / "journal.jsonl", "", "daemon", "soon") as journal:
        watching = asyncio.create_task(expiry.watch(journal, far, soon))
        await asyncio.sleep(0)
        watching.cancel()
    [line] = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert line["event"] == "certificate_trouble" and "agent soon ends on" in line["because"]
    shown = SeenCertificates(far)
    shown.saw("soon", soon.current().until)
    assert [trouble["where"] for trouble in shown.troubles({"soon", "a"})] == ["soon"]
    assert shown.troubles({"a"}) == []


def test_every_call_of_the_wire_has_its_roles() -> None:
    """A call that is new is for nobody until somebody has thought about it."""
    served = [pb.DESCRIPTOR.services_by_name[name] for name in ("Rendezvous", "Fleet")]
    calls = {f"/{service.full_name}/{method.name}" for service in served for method in service.methods}
    assert calls == set(roles.MAY_CALL)
    contents = {field.name for field in pb.DESCRIPTOR.message_types_by_name["Question"].fields}
    assert contents > roles.MAY_BE_ASKED_BY_VIEWERS


def test_an_identity_is_read_only_where_there_is_exactly_one() -> None:
    ann = Identity(Role.OPERATOR, "ann")
    assert roles.from_uris(["10.0.0.1", roles.to_uri(ann)]) == ann
    two = [roles.to_uri(ann), roles.to_uri(Identity(Role.AGENT, "a"))]
    for names in ([], two, ["elastic://operator/"], ["elastic://king/ann"], ["http://operator/ann"], ["elastic://"]):
        assert roles.from_uris(names) is None, names
    assert "names no role" in roles.objection_to_call(None, "/elastic.wire.Fleet/Ask")
    assert "no role does" in roles.objection_to_call(ann, "/elastic.wire.Fleet/Unheard")


def test_a_pace_lets_a_burst_pass_and_then_so_many_a_second() -> None:
    now_s = [0.0]
    pace = CallRate(10.0, 5.0, lambda: now_s[0])
    assert [pace.due_s() for _ in range(5)] == [0.0] * 5
    assert pace.due_s() == pytest.approx(0.1)
    assert pace.due_s() == pytest.approx(0.2)
    now_s[0] = 10.0
    assert pace.due_s() == 0.0


def test_a_flood_of_refusals_is_a_few_lines(tmp_path: Path) -> None:
    now_s = [0.0]
    path = tmp_path / "journal.jsonl"
    with Journal(path, "", "r", "here") as journal:
        refusals = RejectionLog(journal, lambda: now_s[0])
        for _ in range(10_000):
            refusals.say("noise", at="handshake")
        refusals.say("no role", at="Ask", caller="agent a")
        now_s[0] = AGAIN_S
        refusals.say("noise", at="handshake")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["because"], line["times"]) for line in lines] == [("noise", 1), ("no role", 1), ("noise", 10_000)]


@pytest.mark.parametrize(
    ("line", "because"),
    [
        (
            b"I1122 03:20:46.791334   27806 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL: "
            b"error:100000c0:SSL routines:OPENSSL_internal:PEER_DID_NOT_RETURN_A_CERTIFICATE: Invalid context",
            "the caller has shown no certificate",
        ),
        (
            b"I1122 03:20:46.801114   27797 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL: "
            b"error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate has expired",
            "the caller's certificate is not believed: certificate has expired",
        ),
        (
            b"I1122 03:20:46.801114   27797 ssl_transport_security.cc:2563] Handshake failed with error SSL_ERROR_SSL: "
            b"error:1000007d:SSL routines:OPENSSL_internal:SOMETHING_NEW: x",
            "the handshake failed: SOMETHING_NEW",
        ),
        (b"I1122 03:20:46.801114   27797 other.cc:1] something else", ""),
    ],
)
def test_grpcs_words_about_a_handshake_become_a_reason(line: bytes, because: str) -> None:
    assert rejection_log.reason(line) == because


@pytest.mark.parametrize(
    ("cause", "because"),
    [
        ("UNKNOWN: ipv4:127.0.0.1:7: Failed to connect to remote host: Connection refused", "Connection refused"),
        (
            "UNKNOWN: ipv4:127.0.0.1:7: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL "
            "routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate: OK",
            "its certificate is not believed here: unable to get local issuer certificate",
        ),
        (
            "UNKNOWN: ipv4:127.0.0.1:7: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:100000f7:SSL "
            "routines:OPENSSL_internal:WRONG_VERSION_NUMBER: Invalid certificate verification context: OK",
            "it listens without certificates",
        ),
    ],
)
def test_a_caller_is_told_why_there_is_no_connection(cause: str, because: str) -> None:
    details = f"failed to connect to all addresses; last error: {cause}"
    assert plainly(grpc.StatusCode.UNAVAILABLE, details) == because


def test_what_a_process_says_on_stderr_still_comes_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Journal(tmp_path / "journal.jsonl", "", "r", "here") as journal, rejection_log.told(RejectionLog(journal)):
        os.write(2, b"I1122 03:20:46.801114   27797 other.cc:1] talk\nlast words\nwithout an end")
    assert capfd.readouterr().err == "last words\nwithout an end"


def test_what_a_daemon_says_on_stderr_is_a_line_of_its_log(tmp_path: Path) -> None:
    program = """
import logging, os, sys
from pathlib import Path
from elastic.process import log
from elastic.process.log_line import LogFormat
from elastic.security import rejection_log
from elastic.security.rejection_log import RejectionLog
from elastic.records.journal import Journal
begin = log.beginning(LogFormat.JSON, "info")
with Journal(Path(sys.argv[1]), "", "r", "here", logged=logging.INFO) as journal:
    with rejection_log.told(RejectionLog(journal)):
        begin()
        os.write(2, b"I1122 03:20:46.801114   27797 other.cc:1] talk\\nlast words\\n")
        os.write(2, b"E1122 03:20:46.801114   27797 other.cc:1] broken\\n")
        os.write(2, b"I1122 03:20:46.801114   27797 tsi.cc:1] Handshake failed with error SSL_ERROR_SSL: error:1:a:b:"
            b"WRONG_VERSION_NUMBER: \\n")
        logging.getLogger("elastic.part").info("after")
    logging.getLogger("elastic.part").info("behind")
"""
    words = [sys.executable, "-c", program, str(tmp_path / "journal.jsonl")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert {(line["logger"], line["level"], line["msg"]) for line in told} == {
        ("stderr", "WARNING", "last words"),
        ("grpc", "ERROR", "other.cc:1] broken"),
        ("elastic.security.rejection_log", "WARNING", "refused"),
        ("elastic.part", "INFO", "after"),
        ("elastic.part", "INFO", "behind"),
    }
    assert done.returncode == 0 and len(told) == 5


def test_a_process_whose_stderr_nobody_reads_any_more_goes_on(tmp_path: Path) -> None:
    """It says more than a pipe holds."""
    program = """
import os, sys
from pathlib import Path
from elastic.security import rejection_log
from elastic.security.rejection_log import RejectionLog
from elastic.records.journal import Journal
with Journal(Path(sys.argv[1]), "", "r", "here") as journal, rejection_log.told(RejectionLog(journal)):
    for _ in range(100):
        os.write(2, b"words" * 999 + b"\\n")
print("done")
"""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ran = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "journal.jsonl")],
            stdout=subprocess.PIPE,
            stderr=writing,
            timeout=PATIENCE_S,
        )
    finally:
        os.close(writing)
    assert ran.stdout == b"done\n"


def test_a_keyring_takes_the_first_certificate_that_is_there(certs: Path) -> None:
    assert str(of_role(certs / "vic", Role.OPERATOR, Role.VIEWER).current().identity) == "viewer vic"
    assert (
        Keyring(certs / "a", certificate_authority.ETCD_CLIENT, roots=certificate_authority.ETCD_CA).current().identity
        is None
    )
