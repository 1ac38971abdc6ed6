"""Which nodes of a fleet are reached by which others where workers listen: the leader has them try."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from elastic.fleet.office import NodeSession
from elastic.wire import elastic_pb2 as pb

OTHERS = 32
"""How many others each node tries, those that follow it by name: up to 33 nodes every pair is tried both ways."""

OPEN_S, TRY_S = 2.0, 4.0
"""For the answers of all nodes, together less than an operator waits for one."""

Document = dict[str, Any]
Documents = dict[str, Document]


class Crossings:
    """One look at a time: who asks meanwhile gets what that one finds, so that no number of questions makes nodes busy.
    On the event loop."""

    def __init__(self) -> None:
        self._looking: asyncio.Task[Documents] | None = None

    async def look(self, sessions: Mapping[str, NodeSession]) -> Documents:
        """For each node `host`, where workers of others look for its own, the `port` that was tried there, `ports`, of
        which the kernel there chooses, and `reached`: by other node, why it does not reach that, or nothing. Of one
        that cannot say `because` instead."""
        if self._looking is None:
            self._looking = asyncio.create_task(_look(dict(sessions)))
            self._looking.add_done_callback(self._looked)
        return await asyncio.shield(self._looking)  # others wait for it too

    def _looked(self, task: asyncio.Task[Documents]) -> None:
        self._looking = None


async def _look(sessions: Mapping[str, NodeSession]) -> Documents:
    opened = {
        node: _opened(sessions[node].hello.address, answer)
        for node, answer in (
            await _ask_all(sessions, {node: pb.ExamineNode(open=True) for node in sessions}, OPEN_S)
        ).items()
    }
    ports = {
        node: pb.OpenPort(node=node, host=found["host"], port=found["port"])
        for node, found in opened.items()
        if "port" in found
    }
    queries = {node: pb.ExamineNode(reach=[ports[other] for other in others(node, sorted(ports))]) for node in ports}
    tried = await _ask_all(sessions, {node: query for node, query in queries.items() if query.reach}, TRY_S)
    return {
        node: {**found, **(_tried(queries[node], tried.get(node, {})) if node in ports else {})}
        for node, found in opened.items()
    }


def _opened(host: str, answer: Document) -> Document:
    """What of the answer can be used: it comes from another machine, perhaps of another version."""
    match answer:
        case {"port": int(port), "ports": [int(low), int(high)]} if 0 < port < 65536:
            return {"host": host, "port": port, "ports": [low, high]}
        case {"because": str(because)}:
            return {"because": because}
    return {"because": "it has opened no port; perhaps its agent is of an older version"}


def _tried(query: pb.ExamineNode, answer: Document) -> Document:
    if "because" in answer:
        return {"because": str(answer["because"])}
    reached = answer.get("reached", {})
    if not isinstance(reached, dict):
        return {"because": "its answer cannot be read"}
    return {"reached": {port.node: str(reached.get(port.node, "it was not tried")) for port in query.reach}}


def others(node: str, names: list[str]) -> list[str]:
    """Whom that node is to try."""
    place = names.index(node) + 1
    return [*names[place:], *names[: place - 1]][:OTHERS]


async def _ask_all(
    sessions: Mapping[str, NodeSession], queries: Mapping[str, pb.ExamineNode], within_s: float
) -> Documents:
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
