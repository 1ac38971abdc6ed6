"""How a job's agent reaches the rendezvous, and under which address other nodes reach its workers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from elastic.security.channels import ChannelFactory
from elastic.security.roles import Role

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Reach:
    """address: this node's. replicas: "host:port" of each replica of the rendezvous; (): the one that writes its
    address into the job directory. certs: directory of this node's certificates; None: plain text."""

    address: str = LOOPBACK
    replicas: tuple[str, ...] = ()
    certs: Path | None = None

    def channels(self) -> ChannelFactory:
        """The channels to the replicas, with the certificate of workers if the job's user has no other one. Raises
        ConfigError for certificates that cannot be used."""
        if self.certs is None:
            return ChannelFactory()
        from elastic.security.keyring import of_role

        return ChannelFactory(of_role(self.certs, Role.AGENT, Role.WORKER))

    def words(self) -> dict[str, str]:
        """The values as options of an agent."""
        certs = {"--certs": str(self.certs)} if self.certs is not None else {}
        return {"--rendezvous": ",".join(self.replicas), "--address": self.address, **certs}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rendezvous", default="", help="host:port of each replica, with commas; default: as rendezvous.json says"
    )
    parser.add_argument("--address", default=LOOPBACK, help="IP address of this node (default %(default)s)")
    parser.add_argument("--certs", type=Path, help="directory with certificates (default: plain text)")


def of_options(options: argparse.Namespace) -> Reach:
    replicas = tuple(address for address in options.rendezvous.split(",") if address)
    return Reach(options.address, replicas, options.certs)
