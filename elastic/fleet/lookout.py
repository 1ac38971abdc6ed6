"""What the daemon of a node answers when the leader has it look: around itself, and at the ports of other nodes.

Workers listen on a port that the kernel chooses, under the address that their node offers. A look at ports does the
same: each node opens one for a moment, and others try it. Whoever answers there says its name, so that an address which
leads to another machine is found too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from elastic.fleet import surroundings
from elastic.fleet.surroundings import REACH_S, Document
from elastic.wire import elastic_pb2 as pb

OPEN_S = 15.0
"""Longer than the leader takes to have all others try."""

TRIED_LIMIT = 64
"""Ports in one look; a leader asks for fewer."""

NAME_BYTES = 256

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Of which the kernel chooses, for IPv6 too."""


class Lookout:
    """node: its name. address: under which it offers itself. On the event loop only."""

    def __init__(self, node: str, address: str, replicas: Sequence[str], slots: int, jobs_dir: Path) -> None:
        self._node = node
        self._address = address
        self._replicas = replicas
        self._slots = slots
        self._jobs_dir = jobs_dir
        self._door: asyncio.Server | None = None

    async def answer(self, query: pb.ExamineNode) -> Document:
        if query.open:
            return await self._open()
        if query.reach:
            return {"reached": await _try_all(query.reach[:TRIED_LIMIT])}
        where = self._jobs_dir, self._replicas, self._address, self._slots
        return await asyncio.to_thread(surroundings.of_node, *where)

    def close(self) -> None:
        """Nobody need try any more."""
        if self._door is not None:
            self._door.close()
            self._door = None

    async def _open(self) -> Document:
        self.close()
        try:
            door = self._door = await asyncio.start_server(self._say_name, self._address, 0)
            low, high = (int(word) for word in _RANGE.read_text().split())
        except (OSError, ValueError) as error:
            return {"because": f"cannot listen at {self._address}: {error}"}
        asyncio.get_running_loop().call_later(OPEN_S, door.close)
        return {"port": door.sockets[0].getsockname()[1], "ports": [low, high]}

    async def _say_name(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._node.encode() + b"\n")
        writer.close()


async def _try_all(ports: Sequence[pb.OpenPort]) -> dict[str, str]:
    """By node, why it is not reached, or nothing."""
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
