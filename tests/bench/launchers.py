"""Three nodes of this machine with a worker each, under this project, torchrun and torchft: how they start and end."""

from __future__ import annotations

import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from chaos_tests.cluster import Cluster, Network
from chaos_tests.support.processes import Command, descendants, kill_if_there
from elastic.agent.process import worker_process
from tests.bench import contenders
from tests.bench.turnstile import OPEN, Gate

NODES = ("a", "b", "c")
MORTAL = ("b", "c")
"""Torchrun keeps what all nodes agree on in a process of the first one."""
OURS, TORCHRUN, TORCHFT = "elastic-ring", "torchrun", "torchft"
LIGHTHOUSE = "lighthouse"
IDLE_S = 0.5
FORK_SERVER = "runtime.forkserver.server"
TICK_MS, JOIN_MS, SILENT_MS = 100, 1000, 1000
"""torchft's lighthouse: how often it looks, waits for stragglers, and for the heartbeat of a replica that is dead."""


class Launcher(Protocol):
    """Three nodes of a job that trains. gate: tells the workers' pids. directory: of their stamps."""

    name: str
    gate: Gate
    directory: Path

    def root(self, node: str) -> int:
        """The pid of the process from which all others of the node descend."""
        ...

    def end(self, node: str) -> None:
        """SIGKILL of that process alone."""
        ...

    def start(self, node: str) -> None: ...

    def check(self) -> None:
        """Raises RuntimeError if the job has ended."""
        ...

    def revive(self) -> int:
        """Start the nodes again whose processes have ended by themselves, as a service manager would; how many these
        were. Raises RuntimeError if the job has ended for good."""
        ...


class Elastic:
    """A fleet of this project: etcd, a replica, three daemons."""

    name = OURS

    def __init__(self, home: Path, gate: Gate, cluster: Cluster, job: str) -> None:
        self.gate, self.directory = gate, home / "stamps"
        self.cluster, self._job = cluster, job

    def root(self, node: str) -> int:
        return self.cluster.nodes[node].pid

    def end(self, node: str) -> None:
        self.cluster.end(node)

    def start(self, node: str) -> None:
        self.cluster.node(node)

    def kill_agent(self, node: str) -> Callable[[], None]:
        """All that the daemon has started for the job, and neither the daemon nor what stands by."""
        agent = self._newest("job_agent_started", node)
        pids = (agent, *descendants(agent))

        def strike() -> None:
            for pid in pids:
                kill_if_there(pid)

        return strike

    def have_standbys(self) -> bool:
        """Whether all nodes have one that has begun its last wait."""
        return all(self._has_standby(node) for node in NODES)

    def _has_standby(self, node: str) -> bool:
        standby = self._newest("standby_started", node)
        if standby == self._newest("standby_begins", node):
            return False
        servers = [pid for pid in descendants(standby) if FORK_SERVER in Path(f"/proc/{pid}/cmdline").read_text()]
        before = [worker_process.facts(pid) for pid in servers]
        time.sleep(IDLE_S)
        return bool(servers) and before == [worker_process.facts(pid) for pid in servers]

    def _newest(self, event: str, node: str) -> int:
        """The pid in that node's last line of that event; 0: there is none."""
        lines = [line for line in self.cluster.journal() if line["event"] == event and line["node"] == node]
        return int(lines[-1]["pid"]) if lines else 0

    def revive(self) -> int:
        """Its daemons do not end by themselves."""
        self.check()
        return 0

    def check(self) -> None:
        ended = [line for line in self.cluster.journal() if line["event"] == "job_over"]
        if ended:
            raise RuntimeError(f"{self._job} has ended: {ended[0]['because']}")


@contextmanager
def elastic(
    home: Path,
    network: Network | None,
    script: str = "train_elastic.py",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Elastic]:
    """script: in scripts/, with this environment."""
    directory = home / "stamps"
    directory.mkdir(parents=True)
    with ExitStack() as stack:
        gate = stack.enter_context(closing(Gate(home / "gate")))
        gate.allow(OPEN)
        cluster = stack.enter_context(
            Cluster(home, network, replicas=1, nodes=NODES, environment={"PYTHONPATH": str(contenders.ROOT)})
        )
        job = cluster.submit(
            name="bench",
            command=["python", str(contenders.SCRIPTS / script)],
            workers=len(NODES),
            checkpoint_dir=str(home / "checkpoints"),
            checkpoint_every="off",
            snapshot_every="off",
            env={"BENCH_GATE": str(gate.path), "BENCH_STAMPS": str(directory), "OMP_NUM_THREADS": "1", **environment},
        )
        yield Elastic(home, gate, cluster, job)


def free_port() -> int:
    """Of 127.0.0.1."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


class Commands(ABC):
    """A launcher whose nodes are commands of this process."""

    name: str

    def __init__(self, home: Path, gate: Gate) -> None:
        self.gate, self.directory = gate, home / "stamps"
        self._home = home
        self._port = free_port()
        self._commands: dict[str, Command] = {}

    def root(self, node: str) -> int:
        return self._commands[node].process.pid

    def end(self, node: str) -> None:
        process = self._commands.pop(node).process
        process.kill()
        process.wait()

    def check(self) -> None:
        for node, command in self._commands.items():
            if command.process.poll() is not None:
                raise RuntimeError(f"{node} of {self.name} has ended:\n{command.output[-4000:]}")

    @abstractmethod
    def start(self, node: str) -> None: ...

    def _within(self, node: str) -> tuple[str, ...]:
        """Put before a command of that node."""
        return ()

    def revive(self) -> int:
        ended = [node for node in NODES if node in self._commands and self._commands[node].process.poll() is not None]
        for node in ended:
            print(f"{node} of {self.name} has ended by itself:\n{self._commands[node].output[-800:]}", file=sys.stderr)
            self.start(node)
        return len(ended)

    def close(self) -> None:
        for command in self._commands.values():
            command.stop()

    def _run(self, node: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        output = self._home / f"{node}-{time.monotonic_ns()}.out"
        self._commands[node] = Command([*self._within(node), *words], output, environment=environment, cwd=self._home)


class Torchrun(Commands):
    """Three agents of torchrun with a worker each. Whatever they may wait for is set short."""

    name = TORCHRUN

    def start(self, node: str) -> None:
        waits = "last_call_timeout=1,join_timeout=60,close_timeout=1,heartbeat_timeout=1"
        options = [
            f"--nnodes={len(NODES) - 1}:{len(NODES)}",
            "--nproc-per-node=1",
            "--max-restarts=1000",
            "--monitor-interval=0.05",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            "--rdzv-id=bench",
            f"--rdzv-conf={waits},keep_alive_interval=1,keep_alive_max_attempt=3,is_host={node == NODES[0]}",
        ]
        script = str(contenders.SCRIPTS / "train_ddp.py")
        environment = {
            "BENCH_GATE": str(self.gate.path),
            "BENCH_STAMPS": str(self.directory),
            "BENCH_CHECKPOINT": str(self._home / "checkpoint.pt"),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONPATH": str(contenders.ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self._run(node, [sys.executable, "-m", "torch.distributed.run", *options, script], environment)


@contextmanager
def torchrun(home: Path) -> Iterator[Torchrun]:
    (home / "stamps").mkdir(parents=True)
    with closing(Gate(home / "gate")) as gate:
        gate.allow(OPEN)
        with closing(Torchrun(home, gate)) as job:
            for node in NODES:
                job.start(node)
            yield job


class Torchft(Commands):
    """torchft's lighthouse, and a replica group of one process on each node. Whatever they wait for is set short."""

    name = TORCHFT

    def __init__(
        self, home: Path, gate: Gate, peer: Path, network: Network | None, script: str, environment: Mapping[str, str]
    ) -> None:
        super().__init__(home, gate)
        self._network, self._script = network, script
        where = network.add(LIGHTHOUSE) if network is not None else "127.0.0.1"
        self._environment = {
            "PYTHONPATH": os.pathsep.join(map(str, (contenders.ROOT, peer))),
            "OMP_NUM_THREADS": "1",
            "BENCH_GATE": str(gate.path),
            "BENCH_STAMPS": str(self.directory),
            "BENCH_NODES": ",".join(NODES),
            "TORCHFT_LIGHTHOUSE": f"http://{where}:{self._port}",
            **({"GLOO_SOCKET_IFNAME": "eth0"} if network is not None else {}),
            **environment,
        }
        waits = (f"--quorum_tick_ms={TICK_MS}", f"--join_timeout_ms={JOIN_MS}", f"--heartbeat_timeout_ms={SILENT_MS}")
        lighthouse = (str(peer / "bin" / "torchft_lighthouse"), "--min_replicas=1", f"--bind={where}:{self._port}")
        self._run(LIGHTHOUSE, [sys.executable, *lighthouse, *waits], self._environment)

    def start(self, node: str) -> None:
        where = self._network.add(node) if self._network is not None else "127.0.0.1"
        environment = {**self._environment, "BENCH_NODE": node, "BENCH_ADDRESS": where}
        self._run(node, [sys.executable, str(contenders.SCRIPTS / self._script)], environment)

    def _within(self, node: str) -> tuple[str, ...]:
        return self._network.within(node) if self._network is not None else ()


@contextmanager
def torchft(
    home: Path,
    peer: Path,
    network: Network | None = None,
    script: str = "train_torchft.py",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Torchft]:
    """script: in scripts/, with this environment. peer: may be relative, though the job's processes run elsewhere."""
    (home / "stamps").mkdir(parents=True)
    with closing(Gate(home / "gate")) as gate:
        gate.allow(OPEN)
        with closing(Torchft(home, gate, peer.resolve(), network, script, environment)) as job:
            for node in NODES:
                job.start(node)
            yield job
