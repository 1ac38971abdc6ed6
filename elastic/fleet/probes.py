"""Facts about the replicas and nodes of a fleet, found when an operator asks: `elastic doctor` judges them.

`take` asks every replica and every node. Documents go over the wire as JSON; findings.py reads them and treats missing
facts as not known, because the two sides may be of different versions.

Which nodes reach which others is tried: workers listen on a port that the kernel chooses, under the address that their
node offers. So each node opens such a port for a moment, and the fleet's leader has other nodes try it. The node that
answers there says its name, so that an address which leads to another machine is found too.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.errors import ConfigError, ElasticError
from elastic.fleet.findings import ProbeAnswer, ProbeAnswers
from elastic.fleet.node import job_environment
from elastic.process import notify
from elastic.rendezvous.endpoint import split
from elastic.version import __version__
from elastic.wire import elastic_pb2 as pb

if TYPE_CHECKING:  # a node has no leader and no etcd in its process
    from elastic.fleet.client import FleetClient
    from elastic.fleet.replica.leader import NodeSession
    from elastic.store.etcd import EtcdStore

OTHERS = 32
"""How many other nodes each node tries, those that follow it by name: up to 33 nodes every pair is tried both ways."""

OPENED_WITHIN_S, TRIED_WITHIN_S = 2.0, 4.0
"""Most seconds for the answers of all nodes to each of two questions, together less than an operator waits for one."""

NodeAnswer = dict[str, Any]
NodeAnswers = dict[str, NodeAnswer]


class ReachProbes:
    """Tries which nodes reach which others, on the event loop. Only one look runs at a time, and a question that comes
    meanwhile gets its result, so that many questions do not make nodes busy."""

    def __init__(self) -> None:
        self._looking: asyncio.Task[NodeAnswers] | None = None

    async def look(self, sessions: Mapping[str, NodeSession]) -> NodeAnswers:
        """Node -> `host`, its address for other workers, `port`, which was tried there, `ports`, the range from which
        its kernel chooses, and `reached`: other node -> why it is not reached, or "". A node that cannot tell has
        `because` instead."""
        if self._looking is None:
            self._looking = asyncio.create_task(_look(dict(sessions)))
            self._looking.add_done_callback(self._looked)
        return await asyncio.shield(self._looking)  # others wait for it too

    def _looked(self, task: asyncio.Task[NodeAnswers]) -> None:
        self._looking = None


async def _look(sessions: Mapping[str, NodeSession]) -> NodeAnswers:
    opened = {
        node: _opened(sessions[node].hello.address, answer)
        for node, answer in (
            await _ask_all(sessions, {node: pb.ExamineNode(open=True) for node in sessions}, OPENED_WITHIN_S)
        ).items()
    }
    ports = {
        node: pb.OpenPort(node=node, host=found["host"], port=found["port"])
        for node, found in opened.items()
        if "port" in found
    }
    queries = {node: pb.ExamineNode(reach=[ports[other] for other in others(node, sorted(ports))]) for node in ports}
    tried = await _ask_all(sessions, {node: query for node, query in queries.items() if query.reach}, TRIED_WITHIN_S)
    return {
        node: {**found, **(_tried(queries[node], tried.get(node, {})) if node in ports else {})}
        for node, found in opened.items()
    }


def _opened(host: str, answer: NodeAnswer) -> NodeAnswer:
    """The usable part of an answer, which comes from another machine, perhaps of another version."""
    match answer:
        case {"port": int(port), "ports": [int(low), int(high)]} if 0 < port < 65536:
            return {"host": host, "port": port, "ports": [low, high]}
        case {"because": str(because)}:
            return {"because": because}
    return {"because": "it has opened no port; perhaps its agent is of an older version"}


def _tried(query: pb.ExamineNode, answer: NodeAnswer) -> NodeAnswer:
    if "because" in answer:
        return {"because": str(answer["because"])}
    reached = answer.get("reached", {})
    if not isinstance(reached, dict):
        return {"because": "its answer cannot be read"}
    return {"reached": {port.node: str(reached.get(port.node, "it was not tried")) for port in query.reach}}


def others(node: str, names: list[str]) -> list[str]:
    """The names of the nodes that this node is to try."""
    place = names.index(node) + 1
    return [*names[place:], *names[: place - 1]][:OTHERS]


async def _ask_all(
    sessions: Mapping[str, NodeSession], queries: Mapping[str, pb.ExamineNode], within_s: float
) -> NodeAnswers:
    answers = await asyncio.gather(*(_ask(sessions[node], query, within_s) for node, query in queries.items()))
    return dict(zip(queries, answers, strict=True))


async def _ask(session: NodeSession, query: pb.ExamineNode, within_s: float) -> dict[str, Any]:
    order = pb.NodeOrder(examine=query)
    answer = await session.ask(order, order.examine, within_s)
    if not isinstance(answer, pb.Examined):
        return {"because": f"no answer within {within_s:g} s"}
    try:
        document = json.loads(answer.document)
    except ValueError as error:
        return {"because": f"its answer cannot be read: {error}"}
    return document if isinstance(document, dict) else {"because": "its answer is no document"}


REACH_S = 2.0
"""Most seconds for a connection, or for an answer of etcd, which takes milliseconds where all is well."""

Document = dict[str, object]


def of_replica(directory: Path, endpoints: Sequence[str], open_etcd: Callable[[str], EtcdStore]) -> Document:
    """The facts that a replica finds. open_etcd: opens a store on one member of the cluster."""
    with ThreadPoolExecutor(len(endpoints)) as threads:
        etcd = list(threads.map(lambda endpoint: of_etcd(endpoint, open_etcd), endpoints))
    return {**_anywhere(directory), "etcd": etcd}


def of_node(directory: Path, replicas: Sequence[str], address: str, slots: int) -> Document:
    with ThreadPoolExecutor(len(replicas)) as threads:
        reached = list(threads.map(_reach, replicas))
    return {
        **_anywhere(directory),
        "torch": _version("torch"),
        "address": address,
        "slots": slots,
        "gpus": list(job_environment.of_node(os.environ)),
        "gpu_driver": Path("/proc/driver/nvidia/version").exists(),
        "replicas": dict(zip(replicas, reached, strict=True)),
    }


def _of_this_process(process: str) -> Document:
    """What findings about an agent need; rolling_upgrade.AgentFacts reads it."""
    return {"process": process, "command": shlex.join(sys.orig_argv), "is_service": notify.has_manager()}


def _anywhere(directory: Path) -> Document:
    disk = shutil.disk_usage(directory)
    return {
        "version": __version__,
        "disk": {"path": str(directory), "free": disk.free, "total": disk.total},
        "wall_s": time.time(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _reach(replica: str) -> str:
    """Why there is no connection to the replica, or ""."""
    try:
        with socket.create_connection(split(replica), timeout=REACH_S):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def of_etcd(endpoint: str, open_etcd: Callable[[str], EtcdStore]) -> Document:
    """The state of that member of etcd, or in `because` why it does not answer."""
    try:
        with open_etcd(endpoint) as etcd:
            etcd.health(timeout_s=REACH_S)  # the first call connects
            began_s = time.monotonic()
            health = etcd.health(timeout_s=REACH_S)
            told_ms = 1000 * (time.monotonic() - began_s)
    except ElasticError as error:
        return {"endpoint": endpoint, "because": str(error)}
    return {
        "endpoint": endpoint,
        "because": "",
        "version": health.version,
        "bytes": health.size,
        "alarms": list(health.alarms),
        "ms": round(told_ms, 2),
    }


LISTEN_S = 15.0
"""Seconds for which a port is open: longer than the leader takes to have all others try it."""

TRIED_LIMIT = 64
"""Most ports that a node tries in one look; a leader asks for fewer."""

NAME_BYTES = 256

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Has the range of ports from which the kernel chooses, for IPv6 too."""


class NodeProbes:
    """A node's answers to queries, on the event loop only. node: its name. address: under which other nodes reach
    it."""

    def __init__(self, node: str, address: str, replicas: Sequence[str], slots: int, jobs_dir: Path) -> None:
        self._node = node
        self._address = address
        self._replicas = replicas
        self.slots = slots
        """How many workers the node takes now."""
        self.process = secrets.token_hex(8)
        """Tells this daemon from the one before it and the one after it."""
        self._jobs_dir = jobs_dir
        self._server: asyncio.Server | None = None

    async def answer(self, query: pb.ExamineNode) -> Document:
        if query.open:
            return await self._open()
        if query.reach:
            return {"reached": await _try_all(query.reach[:TRIED_LIMIT])}
        where = self._jobs_dir, self._replicas, self._address, self.slots
        return {**await asyncio.to_thread(of_node, *where), "agent": _of_this_process(self.process)}

    def close(self) -> None:
        """Close the port that other nodes try."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _open(self) -> Document:
        self.close()
        try:
            server = self._server = await asyncio.start_server(self._say_name, self._address, 0)
            low, high = (int(word) for word in _RANGE.read_text().split())
        except (OSError, ValueError) as error:
            return {"because": f"cannot listen at {self._address}: {error}"}
        asyncio.get_running_loop().call_later(LISTEN_S, server.close)
        return {"port": server.sockets[0].getsockname()[1], "ports": [low, high]}

    async def _say_name(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._node.encode() + b"\n")
        writer.close()


async def _try_all(ports: Sequence[pb.OpenPort]) -> dict[str, str]:
    """Node -> why its port is not reached, or ""."""
    tried = await asyncio.gather(*map(_try, ports))
    return {port.node: because for port, because in zip(ports, tried, strict=True)}


async def _try(port: pb.OpenPort) -> str:
    try:
        async with asyncio.timeout(REACH_S):
            reader, writer = await asyncio.open_connection(port.host, port.port, limit=NAME_BYTES)
            try:
                name = (await reader.readline()).decode(errors="replace").rstrip("\n")
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer within {REACH_S:g} s"
    except ValueError:  # a line that does not end
        name = "more than a name"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return "" if name == port.node else f"something else answers there: {name!r:.80}"


ASKED_AT_ONCE = 32


def take(client: FleetClient) -> ProbeAnswers:
    """Ask all replicas and nodes. One that does not answer is in the result, with the reason."""
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        replicas = [threads.submit(_answer_of, partial(client.examine, replica=address)) for address in client.replicas]
        try:
            overview = client.overview()
        except ElasticError:
            overview = {"leader": "", "nodes": [], "troubles": [], "jobs": []}
        leader = str(overview["leader"])
        names = [str(node["node"]) for node in overview["nodes"] if node["up"]]
        away = {str(node["node"]): ProbeAnswer(because="is away") for node in overview["nodes"] if not node["up"]}
        nodes = [threads.submit(_answer_of, partial(client.examine, node=name)) for name in names]
        crossings = threads.submit(_answer_of, client.crossings) if len(names) > 1 else None
        return ProbeAnswers(
            __version__,
            leader,
            {address: answer.result() for address, answer in zip(client.replicas, replicas, strict=True)},
            {**{name: answer.result() for name, answer in zip(names, nodes, strict=True)}, **away},
            tuple(overview.get("troubles", ())),
            crossings.result() if crossings is not None else None,
            tuple(overview["jobs"]),
        )


def _answer_of(ask: Callable[[], dict[str, Any]]) -> ProbeAnswer:
    """The answer to one question. Its clock is taken as read halfway between the question and the answer."""
    began_s, wall_s = time.monotonic(), time.time()
    try:
        document = ask()
    except ConfigError as error:  # an older version, for example, does not know the question
        return ProbeAnswer(because=f"refuses: {error}")
    except ElasticError as error:
        return ProbeAnswer(because=str(error))
    took_s = time.monotonic() - began_s
    offset_s = float(document.get("wall_s", wall_s + took_s / 2)) - (wall_s + took_s / 2)
    return ProbeAnswer(document, "", 1000 * took_s, offset_s, took_s / 2)
