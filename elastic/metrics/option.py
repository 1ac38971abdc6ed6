"""`--metrics` of a command. Commands without it import nothing else of this package."""

from __future__ import annotations

import argparse

from elastic.errors import ConfigError
from elastic.rendezvous.endpoint import is_loopback, parse, split

LOOPBACK = "127.0.0.1"


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics",
        metavar="[HOST:]PORT",
        help=f"serve /metrics for Prometheus, /healthz and /readyz at this address; HOST defaults to {LOOPBACK} "
        "(default: not at all)",
    )


def address_of(text: str, *, certs: bool | None) -> str:
    """The HOST:PORT for what `--metrics` says. certs: whether this process shows certificates; None: it never does.

    Raises ConfigError for what is no address, and for an address that other machines reach without certificates.
    """
    address, *others = parse("--metrics", f"{LOOPBACK}:{text}" if text.isdecimal() else text, any_port=True)
    if others:
        raise ConfigError(f"--metrics {text:.80} is several addresses; give one")
    if not is_loopback(split(address)[0]) and not certs:
        instead = "let the scraper, or a proxy with TLS of your own, run on this machine"
        if certs is not None:
            instead = "give --certs DIR; certificates of the roles operator and viewer may read the metrics then"
        raise ConfigError(f"--metrics {address} can be read from other machines: give {LOOPBACK}:PORT, or {instead}")
    return address
