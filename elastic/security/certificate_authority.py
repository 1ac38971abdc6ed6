"""Two small certificate authorities in one directory: one for the fleet, and one for etcd.

There are two because etcd knows no roles: every holder of a certificate that etcd believes may write everything. So
only replicas get a certificate for etcd, and etcd refuses a node's agent, though it has a certificate of the fleet.

Each certificate lies in one file together with its key, mode 0600: a renewal is one atomic rename.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elastic.config import check_name
from elastic.errors import ConfigError
from elastic.records.files import write_atomically
from elastic.security.keyring import FLEET_CA
from elastic.security.roles import ETCD_SERVER_NAME, NODE_NAME, SERVER_NAME, Identity, Role, to_uri

ETCD_CA = "etcd-ca.pem"
ETCD, ETCD_CLIENT = "etcd.pem", "etcd-client.pem"
ETCD_ROLE = "etcd"
"""A role of the command line alone: a member of the etcd cluster speaks for no node of the fleet."""

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 365
DAYS_LIMIT = 36500

BACKDATED = timedelta(minutes=10)
"""How far certificates begin in the past: clocks of machines differ a little, and a certificate must be valid at
once."""

_DNS_NAME = re.compile(
    r"(?=.*[A-Za-z])[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)

_SERVER, _CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH


class Authority:
    """Issues certificates. directory: has ca.pem, etcd-ca.pem and their keys. Raises ConfigError if they are
    missing."""

    def __init__(self, directory: Path) -> None:
        self._issuers = {name: _load(directory, name) for name in (FLEET_CA, ETCD_CA)}

    def issue(
        self, name: str, roles: Sequence[str], out: Path, addresses: Sequence[str] = (), days: int | None = None
    ) -> None:
        """Write the certificates for these roles, and the authorities that their owners have to trust, into the
        directory `out`.

        addresses: IP addresses or DNS names of a member of etcd, which its certificate must name. Raises ConfigError.
        """
        check_name("NAME", name)
        hosts = [_host(address) for address in addresses]
        if (ETCD_ROLE in roles) != bool(hosts):
            raise ConfigError("--address goes with --role etcd: only etcd's certificates name addresses, and must")
        days = _check_days(CERTIFICATE_DAYS if days is None else days)
        _make(out)
        for role in dict.fromkeys(roles):
            if role == ETCD_ROLE:
                self._write(
                    out, ETCD, ETCD_CA, name, [*hosts, x509.DNSName(ETCD_SERVER_NAME)], (_SERVER, _CLIENT), days
                )
                self._trust(out, ETCD_CA)
                continue
            self._issue_role(name, Role(role), out, days)
            if role == Role.AGENT:
                self._issue_role(name, Role.WORKER, out, days)
            if role == Role.RENDEZVOUS:
                self._write(out, ETCD_CLIENT, ETCD_CA, name, [], (_CLIENT,), days)
                self._trust(out, ETCD_CA)
            self._trust(out, FLEET_CA)

    def _issue_role(self, name: str, role: Role, out: Path, days: int) -> None:
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(to_uri(Identity(role, name)))]
        if role is Role.RENDEZVOUS:
            names.append(x509.DNSName(SERVER_NAME))
        if role is Role.WORKER:
            names.append(x509.DNSName(NODE_NAME))
        usages = {Role.RENDEZVOUS: (_SERVER,), Role.WORKER: (_SERVER, _CLIENT)}.get(role, (_CLIENT,))
        self._write(out, f"{role}.pem", FLEET_CA, name, names, usages, days)

    def _write(
        self,
        out: Path,
        file: str,
        issuer: str,
        name: str,
        names: Sequence[x509.GeneralName],
        usages: Iterable[x509.ObjectIdentifier],
        days: int,
    ) -> None:
        ca, ca_key = self._issuers[issuer]
        key = ec.generate_private_key(ec.SECP256R1())
        until = min(_now() + timedelta(days=days), ca.not_valid_after_utc)
        builder = _builder(name, ca.subject, key.public_key(), ca_key.public_key(), until)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(list(usages)), critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        signed = builder.sign(ca_key, hashes.SHA256())
        write_atomically(out / file, _key_pem(key) + _cert_pem(signed), 0o600)

    def _trust(self, out: Path, file: str) -> None:
        """Add this authority to those in the file: while a fleet moves to a new authority, both are believed."""
        own = self._issuers[file][0]
        path = out / file
        known = x509.load_pem_x509_certificates(path.read_bytes()) if path.exists() else []
        if own not in known:
            write_atomically(path, b"".join(_cert_pem(cert) for cert in (*known, own)))


def create(directory: Path, days: int | None = None) -> None:
    """Make new authorities. Raises ConfigError if the directory has one."""
    days = _check_days(AUTHORITY_DAYS if days is None else days)
    _make(directory)
    for file in (FLEET_CA, ETCD_CA):
        if (directory / file).exists() or _key_path(directory, file).exists():
            raise ConfigError(
                f"{directory} has a {file} already, which may have issued certificates; give another directory"
            )
    for file, subject in ((FLEET_CA, "elastic fleet"), (ETCD_CA, "elastic etcd")):
        key = ec.generate_private_key(ec.SECP256R1())
        told_apart = f"{subject} {secrets.token_hex(4)}"  # two authorities may be trusted at once
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, told_apart)])
        until = _now() + timedelta(days=days)
        builder = _builder(told_apart, name, key.public_key(), key.public_key(), until)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(usage, critical=True)
        write_atomically(_key_path(directory, file), _key_pem(key), 0o600)
        write_atomically(directory / file, _cert_pem(builder.sign(key, hashes.SHA256())))


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePublicKey, until: datetime
) -> x509.CertificateBuilder:
    """With the identifiers of both keys, without which Python 3.13, as RFC 5280, believes no certificate."""
    builder = x509.CertificateBuilder(
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]),
        issuer_name=issuer,
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=_now() - BACKDATED,
        not_valid_after=until,
    )
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer)
    return builder.add_extension(issued_by, critical=False)


def _load(directory: Path, file: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    path = _key_path(directory, file)
    try:
        cert = x509.load_pem_x509_certificate((directory / file).read_bytes())
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        because = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{directory} holds no authority: {file} or {path.name}: {because}; make one with "
            f"`elastic certs init {directory}`"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise ConfigError(f"{path} is not the key of {file}; restore both from one copy")
    if cert.not_valid_after_utc <= _now():
        raise ConfigError(f"{directory / file} ended on {cert.not_valid_after_utc:%Y-%m-%d}; make a new authority")
    return cert, key


def _key_path(directory: Path, file: str) -> Path:
    return directory / file.replace(".pem", "-key.pem")


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}; give a directory that can be written") from error


def _host(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError as error:
        if _DNS_NAME.fullmatch(address):
            return x509.DNSName(address)
        raise ConfigError(f"--address {address!r:.80} is neither an IP address nor a name of DNS") from error


def _check_days(days: int) -> int:
    if not 1 <= days <= DAYS_LIMIT:
        raise ConfigError(f"--days={days} must be 1 to {DAYS_LIMIT}")
    return days


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _cert_pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _now() -> datetime:
    return datetime.now(UTC)
