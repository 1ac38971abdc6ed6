"""`elastic certs`: an authority, its certificates, and what a directory holds."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elastic.cli.options import add_answer, answer
from elastic.errors import ConfigError, ExitCode
from elastic.security.roles import Role

ROLES = ("rendezvous", "agent", "operator", "viewer", "etcd")

EXAMPLES = """\
examples:
  elastic certs init ca                                                          once, on a machine you trust
  elastic certs node n1 --ca ca --out n1 --role agent                            for a node: copy n1/ there
  elastic certs node n1 --ca ca --out n1 --role rendezvous --role etcd --address 10.0.0.1
  elastic certs node ann --ca ca --out ~/.elastic --role operator                for a person
  elastic certs show n1
  elastic agent --certs n1 --rendezvous 10.0.0.1:7070 --address 10.0.0.1         or ELASTIC_CERTS=n1

roles:
  rendezvous  a replica; also its certificate for etcd          agent   a node, and its workers
  operator    submit, stop, drain and everything else           viewer  what only looks
  etcd        a member of the etcd cluster; needs --address

The directory of `init` holds the keys that all trust hangs on: keep it off the nodes.
"""


def add(verbs: Any) -> None:
    certs = verbs.add_parser(
        "certs",
        help="certificates for a fleet: a small authority, one certificate for each node and person",
        description="Make and show the certificates with which the machines of a fleet and its operators know each "
        "other.",
        epilog=EXAMPLES,
    )
    what = certs.add_subparsers(dest="certs", required=True, metavar="WHAT")
    init = what.add_parser("init", help="make an authority", description="Make an authority in a new directory.")
    init.add_argument("directory", type=Path, metavar="DIR")
    _add_days(init, "10 years")
    init.set_defaults(verb=_init)
    node = what.add_parser(
        "node",
        help="issue certificates to a node or a person",
        description="Issue certificates, each in one file with its key. Again: issue new ones in their place, which "
        "running processes use without a restart.",
    )
    node.add_argument("name", metavar="NAME", help="name of the node (its --node) or of the person")
    node.add_argument(
        "--ca", type=Path, required=True, metavar="DIR", help="directory of the authority, as `init` made it"
    )
    node.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory for the certificates, which is the node's --certs",
    )
    node.add_argument(
        "--role", action="append", required=True, choices=ROLES, help="what its owner may do; may be repeated"
    )
    node.add_argument(
        "--address",
        action="append",
        default=[],
        metavar="HOST",
        help="IP address or DNS name of the machine; may be repeated",
    )
    _add_days(node, "1 year")
    node.set_defaults(verb=_node)
    show = what.add_parser("show", help="what a directory holds, and until when", description="Show certificates.")
    show.add_argument("directory", type=Path, metavar="DIR")
    add_answer(show, _show)


def _add_days(verb: argparse.ArgumentParser, default: str) -> None:
    verb.add_argument("--days", type=int, metavar="N", help=f"days until it expires (default {default})")


def _init(options: argparse.Namespace) -> int:
    from elastic.security import certificate_authority

    certificate_authority.create(options.directory, options.days)
    print(f"{options.directory} is an authority now; keep it off the nodes, and a copy of it where it is safe")
    return ExitCode.DONE


def _node(options: argparse.Namespace) -> int:
    from elastic.security.certificate_authority import Authority

    Authority(options.ca).issue(options.name, options.role, options.out, options.address, options.days)
    for line in _lines(options.out):
        print(_text(line))
    return ExitCode.DONE


def _show(options: argparse.Namespace) -> int:
    """Bad input if one of them cannot be used."""
    found = _lines(options.directory)
    text = "\n".join(map(_text, found)) if found else f"{options.directory} holds no certificates"
    code = ExitCode.BAD_INPUT if any(line["problem"] for line in found) else ExitCode.DONE
    return answer(options, {"directory": str(options.directory), "certificates": found}, text, code)


def _lines(directory: Path) -> list[dict[str, Any]]:
    """One for each certificate with a key. Raises ConfigError if there is no such directory."""
    from elastic.security import keyring
    from elastic.security.certificate_authority import ETCD, ETCD_CA, ETCD_CLIENT

    if not directory.is_dir():
        raise ConfigError(f"{directory} is no directory")
    files = [f"{role}.pem" for role in Role] + [ETCD, ETCD_CLIENT]
    lines = []
    for file in files:
        if not (path := directory / file).exists():
            continue
        line: dict[str, Any] = {"file": file, "name": "", "until": "", "days": 0, "problem": ""}
        try:
            found = keyring.read(path, directory / (ETCD_CA if file in (ETCD, ETCD_CLIENT) else keyring.FLEET_CA))
            line["name"] = found.name
            line["until"] = found.until.isoformat()
            line["days"] = (found.until - datetime.now(UTC)).days
            keyring.check_time(found)
        except ConfigError as error:
            line["problem"] = str(error)
        lines.append(line)
    return lines


def _text(line: dict[str, Any]) -> str:
    if line["problem"]:
        return f"{line['file']:<16} NOT USABLE: {line['problem']}"
    return f"{line['file']:<16} {line['name']:<16} until {line['until'][:10]}, {line['days']} days"
