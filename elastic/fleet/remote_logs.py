"""The logs of workers and the journals of one job, for `elastic logs` and `elastic story`: from the job's directory
here, or from the nodes of a fleet and the replicas that have led the job.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from elastic.errors import ConfigError, ElasticError
from elastic.protocol.worker_id import node_of
from elastic.records import job_files
from elastic.records.job_directory import check_job
from elastic.records.journal import Line, parse

if TYPE_CHECKING:
    from elastic.fleet.client import FleetClient, Log


FOLLOW_POLL_S = 0.5


class LogSource(Protocol):
    """Where logs are read. names: the names of all workers' logs that can be read now. read: a piece from that byte
    on."""

    def names(self) -> list[str]: ...
    def read(self, name: str, offset: int) -> job_files.LogPiece: ...


class DirectoryLogs:
    """The logs of one job on this machine. Raises ConfigError if the directory holds no job."""

    def __init__(self, job_dir: Path) -> None:
        check_job(job_dir)
        self._dir = job_dir

    def names(self) -> list[str]:
        return [name for name in self.read("", 0).text.decode().splitlines() if is_worker(name)]

    def read(self, name: str, offset: int) -> job_files.LogPiece:
        return job_files.read(self._dir, "", name, offset)


class FleetLogs:
    """The logs of one job of a fleet, from the nodes that attend. Logs of a node that is away are left out, and a line
    says so once."""

    def __init__(self, client: FleetClient, job: str) -> None:
        self._client = client
        self._job = job
        self._away: set[str] = set()

    def names(self) -> list[str]:
        nodes = [node["node"] for node in self._client.overview()["nodes"] if node["up"]]
        names = [name for node in nodes for name in self._ask(node, "", 0).text.decode().splitlines()]
        return sorted(name for name in names if is_worker(name))

    def read(self, name: str, offset: int) -> Log:
        return self._ask(node_of(name), name, offset)

    def _ask(self, node: str, log: str, offset: int) -> Log:
        piece = self._client.log(self._job, node, log, offset)
        if piece.away and node not in self._away:
            print(f"elastic: node {node} is away, and its logs with it", file=sys.stderr, flush=True)
        (self._away.add if piece.away else self._away.discard)(node)
        return piece


def is_worker(name: str) -> bool:
    """Whether this is the name of a worker's log, `<node>.<slot>.<incarnation>`; journals have other names."""
    node, _, numbers = name.partition(".")
    slot, _, incarnation = numbers.partition(".")
    return "/" not in node and slot.isdigit() and incarnation.isdigit()


def show(source: LogSource, worker: str | None, *, follow: bool, as_json: bool) -> None:
    """Print all logs, or the log of one worker. follow: also what is written later, until an interrupt. Raises
    ConfigError for a worker that has no log."""
    offsets: dict[str, int] = {}
    last = ""
    while True:
        try:
            names = source.names()
            if worker is not None and worker not in names and not offsets:
                raise ConfigError(f"no log of {worker}; there are {', '.join(names) or 'none'}")
            for name in (name for name in names if worker in (None, name)):
                while (piece := source.read(name, offsets.get(name, 0))).text:
                    offsets[name] = piece.end
                    _put(name, piece.text, as_json=as_json, headed=worker is not None or name == last)
                    last = name
        except ConfigError:
            raise
        except ElasticError:
            if not follow:
                raise
        if not follow:
            return
        time.sleep(FOLLOW_POLL_S)  # files of other processes: there is nothing to wait on


STACKS_S = 10.0
"""Seconds in which a worker has to begin to write its stacks; a busy machine needs some."""
QUIET_S = 0.5
"""When nothing was added to a log for so long, the stacks are whole."""


def stacks(source: LogSource, worker: str, ask: Callable[[], None]) -> str:
    """What a worker writes to its log when it is asked for the stacks of its threads. ask: does that. Raises
    ElasticError if the worker writes nothing: it is stopped, or handles SIGQUIT in its own way."""
    begin = source.read(worker, 0).size
    ask()
    deadline_s, text, grown_s = time.monotonic() + STACKS_S, b"", 0.0
    while time.monotonic() < deadline_s:
        time.sleep(FOLLOW_POLL_S / 5)  # a file of another process: there is nothing to wait on
        piece = source.read(worker, begin + len(text))
        if piece.text:
            text, grown_s = text + piece.text, time.monotonic()
        elif b"most recent call first" in text and time.monotonic() >= grown_s + QUIET_S:
            return text.decode(errors="replace")
    raise ElasticError(
        f"{worker} has not written its stacks within {STACKS_S:g} s: it is stopped, or its script handles SIGQUIT"
    )


def _put(name: str, text: bytes, *, as_json: bool, headed: bool) -> None:
    if as_json:
        print(json.dumps({"log": name, "text": text.decode(errors="replace")}), flush=True)
        return
    if not headed:
        print(f"==> {name} <==", flush=True)
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()


PREFIX = "journal/"

Read: TypeAlias = "Callable[[str, str, int], Log]"
"""(job, log, offset) -> a piece of the log."""


def of_job(client: FleetClient, job: str) -> tuple[list[Line], dict[str, str]]:
    """The journal lines of a job in order of time, though clocks may differ a little; and machine -> why it could not
    be asked."""
    lines: list[Line] = []
    away: dict[str, str] = {}
    for machine, read in _readers(client, client.overview(), away):
        try:
            for whose, name in journals(read, job):
                lines += lines_about(job, RemoteTail().lines(read, whose, name))
        except (ConfigError, ElasticError) as error:
            away[machine] = str(error)
    return sorted(lines, key=lambda line: float(line["t_wall"])), away


def _readers(client: FleetClient, overview: dict[str, Any], away: dict[str, str]) -> Iterator[tuple[str, Read]]:
    for address in client.replicas:
        yield f"replica {address}", partial(client.own_log, address)
    for node in overview["nodes"]:
        if node["up"]:
            yield f"node {node['node']}", partial(of_node, client, str(node["node"]))
        else:
            away[f"node {node['node']}"] = "is away"


def of_node(client: FleetClient, node: str, job: str, log: str, offset: int) -> Log:
    """A piece of a log of that node. Raises ElasticError if it does not answer."""
    piece = client.log(job, node, log, offset)
    if piece.away:
        raise ElasticError("it does not answer")
    return piece


@dataclass(slots=True)
class RemoteTail:
    """The new whole lines of a file of another machine."""

    offset: int = 0
    torn: bytes = b""

    def lines(self, read: Read, job: str, name: str) -> list[bytes]:
        found: list[bytes] = []
        while (piece := read(job, name, self.offset)).text:
            self.offset = piece.end
            *whole, self.torn = (self.torn + piece.text).split(b"\n")
            found += whole
        return found


def journals(read: Read, job: str) -> Iterator[tuple[str, str]]:
    """(job, name) of the job's own journals there, and, with job "", of journals of several jobs."""
    for whose in (job, ""):
        for name in read(whose, "", 0).text.decode().splitlines():
            if name.startswith(PREFIX):
                yield whose, name


def lines_about(job: str, texts: Iterable[bytes]) -> Iterator[Line]:
    """The lines of journals among these that are about the job."""
    return (line for line in map(parse, texts) if line is not None and line.get("job") == job)
