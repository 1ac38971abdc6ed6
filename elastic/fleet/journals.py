"""The journals of one job of a fleet, from wherever they lie: its nodes, and the replicas that have led it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from elastic.errors import ConfigError, ElasticError
from elastic.fleet.client import FleetClient, Log
from elastic.journal import Line, parse

PREFIX = "journal/"

Read = Callable[[str, str, int], Log]
"""job, log, offset -> a piece."""


def of_job(client: FleetClient, job: str) -> tuple[list[Line], dict[str, str]]:
    """Its lines by time of day, of clocks that may differ a little; and who could not be asked, and why."""
    lines: list[Line] = []
    away: dict[str, str] = {}
    for whose, read in _readers(client, client.overview(), away):
        try:
            lines += _lines(read, job)
        except (ConfigError, ElasticError) as error:
            away[whose] = str(error)
    return sorted(lines, key=lambda line: float(line["t_wall"])), away


def _readers(client: FleetClient, overview: dict[str, Any], away: dict[str, str]) -> Iterator[tuple[str, Read]]:
    for address in client.replicas:
        yield f"replica {address}", partial(client.own_log, address)
    for node in overview["nodes"]:
        if node["up"]:
            yield f"node {node['node']}", partial(_of_node, client, str(node["node"]))
        else:
            away[f"node {node['node']}"] = "is away"


def _of_node(client: FleetClient, node: str, job: str, log: str, offset: int) -> Log:
    piece = client.log(job, node, log, offset)
    if piece.away:
        raise ElasticError("it does not answer")
    return piece


def _lines(read: Read, job: str) -> Iterator[Line]:
    """Of the job's own journals there, and of those of whoever runs several jobs what is said of this one."""
    for whose in (job, ""):
        names = [name for name in read(whose, "", 0).text.decode().splitlines() if name.startswith(PREFIX)]
        for name in names:
            yield from (line for line in _whole(read, whose, name) if line.get("job") == job)


def _whole(read: Read, job: str, name: str) -> Iterator[Line]:
    offset, torn = 0, b""
    while (piece := read(job, name, offset)).text:
        offset = piece.end
        *texts, torn = (torn + piece.text).split(b"\n")
        yield from (line for text in texts if (line := parse(text)) is not None)
