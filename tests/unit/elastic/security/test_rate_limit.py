"""What a caller may take of a server at once, over real connections: calls, words, bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from elastic.records.journal import Journal
from elastic.security import rate_limit, rejection_log
from elastic.security.interceptor import AuthInterceptor
from elastic.security.rate_limit import CallerLimits, CallRate
from elastic.security.rejection_log import AGAIN_S, KINDS_KEPT, LINES_AT_ONCE, OTHERS, RejectionLog
from elastic.security.secure_server import SecureServer, ServerCertificates
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import FleetStub, Stub, add_to_server

PATIENCE_S = 60.0
GRPCS_LIMIT = 1 << 20

LOOK = pb.Question(overview=pb.Overview())
WORD = pb.NodeWord(hello=pb.NodeHello(node="a"))


class Echo:
    """Answers each word, and each question."""

    async def Attend(self, words: AsyncIterator[pb.NodeWord], context: Any) -> None:
        async for word in words:
            await context.write(pb.NodeOrder(log=pb.LogQuery(log=word.hello.node)))

    async def Ask(self, request: pb.Question, context: Any) -> pb.Answer:
        return pb.Answer(leading=True)


class Behind:
    """A server behind a guard. address: over TCP, or of a socket."""

    def __init__(self, address: str, path: Path) -> None:
        self.address, self._path = address, path

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[Stub]:
        async with grpc.aio.insecure_channel(self.address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            yield FleetStub(channel)

    def lines(self, event: str = "refused") -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self._path.read_text().splitlines()]
        return [line for line in found if line["event"] == event]

    async def line(self, because: str) -> dict[str, Any]:
        """Waited for: the server may write it a little later than the caller hears of it."""
        while not (found := [line for line in self.lines() if because in line["because"]]):
            await asyncio.sleep(0.01)
        return found[0]


@asynccontextmanager
async def play(tmp_path: Path, listen: str = "127.0.0.1:0") -> AsyncIterator[Behind]:
    path = tmp_path / "journal.jsonl"
    with Journal(path, "", "r", "here") as journal:
        journal.write("listening")
        guard = AuthInterceptor(RejectionLog(journal), asks_roles=False)
        options = (("grpc.max_receive_message_length", GRPCS_LIMIT),)
        server = grpc.aio.server(options=options, interceptors=(guard,))
        add_to_server("Fleet", Echo(), server)
        port = server.add_insecure_port(listen)
        await server.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield Behind(listen.replace(":0", f":{port}"), path)
        finally:
            await server.stop(grace=None)


async def said(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return f"{caught.value.code().name} {caught.value.details()}"


async def test_a_caller_has_so_many_calls_open_and_may_have_others_when_some_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limit, "CALLS_AT_ONCE", 2)
    async with play(tmp_path) as behind, behind.stub() as one, behind.stub() as other:
        streams = [one.Attend(), other.Attend()]  # by two connections of the same machine
        for stream in streams:
            await stream.write(WORD)
            assert (await stream.read()).log.log == "a"
        refused = await said(other.Ask(LOOK))
        assert refused.startswith("RESOURCE_EXHAUSTED") and "calls at once" in refused
        assert (await behind.line("calls at once"))["peer"].startswith("127.0.0.1:")
        await streams[0].done_writing()
        assert not await streams[0].read()
        assert (await one.Ask(LOOK)).leading
        await streams[1].write(WORD)
        assert (await streams[1].read()).log.log == "a", "what was open has not noticed"


async def test_who_asks_too_often_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "BURST", 3.0)
    monkeypatch.setattr(rate_limit, "WORDS_A_SECOND", 1e-6)
    async with play(tmp_path) as behind, behind.stub() as stub:
        for _ in range(3):
            assert (await stub.Ask(LOOK)).leading
        refused = await said(stub.Ask(LOOK))
        assert refused.startswith("RESOURCE_EXHAUSTED") and "ask less often" in refused
        assert await behind.line("calls a second")


async def test_who_streams_too_fast_is_read_more_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "BURST", 3.0)
    monkeypatch.setattr(rate_limit, "WORDS_A_SECOND", 500.0)
    # By a clock that stands still, so that the words come too fast on the slowest machine, too.
    monkeypatch.setattr(rate_limit, "CallRate", lambda a_second, burst: CallRate(a_second, burst, lambda: 0.0))
    async with play(tmp_path) as behind:
        async with behind.stub() as stub:
            stream = stub.Attend()
            for _ in range(9):
                await stream.write(WORD)
            await stream.done_writing()
            assert [order.log.log async for order in stream] == ["a"] * 9, "nothing is lost"
        [line] = behind.lines("slowed")
        assert "words a second" in line["because"] and not behind.lines()


async def test_over_a_socket_of_this_machine_each_call_has_a_pace_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many workers as there are slots, and none pays for another one."""
    for module in ("rate_limit", "interceptor"):
        monkeypatch.setattr(f"elastic.security.{module}.BURST", 2.0)
        monkeypatch.setattr(f"elastic.security.{module}.WORDS_A_SECOND", 1e-6)
    async with play(tmp_path, f"unix:{tmp_path}/socket") as behind:
        async with behind.stub() as stub:
            for _ in range(3):
                stream = stub.Attend()
                for _ in range(2):
                    await stream.write(WORD)
                await stream.done_writing()
                assert [order.log.log async for order in stream] == ["a"] * 2
        assert not behind.lines("slowed")


async def test_a_message_that_is_too_large_is_refused_and_told_with_the_callers_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "WORD_LIMIT", GRPCS_LIMIT // 2)
    ours, grpcs = "x" * (GRPCS_LIMIT // 2), "x" * (GRPCS_LIMIT + 1)
    async with play(tmp_path) as behind:
        async with behind.stub() as stub:
            for number, (text, because) in enumerate(((ours, "a message larger"), (grpcs, "its message has not come"))):
                refused = await said(stub.Ask(pb.Question(stop=pb.Stop(because=text))))
                assert refused.startswith("RESOURCE_EXHAUSTED"), refused
                line = await behind.line(because)
                assert line["peer"].startswith("127.0.0.1:") and line["at"].endswith("/Ask")
                assert len(behind.lines()) == number + 1
            stream = stub.Attend()
            await stream.write(WORD)
            assert (await stream.read()).log.log == "a"
            await stream.write(pb.NodeWord(hello=pb.NodeHello(node=ours)))
            refused = await said(stream.read())
            assert refused.startswith("RESOURCE_EXHAUSTED"), refused
            assert (await stub.Ask(LOOK)).leading, "and others are served"
        assert {line["at"].rpartition("/")[2] for line in behind.lines()} == {"Ask", "Attend"}


async def test_a_message_that_is_none_is_refused(tmp_path: Path) -> None:
    async with play(tmp_path) as behind:
        async with grpc.aio.insecure_channel(behind.address) as channel:
            call = channel.unary_unary("/elastic.wire.Fleet/Ask", lambda text: text, pb.Answer.FromString)
            assert (await said(call(b"\xff\xff\xff"))).startswith("INVALID_ARGUMENT")
        assert await behind.line("cannot be read")


def test_who_has_a_call_open_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limit, "CALLERS_KEPT", 3)
    known = CallerLimits()
    with known.call("first") as first:
        assert first is not None
        for number in range(10):
            with known.call(f"passes by {number}"):
                pass
        with known.call("first") as again:
            assert again is first and first.calls == 2
    assert len(known._known) == 3
    assert first.calls == 0


def test_a_pace_that_allows_nothing_more_keeps_no_debts() -> None:
    now_s = [0.0]
    pace = CallRate(10.0, 2.0, lambda: now_s[0])
    assert [pace.allows() for _ in range(50)] == [True, True, *[False] * 48]
    now_s[0] = 0.1
    assert pace.allows() and not pace.allows()


def test_each_peer_is_told_of_and_all_together_are_a_few_lines(tmp_path: Path) -> None:
    now_s = [0.0]
    path = tmp_path / "journal.jsonl"
    with Journal(path, "", "r", "here") as journal:
        refusals = RejectionLog(journal, lambda: now_s[0])
        for _ in range(100):
            for host in ("10.0.0.7", "10.0.0.8"):
                refusals.say("noise", at="Ask", peer=f"{host}:5000")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["peer"] for line in lines] == ["10.0.0.7:5000", "10.0.0.8:5000"]
        for number in range(10_000):
            refusals.say(f"lie {number}", at="Ask", peer="10.0.0.9:5000")
        assert len(path.read_text().splitlines()) == LINES_AT_ONCE
        now_s[0] = AGAIN_S
        refusals.say("noise", at="Ask", peer="10.0.0.7:5001")
        assert json.loads(path.read_text().splitlines()[-1])["peer"] == "10.0.0.7:5001"


def test_refusals_that_are_only_counted_are_written_later_and_none_is_lost(tmp_path: Path) -> None:
    now_s = [0.0]
    path = tmp_path / "journal.jsonl"

    def told() -> list[tuple[str, int]]:
        return [(line["because"], line["times"]) for line in map(json.loads, path.read_text().splitlines())]

    with Journal(path, "", "r", "here") as journal:
        refusals = RejectionLog(journal, lambda: now_s[0])
        for _ in range(100):
            refusals.say("noise", at="handshake", peer="10.0.0.7:1")
        refusals.flush()
        assert told() == [("noise", 1)], "it is not due"
        now_s[0] = AGAIN_S
        refusals.flush()
        refusals.flush()
        assert told() == [("noise", 1), ("noise", 99)]
        for host in ("10.0.0.8", "10.0.0.8", "10.0.0.9"):  # as workers say it
            refusals.say("noise", at="worker", peer=host)
        now_s[0] = 2 * AGAIN_S
        refusals.flush()
        assert json.loads(path.read_text().splitlines()[-1])["peer"] == "10.0.0.8"
        assert sum(times for _, times in told()) == 103 and len(told()) == 5
        for number in range(2 * KINDS_KEPT):
            refusals.say(f"lie {number}", at="Ask")
            refusals.say(f"lie {number}", at="Ask")
        refusals.flush(last=True)
        assert sum(times for _, times in told()) == 103 + 4 * KINDS_KEPT
        assert len(told()) <= 5 + LINES_AT_ONCE + KINDS_KEPT + 1 and told()[-1][0] == OTHERS


async def test_a_server_writes_what_was_only_counted_while_it_runs_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path, "", "r", "here") as journal:
        with SecureServer(ServerCertificates(), journal) as secure:
            monkeypatch.setattr(rejection_log, "AGAIN_S", 0.01)
            watching = asyncio.create_task(secure.watch())
            for _ in range(2):
                secure.refusals.say("noise", at="Ask")
            while len(path.read_text().splitlines()) < 2:
                await asyncio.sleep(0)
            watching.cancel()
            monkeypatch.setattr(rejection_log, "AGAIN_S", 1000.0)
            secure.refusals.say("other", at="Ask")
            secure.refusals.say("other", at="Ask")
        assert [json.loads(line)["because"] for line in path.read_text().splitlines()] == ["noise"] * 2 + ["other"] * 2
