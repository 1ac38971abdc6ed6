"""An agent attends a job only where the fleet has placed that, by the token of that place, and nobody else does."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from chaos_tests.nemesis import nodes
from elastic.agent.context import AgentContext
from elastic.agent.leader_session import LeaderSession
from elastic.agent.standing_words import StandingWords
from elastic.config import JobSpec
from elastic.errors import NotAdmitted
from elastic.fleet import documents
from elastic.fleet.documents import FleetJob, FleetState, Grant, NodeShare, Placement, Result, Submission
from elastic.fleet.node.job_environment import NodeSettings
from elastic.fleet.node.job_runner import JobDuty, JobRunner
from elastic.fleet.node.notice_board import NoticeBoard
from elastic.fleet.replica import admission
from elastic.fleet.replica import leader as leader_module
from elastic.fleet.replica.admission import Admission
from elastic.records.files import TOKEN, read_token
from elastic.records.journal import Journal, read
from elastic.rendezvous.leader import JobLeader, StoreThread
from elastic.rendezvous.reach import Reach
from elastic.rendezvous.service import SERVER_OPTIONS, JobEntry, NotKnown, RendezvousService
from elastic.security.rejection_log import RejectionLog
from elastic.store.election import Candidate, Won
from elastic.store.lease import LeaseKeeper
from elastic.wire import elastic_pb2 as pb
from elastic.wire.services import RendezvousStub, add_to_server
from tests.memory_store import MemoryStore
from tests.unit.elastic.agent.test_leader_session import Attendant
from tests.unit.elastic.fleet.test_leader import Leading, duties, leads

PATIENCE_S = 30.0
CALL_S = 20.0


def spec(name: str = "train-1") -> JobSpec:
    return JobSpec(name=name, command=("train",), workers=1, checkpoint_dir="/shared")


def job(*placed: str, name: str = "train-1", **fields: Any) -> FleetJob:
    placement = Placement(tuple(NodeShare(node, 1) for node in placed)) if placed else None
    return FleetJob(Submission(spec(name), 1, name, "0123"), placement, **fields)


def granted(before: FleetJob, *placed: str, left: Collection[str] = ()) -> dict[str, str]:
    made = iter(["first", "second"])
    given = documents.granted(before, job(*placed).placement, left, lambda: next(made))
    return {grant.node: grant.token for grant in given}


# ------------------------------------------------------------------------------------------------------- what is given


def test_a_new_place_comes_with_a_token_and_keeps_it_until_the_agent_has_left() -> None:
    assert granted(job(), "a") == {"a": "first"}
    held = job("a", grants=(Grant("a", "old"),))
    assert granted(held, "a", "b") == {"a": "old", "b": "first"}
    assert granted(held, "b") == {"a": "old", "b": "first"}, "it drains, and may need its leader"
    assert granted(held, "b", left="a") == {"b": "first"}
    assert granted(held, left="a") == {}
    back = job("b", grants=(Grant("a", "old"), Grant("b", "b")))
    assert granted(back, "a", "b") == {"a": "old", "b": "b"}, "the drain was taken back"
    assert granted(job("b", grants=(Grant("b", "b"),)), "a", "b") == {"a": "first", "b": "b"}, "gone, and placed again"


def test_a_place_whose_grants_cannot_be_read_gets_another_token() -> None:
    assert granted(job("a"), "a", "b") == {"a": "first", "b": "second"}


@pytest.mark.parametrize(
    ("known", "node", "token", "because"),
    [
        (job("a", grants=(Grant("a", "t"),)), "a", "t", ""),
        (job("a", grants=(Grant("a", "t"),)), "a", "", "the token"),
        (job("a", grants=(Grant("a", "t"),)), "a", "é", "the token"),
        (job("a", grants=(Grant("a", "t"),)), "b", "t", "not placed"),
        (job("a", grants=(Grant("a", "t"), Grant("b", "u"))), "b", "u", ""),  # it drains
        (job("a", grants=(Grant("a", "t"), Grant("b", "u"))), "b", "t", "the token"),  # of another node
        (job("a"), "a", "", "not placed"),  # its grants cannot be read
        (job("a"), "b", "", "not placed"),
        (job("a", result=Result(0, "done")), "a", "", "not placed"),
        (job(), "a", "", "not placed"),
        (None, "a", "t", "not placed"),
    ],
)
def test_who_may_attend(known: FleetJob | None, node: str, token: str, because: str) -> None:
    objection = documents.objection(known, node, token)
    assert because in objection and bool(because) == bool(objection)


def test_a_token_is_shown_nowhere() -> None:
    assert "secret" not in repr(job("a", grants=(Grant("a", "secret"),)))


# ----------------------------------------------------------------------------------------------- the fleet's leader


def daemon(leading: Leading, node: str, *holds: str) -> Any:
    """One that has those jobs."""
    session = leading.fleet_leader.attach(pb.NodeHello(node=node, slots=1, address="10.0.0.1", leave_ms=1000))
    hold(leading, session, *holds)
    return session


def hold(leading: Leading, session: Any, *jobs: str) -> None:
    leading.fleet_leader.heard(session, pb.NodeWord(troubles=pb.NodeTroubles(holds=jobs)))


async def tokens(leading: Leading, wanted: Collection[str]) -> dict[str, str]:
    """By node, once those are granted."""
    while True:
        found = {grant.node: grant.token for one in leading.fleet_leader.state.jobs for grant in one.grants}
        if found.keys() == set(wanted):
            return found
        await asyncio.sleep(0.005)  # the store has a thread of its own


async def test_a_daemon_is_told_its_token_which_dies_when_the_agent_has_left_and_is_another_one_the_next_time(
    tmp_path: Path,
) -> None:
    async with leads(tmp_path) as leading:
        a, b = daemon(leading, "a"), daemon(leading, "b")
        name = await leading.submit("train", 1, 1)
        (duty,) = await duties(a, {name: 1})
        assert len(duty.token) == 64 and await tokens(leading, "a") == {"a": duty.token}
        hold(leading, a, name)
        await leading.fleet_leader.change(lambda to: to.cordon("a", "disk"))
        (moved,) = await duties(b, {name: 1})
        await duties(a, {})
        assert moved.token != duty.token
        assert await tokens(leading, "ab") == {"a": duty.token, "b": moved.token}, "it is leaving"
        hold(leading, a)
        await tokens(leading, "b")
        hold(leading, b, name)
        await leading.fleet_leader.change(lambda to: to.cordon("a", ""))
        await leading.fleet_leader.change(lambda to: to.cordon("b", "disk"))
        (again,) = await duties(a, {name: 1})
        assert again.token not in ("", duty.token)


async def test_another_leader_of_the_fleet_tells_the_same_token(tmp_path: Path) -> None:
    async with leads(tmp_path) as leading:
        name = await leading.submit("train", 1, 1)
        (duty,) = await duties(daemon(leading, "a"), {name: 1})
        other = leader_module.FleetLeader(leading.tenure, leading.store, leading.thread, leading.journal)
        work = asyncio.create_task(other.lead())
        await other.ready.wait()
        a = other.attach(pb.NodeHello(node="a", slots=1, address="10.0.0.1", leave_ms=1000))
        assert [one.token for one in await duties(a, {name: 1})] == [duty.token]
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def test_a_grant_ends_also_where_nobody_says_that_the_agent_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "ABSENT_NODES_CHECK_S", 0.01)
    monkeypatch.setattr(leader_module, "ABSENT_S", 0.05)
    monkeypatch.setattr(leader_module, "AWAY_S", 0.05)
    async with leads(tmp_path) as leading:
        a = daemon(leading, "a")
        name = await leading.submit("train", 1, 1)
        await duties(a, {name: 1})
        hold(leading, a, name)
        leading.fleet_leader.detach(a)
        await duties(daemon(leading, "b"), {})
        await leading.fleet_leader.change(lambda to: to.scale(name, 2))
        await tokens(leading, "b")


# ------------------------------------------------------------------------------------------------------- the replica


async def test_a_replica_reads_once_more_before_it_refuses_and_says_so_when_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "PAUSE_S", 0.01)
    monkeypatch.setattr(admission, "REREAD_S", 0.2)
    refused: list[tuple[str, ...]] = []
    wanted = 0
    async with asyncio.timeout(PATIENCE_S):
        state: FleetState | None = FleetState((job("a", grants=(Grant("a", "t"),)),))

        def reread() -> None:
            nonlocal wanted
            wanted += 1
            door.reads()
            if state is not None:
                door.read(state)

        door = Admission(lambda *told: refused.append(told), reread)
        asked = [door.objection("train-1", "a", token, "10.0.0.9:1") for token in ("t", "t", "u")]
        found = await asyncio.gather(*asked)
        assert found[:2] == ["", ""] and "token" in found[2] and wanted == 1, "one reading for all of them"
        assert [one[1:] for one in refused] == [("train-1", "a", "10.0.0.9:1")]
        assert await door.objection("train-1", "a", "t", "") == "" and wanted == 1, "it knows that one"
        assert door.stands("train-1", "a", "t") and not door.stands("train-1", "b", "t")
        state = None
        with pytest.raises(NotKnown):
            await door.objection("train-1", "b", "t", "")
        assert len(refused) == 1


async def test_agents_of_a_job_that_cannot_be_read_now_are_admitted_as_before_and_others_ask_again() -> None:
    refused: list[object] = []
    state = FleetState((job("a", grants=(Grant("a", "t"),)),))

    def reread() -> None:
        door.reads()
        door.read(state)

    async with asyncio.timeout(PATIENCE_S):
        door = Admission(lambda *told: refused.append(told), reread)
        door.read(state)
        state = FleetState(left_out={"train-1": frozenset()})
        for _ in range(2):
            door.read(state)
            assert await door.objection("train-1", "a", "t", "") == "" and door.stands("train-1", "a", "t")
        with pytest.raises(NotKnown):
            await door.objection("train-1", "b", "of a new place", "")
        state = FleetState()
        assert await door.objection("train-1", "a", "u", "") and len(refused) == 1
        assert not door.stands("train-1", "a", "t"), "it is over"


class At:
    """A replica that leads two jobs, both on node a."""

    def __init__(self, home: Path, journal: Journal) -> None:
        self.home, self.journal = home, journal
        self.refusals = RejectionLog(journal)
        self.door = Admission(self._refused, self._reread)
        self.service = RendezvousService(self.door)
        self.leaders: dict[str, JobLeader] = {}
        self.channel: grpc.aio.Channel
        self.address = ""
        self.state = FleetState(
            tuple(job("a", name=name, grants=(Grant("a", f"of {name}"),)) for name in ("one-1", "two-2"))
        )

    def _refused(self, because: str, job: str, node: str, peer: str) -> None:
        self.refusals.say(because, at="Attend", caller=f"agent {node}", peer=peer, job=job)

    def _reread(self) -> None:
        self.door.reads()
        self.door.read(self.state)

    async def attend(self, job: str, node: str, token: str) -> tuple[Any, AsyncIterator[pb.LeaderOrder]]:
        """Returns the first order and the rest. Raises AioRpcError."""

        async def words() -> AsyncIterator[pb.AgentWord]:
            yield pb.AgentWord(hello=pb.AgentHello(job=job, node=node, slots=1, token=token))
            await asyncio.Event().wait()

        call = RendezvousStub(self.channel).Attend(words(), timeout=CALL_S)
        return await call.read(), call

    def agent(self, job: str, token: str) -> LeaderSession:
        """The product's, with that token in its directory."""
        home = self.home / job
        home.mkdir()
        (home / TOKEN).write_text(token)
        reach = Reach(replicas=(self.address,))
        return LeaderSession(AgentContext(spec(job), home, "a", 1, reach, self.journal), Attendant(), StandingWords())


def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: Callable[[At], Awaitable[None]]) -> list[Any]:
    """Returns the lines of the journal."""
    monkeypatch.setattr(admission, "PAUSE_S", 0.01)

    async def told() -> None:
        with Journal(tmp_path / "journal.jsonl", "", "r", "here") as journal:
            at, store, thread = At(tmp_path, journal), MemoryStore(), StoreThread()
            tenures = []
            for one in at.state.jobs:
                candidate = Candidate(store, one.name, "here", lambda: 0.0)
                won = candidate.stand()
                assert isinstance(won, Won)
                tenures.append(LeaseKeeper(candidate, won.term))
                at.leaders[one.name] = JobLeader(one.spec, tenures[-1], journal, thread)
                at.service.leads[one.name] = JobEntry(journal, at.leaders[one.name])
            server = grpc.aio.server(options=SERVER_OPTIONS)
            add_to_server("Rendezvous", at.service, server)
            at.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            try:
                async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(at.address) as at.channel:
                    await story(at)
            finally:
                await server.stop(grace=None)
                thread.close()

    asyncio.run(told())
    return list(read(tmp_path / "journal.jsonl"))


def test_agents_of_two_jobs_on_a_node_cannot_end_each_others_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(at: At) -> None:
        welcome, _ = await at.attend("two-2", "a", "of two-2")
        assert welcome.WhichOneof("content") == "welcome"
        session = at.leaders["two-2"]._agents["a"]
        for token in ("of one-1", ""):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await at.attend("two-2", "a", token)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        guess = await asyncio.to_thread(nodes.attend, (at.address,), "two-2", "a", "a guess")
        assert guess == {at.address: nodes.REFUSED}, "as elastic chaos does it"
        assert at.leaders["two-2"].is_current(session) and not session.ended.is_set()
        right = await asyncio.to_thread(nodes.attend, (at.address,), "two-2", "a", "of two-2")
        assert right == {at.address: nodes.ADMITTED} and session.ended.is_set(), "but its own agent may come again"

    lines = play(tmp_path, monkeypatch, story)
    (line,) = [line for line in lines if line["event"] == "refused"]  # the second within ten seconds is counted only
    assert (line["job"], line["caller"], line["at"], line["times"]) == ("two-2", "agent a", "Attend", 1)
    assert line["peer"].startswith("127.0.0.1:") and "token" in line["because"]
    assert "of one-1" not in json.dumps(lines) and "of two-2" not in json.dumps(lines)


def test_an_agent_that_is_not_admitted_ends_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(at: At) -> None:
        with pytest.raises(NotAdmitted, match="of one-1 does not admit the agent of a: the token is not that of"):
            await at.agent("one-1", "of two-2").always()

    assert [line["event"] for line in play(tmp_path, monkeypatch, story)] == ["refused", "not_admitted"]


def test_an_agent_whose_place_is_over_is_dismissed_and_not_admitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that has stolen the token while it was good."""

    async def story(at: At) -> None:
        session = at.agent("one-1", "of one-1")
        agent = asyncio.create_task(session.always())
        while not session.term:
            await asyncio.sleep(0.01)  # on another connection
        at.leaders["one-1"].keep(lambda node, token: at.door.stands("one-1", node, token))
        assert not at.leaders["one-1"]._agents["a"].ended.is_set()
        at.state = FleetState((job("b", name="one-1", grants=(Grant("b", "of b"),)),))
        at.door.read(at.state)
        at.leaders["one-1"].keep(lambda node, token: at.door.stands("one-1", node, token))
        with pytest.raises(NotAdmitted, match="has not placed this job on this node, or not any more"):
            await agent
        assert "a" not in at.leaders["one-1"]._agents

    told = [line["event"] for line in play(tmp_path, monkeypatch, story)]
    assert told == ["attending", "agent_dismissed", "no_leader", "refused", "not_admitted"]


# -------------------------------------------------------------------------------------------------------- the daemon


def test_a_token_lies_in_a_file_of_its_user_alone_for_as_long_as_the_job_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is started in the keeper's place says what it was given."""
    said = tmp_path / "said"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f'#!/bin/sh\n(echo "$@"; env) > {said}.new\nmv {said}.new {said}\nread line\n')
    (tmp_path / "python").chmod(0o755)
    site = NodeSettings(node="a", reach=Reach(), jobs_dir=tmp_path / "jobs", notices="none", grace_s=1.0)
    submission = Submission(JobSpec(name="t-1", command=("t",), workers=1, checkpoint_dir=str(tmp_path)), 1, "t-1", "0")

    async def story(journal: Journal) -> None:
        mask = os.umask(0)
        try:
            board = NoticeBoard(journal, lambda: None)
            runner = JobRunner(site, JobDuty(submission, 1, None, "correct-horse"), board, journal, lambda: None)
            while not said.exists():
                await asyncio.sleep(0.01)  # another process
            file = runner.directory / TOKEN
            assert read_token(runner.directory) == "correct-horse" and stat.S_IMODE(file.stat().st_mode) == 0o600
            runner.grant("another one")
            assert read_token(runner.directory) == "another one" and stat.S_IMODE(file.stat().st_mode) == 0o600
            runner.stop()
            await runner.ended()
            assert not file.exists()
        finally:
            os.umask(mask)

    with Journal(tmp_path / "journal.jsonl", "", "d", "a") as journal:
        asyncio.run(asyncio.wait_for(story(journal), PATIENCE_S))
    assert "elastic.agent.process.subreaper" in said.read_text()
    for path in (said, tmp_path / "journal.jsonl"):
        assert "correct-horse" not in path.read_text()
