"""A replica of a fleet: a store that refuses it, a lead that ends at once, and a stop that outlives a failed part."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.config import JobSpec
from elastic.errors import ConfigError, StoreRefused
from elastic.fleet import probes, registry
from elastic.fleet.documents import FleetJob, FleetState, Grant, NodeShare, Placement, Result, Submission, Wish
from elastic.fleet.replica import server as server_module
from elastic.fleet.replica.leader import FleetLeader
from elastic.fleet.replica.server import Server
from elastic.fleet.replica.service import FleetService
from elastic.protocol.membership import End, State, Stopped
from elastic.records.files import read_job
from elastic.records.journal import Journal
from elastic.rendezvous import job_replica
from elastic.rendezvous.leader import StoreThread
from elastic.rendezvous.service import JobEntry
from elastic.security.expiry import SeenCertificates
from elastic.security.secure_server import ServerCertificates
from elastic.store.base import Lease
from elastic.store.election import Candidate
from tests.memory_store import MemoryStore

PATIENCE_S = 30.0

SPEC = JobSpec(name="train-1", command=("train",), workers=1, checkpoint_dir="/shared")
STOPPED = FleetJob(Submission(SPEC, 1, "train-1", "0123"), Placement((NodeShare("a", 1),)), Wish("enough"))


class Full(MemoryStore):
    """Grants no lease the first time, as an etcd without space."""

    refusals = 1

    def lease(self, ttl_s: float, *, timeout_s: float) -> Lease:
        if self.refusals:
            self.refusals -= 1
            raise StoreRefused("mvcc: database space exceeded")
        return super().lease(ttl_s, timeout_s=timeout_s)


def events(journal: Path) -> list[str]:
    return [json.loads(line)["event"] for line in journal.read_text().splitlines()]


@asynccontextmanager
async def play(tmp_path: Path, store: MemoryStore | None = None) -> AsyncIterator[tuple[Server, Path]]:
    """A replica that does not listen, and its journal."""
    path = tmp_path / "journal.jsonl"
    with Journal(path, "", "rendezvous", "here") as journal:
        server = Server(tmp_path, (), "127.0.0.1:0", ServerCertificates())
        server._journal, server._etcd = journal, store or MemoryStore()  # type: ignore[assignment]
        server._address = "here:1"
        server._fleet_service = FleetService(server._service, journal, SeenCertificates(), tmp_path, dict)
        async with asyncio.timeout(PATIENCE_S):
            yield server, path


async def test_a_replica_that_the_store_refuses_stands_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_replica, "REFUSED_S", 0.01)
    store = Full()
    async with play(tmp_path) as (server, path):
        candidate = Candidate(store, registry.NAME, "here:1", lambda: 0.0)
        with closing(StoreThread()) as thread:
            assert await job_replica.win(candidate, thread, lambda leader: None, server._journal) > 0
        assert "not_elected" in events(path)


async def test_a_member_of_etcd_that_may_lose_data_is_refused_also_one_that_comes_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {"a:1": {"because": "", "version": "3.4.23"}, "b:1": {"because": "does not answer"}}
    monkeypatch.setattr(probes, "of_etcd", lambda endpoint, open_etcd: members[endpoint])
    monkeypatch.setattr(server_module, "LOOK_AGAIN_S", 0.01)
    async with play(tmp_path) as (server, _):
        unknown = await server._judged(["a:1", "b:1"])
        assert unknown == ["b:1"]
        judging = asyncio.create_task(server._judge_others(unknown))
        members["b:1"] = {"because": "", "version": "3.5.1"}
        with pytest.raises(
            ConfigError, match=r"b:1 of etcd has version 3\.5\.1.*apt-get install etcd-server.*--allow-"
        ):
            await judging


async def test_a_replica_whose_lead_ends_at_once_rests_before_it_stands_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    sleep = asyncio.sleep

    async def lead(leader: FleetLeader) -> str:
        return "mvcc: database space exceeded"

    async def rest(delay_s: float) -> None:
        rests.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(FleetLeader, "lead", lead)
    monkeypatch.setattr(server_module, "asyncio", SimpleNamespace(sleep=rest, Event=asyncio.Event))
    async with play(tmp_path) as (server, path):
        standing = asyncio.create_task(server._stand())
        while len(rests) < 2:
            await sleep(0.01)
        standing.cancel()
        await asyncio.gather(standing, return_exceptions=True)
        leads = events(path).count("not_leading_fleet")
        assert set(rests) == {server_module.REST_S} and leads - 1 <= len(rests) <= leads


async def test_a_replica_admits_by_the_store_and_ends_the_streams_of_those_whose_place_is_over(tmp_path: Path) -> None:
    store = MemoryStore()
    kept: list[tuple[str, bool]] = []

    class Leading:
        """With agents on two nodes, both admitted by one token."""

        group = SimpleNamespace(size=0)

        def keep(self, stands: Callable[[str, str], bool]) -> None:
            kept[:] = [(node, stands(node, "t")) for node in "ab"]

    async with play(tmp_path, store) as (server, _):
        candidate = Candidate(store, registry.NAME, "here:1", lambda: 0.0)
        candidate.stand()
        to = registry.Registry(store, candidate)
        job = to.submit(SPEC)
        server._parts[job] = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        server._service.leads[job] = JobEntry(None, Leading())  # type: ignore[arg-type]
        following = asyncio.create_task(server._follow())
        try:
            to.place(job, Placement((NodeShare("a", 1),)), (Grant("a", "t"), Grant("b", "t")))
            assert await server._admission.objection(job, "a", "t", "") == ""
            assert kept == [("a", True), ("b", True)]
            to.grant(job, (Grant("a", "t"),))
            while kept[1][1]:
                await asyncio.sleep(0.01)  # the store has a thread of its own
            assert kept == [("a", True), ("b", False)]
        finally:
            server._parts[job].cancel()
            following.cancel()
            await asyncio.gather(following, server._parts[job], return_exceptions=True)


async def test_a_stop_reaches_the_part_that_begins_again_after_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Stopped] = []
    began: list[str] = []

    class Part:
        """The first finds no room on the disk; the second leads, and ends the job when it is told to."""

        def __init__(self, *given: Any, **_: Any) -> None:
            began.append("")
            if len(began) == 1:
                raise OSError(28, "No space left on device")
            self.service, self.ended = given[4], given[7]
            self.stopped = asyncio.Event()

        def write_address(self) -> None:
            group = SimpleNamespace(state=State.FORMING)
            leader: Any = SimpleNamespace(group=group, post=self.post)
            self.service.leads["train-1"] = JobEntry(None, leader)  # type: ignore[arg-type]

        async def post(self, event: Stopped) -> None:
            heard.append(event)
            self.stopped.set()

        async def run(self) -> None:
            await self.stopped.wait()
            self.service.leads["train-1"].leader = None
            await self.ended({"exit_code": 143, "because": "stopped", "digest": "", "generation": 0})

    monkeypatch.setattr(server_module, "JobReplica", Part)
    monkeypatch.setattr(server_module, "STOP_POLL_S", 0.01)
    async with play(tmp_path) as (server, path):
        state = FleetState((STOPPED,))
        server._apply(state, 1)
        while server._parts:
            await asyncio.sleep(0.01)
        assert "part_failed" in events(path)
        server._apply(state, 2)
        await server._parts["train-1"]
        assert heard == [Stopped("stopped: enough", at_once=True)]
        assert server._etcd.get(f"{registry.ROOT}results/train-1", timeout_s=1) is not None
        ended = FleetJob(STOPPED.submission, STOPPED.placement, STOPPED.stop, Result(143, "stopped"))
        server._apply(FleetState((ended,)), 3)
        while server._stops:
            await asyncio.sleep(0.01)
        assert "stop_failed" not in events(path)


async def test_a_replica_keeps_nothing_of_the_environment_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Part:
        def __init__(self, spec: JobSpec, *_: Any, **__: Any) -> None:
            assert spec.env == ()

        def write_address(self) -> None: ...

        async def run(self) -> None: ...

    monkeypatch.setattr(server_module, "JobReplica", Part)
    async with play(tmp_path) as (server, _):
        spec = replace(SPEC, env=("KEY=correct-horse",), env_from="/etc/secrets.env")
        server._apply(
            FleetState((FleetJob(Submission(spec, 1, "train-1", "0123"), Placement((NodeShare("a", 1),))),)), 1
        )
        await server._parts["train-1"]
        assert read_job(tmp_path / "jobs" / "train-1").env_from == "/etc/secrets.env"
        for left in filter(Path.is_file, tmp_path.rglob("*")):
            assert "correct-horse" not in left.read_text()
        assert all(left.stat().st_mode & 0o077 == 0 for left in tmp_path.rglob("*"))


async def test_a_document_that_cannot_be_read_is_told_once(tmp_path: Path) -> None:
    async with play(tmp_path) as (server, path):
        for revision in (1, 2):
            server._apply(FleetState(unread={"results/train-1": "Result is no object"}), revision)
        assert events(path) == ["document_unread"]


async def test_the_slots_of_a_job_are_free_while_its_agents_still_take_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with play(tmp_path) as (server, _):

        class Leads:
            """Ends at once, and is rid of its agents when the fleet knows that."""

            generation = term = 1
            dismiss = result = staticmethod(lambda *_: {"exit_code": 0, "because": "", "digest": "", "generation": 1})

            def __init__(self, *_: Any) -> None: ...

            async def lead(self, chain: object) -> End:
                return End(0, "complete")

            async def announce_end(self, end: End) -> None:
                while not known():
                    await asyncio.sleep(0.01)

        def known() -> bool:
            return server._etcd.get(f"{registry.ROOT}results/train-1", timeout_s=1) is not None

        monkeypatch.setattr(job_replica, "JobLeader", Leads)
        server._apply(FleetState((STOPPED,)), 1)
        await server._parts["train-1"]
        assert known()


async def test_a_part_of_a_job_that_is_forgotten_ends(tmp_path: Path) -> None:
    """As on a replica that was cut off from the store until then."""
    async with play(tmp_path) as (server, _):
        server._apply(FleetState((STOPPED,)), 1)
        part = server._parts["train-1"]
        server._apply(FleetState(unread={"placements/train-1": "no"}), 2)
        assert not part.cancelling() and part is server._parts["train-1"], "it may be a document of its that is bad"
        server._apply(FleetState(), 3)
        await asyncio.gather(part, return_exceptions=True)
        assert part.cancelled() and not server._parts
