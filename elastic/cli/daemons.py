"""`elastic rendezvous` and `elastic agent`: the processes that a fleet is made of."""

from __future__ import annotations

import argparse
import gc
import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic import file_modes
from elastic.cli.options import add_certs, add_replicas, certs_of, keyring_of
from elastic.config import check_name, check_pairs, check_text
from elastic.errors import ConfigError
from elastic.metrics import option as metrics_option
from elastic.preemption import selection
from elastic.records.job_directory import DEFAULT_PARENT
from elastic.rendezvous.endpoint import check_plain, check_reachable, own_address, parse
from elastic.security.roles import ETCD_SERVER_NAME, Role

if TYPE_CHECKING:
    from elastic.fleet.job_environment import NodeSettings
    from elastic.metrics.replica import ReplicaMetrics
    from elastic.security.keyring import Keyring
    from elastic.store.etcd import Tls


GRACE_S = 30.0

RENDEZVOUS_EXAMPLES = """\
examples:
  elastic rendezvous --etcd 127.0.0.1:2379 --listen 127.0.0.1:7070
  elastic rendezvous --etcd 10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379 --listen 10.0.0.1:7070 --certs n1
  elastic rendezvous --etcd 127.0.0.1:2379 --listen 127.0.0.1:7070 --metrics 9400

One to three of these, on different machines, with the same etcd: one of them leads, the others take over.

exit codes:
  2 bad input    130, 143 stopped
"""


AGENT_EXAMPLES = """\
examples:
  elastic agent --rendezvous 127.0.0.1:7070 --slots 2
  elastic agent --rendezvous 10.0.0.1:7070,10.0.0.2:7070 --address 10.0.0.7 --slots 8 --label gpu=h100 --certs n7
  elastic agent --rendezvous 127.0.0.1:7070 --slots 2 --metrics 9401
  /opt/elastic-2/bin/elastic agent --upgrade --jobs-dir /var/lib/elastic

With --upgrade this program takes the place of the agent that runs there, in the same process and with the options of
that one; its jobs and their workers go on. A program that cannot start, or cannot read what it would be handed, is
refused.

Ctrl-C and SIGTERM take the node out of its jobs first, between two steps; a second one ends them at once.

exit codes:
  2 bad input    130, 143 stopped
"""


def add(verbs: Any) -> None:
    _add_rendezvous(verbs)
    _add_agent(verbs)


def _add_rendezvous(verbs: Any) -> None:
    verb = verbs.add_parser(
        "rendezvous",
        help="serve a fleet: one replica of what decides where jobs run, and who is a member of each",
        description="One replica of a fleet's rendezvous. Everything that lasts is in etcd.",
        epilog=RENDEZVOUS_EXAMPLES,
    )
    verb.add_argument("--etcd", required=True, metavar="HOST:PORT,...", help="members of the etcd cluster, as IPs")
    verb.add_argument("--listen", required=True, metavar="HOST:PORT", help="the address that agents and users reach")
    verb.add_argument(
        "--dir",
        type=Path,
        default=Path("elastic-rendezvous"),
        metavar="DIR",
        help="for journals; nothing in it is needed again (default ./%(default)s)",
    )
    verb.add_argument(
        "--allow-unsafe-etcd",
        action="store_true",
        help="also with members of etcd of versions 3.5.0 to 3.5.2, which may lose data when they are killed",
    )
    metrics_option.add_option(verb)
    add_certs(verb)
    verb.set_defaults(verb=_rendezvous)


def _rendezvous(options: argparse.Namespace) -> int:
    import asyncio

    from elastic.security import rejection_log

    certs = certs_of(options)
    if certs is not None:
        rejection_log.ask_for_talk()
    from elastic.fleet.server import Server
    from elastic.security.secure_server import ServerCertificates

    (listen,) = _one("--listen", parse("--listen", options.listen, any_port=True))
    endpoints = parse("--etcd", options.etcd)
    if listen.startswith(("0.0.0.0:", "[::]:")):
        raise ConfigError(f"--listen {listen} is every address; give the one that agents reach")
    keyring = keyring_of(certs, Role.RENDEZVOUS)
    tls, others = _etcd_tls(certs, several=len(endpoints) > 1)
    check_plain("--listen", [listen], allowed=options.insecure or keyring is not None)
    check_plain("--etcd", endpoints, allowed=options.insecure or tls is not None)
    _make(options.dir, "--dir")
    lock = ServerCertificates(keyring, tls, others)
    directory = options.dir.absolute()
    with _metrics_of_replica(options.metrics, directory, lock.keyrings) as metrics:
        server = Server(directory, endpoints, listen, lock, unsafe_etcd=options.allow_unsafe_etcd, metrics=metrics)
        return asyncio.run(server.run())


def _metrics_of_replica(
    chosen: str | None, directory: Path, keyrings: Sequence[Keyring]
) -> AbstractContextManager[ReplicaMetrics | None]:
    if chosen is None:
        return nullcontext()
    from elastic.metrics import service

    return service.of_replica(metrics_option.address_of(chosen, certs=bool(keyrings)), directory, keyrings)


def _etcd_tls(certs: Path | None, *, several: bool) -> tuple[Tls | None, tuple[Keyring, ...]]:
    """What to show to etcd, if these certificates have something for it. several: endpoints, of which gRPC does not
    compare each with its certificate. Raises ConfigError."""
    from elastic.security.certificate_authority import ETCD_CA, ETCD_CLIENT
    from elastic.security.keyring import Keyring
    from elastic.store.etcd import Tls

    if certs is None or not (certs / ETCD_CLIENT).exists():
        return None, ()
    keyring = Keyring(certs, ETCD_CLIENT, roots=ETCD_CA)
    path = str(certs / ETCD_CLIENT)
    return Tls(str(certs / ETCD_CA), path, path, ETCD_SERVER_NAME if several else None), (keyring,)


def _add_agent(verbs: Any) -> None:
    verb = verbs.add_parser(
        "agent",
        help="offer this machine to a fleet",
        description="The daemon of a node: it runs the workers of the jobs that the fleet places here. They end with "
        "it.",
        epilog=AGENT_EXAMPLES,
    )
    add_replicas(verb, verb)
    verb.add_argument(
        "--upgrade",
        action="store_true",
        help="this program takes the place of the one that runs with the same --jobs-dir and --node; jobs go on",
    )
    verb.add_argument("--json", action="store_true", help="with --upgrade: the outcome as one JSON object")
    verb.add_argument("--handover", type=int, help=argparse.SUPPRESS)
    verb.add_argument("--node", metavar="N", help="name of this node, unique in the fleet (default: the host's)")
    verb.add_argument("--slots", type=int, default=1, metavar="N", help="workers it takes (default %(default)s)")
    verb.add_argument(
        "--label", action="append", default=[], metavar="K=V", help="something jobs may ask for; any number of times"
    )
    verb.add_argument(
        "--address", default="127.0.0.1", metavar="HOST", help="under which other nodes reach it (default %(default)s)"
    )
    verb.add_argument(
        "--jobs-dir",
        type=Path,
        default=Path(DEFAULT_PARENT),
        metavar="DIR",
        help="on this machine; each job gets a directory in it (default ./%(default)s)",
    )
    selection.add_option(verb)
    verb.add_argument(
        "--grace",
        type=float,
        default=GRACE_S,
        metavar="S",
        help="how long a job may take to leave this node in order (default %(default)g)",
    )
    verb.add_argument(
        "--job-user",
        metavar="NAME",
        help="run the jobs as this user, who can read neither the certificates of this agent nor its memory; the agent "
        "itself has to be started as root (default: as the agent)",
    )
    metrics_option.add_option(verb)
    verb.set_defaults(verb=_agent)


def _agent(options: argparse.Namespace) -> int:
    from elastic.agent.process.agent_process import standbys
    from elastic.records.job_directory import JobLock, lock_identity
    from elastic.records.journal import Journal, journal_path
    from elastic.records.retention import Retention

    if options.upgrade:
        from elastic.cli.upgrade import upgrade

        return upgrade(options.jobs_dir, _node_of(options), as_json=options.json)
    checked = _checked(options)
    site, node, jobs_dir = checked.site, checked.site.node, checked.site.jobs_dir
    who = f"daemon-{node}"
    otherwise = "give another --node, another --jobs-dir, or --upgrade to take its place"
    with (
        JobLock(jobs_dir / f"{node}.lock", otherwise),
        Journal(journal_path(jobs_dir, who), "", who, node, retention=Retention(who)) as journal,
        _metrics_of_agent(checked),
    ):
        waiting = standbys(jobs_dir, node, site.job_user, journal) if options.handover is None else {}
        # They import side by side with this process, which has the larger part of its own imports before it.
        gc.disable()  # imports leave hardly any garbage, and to look for it is a tenth of their time
        import asyncio

        from elastic.agent.handover import Handed
        from elastic.fleet.leader_session import Offer
        from elastic.fleet.node_daemon import Daemon
        from elastic.security.channels import ChannelFactory

        gc.freeze()
        gc.enable()
        print(
            f"elastic: node {node} at {site.reach.address} with {options.slots} slots; jobs in {jobs_dir}", flush=True
        )
        handed = Handed.read(options.handover) if options.handover is not None else None
        lock = lock_identity(jobs_dir / f"{node}.lock.id")

        async def watch_certificates() -> None:
            if checked.keyrings:
                from elastic.security import expiry  # most nodes have none, and need not read about them

                await expiry.watch(journal, *checked.keyrings)

        async def attend() -> int:
            watching = asyncio.create_task(watch_certificates())
            try:
                offer = Offer(options.slots, tuple(options.label), lock)
                return await Daemon(site, offer, journal, ChannelFactory(checked.keyring), handed, waiting).run()
            finally:
                watching.cancel()

        return asyncio.run(attend())


@dataclass(frozen=True, slots=True)
class _Checked:
    """What a daemon needs of its options. keyring: its own; keyrings: also that of its workers. metrics: the address of
    its metrics, or None."""

    site: NodeSettings
    keyring: Keyring | None
    keyrings: Sequence[Keyring]
    metrics: str | None


def _metrics_of_agent(checked: _Checked) -> AbstractContextManager[None]:
    if checked.metrics is None:
        return nullcontext()
    from elastic.metrics import service

    return service.of_agent(checked.metrics, checked.site.jobs_dir, checked.site.node, checked.keyrings)


def trial(words: Sequence[str], state: Mapping[str, Any]) -> None:
    """Everything for which a daemon that takes over could end: of these words, and this state."""
    from elastic.cli import parser
    from elastic.fleet import upgrade_state

    _checked(parser().parse_args(words))
    upgrade_state.read(state)


def _node_of(options: argparse.Namespace) -> str:
    node: str = options.node if options.node is not None else default_node(socket.gethostname())
    check_name("--node", node)
    return node


def _checked(options: argparse.Namespace) -> _Checked:
    """Raises ConfigError."""
    from elastic.agent.process.worker_process import check_descriptors
    from elastic.fleet.job_environment import NodeSettings
    from elastic.rendezvous.reach import Reach
    from elastic.security import job_user as users

    node = _node_of(options)
    if options.rendezvous is None:
        raise ConfigError("give --rendezvous HOST:PORT,...; or --upgrade for an agent that runs already")
    replicas = parse("--rendezvous", options.rendezvous)
    if options.slots < 1:
        raise ConfigError(f"--slots={options.slots} must be >= 1")
    check_descriptors(options.slots, etcd=False)
    check_pairs("--label", options.label)
    selection.check_grace(options.grace)
    notices = selection.check(options.notices)
    address = own_address(options.address)
    certs = certs_of(options)
    keyring, of_workers = keyring_of(certs, Role.AGENT), keyring_of(certs, Role.WORKER)
    check_plain("--rendezvous", replicas, allowed=options.insecure or keyring is not None)
    check_plain("--address", [address], allowed=options.insecure or keyring is not None)
    check_reachable(address, replicas)
    if keyring is not None:
        check_own(keyring, node)
    jobs_dir = options.jobs_dir.absolute()
    is_new = not jobs_dir.exists()
    _make(options.jobs_dir, "--jobs-dir")
    job_user = None
    if options.job_user is not None:
        job_user = users.find(options.job_user)
        if is_new:
            jobs_dir.chmod(0o755)
        users.check(job_user, jobs_dir)
    site = NodeSettings(
        node=node,
        reach=Reach(address, replicas, certs),
        jobs_dir=jobs_dir,
        notices=notices,
        grace_s=options.grace,
        job_user=job_user,
    )
    keyrings = [one for one in (keyring, of_workers) if one is not None]
    metrics = options.metrics and metrics_option.address_of(options.metrics, certs=bool(keyrings))
    return _Checked(site, keyring, keyrings, metrics)


def check_own(keyring: Keyring, node: str) -> None:
    """Raises ConfigError for the certificate of another node, which no replica would let in."""
    identity = keyring.current().identity
    if identity is not None and identity.name != node:
        raise ConfigError(f"{keyring.current().path} is of node {identity.name}; give --node {identity.name}")


def default_node(host: str) -> str:
    """The host's name as that of a node: without its domain."""
    return "".join(c if c.isalnum() else "-" for c in host.partition(".")[0].lower()).strip("-")[:63] or "node"


def _one(option: str, values: tuple[str, ...]) -> tuple[str]:
    if len(values) != 1:
        raise ConfigError(f"{option} takes one address, not {len(values)}")
    return (values[0],)


def _make(directory: Path, option: str) -> None:
    check_text(option, directory.absolute())
    try:
        file_modes.make_directory(directory / "journal")
    except OSError as error:
        raise ConfigError(f"{option} {directory}: {error.strerror}; give a directory that can be written") from error
