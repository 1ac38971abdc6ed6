"""Asks every replica and every node of a fleet what it finds around itself; findings.py judges it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import elastic
from elastic.errors import ConfigError, ElasticError
from elastic.fleet.client import FleetClient
from elastic.fleet.findings import Answer, Survey

ASKED_AT_ONCE = 32


def take(client: FleetClient) -> Survey:
    """Whoever does not answer is in it, with the reason."""
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        replicas = [threads.submit(_ask, partial(client.examine, replica=address)) for address in client.replicas]
        try:
            overview = client.overview()
        except ElasticError:
            overview = {"leader": "", "nodes": [], "troubles": [], "jobs": []}
        leader = str(overview["leader"])
        names = [str(node["node"]) for node in overview["nodes"] if node["up"]]
        away = {str(node["node"]): Answer(because="is away") for node in overview["nodes"] if not node["up"]}
        nodes = [threads.submit(_ask, partial(client.examine, node=name)) for name in names]
        crossings = threads.submit(_ask, client.crossings) if len(names) > 1 else None
        return Survey(
            elastic.__version__,
            leader,
            {address: answer.result() for address, answer in zip(client.replicas, replicas, strict=True)},
            {**{name: answer.result() for name, answer in zip(names, nodes, strict=True)}, **away},
            tuple(overview.get("troubles", ())),
            crossings.result() if crossings is not None else None,
            tuple(overview["jobs"]),
        )


def _ask(ask: Callable[[], dict[str, Any]]) -> Answer:
    """Its clock was read between the question and the answer."""
    began_s, wall_s = time.monotonic(), time.time()
    try:
        document = ask()
    except ConfigError as error:  # one that is older, for example, and does not know the question
        return Answer(because=f"refuses: {error}")
    except ElasticError as error:
        return Answer(because=str(error))
    took_s = time.monotonic() - began_s
    offset_s = float(document.get("wall_s", wall_s + took_s / 2)) - (wall_s + took_s / 2)
    return Answer(document, "", 1000 * took_s, offset_s, took_s / 2)
