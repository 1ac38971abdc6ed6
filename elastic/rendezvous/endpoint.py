"""Addresses as an operator gives them. Plain text leaves a machine only if the operator has allowed it."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from elastic.errors import ConfigError

INSECURE = "--insecure"

_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")


def parse(option: str, text: str, *, any_port: bool = False) -> tuple[str, ...]:
    """Parse one or several "host:port" with commas. any_port: 0 is allowed. Raises ConfigError naming the option."""
    addresses = tuple(word for word in (word.strip() for word in text.split(",")) if word)
    if not addresses:
        raise ConfigError(f"{option} is empty; give HOST:PORT, several with commas")
    for address in addresses:
        matched = _ADDRESS.fullmatch(address)
        if matched is None or not (0 if any_port else 1) <= int(matched["port"]) <= 65535:
            raise ConfigError(f"{option} {address!r:.80} must be HOST:PORT, for example 10.0.0.1:7070")
    return addresses


def check_plain(option: str, hosts: Sequence[str], *, allowed: bool) -> None:
    """Raise ConfigError if a host is another machine, or may be reached from one, and plain text is not allowed. hosts:
    with or without a port. allowed: there are certificates, or the operator has allowed plain text."""
    open_hosts = [host for host in hosts if not is_loopback(host_of(host))]
    if open_hosts and not allowed:
        raise ConfigError(
            f"other machines reach {option} {open_hosts[0]}, and without certificates anybody who reaches the port can "
            "run commands as this user. Make certificates with `elastic certs init` and `elastic certs node`, and give "
            f"--certs DIR; or give {INSECURE}, if only machines that you trust reach the port"
        )


def host_of(address: str) -> str:
    matched = _ADDRESS.fullmatch(address)
    return matched["host"].strip("[]") if matched is not None else address


def split(address: str) -> tuple[str, int]:
    """Host and port of an address that `parse` has accepted."""
    return host_of(address), int(address.rpartition(":")[2])


def own_address(text: str) -> str:
    """The IP address of this machine for the text. Raises ConfigError if it is not one of this machine."""
    try:
        address = str(socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"--address {text!r:.80} is not known: {error.strerror}; give this machine's IP") from error
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError(f"--address {text} is every address; give the one under which other nodes reach this one")
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise ConfigError(
            f"--address {text} is not an address of this machine ({error.strerror}); `hostname -I` shows them"
        ) from error
    return address


def address_towards(replicas: Sequence[str]) -> str:
    """The IP address from which this machine reaches the first of these replicas that is another machine; 127.0.0.1 if
    none is. Nothing is sent. Raises ConfigError if there is no way to any."""
    far = [replica for replica in replicas if not is_loopback(host_of(replica))]
    trouble = ""
    for replica in far:
        try:
            family, kind, *_, there = socket.getaddrinfo(*split(replica), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(there)
                return str(probe.getsockname()[0])
        except OSError as error:
            trouble = trouble or f"{replica}: {error.strerror}"
    if far:
        raise ConfigError(
            f"this machine has no route to the rendezvous ({trouble}); give --address, or another --rendezvous"
        )
    return "127.0.0.1"


def check_reachable(address: str, replicas: Sequence[str]) -> None:
    """Raise ConfigError for a node that other nodes cannot reach, though its rendezvous is elsewhere."""
    far = [replica for replica in replicas if not is_loopback(host_of(replica))]
    if far and is_loopback(address):
        raise ConfigError(
            f"only this machine reaches --address {address}, and the rendezvous at {far[0]} is on another one; "
            "give the address at which other nodes reach this one"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
