"""`elastic rendezvous` and `elastic agent`: the processes that a fleet is made of."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.cli.options import add_certs, add_replicas, certs_of, keyring_of
from elastic.config import check_name, check_pairs, check_text
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.metrics import option as metrics_option
from elastic.preemption import selection
from elastic.process import file_modes, log
from elastic.process.log_line import LogFormat
from elastic.process.option_file import OptionFile, differences
from elastic.protocol.worker_id import node_name
from elastic.records.job_directory import DEFAULT_PARENT
from elastic.rendezvous.endpoint import address_towards, check_plain, check_reachable, own_address, parse
from elastic.security.roles import ETCD_SERVER_NAME, Role

if TYPE_CHECKING:
    from elastic.fleet.node.job_environment import NodeSettings
    from elastic.fleet.node.node_daemon import Reread
    from elastic.metrics.replica import ReplicaMetrics
    from elastic.security.keyring import Keyring
    from elastic.store.etcd import Tls


GRACE_S = 30.0

_log = logging.getLogger(__name__)

RENDEZVOUS_EXAMPLES = """\
examples:
  elastic rendezvous --etcd 127.0.0.1:2379 --listen 127.0.0.1:7070
  elastic rendezvous --etcd 10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379 --listen 10.0.0.1:7070 --certs n1
  elastic rendezvous --etcd 127.0.0.1:2379 --listen 127.0.0.1:7070 --metrics 9400 --log-format json

Run one to three replicas, on different machines, with the same etcd. One of them leads; if it ends, another one does.

exit codes:
  2 bad input    130, 143 stopped
"""


AGENT_EXAMPLES = """\
examples:
  elastic agent --rendezvous 127.0.0.1:7070 --slots 2
  elastic agent --rendezvous 10.0.0.1:7070,10.0.0.2:7070 --slots 8 --label gpu=h100 --certs n7
  elastic agent --rendezvous 127.0.0.1:7070 --slots 2 --metrics 9401
  elastic agent --config /etc/elastic/agent.toml          slots = 2, label = ["gpu=h100"], jobs_dir = "/var/lib/elastic"

With --config SIGHUP has the agent read the file again: slots, label, notices and log_level may change while it runs.

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
        help="serve a fleet: run a replica of the service that decides where jobs run and who their members are",
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
        help="directory for journals; no later replica needs them (default ./%(default)s)",
    )
    verb.add_argument(
        "--allow-unsafe-etcd",
        action="store_true",
        help="accept members of etcd of versions 3.5.0 to 3.5.2, which may lose data when they are killed",
    )
    metrics_option.add_option(verb)
    add_certs(verb)
    log.add_options(verb)
    verb.set_defaults(verb=_rendezvous)


def _rendezvous(options: argparse.Namespace) -> int:
    import asyncio

    from elastic.security import rejection_log

    certs = certs_of(options)
    if certs is not None:
        rejection_log.ask_for_talk()
    from elastic.fleet.replica.server import Server
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
    begin = log.beginning(LogFormat(options.log_format), options.log_level)
    with _logged(), _metrics_of_replica(options.metrics, directory, lock.keyrings) as metrics:
        server = Server(
            *(directory, endpoints, listen, lock), unsafe_etcd=options.allow_unsafe_etcd, metrics=metrics, listens=begin
        )
        return asyncio.run(server.run())


@contextmanager
def _logged() -> Iterator[None]:
    """What ends a daemon that has begun to log is a line of its log. Raises SystemExit then. What ends it before is for
    who has started it."""
    try:
        yield
    except (ElasticError, OSError) as error:
        if not log.has_begun():
            raise
        _log.critical("the process ends: %s", error, exc_info=isinstance(error, OSError))
        sys.exit(ExitCode.BAD_INPUT if isinstance(error, ConfigError | OSError) else ExitCode.BELOW_QUORUM)


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
    verb.remembers = True
    verb.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help='options from a TOML file, under their names without dashes: slots = 2, jobs_dir = "/var/lib/elastic"; '
        "options of the command line override it. SIGHUP has the agent read it again",
    )
    add_replicas(verb, verb)
    verb.add_argument(
        "--node",
        metavar="N",
        help="name of this node, unique in the fleet (default: in a job of Slurm the name of the node there, else the "
        "host's name)",
    )
    verb.add_argument(
        "--slots",
        type=int,
        default=default_slots(os.environ),
        metavar="N",
        help="workers that this node takes (default: in a job of Slurm its GPUs on the node, or the CPUs of a task; "
        "else 1)",
    )
    verb.add_argument(
        "--label", action="append", default=[], metavar="K=V", help="a label that jobs may ask for; repeatable"
    )
    verb.add_argument(
        "--address",
        metavar="HOST",
        help="address at which other nodes reach this one (default: the one from which it reaches the rendezvous)",
    )
    verb.add_argument(
        "--jobs-dir",
        type=Path,
        default=Path(DEFAULT_PARENT),
        metavar="DIR",
        help="directory on this machine; each job gets a directory in it (default ./%(default)s)",
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
    log.add_options(verb)
    verb.set_defaults(verb=_agent)


def _agent(options: argparse.Namespace) -> int:
    from elastic.agent.process.agent_process import standbys
    from elastic.records.job_directory import JobLock, lock_identity
    from elastic.records.journal import Journal, journal_path
    from elastic.records.retention import Retention

    options, settings = _settled(options)
    if options.config is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # until the daemon can hear it
    with settings.placing():
        checked = _checked(options)
    site, node, jobs_dir = checked.site, checked.site.node, checked.site.jobs_dir
    who = f"daemon-{node}"
    otherwise = "give each node a --jobs-dir of its own, on a disk of its own"
    holder = f"node {node}, on {socket.gethostname()}, "  # another machine may have this directory, too
    with ExitStack() as stack:
        stack.enter_context(JobLock(jobs_dir / "agent.lock", otherwise, holder))
        path = journal_path(jobs_dir, who)
        journal = stack.enter_context(Journal(path, "", who, node, retention=Retention(who), logged=logging.INFO))
        metrics = stack.enter_context(_metrics_of_agent(checked))
        log.beginning(LogFormat(options.log_format), options.log_level)()
        stack.enter_context(_logged())
        waiting = standbys(jobs_dir, node, site.job_user, journal)
        # They import side by side with this process, which has the larger part of its own imports before it.
        gc.disable()  # imports leave hardly any garbage, and to look for it is a tenth of their time
        import asyncio

        from elastic.fleet.node.leader_session import Offer
        from elastic.fleet.node.node_daemon import Daemon
        from elastic.security.channels import ChannelFactory

        gc.freeze()
        gc.enable()
        shown_at = {"metrics": metrics} if metrics else {}
        about = {"address": site.reach.address, "slots": options.slots, "jobs_dir": str(jobs_dir), **shown_at}
        journal.write("daemon_started", **about)
        lock = lock_identity(jobs_dir / f"{node}.lock.id")

        async def watch_certificates() -> None:
            if checked.keyrings:
                from elastic.security import expiry  # most nodes have none, and need not read about them

                await expiry.watch(journal, *checked.keyrings)

        async def attend() -> int:
            watching = asyncio.create_task(watch_certificates())
            try:
                offer = Offer(options.slots, tuple(options.label), lock)
                channels = ChannelFactory(checked.keyring)
                given = settings if options.config is not None else None
                return await Daemon(site, offer, journal, channels, waiting, given).run()
            finally:
                watching.cancel()

        return asyncio.run(attend())


MAY_CHANGE = ("slots", "label", "notices", "log_level")
"""Options of an agent that the file may change while it runs."""


class _Settings:
    """The options of an agent, from its command line and its file."""

    def __init__(self, file: OptionFile) -> None:
        self._file = file
        self.values = file.options()

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Errors about options that are from the file name file and line."""
        try:
            yield
        except ConfigError as error:
            raise self._file.placed(error) from error

    def reread(self) -> Reread:
        from elastic.fleet.node.node_daemon import Reread

        found = self._file.options()
        with self.placing():
            _check_changing(argparse.Namespace(**found))
        other = {name: (_as_json(self.values[name]), _as_json(found[name])) for name in differences(self.values, found)}
        changed = {name: values for name, values in other.items() if name in MAY_CHANGE}
        refused = {name: values for name, values in other.items() if name not in MAY_CHANGE}
        self.values |= {name: found[name] for name in changed}
        now = self.values
        return Reread(now["slots"], tuple(now["label"]), now["notices"], now["log_level"], changed, refused)


def _settled(options: argparse.Namespace) -> tuple[argparse.Namespace, _Settings]:
    """The options with what the file has of them. Raises ConfigError."""
    settings = _Settings(OptionFile(options.parser, options.config, options.words, but=("config",)))
    return argparse.Namespace(**{**vars(options), **settings.values}), settings


def _as_json(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True, slots=True)
class _Checked:
    """What a daemon needs of its options. keyring: its own; keyrings: also that of its workers. metrics: the address of
    its metrics, or None."""

    site: NodeSettings
    keyring: Keyring | None
    keyrings: Sequence[Keyring]
    metrics: str | None


def _metrics_of_agent(checked: _Checked) -> AbstractContextManager[str]:
    if checked.metrics is None:
        return nullcontext("")
    from elastic.metrics import service

    return service.of_agent(checked.metrics, checked.site.jobs_dir, checked.site.node, checked.keyrings)


def _node_of(options: argparse.Namespace) -> str:
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    node: str = options.node if options.node is not None else node_name(host)
    check_name("--node", node)
    return node


def _checked(options: argparse.Namespace) -> _Checked:
    """Raises ConfigError."""
    from elastic.fleet.node.job_environment import NodeSettings
    from elastic.rendezvous.reach import Reach
    from elastic.security import job_user as users

    node = _node_of(options)
    if options.rendezvous is None:
        raise ConfigError("give --rendezvous HOST:PORT,...")
    replicas = parse("--rendezvous", options.rendezvous)
    _check_changing(options)
    selection.check_grace(options.grace)
    address = address_towards(replicas) if options.address is None else own_address(options.address)
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
        notices=options.notices,
        grace_s=options.grace,
        job_user=job_user,
        log_words=log.words(options.log_format, options.log_level),
    )
    keyrings = [one for one in (keyring, of_workers) if one is not None]
    metrics = options.metrics and metrics_option.address_of(options.metrics, certs=bool(keyrings))
    return _Checked(site, keyring, keyrings, metrics)


def _check_changing(options: argparse.Namespace) -> None:
    """Raises ConfigError for options of MAY_CHANGE."""
    from elastic.agent.process.worker_process import check_descriptors

    if options.slots < 1:
        raise ConfigError(f"--slots={options.slots} must be >= 1")
    check_descriptors(options.slots, etcd=False)
    check_pairs("--label", options.label)
    selection.check(options.notices)


def check_own(keyring: Keyring, node: str) -> None:
    """Raises ConfigError for the certificate of another node, which no replica would let in."""
    identity = keyring.current().identity
    if identity is not None and identity.name != node:
        raise ConfigError(f"{keyring.current().path} is of node {identity.name}; give --node {identity.name}")


def default_slots(environment: Mapping[str, str]) -> int:
    """What a job of Slurm has on this node: its GPUs, or CPUs for a task. 1 elsewhere, and where neither is known."""
    for variable in ("SLURM_GPUS_ON_NODE", "SLURM_CPUS_PER_TASK"):
        if (count := environment.get(variable, "")).isdecimal() and int(count) > 0:
            return int(count)
    return 1


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
