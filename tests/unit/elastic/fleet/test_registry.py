"""A fleet's documents: what is written under a term is read by all, and by nobody else's term."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic.config import JobSpec
from elastic.errors import CompareFailed, ConfigError, StoreRefused, StoreUnavailable
from elastic.fleet import registry
from elastic.fleet.documents import FleetJob, FleetState, Grant, NodeShare, Placement, Result, Size, Wish
from elastic.fleet.registry import Registry
from elastic.store.base import Compare, Delete, Listing, Put, Store, TxnResult
from elastic.store.election import Candidate, LeadershipLost, Won
from elastic.wire import codec
from tests.memory_store import MemoryStore, write_key

SPEC = JobSpec(
    name="train",
    command=("python", "train.py"),
    workers=2,
    env=("LR=3",),
    labels=("gpu=h100",),
    checkpoint_dir="s3://bucket/runs",
)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def elected(store: MemoryStore, name: str = "r1") -> tuple[Candidate, Registry]:
    candidate = Candidate(store, registry.NAME, name, lambda: 0.0)
    assert isinstance(candidate.stand(), Won)
    return candidate, Registry(store, candidate)


def test_jobs_get_names_that_no_other_job_ever_had(store: MemoryStore) -> None:
    _, to = elected(store)
    names = [to.submit(SPEC), to.submit(SPEC), to.submit(JobSpec(name="eval", command=("a",), workers=1))]
    assert names == ["train-1", "train-2", "eval-3"]
    state, _ = registry.read(store)
    assert [job.name for job in state.jobs] == names
    assert len({job.submission.identity for job in state.jobs}) == 3


def test_everything_that_is_written_is_read(store: MemoryStore) -> None:
    _, to = elected(store)
    first = to.submit(SPEC)
    before = registry.read(store)[0].jobs[0].submission
    to.end(first, Result(6, "drained"))
    name = to.submit(SPEC, before, "step-7")
    placement = Placement((NodeShare("a", 1), NodeShare("b", 1)))
    grants = (Grant("a", "secret"), Grant("b", ""))
    to.place(name, placement, grants)
    to.stop(name, "enough")
    to.scale(name, 7)
    to.cordon("b", "disk")
    registry.end(store, name, Result(6, "drained", "", 4))
    registry.end(store, name, Result(0, "said too late"))
    state, _ = registry.read(store)
    _, job = state.jobs
    assert (job.submission.series, job.submission.identity) == (first, before.identity)
    assert (job.submission.resume, job.submission.interruptions) == ("step-7", 1)
    assert job.submission.checkpoints == f"{SPEC.checkpoint_dir}/train-1"
    assert (job.spec.env, job.spec.labels, job.placement, job.grants) == (SPEC.env, SPEC.labels, placement, grants)
    assert (job.size, job.workers) == (Size(7), 7)
    assert (job.stop, job.result) == (Wish("enough"), Result(6, "drained", "", 4))
    assert dict(state.cordons) == {"b": Wish("disk")}
    to.cordon("b", "")
    assert registry.read(store)[0].cordons == {}


def test_a_job_of_a_fleet_that_is_gone_keeps_its_checkpoints(store: MemoryStore) -> None:
    _, to = elected(store)
    to.submit(SPEC, resume="step-7", identity="a1b2")
    (job,) = registry.read(store)[0].jobs
    assert (job.submission.series, job.submission.identity) == ("train-1", "a1b2")
    assert (job.submission.resume, job.submission.interruptions) == ("step-7", 1)


def test_of_the_jobs_with_the_same_checkpoints_one_at_most_is_not_over(store: MemoryStore) -> None:
    _, to = elected(store)
    first = to.submit(SPEC)
    before = registry.read(store)[0].jobs[0].submission
    with pytest.raises(ConfigError, match=r"train-1 has the checkpoints of train-1 and is not over; stop it first"):
        to.submit(SPEC, before)
    to.end(first, Result(6, "drained"))
    second = to.submit(SPEC, before, token="t1")
    assert to.submit(SPEC, before, token="t1") == second, "the same request"
    with pytest.raises(ConfigError, match=r"train-2 has the checkpoints of train-1 and is not over"):
        to.submit(SPEC, before)
    to.stop(second, "preempted for eval-9", preempts=True)
    to.end(second, Result(6, "drained"))
    with pytest.raises(ConfigError, match=r"train-2 has the checkpoints of train-1 and is not over"):
        to.submit(SPEC, before)
    third = to.resubmit(registry.read(store)[0].jobs[1])
    to.end(third, Result(6, "drained"))
    assert to.submit(SPEC, before) == "train-4", "the one that was preempted went on, and is over"


def test_of_two_resumes_in_the_same_moment_one_is_written(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _, to = elected(store)
    to.end(to.submit(SPEC), Result(6, "drained"))
    before, read = registry.read(store)[0].jobs[0].submission, registry.read

    def other(of: Store) -> tuple[FleetState, int]:
        found = read(of)
        monkeypatch.setattr(registry, "read", read)
        to.submit(SPEC, before)
        return found

    monkeypatch.setattr(registry, "read", other)
    with pytest.raises(CompareFailed):
        to.submit(SPEC, before)
    assert [job.name for job in registry.read(store)[0].jobs] == ["train-1", "train-2"]


def test_a_leader_that_was_replaced_writes_nothing(store: MemoryStore) -> None:
    first, to = elected(store)
    first.resign()
    elected(store, "r2")
    for write in (lambda: to.submit(SPEC), lambda: to.place("train-1", Placement(()), ()), lambda: to.cordon("a", "")):
        with pytest.raises(LeadershipLost):
            write()
    assert registry.read(store)[0].jobs == ()


def test_a_name_without_room_for_a_number_is_refused(store: MemoryStore) -> None:
    _, to = elected(store)
    with pytest.raises(ConfigError, match="too long for a fleet, which adds a number"):
        to.submit(JobSpec(name="x" * 62, command=("a",), workers=1))


def test_of_ended_jobs_those_are_kept_that_have_ended_last(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ENDED_KEPT", 2)
    _, to = elected(store)
    names = [to.submit(SPEC) for _ in range(5)]
    for name in names:
        for part in ("top", "result", *(f"generations/{number}" for number in range(5))):
            write_key(store, f"/elastic/{name}/{part}", b"1", timeout_s=1)
    for name in (*names[1:4], names[0]):
        to.scale(name, 1)
        to.end(name, Result(0, "done"))
    to.forget(registry.read(store)[0])
    assert [job.name for job in registry.read(store)[0].jobs] == [names[0], names[3], names[4]]
    left = {item.key.split("/")[2] for item in store.prefix("/elastic/", timeout_s=1).items} - {registry.NAME}
    assert left == {names[0], names[3], names[4]}, "nothing of those that are forgotten"
    kept = {item.key.rpartition("/")[2] for item in store.prefix(f"{registry.ROOT}", timeout_s=1).items}
    assert kept == {"leader", "count", names[0], names[3], names[4]}
    assert to.submit(SPEC) == "train-6", "numbers are not given again"


def test_a_job_is_forgotten_whose_records_are_more_than_one_answer_of_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Brief(MemoryStore):
        def prefix(self, prefix: str, *, timeout_s: float) -> Listing:
            listing = super().prefix(prefix, timeout_s=timeout_s)
            if sum(len(item.value) for item in listing.items) > 4 * 2**20:
                raise StoreRefused("received message larger than max")
            return listing

    monkeypatch.setattr(registry, "ENDED_KEPT", 0)
    store = Brief()
    _, to = elected(store)
    name = to.submit(SPEC)
    for number in range(500):
        write_key(store, f"/elastic/{name}/generations/{number}", bytes(10_000), timeout_s=1)
    to.end(name, Result(0, "done"))
    to.forget(registry.read(store)[0])
    assert store.prefix(f"/elastic/{name}/", timeout_s=1).items == () == registry.read(store)[0].jobs


def test_a_leader_of_the_past_forgets_nothing(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ENDED_KEPT", 0)
    first, to = elected(store)
    name = to.submit(SPEC)
    to.end(name, Result(0, "done"))
    write_key(store, f"/elastic/{name}/result", b"1", timeout_s=1)
    first.resign()
    elected(store, "r2")
    with pytest.raises(LeadershipLost):
        to.forget(registry.read(store)[0])
    assert store.get(f"/elastic/{name}/result", timeout_s=1) is not None


@pytest.mark.parametrize("garbage", [b"seven", b"", b"-1", b"\xff"])
def test_a_count_that_is_no_number_costs_submissions_only_and_says_what_to_do(
    store: MemoryStore, garbage: bytes
) -> None:
    _, to = elected(store)
    name = to.submit(SPEC)
    write_key(store, registry.COUNT, garbage, timeout_s=1)
    state, _ = registry.read(store)
    assert [job.name for job in state.jobs] == [name] and state.unread.keys() == {"count"}
    with pytest.raises(ConfigError, match=r"/elastic/.fleet/count .* so no job can be submitted; write"):
        to.submit(SPEC)
    write_key(store, registry.COUNT, b"1", timeout_s=1)
    assert to.submit(SPEC) == "train-2"


def test_reasons_of_any_length_are_stored_so_that_they_are_read_again(store: MemoryStore) -> None:
    _, to = elected(store)
    names = [to.submit(SPEC), to.submit(SPEC)]
    traceback = "a and b both raised at train.py:7\n" + "x" * codec.TEXT_LIMIT + " the cause"
    registry.end(store, names[0], Result(1, traceback))
    to.end(names[1], Result(1, traceback))
    to.stop(names[1], traceback)
    to.cordon("b", traceback)
    state, _ = registry.read(store)
    first, second = state.jobs
    assert first.result is not None and second.result is not None and second.stop is not None
    for because in (first.result.because, second.result.because, second.stop.because, state.cordons["b"].because):
        assert len(because) == codec.TEXT_LIMIT and because.endswith("xxx the cause")


def test_a_document_that_cannot_be_read_costs_its_own_job_only(store: MemoryStore) -> None:
    _, to = elected(store)
    names = [to.submit(SPEC) for _ in range(5)]
    bad = {f"jobs/{names[0]}": b"{", f"results/{names[1]}": b"[]", f"placements/{names[2]}": b'{"shares": 7}'}
    wishes = {f"stops/{names[3]}": b'{"why": ""}', "cordons/b": b"null"}
    for key, document in (bad | wishes).items():
        write_key(store, f"{registry.ROOT}{key}", document, timeout_s=1)
    state, _ = registry.read(store)
    assert [job.name for job in state.jobs] == names[3:]
    assert state.left_out == dict.fromkeys(names[:3], frozenset())
    assert state.unread.keys() == (bad | wishes).keys()
    stopped, untouched = state.jobs
    assert stopped.stop is not None and "unknown field 'why'" in stopped.stop.because, "somebody wants it to end"
    assert untouched.stop is None
    assert state.cordons.keys() == {"b"}


@pytest.mark.parametrize("kind", ["jobs", "placements", "sizes", "grants", "results"])
def test_a_job_that_cannot_be_read_is_left_out_with_its_nodes_and_may_have_its_checkpoints(
    store: MemoryStore, kind: str
) -> None:
    _, to = elected(store)
    to.end(to.submit(SPEC), Result(6, "drained"))
    before = registry.read(store)[0].jobs[0].submission
    name = to.submit(SPEC, before)
    to.place(name, Placement((NodeShare("a", 2),)), (Grant("b", "t"),))
    write_key(store, f"{registry.ROOT}{kind}/{name}", b'{"of_a_newer_version": 1}', timeout_s=1)
    state, _ = registry.read(store)
    nodes = {"a", "b"} - {"a" if kind == "placements" else "b" if kind == "grants" else ""}
    assert [job.name for job in state.jobs] == ["train-1"] and state.left_out == {name: nodes}
    with pytest.raises(ConfigError, match=r"train-2 may have the checkpoints of train-1, and cannot be read"):
        to.submit(SPEC, before)
    if kind != "results":
        registry.end(store, name, Result(0, "done"))
        assert registry.read(store)[0].left_out == {}, "it is over"


class Forgetful(MemoryStore):
    """Writes, and then does not answer, as often as it is told to."""

    silent = 0

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[Delete] = (), *, timeout_s: float
    ) -> TxnResult:
        done = super().txn(compares, puts, deletes, timeout_s=timeout_s)
        if self.silent:
            self.silent -= 1
            raise StoreUnavailable("no answer in time", ambiguous=True)
        return done


def test_a_request_that_is_sent_again_makes_one_job() -> None:
    store = Forgetful()
    _, to = elected(store)
    store.silent = 1
    with pytest.raises(StoreUnavailable):
        to.submit(SPEC, token="t1")
    assert to.submit(SPEC, token="t1") == "train-1"
    assert to.submit(SPEC, token="t2") == "train-2", "a request of its own"
    assert [job.name for job in registry.read(store)[0].jobs] == ["train-1", "train-2"]


def test_a_job_waits_runs_and_is_over() -> None:
    job = FleetJob(submission=None)  # type: ignore[arg-type]
    assert (job.waits, job.runs) == (True, False)
    job = FleetJob(submission=None, placement=Placement(()))  # type: ignore[arg-type]
    assert (job.waits, job.runs) == (False, True)
    job = FleetJob(submission=None, placement=Placement(()), result=Result(0, ""))  # type: ignore[arg-type]
    assert (job.waits, job.runs) == (False, False)
