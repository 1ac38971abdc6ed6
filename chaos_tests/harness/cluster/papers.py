"""The certificates of a cluster: an authority of its own, and a directory for each who needs one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastic.doors import authority
from elastic.doors.roles import ETCD_SERVER_NAME, Role
from elastic.etcd import Tls


class Papers:
    """directory: gets the authority, in `ca`, and theirs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        authority.create(directory / "ca")

    def of(self, name: str, role: Role, days: int = 1) -> Path:
        """The directory to give as --certs, with a certificate for that role in it."""
        out = self._directory / name
        if not (out / f"{role}.pem").exists():
            authority.Authority(self._directory / "ca").issue(name, [role], out, days=days)
        return out

    def of_etcd(self, addresses: Sequence[str]) -> tuple[Sequence[str], Tls]:
        """Flags for members at these addresses, and what to show to them."""
        out = self._directory / "etcd"
        authority.Authority(self._directory / "ca").issue("etcd", [authority.ETCD_ROLE], out, addresses, days=1)
        own, roots = out / authority.ETCD, out / authority.ETCD_CA
        flags = ("--client-cert-auth", f"--trusted-ca-file={roots}", f"--cert-file={own}", f"--key-file={own}")
        shown = str(self.of("ann", Role.RENDEZVOUS) / authority.ETCD_CLIENT)
        return flags, Tls(str(roots), shown, shown, ETCD_SERVER_NAME)
