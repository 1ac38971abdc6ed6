"""Whether nodes reach each other where workers listen: real ports, and what the leader makes of the answers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from elastic.fleet import probes
from elastic.fleet.probes import OTHERS, NodeProbes, ReachProbes, others
from elastic.fleet.replica.leader import NodeSession
from elastic.wire import elastic_pb2 as pb

PATIENCE_S = 30.0


def lookout_at(node: str, address: str) -> NodeProbes:
    return NodeProbes(node, address, (), 1, Path("."))


class Nodes:
    """Sessions of nodes, each on a loopback address of its own. deaf: those that answer nothing. old: what nodes of
    another version answer."""

    def __init__(self, names: str, *, deaf: str = "", old: Mapping[str, object] | None = None) -> None:
        self.asked: list[str] = []
        self.sessions = {
            name: NodeSession(pb.NodeHello(node=name, address=f"127.0.0.{number + 2}"))
            for number, name in enumerate(names)
        }
        self._own = {name: lookout_at(name, session.hello.address) for name, session in self.sessions.items()}
        self._deaf, self._old = deaf, old or {}

    async def serve(self) -> None:
        await asyncio.gather(*(self._serve(name, session) for name, session in self.sessions.items()))

    async def _serve(self, name: str, session: NodeSession) -> None:
        while True:
            query = (await session.outbox.get()).examine
            self.asked.append(name)
            if name not in self._deaf:
                found = self._old[name] if name in self._old else await self._own[name].answer(query)
                session.answered(pb.Examined(number=query.number, document=json.dumps(found)))

    def close(self) -> None:
        for own in self._own.values():
            own.close()


def looked(nodes: Nodes) -> probes.NodeAnswers:
    async def story() -> probes.NodeAnswers:
        serving = asyncio.create_task(nodes.serve())
        try:
            looks = ReachProbes()
            async with asyncio.timeout(PATIENCE_S):
                found, same = await asyncio.gather(looks.look(nodes.sessions), looks.look(nodes.sessions))
            assert same is found, "one look for all who ask at once"
            return found
        finally:
            serving.cancel()
            nodes.close()

    return asyncio.run(story())


def test_nodes_that_reach_each_other_say_so() -> None:
    nodes = Nodes("abc")
    found = looked(nodes)
    assert {name: document["reached"] for name, document in found.items()} == {
        "a": {"b": "", "c": ""},
        "b": {"c": "", "a": ""},
        "c": {"a": "", "b": ""},
    }
    assert found["b"]["host"] == "127.0.0.3"
    low, high = found["b"]["ports"]
    assert low <= found["b"]["port"] <= high
    assert sorted(nodes.asked) == [*"aabbcc"], "one look, though two have asked"


def test_a_port_that_is_closed_or_another_ones_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a firewall that rejects, and by an address that leads elsewhere."""

    def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0")
        writer.close()

    async def story() -> dict[str, object]:
        other = await asyncio.start_server(greet, "127.0.0.1", 0)
        with socket.create_server(("127.0.0.1", 0)) as silent, socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            ports = [other.sockets[0].getsockname()[1], closed.getsockname()[1], silent.getsockname()[1]]
            names = ("else", "closed", "silent")
            reach = [
                pb.OpenPort(node=node, host="127.0.0.1", port=port) for node, port in zip(names, ports, strict=True)
            ]
            try:
                return await lookout_at("a", "127.0.0.1").answer(pb.ExamineNode(reach=reach))
            finally:
                other.close()

    monkeypatch.setattr(probes, "REACH_S", 0.5)
    assert asyncio.run(story())["reached"] == {
        "else": "something else answers there: 'SSH-2.0'",
        "closed": "Connection refused",
        "silent": "no answer within 0.5 s",
    }


def test_who_does_not_answer_or_makes_no_sense_is_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "OPENED_WITHIN_S", 0.5)
    found = looked(Nodes("abcde", deaf="c", old={"d": {"version": "0.1"}, "e": {"port": "22", "ports": [1, 2]}}))
    assert found["a"]["reached"] == {"b": ""} and found["b"]["reached"] == {"a": ""}
    assert found["c"] == {"because": "no answer within 0.5 s"}
    assert "older version" in found["d"]["because"] and "older version" in found["e"]["because"]


def test_a_node_that_cannot_listen_where_it_says_is_named() -> None:
    answer = asyncio.run(lookout_at("a", "192.0.2.1").answer(pb.ExamineNode(open=True)))
    assert "cannot listen at 192.0.2.1" in str(answer["because"])


def test_in_a_large_fleet_each_node_is_tried_by_as_many_as_it_tries() -> None:
    names = [f"n{number:03}" for number in range(100)]
    tried = [other for name in names for other in others(name, names)]
    assert all(name not in others(name, names) for name in names)
    assert {tried.count(name) for name in names} == {OTHERS}
    assert sorted(others("b", ["a", "b", "c"])) == ["a", "c"]
