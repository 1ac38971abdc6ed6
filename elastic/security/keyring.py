"""The certificates of this machine, in one directory, read again when their files change.

Certificates are checked here first, because gRPC and TLS tell little: if the other side does not believe a certificate,
we only see a connection that ends.
"""

from __future__ import annotations

import os
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from elastic.errors import CertificateOver, ConfigError
from elastic.security.roles import Identity, Role, from_uris

FLEET_CA = "ca.pem"
PEM_LIMIT = 1 << 20

_Signature = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its key, read from one file. chain: the certificate and the others in the file. roots: the
    authorities to believe."""

    path: Path
    name: str
    identity: Identity | None
    since: datetime
    until: datetime
    chain: bytes
    key: bytes
    roots: bytes

    def context(self, *, called: bool) -> ssl.SSLContext:
        """The TLS context of the called or of the calling side. Both sides show certificates; the caller of this method
        must check whose certificate the other side has shown, as host names are not checked."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if called else ssl.PROTOCOL_TLS_CLIENT)
        if called:
            context.num_tickets = 0
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self.roots.decode())
        with _in_memory(self.chain + self.key) as path:  # the file may have changed by now
            context.load_cert_chain(path)
        return context


class Keyring:
    """The first of these certificates that the directory has. From any thread.

    Raises ConfigError if it has none, or if the certificate cannot be used or is over.
    """

    def __init__(self, directory: Path, *files: str, roots: str = FLEET_CA) -> None:
        self.directory = directory
        found = [file for file in files if (directory / file).exists()]
        if not found:
            raise ConfigError(
                f"{directory} has no {' or '.join(files)}; issue it with `elastic certs node NAME --role "
                f"{files[0].removesuffix('.pem')} --ca DIR --out {directory}`"
            )
        self._path, self._roots = directory / found[0], directory / roots
        self._lock = threading.Lock()
        self._signature = _signature(self._path, self._roots)
        self._current = read(self._path, self._roots)
        check_time(self._current)
        self.problem = ""
        """Why a newer certificate in the directory is not used, so that the one before it is; or ""."""

    def current(self) -> Certificate:
        """The newest certificate that can be used."""
        with self._lock:
            try:
                signature = _signature(self._path, self._roots)
                if signature != self._signature:
                    found = read(self._path, self._roots)
                    check_time(found)
                    self._signature, self._current = signature, found
                self.problem = ""
            except ConfigError as error:
                self.problem = str(error)
            return self._current


def of_role(directory: Path, *roles: Role) -> Keyring:
    """The certificate for the first of these roles that the directory has. Raises ConfigError."""
    keyring = Keyring(directory, *(f"{role}.pem" for role in roles))
    identity = keyring.current().identity
    if identity is None or identity.role not in roles:
        raise ConfigError(f"{keyring.current().path} is the certificate of {identity or 'no role'}; issue it anew")
    return keyring


def read(path: Path, roots_path: Path) -> Certificate:
    """Read a certificate. Raises ConfigError if it is not of that authority, its key is missing, or others can read the
    file."""
    text = _secret(path)
    try:
        roots = roots_path.read_bytes()
        authorities = x509.load_pem_x509_certificates(roots)
    except (OSError, ValueError) as error:
        because = error.strerror if isinstance(error, OSError) else "it holds no certificate"
        raise ConfigError(f"{roots_path} cannot be used: {because}; `elastic certs node` writes it") from error
    try:
        chain = x509.load_pem_x509_certificates(text)
        key = serialization.load_pem_private_key(text, None)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no certificate together with its key: {error}; issue it anew") from error
    cert = chain[0]
    if cert.public_key() != key.public_key():
        raise ConfigError(f"{path}: the key is not the certificate's; issue it anew")
    if not any(_issued(cert, authority) for authority in authorities):
        raise ConfigError(
            f"{path} was not issued by the authority in {roots_path}, so nobody of this fleet would believe it; issue "
            "it anew"
        )
    pem = serialization.Encoding.PEM
    return Certificate(
        path,
        cert.subject.rfc4514_string().removeprefix("CN="),
        from_uris(_uris(cert)),
        cert.not_valid_before_utc,
        cert.not_valid_after_utc,
        b"".join(one.public_bytes(pem) for one in chain),
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        roots,
    )


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """The path of a file with this content, for functions that read only files."""
    with os.fdopen(os.memfd_create("certificate", os.MFD_CLOEXEC), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def until_of(pem: bytes) -> datetime:
    """When the certificate in `pem` ends. Raises ValueError."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc


def _secret(path: Path) -> bytes:
    """The bytes of a file that no other user may read. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{path} is not a file")
        if facts.st_mode & 0o077:
            raise ConfigError(f"{path} holds a key and can be read by others; `chmod 600 {path}`")
        return file.read(PEM_LIMIT)


def check_time(certificate: Certificate) -> None:
    """Raise CertificateOver for a certificate that is over, or not valid yet."""
    now = datetime.now(UTC)
    if now < certificate.since:
        raise CertificateOver(
            f"{certificate.path} begins at {certificate.since:%Y-%m-%d %H:%M} UTC, and here it is "
            f"{now:%Y-%m-%d %H:%M}; set the clock of this machine"
        )
    if certificate.until <= now:
        raise CertificateOver(
            f"{certificate.path} ended at {certificate.until:%Y-%m-%d %H:%M} UTC; issue another one with "
            "`elastic certs node`, which is used without a restart"
        )


def _issued(cert: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        cert.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _uris(cert: x509.Certificate) -> list[str]:
    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _signature(*paths: Path) -> _Signature:
    """What changes whenever one of the files changes. Raises ConfigError."""
    try:
        return tuple((facts.st_mtime_ns, facts.st_ino, facts.st_size) for facts in map(os.stat, paths))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from error
