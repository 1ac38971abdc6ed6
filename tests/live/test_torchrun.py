"""`torchrun --rdzv-backend=elastic`: torch's contract on real etcd, and real torchrun while nodes and members die."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from chaos_tests.cluster import EtcdMembers, sturdy_binary
from chaos_tests.support.processes import Command, descendants, kill_if_there
from elastic.security import certificate_authority
from elastic.security.roles import ETCD_SERVER_NAME
from elastic.store.base import Store
from elastic.store.embedded import EmbeddedEtcd, find_binary
from elastic.store.etcd import Tls
from runtime.frontends.torchrun.run_keys import RunKeys
from tests.conformance.rendezvous_suite import RendezvousSuite

PATIENCE_S = 150.0
POLL_S = 0.05
STEADY = 5
"""Sums that a group has to make to count as one that works."""

SCRIPT = Path(__file__).parent / "scripts" / "plain_ddp.py"
RUNS = itertools.count()


@pytest.fixture(scope="module", params=["embedded", "debian"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Of etcd 3.5 and of 3.4."""
    if request.param == "embedded":
        with EmbeddedEtcd() as etcd, etcd.connect() as store:
            yield store
        return
    with closing(members(tmp_path_factory.mktemp("etcd"), 1)) as cluster, cluster.connect() as store:
        yield store


@pytest.fixture
def keys(store: Store) -> RunKeys:
    return RunKeys(store, f"run-{next(RUNS)}")


def members(directory: Path, size: int, **options: Any) -> EtcdMembers:
    if (binary := sturdy_binary()) is None:
        pytest.skip("no etcd here that survives being killed; `make etcd` fetches one")
    cluster = EtcdMembers(binary, directory, size, **options)
    cluster.wait_healthy()
    return cluster


class TestOnEtcd(RendezvousSuite):
    pass


class Torchrun:
    """Nodes of one worker each, whose script is plain_ddp.py."""

    def __init__(self, home: Path, endpoints: list[str], run: str, conf: str = "") -> None:
        self.home, self._run, self._endpoints, self._conf = home, run, ",".join(endpoints), conf
        self.nodes: dict[str, Command] = {}
        self._starts = itertools.count()
        self.lines.mkdir()

    @property
    def lines(self) -> Path:
        return self.home / "lines"

    def start(self, node: str) -> None:
        conf = f"last_call_timeout=1,join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=3{self._conf}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
        command += ["--max-restarts=20", "--monitor-interval=0.1", "--local-addr=127.0.0.1", f"--rdzv-id={self._run}"]
        command += ["--rdzv-backend=elastic", f"--rdzv-endpoint={self._endpoints}", f"--rdzv-conf={conf}", str(SCRIPT)]
        output = self.home / f"{node}-{next(self._starts)}.out"
        self.nodes[node] = Command(
            command, output, environment={"LINES": str(self.lines), "NODE": node, "OMP_NUM_THREADS": "1"}
        )

    def kill(self, node: str) -> None:
        """SIGKILL of all its processes."""
        command = self.nodes.pop(node)
        for pid in (command.process.pid, *descendants(command.process.pid)):
            kill_if_there(pid)
        command.stop()

    def told(self) -> dict[str, list[dict[str, Any]]]:
        """File of a worker -> its sums."""
        whole = {path.name: path.read_text().rpartition("\n")[0] for path in self.lines.glob("*.jsonl")}
        return {name: [json.loads(line) for line in text.splitlines()] for name, text in whole.items()}

    def together(self, nodes: set[str]) -> Callable[[], dict[int, str]]:
        """What says, from now on, rank -> node once these nodes have made sums together; before, nothing."""
        since = {name: len(sums) for name, sums in self.told().items()}

        def ranks() -> dict[int, str]:
            for node, command in self.nodes.items():
                assert command.process.poll() is None, f"{node} has ended:\n{command.output[-3000:]}"
            newest: dict[int, str] = {}
            for name, sums in self.told().items():
                made = [one for one in sums[since.get(name, 0) :] if one["world"] == len(nodes)]
                if len(made) >= STEADY and name.partition("-")[0] in nodes:
                    assert all(one["sum"] == sum(range(1, len(nodes) + 1)) for one in made), made
                    newest[made[-1]["rank"]] = name.partition("-")[0]
            return newest if set(newest) == set(range(len(nodes))) and set(newest.values()) == nodes else {}

        return ranks

    def until(self, ranks: Callable[[], dict[int, str]]) -> dict[int, str]:
        deadline_s = time.monotonic() + PATIENCE_S
        while not (found := ranks()):
            if time.monotonic() > deadline_s:
                outputs = "\n".join(f"{node}:\n{command.output[-2000:]}" for node, command in self.nodes.items())
                pytest.fail(f"not within {PATIENCE_S:g} s\n{ {n: t[-1:] for n, t in self.told().items()} }\n{outputs}")
            time.sleep(POLL_S)  # files of other processes: there is nothing to wait on
        return found

    def end(self) -> None:
        """In order, and all well."""
        (self.lines / "stop").touch()
        for node, command in self.nodes.items():
            assert command.process.wait(PATIENCE_S) == 0, f"{node}:\n{command.output[-3000:]}"

    def close(self) -> None:
        for command in self.nodes.values():
            command.stop()


@pytest.mark.long
@pytest.mark.etcd_faults
def test_the_first_node_and_a_member_of_etcd_may_die(tmp_path: Path) -> None:
    """torch's c10d backend loses the job with the node that keeps its store, and torch's agents keep the address of a
    first node that is gone."""
    with ExitStack() as stack:
        cluster = stack.enter_context(closing(members(tmp_path, 3)))
        job = stack.enter_context(closing(Torchrun(tmp_path, cluster.endpoints, "deaths")))
        for node in ("a", "b"):
            job.start(node)
        ranks = job.until(job.together({"a", "b"}))
        for first in (ranks[0], None):
            cluster.kill(0)
            if first is not None:
                job.kill(first)
                (left,) = job.nodes
                job.until(job.together({left}))
                job.start(first)
            ranks = job.until(job.together({"a", "b"}))
            cluster.start(0)
            cluster.wait_healthy()
        job.end()


def test_agents_prove_to_etcd_who_they_are(tmp_path: Path) -> None:
    certificate_authority.create(tmp_path / "ca")
    issuer = certificate_authority.Authority(tmp_path / "ca")
    certs = tmp_path / "certs"
    issuer.issue("m0", ["rendezvous"], certs)
    issuer.issue("m0", ["etcd"], certs, ["127.0.0.1"])
    ca, client = (str(certs / name) for name in (certificate_authority.ETCD_CA, certificate_authority.ETCD_CLIENT))
    server = str(certs / certificate_authority.ETCD)
    flags = ["--client-cert-auth", f"--trusted-ca-file={ca}", f"--cert-file={server}", f"--key-file={server}"]
    tls = Tls(ca, client, client, ETCD_SERVER_NAME)
    with ExitStack() as stack:
        cluster = stack.enter_context(
            closing(EtcdMembers(find_binary(), tmp_path, 1, scheme="https", flags=flags, tls=tls))
        )
        cluster.wait_healthy()
        conf = f",cacert={ca},cert={client},key={client},server_name={ETCD_SERVER_NAME}"
        job = stack.enter_context(closing(Torchrun(tmp_path, cluster.endpoints, "secret", conf)))
        job.start("a")
        assert job.until(job.together({"a"})) == {0: "a"}
        job.end()
