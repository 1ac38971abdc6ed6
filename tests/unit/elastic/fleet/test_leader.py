"""What the leader of a fleet tells its nodes: everything that they have to run, and only when it knows it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from elastic.checkpoints.naming import PERIODIC
from elastic.checkpoints.pointer import Pointer
from elastic.cli.fleet.jobs import overview_text
from elastic.config import JobSpec
from elastic.errors import CompareFailed, LeaseExpired, StoreRefused, StoreUnavailable
from elastic.fleet import registry
from elastic.fleet.documents import FleetJob, FleetState, Result, Size, Submission, Wish
from elastic.fleet.queue.scheduler import Schedule
from elastic.fleet.registry import Registry
from elastic.fleet.replica import leader as leader_module
from elastic.fleet.replica.leader import FleetLeader, NodeSession
from elastic.fleet.replica.service import FleetService
from elastic.records.events import story as stories
from elastic.records.journal import Journal
from elastic.rendezvous.leader import StoreThread
from elastic.rendezvous.service import RendezvousService
from elastic.security.expiry import SeenCertificates
from elastic.security.roles import Caller
from elastic.store.base import Store
from elastic.store.election import Candidate, Won
from elastic.store.lease import LeaseKeeper
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb
from tests.memory_store import MemoryStore, write_key

PATIENCE_S = 30.0


def calling(*names: str) -> Any:
    """The context of a call with these names in the caller's certificate."""
    shown = {"x509_subject_alternative_name": [name.encode() for name in names]} if names else {}
    return SimpleNamespace(peer=lambda: "ipv4:10.0.0.3:4711", auth_context=lambda: shown)


HERE = calling()


@pytest.fixture(autouse=True)
def absent_nodes_are_looked_for_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "ABSENT_NODES_CHECK_S", 0.01)


class Leading:
    """A leader of a fleet on a store in memory, with nodes on paper."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = MemoryStore()
        self.candidate = Candidate(self.store, registry.NAME, "here", time.monotonic)
        won = self.candidate.stand()
        assert isinstance(won, Won)
        self.tenure = LeaseKeeper(self.candidate, won.term)
        self.thread = StoreThread()
        self.journal = Journal(directory / "journal.jsonl", "", "rendezvous", "here")
        self.fleet_leader = FleetLeader(self.tenure, self.store, self.thread, self.journal)

    def node(self, name: str, slots: int = 1, address: str = "10.0.0.1", lock: str = "") -> NodeSession:
        return self.fleet_leader.attach(pb.NodeHello(node=name, slots=slots, address=address, lock=lock))

    def service(self, fleet_leader: FleetLeader | None = None) -> FleetService:
        found = FleetService(RendezvousService(), self.journal, SeenCertificates(), self.directory, dict)
        found.fleet_leader = fleet_leader or self.fleet_leader
        return found

    async def submit(self, name: str, workers: int, least: int, priority: int = 0) -> str:
        spec = JobSpec(
            name=name,
            command=("train",),
            workers=workers,
            min_workers=least,
            priority=priority,
            checkpoint_dir="/shared",
        )
        await asyncio.wait_for(self.fleet_leader.ready.wait(), PATIENCE_S)
        return await self.fleet_leader.change(lambda to: to.submit(spec))


@asynccontextmanager
async def leads(tmp_path: Path) -> AsyncIterator[Leading]:
    leading = Leading(tmp_path)
    try:
        async with leading.tenure:
            work = asyncio.create_task(leading.fleet_leader.lead())
            try:
                async with asyncio.timeout(PATIENCE_S):
                    yield leading
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
    finally:
        leading.thread.close()
        leading.journal.close()


async def duties(session: NodeSession, wanted: dict[str, int]) -> list[pb.Duty]:
    """Wait until the node is told to run exactly those."""
    while True:
        order = await session.outbox.get()
        if order.WhichOneof("content") == "duties":
            told = list(order.duties.duties)
            if {duty.job: duty.slots for duty in told} == wanted:
                return told


async def test_nodes_are_told_when_a_job_fits_and_when_it_is_over(tmp_path: Path) -> None:
    async with leads(tmp_path) as leading:
        a = leading.node("a")
        assert (await a.outbox.get()).welcome.term == leading.fleet_leader.term, "the first word"
        job = await leading.submit("train", 3, 2)
        await duties(a, {})
        b = leading.node("b", slots=2)
        (duty,) = await duties(b, {job: 2})
        assert codec.from_json(Submission, duty.document.encode()).spec.min_workers == 2
        await duties(a, {job: 1})
        await leading.fleet_leader.change(lambda to: to.stop(job, "enough"))
        leading.fleet_leader.read(*registry.read(leading.store))
        assert [one.leave for one in await duties(a, {job: 1})] == [True]
        registry.end(leading.store, job, Result(6, "drained"))
        leading.fleet_leader.read(*registry.read(leading.store))
        while not (told := (await a.outbox.get()).duties).over:
            pass
        assert ([one.job for one in told.over], list(told.duties)) == ([job], []), "what follows the training may go on"
        assert codec.from_json(Result, told.over[0].result.encode()) == Result(6, "drained")


async def test_the_nodes_of_a_job_that_cannot_be_read_keep_it_and_get_no_other_whoever_leads(tmp_path: Path) -> None:
    async with leads(tmp_path) as leading:
        a = leading.node("a", slots=2)
        job = await leading.submit("train", 1, 1)
        await duties(a, {job: 1})
        key = f"{registry.ROOT}jobs/{job}"
        item = leading.store.get(key, timeout_s=1)
        assert item is not None
        write_key(leading.store, key, b'{"of_a_newer_version": 1}', timeout_s=1)
        await leading.submit("next", 1, 1)  # the documents are read again
        while not (told := (await a.outbox.get()).duties).keeps:
            pass
        assert (list(told.keeps), list(told.duties)) == ([job], [])
        successor = FleetLeader(leading.tenure, leading.store, leading.thread, leading.journal)
        successor.state, _ = registry.read(leading.store)
        again = successor.attach(a.hello)
        for holds in (None, frozenset({job}), frozenset()):  # its share is in etcd, whatever the daemon says
            again.holds = holds
            assert successor.plan().placements == {}, "nobody knows how many slots are free there"
        successor._tell("a", again)
        assert again.told is not None and list(again.told.keeps) == [job]
        shown = leading.service()._overview(leading.fleet_leader)
        assert shown["nodes"][0]["because"] == f"gets no job while etcd has documents of {job} that cannot be read"
        write_key(leading.store, key, item.value, timeout_s=1)
        leading.fleet_leader.read(*registry.read(leading.store))
        assert not (await duties(a, {job: 1, "next-2": 1}))[0].leave


async def test_a_node_that_leaves_or_is_cordoned_is_told_to_run_nothing(tmp_path: Path) -> None:
    async with leads(tmp_path) as leading:
        a, b, c = (leading.node(name) for name in "abc")
        job = await leading.submit("train", 1, 1)
        await duties(a, {job: 1})
        leading.fleet_leader.heard(a, pb.NodeWord(leaves=pb.NodeLeaves(because="asked")))
        await duties(a, {})
        await duties(b, {job: 1})
        await leading.fleet_leader.change(lambda to: to.cordon("b", "disk"))
        leading.fleet_leader.read(*registry.read(leading.store))
        await duties(b, {})
        await duties(c, {job: 1})


async def test_the_slots_of_an_absent_node_are_given_elsewhere_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "ABSENT_S", 0.2)
    async with leads(tmp_path) as leading:
        a, b = leading.node("a"), leading.node("b")
        job = await leading.submit("train", 2, 1)
        await duties(a, {job: 1})
        await duties(b, {job: 1})
        leading.fleet_leader.detach(b)
        await duties(leading.node("c"), {job: 1})
        await duties(leading.node("b"), {})


async def test_the_slots_of_an_absent_node_that_an_operator_has_given_up_are_given_elsewhere_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "ABSENT_S", 1e9)
    async with leads(tmp_path) as leading:
        a, b, c = leading.node("a"), leading.node("b"), leading.node("c")
        job = await leading.submit("train", 2, 1)
        await duties(a, {job: 1})
        await duties(b, {job: 1})
        leading.fleet_leader.detach(b)
        await leading.fleet_leader.change(lambda to: to.cordon("b", "its machine is gone"))
        await duties(c, {job: 1})
        leading.fleet_leader.detach(a)
        leading.fleet_leader.detach(c)
        await leading.fleet_leader.change(lambda to: to.cordon("a", "its machine is gone"))
        await leading.fleet_leader.change(lambda to: to.cordon("c", "its machine is gone"))
        await duties(leading.node("d"), {job: 1})


async def test_a_job_larger_than_the_fleet_is_told_so_and_holds_up_others_while_nodes_may_still_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with leads(tmp_path) as leading:
        leader, fleet_service = leading.fleet_leader, leading.service()
        b = leading.node("b", slots=2)
        leading.node("a")

        async def submit(name: str, least: int) -> Any:
            spec = JobSpec(name=name, command=("t",), workers=least, min_workers=least, checkpoint_dir="/shared")
            submitted = pb.Submit(document=codec.to_json(spec).decode())
            return json.loads((await fleet_service.Ask(pb.Question(submit=submitted), HERE)).document)

        async def overview() -> dict[str, Any]:
            jobs = json.loads((await fleet_service.Ask(pb.Question(overview=pb.Overview()), HERE)).document)["jobs"]
            return {job["job"]: job for job in jobs}

        await asyncio.wait_for(leader.ready.wait(), PATIENCE_S)
        assert await submit("large", 3) == {"job": "large-1", "larger": ""}
        await duties(b, {"large-1": 2})
        assert (await submit("huge", 5))["larger"] == "", "a node may be on its way to this leader"
        await submit("small", 1)
        monkeypatch.setattr(leader_module, "ABSENT_S", 0.0)  # from now on nobody is waited for
        huge = "larger than the fleet, which has 3 slots on 2 nodes: needs 5 at once, and holds up nobody"
        assert (await submit("other", 5))["larger"] == huge
        while not (told := (await overview())["huge-2"])["larger"]:
            await asyncio.sleep(0.01)
        assert (told["state"], told["because"]) == ("waits", huge)
        registry.end(leading.store, "large-1", Result(0, "done"))
        leader.read(*registry.read(leading.store))
        await duties(b, {"small-3": 1})
        monkeypatch.setattr(leader_module, "ABSENT_S", 1e9)
        monkeypatch.setattr(leader, "_began_s", float("-inf"))
        assert leader.plan().larger == {"huge-2", "other-4"}
        c = leading.node("c", slots=2)
        leader.detach(c)
        assert leader.plan().larger == set(), "a node that is away for a moment still counts"
        monkeypatch.setattr(c, "leaves", "asked")
        assert leader.plan().larger == {"huge-2", "other-4"}, "and one that has said goodbye does not"


async def preempted(leading: Leading, a: NodeSession) -> tuple[str, str]:
    """A job that node a is told to leave, and the one that it leaves for."""
    low = await leading.submit("low", 1, 1)
    await duties(a, {low: 1})
    high = await leading.submit("high", 1, 1, priority=1)
    while not (await duties(a, {low: 1}))[0].leave:
        pass
    return low, high


POINTER = Pointer("step-000000000080.0.g3-e09a5847", "a.0.0", 3)


async def test_a_preempted_job_leaves_and_goes_on_as_another_one_whoever_leads_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "ABSENT_S", 0.0)
    async with leads(tmp_path) as leading:
        a = leading.node("a", slots=2)
        low = await leading.submit("low", 2, 2)
        await duties(a, {low: 2})
        await leading.fleet_leader.change(lambda to: to.scale(low, 2))
        high = await leading.submit("high", 1, 1, priority=1)
        while not (await duties(a, {low: 2}))[0].leave:
            pass
        (waits,) = (job.stop for job in leading.fleet_leader.state.jobs if job.name == low)
        assert waits == Wish(f"preempted for {high}", preempts=True)

        # Another leader goes on with what the first one has begun: the documents are all that there is.
        key = f"/elastic/{low}/checkpoints/{PERIODIC}"
        write_key(leading.store, key, POINTER.to_json(), timeout_s=1.0)
        registry.end(leading.store, low, Result(6, "drained"))
        successor = FleetLeader(leading.tenure, leading.store, leading.thread, leading.journal)
        leading.fleet_leader.sessions, successor.sessions = {}, leading.fleet_leader.sessions
        work = asyncio.create_task(successor.lead())
        try:
            await duties(a, {high: 1})
            state, _ = registry.read(leading.store)
            again = state.after(low)
            assert again is not None and state.after(again.name) is None
            assert (again.name, again.since, again.waits, again.size) == ("low-3", 1, True, Size(2))
            before = next(job for job in state.jobs if job.name == low).submission
            told = again.submission
            assert (told.series, told.identity, told.resume) == (before.series, before.identity, POINTER.entry)
            fleet_service = leading.service(successor)
            shown = {job["job"]: job for job in (fleet_service.overview() or {})["jobs"]}
            assert shown[low]["because"] == f"preempted for {high}; goes on as low-3"
            while not (told_now := {job["job"]: job for job in (fleet_service.overview() or {})["jobs"]}["low-3"])[
                "place"
            ]:
                await asyncio.sleep(0.01)
            assert (told_now["place"], told_now["because"]) == (
                1,
                "needs 2 free slots at once, and 1 of the 2 on 1 node are free",
            )
            asked = pb.Question(scale=pb.Scale(job=low, workers=2))
            assert json.loads((await fleet_service.Ask(asked, HERE)).document)["job"] == "low-3", (
                "its old name still does"
            )
            registry.end(leading.store, high, Result(0, "done"))
            successor.read(*registry.read(leading.store))
            await duties(a, {"low-3": 2})
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


@pytest.mark.parametrize(
    ("ended", "stopped", "again"),
    [
        (Result(0, "done"), False, False),
        (Result(1, "its script has failed"), False, False),
        (Result(6, "drained"), True, False),
        (Result(6, "drained"), False, True),
        (Result(143, "did not leave in time"), False, True),
        (Result(4, "all nodes died meanwhile"), False, True),
    ],
)
async def test_which_preempted_job_waits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Result, stopped: bool, again: bool
) -> None:
    monkeypatch.setattr(leader_module, "ABSENT_S", 0.0)
    async with leads(tmp_path) as leading:
        a = leading.node("a")
        low, high = await preempted(leading, a)
        if stopped:
            fleet_service = leading.service()
            assert not (await fleet_service.Ask(pb.Question(stop=pb.Stop(job=low, because="enough")), HERE)).refused
        registry.end(leading.store, low, ended)
        leading.fleet_leader.read(*registry.read(leading.store))
        await duties(a, {high: 1})
        await leading.fleet_leader.change(
            lambda to: to.cordon("b", "another round, which comes behind the one that wrote")
        )
        names = [job.name for job in registry.read(leading.store)[0].jobs]
        assert names == [low, high, *(["low-3"] if again else [])]


@pytest.mark.parametrize("when", ["before it is preempted", "after it has been written again"])
async def test_an_operators_stop_wins_whatever_the_leader_is_writing_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(leader_module, "ABSENT_S", 0.0)
    plan, writes_again = FleetLeader.plan, Registry.resubmit
    stops: list[str] = []
    async with leads(tmp_path) as leading:
        fleet_service = leading.service()
        written, named = asyncio.Event(), {"job": "low-1"}
        loop = asyncio.get_running_loop()

        def stopped_meanwhile(leader: FleetLeader) -> Schedule:
            found = plan(leader)
            if found.preempted and when.startswith("before") and not stops:
                stops.extend(found.preempted)
                Registry(leading.store, leading.candidate).stop(stops[0], "enough")
            return found

        def unanswered(to: Registry, job: FleetJob) -> str:
            name = writes_again(to, job)
            if not written.is_set():
                loop.call_soon_threadsafe(written.set)
                raise StoreUnavailable("no answer in time", ambiguous=True)
            return name

        monkeypatch.setattr(FleetLeader, "plan", stopped_meanwhile)
        monkeypatch.setattr(Registry, "resubmit", unanswered)
        monkeypatch.setattr(leader_module, "RETRY_S", 0.3)
        a = leading.node("a")
        low, high = await preempted(leading, a)
        registry.end(leading.store, low, Result(6, "drained"))
        leading.fleet_leader.read(*registry.read(leading.store))
        if when.startswith("after"):
            await written.wait()
            assert leading.fleet_leader.state.after(low) is None, "the leader has not heard of it"
            asked = pb.Question(stop=pb.Stop(job=low, because="enough"))
            named = json.loads((await fleet_service.Ask(asked, HERE)).document)
        await duties(a, {high: 1})
        registry.end(leading.store, high, Result(0, "done"))
        leading.fleet_leader.read(*registry.read(leading.store))
        await leading.fleet_leader.change(lambda to: to.cordon("b", "another round"))
        live = [job for job in registry.read(leading.store)[0].jobs if job.runs or (job.waits and job.stop is None)]
        assert live == []
        assert named == {"job": "low-3" if when.startswith("after") else low}


async def test_a_preempted_job_that_cannot_be_written_again_is_told_of_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "ABSENT_S", 0.0)
    async with leads(tmp_path) as leading:
        a = leading.node("a")
        long = await leading.submit("a" * 61, 1, 1)  # with the next number of two digits the name is too long
        await duties(a, {long: 1})
        write_key(leading.store, registry.COUNT, b"9", timeout_s=1.0)
        high = await leading.submit("high", 1, 1, priority=1)
        while not (await duties(a, {long: 1}))[0].leave:
            pass
        registry.end(leading.store, long, Result(6, "drained"))
        leading.fleet_leader.read(*registry.read(leading.store))
        await duties(a, {high: 1})
        fleet_service = leading.service()
        shown = {job["job"]: job for job in (fleet_service.overview() or {})["jobs"]}[long]
        assert shown["state"] == "waits" and "too long for a fleet" in shown["because"]
        events = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
        assert [event["job"] for event in events if event["event"] == "not_waiting_again"] == [long]


async def test_a_preempted_job_that_goes_on_as_one_which_cannot_be_read_is_not_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_module, "ABSENT_S", 0.0)
    async with leads(tmp_path) as leading:
        low, _ = await preempted(leading, leading.node("a"))
        registry.end(leading.store, low, Result(6, "drained"))
        successor = FleetLeader(leading.tenure, leading.store, leading.thread, leading.journal)
        await successor._reread()
        assert await successor._hand_out()
        write_key(leading.store, f"{registry.ROOT}jobs/low-3", b"{", timeout_s=1)
        await successor._reread()
        assert not await successor._hand_out() and registry.read(leading.store)[0].left_out.keys() == {"low-3"}


async def test_a_quota_is_given_and_shown(tmp_path: Path) -> None:
    async with leads(tmp_path) as leading:
        await asyncio.wait_for(leading.fleet_leader.ready.wait(), PATIENCE_S)
        fleet_service = leading.service()

        async def allow(owner: str, slots: int) -> pb.Answer:
            return await fleet_service.Ask(pb.Question(allow=pb.Allow(owner=owner, slots=slots)), HERE)

        assert json.loads((await allow("ann", 4)).document) == {"owner": "ann", "slots": 4, "before": 0}
        assert "owner ann            0 slots, quota 4" in overview_text(fleet_service.overview() or {})
        assert json.loads((await allow("ann", 0)).document) == {"owner": "ann", "slots": 0, "before": 4}
        assert (fleet_service.overview() or {})["owners"] == []
        assert "OWNER='Ann/../x' must be" in (await allow("Ann/../x", 4)).refused
        assert "give 1 to 1000000" in (await allow("ann", -1)).refused


async def test_a_second_daemon_of_one_name_is_refused_and_a_restarted_one_is_not(tmp_path: Path) -> None:
    """Else each would end the other's stream, and both would run the node's jobs. Who holds the lock of a node is the
    only one who does, so nobody has to find out first that the one before it is gone."""
    async with leads(tmp_path) as leading:
        first = leading.node("a", lock="1f boot")
        for other in ("2e boot", "1f another boot"):
            with pytest.raises(codec.WireError, match=r"a node a attends from 10.0.0.1 already; give this one another"):
                leading.node("a", address="10.0.0.2", lock=other)
        assert leading.fleet_leader.sessions["a"] is first and not first.ended.is_set()
        again = leading.node("a", address="10.0.0.2", lock="1f boot")
        assert first.ended.is_set() and not again.ended.is_set()
        leading.fleet_leader.detach(first)
        assert leading.fleet_leader.sessions == {"a": again}, "what a stream that was replaced says no longer counts"
        leading.fleet_leader.detach(again)
        assert leading.node("a", lock="2e boot") is leading.fleet_leader.sessions["a"]


async def test_a_change_that_was_written_and_cannot_be_read_back_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(leading: Leading) -> None:
        a, read = leading.node("a"), registry.read

        def unanswered(store: Store) -> tuple[FleetState, int]:
            raise StoreUnavailable("no answer in time")

        monkeypatch.setattr(registry, "read", unanswered)
        job = await leading.submit("train", 1, 1)
        monkeypatch.setattr(registry, "read", read)
        leading.fleet_leader.read(*registry.read(leading.store))  # as the replica does on its own
        await duties(a, {job: 1})

    async with leads(tmp_path) as leading:
        await asyncio.wait_for(leading.fleet_leader.ready.wait(), PATIENCE_S)
        await story(leading)


async def test_what_the_store_refuses_is_told_at_once_and_what_may_be_asked_again_is_not(tmp_path: Path) -> None:
    async with leads(tmp_path) as leading:
        await asyncio.wait_for(leading.fleet_leader.ready.wait(), PATIENCE_S)
        ask = pb.Question(allow=pb.Allow(owner="vision", slots=2))
        service, change = leading.service(), AsyncMock()
        leading.fleet_leader.change = change  # type: ignore[method-assign]
        change.side_effect = StoreRefused("etcd: RESOURCE_EXHAUSTED: mvcc: database space exceeded")
        answer = await service.Ask(ask, HERE)
        assert answer.leading and answer.refused == f"etcd refuses this: {change.side_effect}"
        for change.side_effect in (CompareFailed("meanwhile"), LeaseExpired("gone"), StoreUnavailable("no answer")):
            answer = await service.Ask(ask, HERE)
            assert (answer.leading, answer.refused) == (False, "")


async def test_a_submission_that_is_asked_for_twice_with_one_token_makes_one_job(tmp_path: Path) -> None:
    async with leads(tmp_path) as leading:
        await asyncio.wait_for(leading.fleet_leader.ready.wait(), PATIENCE_S)
        fleet_service = leading.service()
        spec = JobSpec(name="train", command=("train",), workers=1, checkpoint_dir="/shared")
        submit = pb.Submit(document=codec.to_json(spec).decode(), token="t1")
        answers = [await fleet_service.Ask(pb.Question(submit=submit), HERE) for _ in range(2)]
        assert [json.loads(answer.document) for answer in answers] == [{"job": "train-1", "larger": ""}] * 2
        assert [job.name for job in registry.read(leading.store)[0].jobs] == ["train-1"]
        answer = await fleet_service.Ask(
            pb.Question(submit=pb.Submit(document=submit.document, token="x" * 70_000)), HERE
        )
        assert "token='xxx" in answer.refused


async def test_a_job_gets_another_size_within_what_its_file_allows(tmp_path: Path) -> None:
    async with leads(tmp_path) as leading:
        fleet_service = leading.service()
        a, b = leading.node("a"), leading.node("b")
        job = await leading.submit("train", 2, 1)
        await duties(a, {job: 1})
        await duties(b, {job: 1})

        async def ask(workers: int) -> pb.Answer:
            return await fleet_service.Ask(pb.Question(scale=pb.Scale(job="train", workers=workers)), HERE)

        assert json.loads((await ask(1)).document) == {"job": job, "workers": 1, "before": 2}
        await duties(b, {})
        assert json.loads((await ask(2)).document)["before"] == 1
        await duties(b, {job: 1})
        for workers in (0, 3):
            assert "takes 1 to 2 workers" in (await ask(workers)).refused
        await leading.fleet_leader.change(lambda to: to.end(job, Result(0, "done")))
        assert (await ask(1)).refused == f"{job} is over: done"


async def test_the_overview_has_the_jobs_whose_agents_are_on_a_node_also_of_jobs_that_are_over(tmp_path: Path) -> None:
    async with leads(tmp_path) as leading:
        await asyncio.wait_for(leading.fleet_leader.ready.wait(), PATIENCE_S)
        a, service = leading.node("a"), leading.service()
        shown = service.overview()
        assert shown is not None and shown["nodes"][0]["holds"] is None
        leading.fleet_leader.heard(a, pb.NodeWord(troubles=pb.NodeTroubles(holds=["train-1"])))
        shown = service.overview()
        assert shown is not None and shown["nodes"][0]["holds"] == ["train-1"] and not shown["nodes"][0]["jobs"]


async def test_only_the_agent_of_a_drained_node_is_told_to_end(tmp_path: Path) -> None:
    async with leads(tmp_path) as leading:
        fleet_service = leading.service()
        await asyncio.wait_for(leading.fleet_leader.ready.wait(), PATIENCE_S)
        a = leading.node("a")
        end = pb.Question(end_agent=pb.EndAgent(node="a", process="p"))
        assert "node a is not drained" in (await fleet_service.Ask(end, HERE)).refused
        await leading.fleet_leader.change(lambda to: to.cordon("a", "why"))
        assert json.loads((await fleet_service.Ask(end, HERE)).document) == {"node": "a"}
        told = [a.outbox.get_nowait() for _ in range(a.outbox.qsize())]
        assert [order.end.process for order in told if order.HasField("end")] == ["p"]
        leading.fleet_leader.detach(a)
        assert json.loads((await fleet_service.Ask(end, HERE)).document) == {"away": True}


async def test_nodes_are_told_what_to_run_though_what_has_ended_cannot_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ENDED_KEPT", 0)
    tried = asyncio.Event()
    async with leads(tmp_path) as leading:
        loop = asyncio.get_running_loop()

        def refused(to: Registry, state: FleetState) -> None:
            loop.call_soon_threadsafe(tried.set)
            raise StoreRefused("no rights")

        forget = Registry.forget
        monkeypatch.setattr(Registry, "forget", refused)
        a = leading.node("a")
        first = await leading.submit("first", 1, 1)
        await duties(a, {first: 1})
        await leading.fleet_leader.change(lambda to: to.end(first, Result(0, "done")))
        await tried.wait()
        second = await leading.submit("second", 1, 1)
        await duties(a, {second: 1})
        tried.clear()
        await tried.wait()
        said = (tmp_path / "journal.jsonl").read_text()
        assert said.count("ended_jobs_not_forgotten") == 1 == said.count("no rights"), "once, however often it is tried"
        monkeypatch.setattr(Registry, "forget", forget)
        while [job.name for job in leading.fleet_leader.state.jobs] != [second]:
            await asyncio.sleep(0.01)


def test_an_office_whose_lease_is_gone_leads_no_longer_and_ends_its_streams(tmp_path: Path) -> None:
    async def told() -> str:
        leading = Leading(tmp_path)
        session = leading.node("a")
        async with leading.tenure:
            work = asyncio.create_task(leading.fleet_leader.lead())
            await asyncio.wait_for(leading.fleet_leader.ready.wait(), PATIENCE_S)
            leading.store.advance(1e9)
            because = await asyncio.wait_for(work, PATIENCE_S)
        assert session.ended.is_set()
        leading.thread.close()
        leading.journal.close()
        return because

    assert "lease has expired" in asyncio.run(told())


async def test_a_question_whose_asker_is_gone_is_forgotten() -> None:
    session = NodeSession(pb.NodeHello(node="a"))
    order = pb.NodeOrder(log=pb.LogQuery())
    asking = asyncio.create_task(session.ask(order, order.log))
    await session.outbox.get()
    asking.cancel()
    await asyncio.wait([asking])
    assert not session.queries


async def test_every_change_is_journaled_with_its_caller_and_a_job_knows_its_owner(tmp_path: Path) -> None:
    async with leads(tmp_path) as leading:
        await asyncio.wait_for(leading.fleet_leader.ready.wait(), PATIENCE_S)
        fleet_service = leading.service()
        a = leading.node("a", slots=2)
        ann, spec = (
            calling("elastic://operator/ann"),
            JobSpec(name="train", command=("t",), workers=2, checkpoint_dir="/shared"),
        )

        async def ask(context: Any = ann, **content: Any) -> Any:
            answer = await fleet_service.Ask(pb.Question(**content), context)
            assert not answer.refused
            return json.loads(answer.document)

        document = codec.to_json(spec).decode()
        await ask(submit=pb.Submit(document=document))
        await duties(a, {"train-1": 2})
        await ask(scale=pb.Scale(job="train-1", workers=1))
        await ask(cordon=pb.Cordon(node="a", because="repair"))
        await ask(stop=pb.Stop(job="train-1", because="enough"))
        await ask(HERE, submit=pb.Submit(document=document))
        lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
        changes = {"submitted", "scaled", "cordoned", "stop_asked"}
        told = [(line["event"], line["job"], line["caller"]) for line in lines if line["event"] in changes]
        assert told == [
            *((event, "train-1", "operator ann") for event in ("submitted", "scaled", "cordoned", "stop_asked")),
            ("submitted", "train-2", "somebody without a certificate"),
        ]
        assert {line["peer"] for line in lines if line["event"] in changes} == {"10.0.0.3:4711"}
        owners = [Caller("ann", "operator", "10.0.0.3:4711"), Caller("", "", "10.0.0.3:4711")]
        assert [job.owner for job in registry.read(leading.store)[0].jobs] == owners
        shown = await ask(HERE, overview=pb.Overview())
        assert "submitted by operator ann, from 10.0.0.3:4711" in overview_text(shown, long=True)
        assert "submitted by somebody without a certificate, from" in overview_text(shown, long=True)
        assert "ann" not in overview_text(shown)
        about = [line for line in lines if line["job"] == "train-1"]
        led = [{**about[0], "event": "committed", "generation": 1, "kind": "form", "members": ["a.0.0"]}]
        said = [moment.said for moment in stories.of_generation(about[:1] + led + about[1:], 1)]
        assert "operator ann submits it, from 10.0.0.3:4711" in said


def test_what_was_submitted_to_an_older_version_has_no_owner() -> None:
    told = {"job": "train-1", "state": "waits", "slots": {}, "workers": 1, "because": ""}
    assert "whom the version of then did not note" in overview_text({"jobs": [told], "nodes": []}, long=True)


async def test_a_stream_of_which_grpc_tells_the_end_twice_is_over(tmp_path: Path) -> None:
    """It ends the words, and then it cancels the call, which may just be ending because of the words."""
    async with leads(tmp_path) as leading:
        fleet_service = leading.service()

        speaking = asyncio.Event()

        async def words() -> AsyncIterator[pb.NodeWord]:
            yield pb.NodeWord(hello=pb.NodeHello(node="a", slots=1))
            await speaking.wait()

        async def write(order: pb.NodeOrder) -> None:
            if not written:
                written.append(order)
                leading.fleet_leader.sessions["a"].outbox.put_nowait(pb.NodeOrder())
                return
            try:
                speaking.set()
                await asyncio.Event().wait()
            finally:  # nobody speaks any more: the call is ending
                call.cancel()
                await asyncio.sleep(0)

        written: list[pb.NodeOrder] = []
        call = asyncio.create_task(
            fleet_service.Attend(words(), SimpleNamespace(write=write, send_initial_metadata=AsyncMock()))
        )
        with pytest.raises(asyncio.CancelledError):
            await call
        assert leading.fleet_leader.sessions == {}
        leading.node("a", lock="another one")
