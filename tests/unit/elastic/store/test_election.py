"""One leader at a time, one record a number, whatever call to the store is lost on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from elastic.checkpoints.pointer import Pointer
from elastic.errors import CheckpointCorrupt, CompareFailed, StoreUnavailable
from elastic.protocol.messages import Generation, Kind, Plan
from elastic.store import chunks, election
from elastic.store.base import Compare, Delete, Item, Listing, Put, TxnResult
from elastic.store.election import LEASE_S, Candidate, LeadershipLost, Taken, Won
from elastic.wire.codec import WireError
from tests.memory_store import MemoryStore, delete_key, write_key


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class LossyStore(MemoryStore):
    """Fails the nth call from now: before it happens, or (a transaction) after it happened."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_in: int | None = None
        self.after = False

    def _lose(self, *, ambiguous: bool) -> bool:
        if self.fail_in is None:
            return False
        self.fail_in -= 1
        if self.fail_in >= 0:
            return False
        self.fail_in = None
        if ambiguous and self.after:
            return True
        raise StoreUnavailable("lost")

    def get(self, key: str, *, timeout_s: float) -> Item | None:
        self._lose(ambiguous=False)
        return super().get(key, timeout_s=timeout_s)

    def txn(
        self, compares: Sequence[Compare], puts: Sequence[Put], deletes: Sequence[Delete] = (), *, timeout_s: float
    ) -> TxnResult:
        late = self._lose(ambiguous=True)
        result = super().txn(compares, puts, deletes, timeout_s=timeout_s)
        if late:
            raise StoreUnavailable("lost", ambiguous=True)
        return result


def candidate(store: MemoryStore, name: str, clock: Clock | None = None) -> Candidate:
    return Candidate(store, "job", name, clock or Clock())


def leads(store: MemoryStore) -> Candidate:
    """It stands, and is elected."""
    leader = candidate(store, "one:1")
    leader.stand()
    return leader


def record(number: int, kind: Kind = Kind.LOSS, base: int | None = None, because: str = "") -> Generation:
    return Generation(number, kind, number if base is None else base, (), Plan(), because)


def test_the_first_candidate_wins_and_the_second_learns_where_it_is() -> None:
    store = MemoryStore()
    first, second = candidate(store, "one:1"), candidate(store, "two:2")
    assert isinstance(first.stand(), Won)
    assert second.stand() == Taken("one:1", 3)


def test_a_successor_has_a_higher_term() -> None:
    store = MemoryStore()
    first, second = candidate(store, "one:1"), candidate(store, "two:2")
    won = first.stand()
    first.resign()
    again = second.stand()
    assert isinstance(won, Won) and isinstance(again, Won)
    assert again.term > won.term


def test_a_dead_leaders_place_is_free_when_its_lease_is_over() -> None:
    store = MemoryStore()
    candidate(store, "one:1").stand()
    second = candidate(store, "two:2")
    store.advance(LEASE_S - 0.1)
    assert isinstance(second.stand(), Taken)
    store.advance(LEASE_S)
    assert isinstance(second.stand(), Won)


def test_a_leader_stops_relying_on_its_lease_before_the_store_ends_it() -> None:
    store, clock = MemoryStore(), Clock()
    leader = candidate(store, "one:1", clock)
    leader.stand()
    clock.now_s = 1.0
    store.advance(1.0)
    assert leader.renew() < store.next_expiry_s()
    store.advance(10.0)
    with pytest.raises(LeadershipLost):
        leader.renew()


def test_committed_records_are_read_back_from_the_last_loss_on() -> None:
    leader = leads(store := MemoryStore())
    assert leader.chain() == ()
    records = [record(1, Kind.FORM), record(2, Kind.PLANNED, 1), record(3), record(4, Kind.PLANNED, 3)]
    for generation in records:
        leader.commit(generation)
    successor = candidate(store, "two:2")
    leader.resign()
    successor.stand()
    assert successor.chain() == tuple(records[2:])
    successor.commit(record(5))
    assert successor.chain() == (record(5),)


@pytest.mark.parametrize("planned", [1, 7, 120])
def test_a_long_chain_is_read_in_few_reads_whatever_came_before_it(
    planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the numbers get longer, 9 to 10 and 99 to 100, and sort as keys otherwise than they count."""
    reads: list[str] = []

    class Counting(MemoryStore):
        def between(self, first: str, end: str, *, limit: int, timeout_s: float) -> Listing:
            reads.append(first)
            return super().between(first, end, limit=limit, timeout_s=timeout_s)

    store = Counting()
    leader = leads(store)
    records = [record(number) for number in range(1, 6)]
    records += [record(number, Kind.PLANNED, 5) for number in range(6, 6 + planned)]
    for generation in records:
        leader.commit(generation)
    assert leader.chain() == tuple(records[4:])
    assert len(reads) <= 3 + planned // election.RECORDS_AT_ONCE + len(str(planned))
    monkeypatch.setattr(election, "RECORDS_AT_ONCE", 2)
    assert leader.chain() == tuple(records[4:])
    delete_key(store, f"/elastic/job/generations/{records[-2].number}", timeout_s=1)
    with pytest.raises(WireError, match=f"generation {records[-2].number} is missing"):
        leader.chain()


def test_a_leader_that_was_replaced_commits_nothing() -> None:
    store = MemoryStore()
    first, second = candidate(store, "one:1"), candidate(store, "two:2")
    first.stand()
    first.commit(record(1, Kind.FORM))
    store.advance(60.0)
    second.stand()
    second.chain()
    with pytest.raises(LeadershipLost):
        first.commit(record(2))
    with pytest.raises(LeadershipLost):
        first.finish({"exit_code": 0})
    assert second.chain() == (record(1, Kind.FORM),)
    assert second.result() is None


def test_a_number_is_never_given_twice() -> None:
    leader = leads(MemoryStore())
    leader.commit(record(1, Kind.FORM))
    with pytest.raises(CompareFailed):
        leader.commit(record(1, because="another plan"))
    assert leader.chain() == (record(1, Kind.FORM),)


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done but not said"])
def test_a_commit_whose_answers_are_lost_happens_once(after: bool) -> None:
    """The 1st, 2nd, 3rd ... call to the store is lost, until the commit gets through."""
    for lost in range(6):
        store = LossyStore()
        leader = leads(store)
        leader.chain()
        store.fail_in, store.after = lost, after
        for _ in range(4):
            try:
                leader.commit(record(1, Kind.FORM))
                break
            except StoreUnavailable:
                continue
        store.fail_in = None
        leader.commit(record(2))
        assert leader.chain() == (record(2),)
        assert len(store.prefix("/elastic/job/generations/", timeout_s=1).items) == 2


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done but not said"])
def test_a_record_in_pieces_is_committed_once_and_whole(after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too long for one write: nobody reads it before all of it is there, whichever call is lost."""
    monkeypatch.setattr(chunks, "PIECE_BYTES", 100)
    for lost in range(8):
        store = LossyStore()
        leader = leads(store)
        assert leader.chain() == ()
        store.fail_in, store.after = lost, after
        for _ in range(3):
            try:
                leader.commit(record(1, Kind.FORM))
                break
            except StoreUnavailable:
                reader = candidate(store, "two:2")
                if not after:
                    assert store.get("/elastic/job/top", timeout_s=1) is None and reader.chain() == ()
        store.fail_in = None
        assert leader.chain() == (record(1, Kind.FORM),)
        assert len(store.prefix("/elastic/job/pieces/", timeout_s=1).items) > 1
        leader.resign()
        assert isinstance(candidate(store, "two:2").stand(), Won)


def test_a_record_with_a_lost_piece_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PIECE_BYTES", 100)
    leader = leads(store := MemoryStore())
    leader.commit(record(1, Kind.FORM))
    delete_key(store, store.prefix("/elastic/job/pieces/", timeout_s=1).items[1].key, timeout_s=1)
    with pytest.raises(WireError, match="generation 1 is not whole"):
        leader.chain()


def test_a_leader_that_was_replaced_writes_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PIECE_BYTES", 100)
    store = MemoryStore()
    first = candidate(store, "one:1")
    first.stand()
    store.advance(60.0)
    candidate(store, "two:2").stand()
    with pytest.raises(LeadershipLost):
        first.commit(record(1, Kind.FORM))
    assert store.prefix("/elastic/job/pieces/", timeout_s=1).items == ()


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done but not said"])
def test_an_election_whose_answers_are_lost_is_won_once(after: bool) -> None:
    for lost in range(5):
        store = LossyStore()
        leader = candidate(store, "one:1")
        store.fail_in, store.after = lost, after
        for _ in range(4):
            try:
                outcome = leader.stand()
                break
            except StoreUnavailable:
                continue
        store.fail_in = None
        assert isinstance(outcome, Won)
        leader.commit(record(1, Kind.FORM))


def test_how_a_job_ended_is_known_to_every_later_leader() -> None:
    leader = leads(store := MemoryStore())
    leader.finish({"exit_code": 0, "because": "done"})
    leader.resign()
    successor = candidate(store, "two:2")
    successor.stand()
    assert successor.result() == {"exit_code": 0, "because": "done"}


def test_the_vacant_key_is_announced() -> None:
    store = MemoryStore()
    leader, waiting = candidate(store, "one:1"), candidate(store, "two:2")
    leader.stand()
    taken = waiting.stand()
    assert isinstance(taken, Taken)
    heard: list[object] = []
    waiting.watch_leader(taken.revision, heard.append)
    leader.resign()
    assert len(heard) == 1


# The pointer to the newest checkpoint

FIRST = Pointer("step-000000000100.0.g1-00000000", "a.0.0", 1)
SECOND = Pointer("step-000000000200.0.g1-00000000", "b.0.0", 1)


def test_the_pointer_only_moves_to_what_is_newer() -> None:
    leader = leads(MemoryStore())
    assert leader.pointer("_periodic") is None
    assert leader.point("_periodic", SECOND) == SECOND
    assert leader.point("_periodic", FIRST) == SECOND
    assert leader.point("_periodic", SECOND) == SECOND, "asked again after an answer that was lost"
    assert leader.point("_periodic", replace(SECOND, holder="a.0.0")) == SECOND, "one worker holds it"
    assert leader.point("best", FIRST) == FIRST, "each series has its own"
    assert leader.pointer("_periodic") == SECOND


def test_a_later_generation_that_went_back_to_an_older_checkpoint_moves_it_to_a_lower_step() -> None:
    leader = leads(MemoryStore())
    leader.point("_periodic", SECOND)
    back = Pointer("step-000000000104.0.g3-00000000", "a.0.1", 3)
    assert leader.point("_periodic", back) == back
    assert leader.point("_periodic", SECOND) == back


def test_a_pointer_made_anew_from_the_storage_is_older_than_whatever_is_taken_then() -> None:
    leader = leads(MemoryStore())
    found = Pointer("step-000000000100.0.g9-00000000", "", 0)
    assert leader.point("_periodic", found) == found
    taken = Pointer("step-000000000104.0.g1-11111111", "a.0.0", 1)
    assert leader.point("_periodic", taken) == taken
    assert leader.point("_periodic", found) == taken


def test_a_leader_that_was_replaced_moves_no_pointer() -> None:
    store = MemoryStore()
    old, new = candidate(store, "one:1"), candidate(store, "two:2")
    old.stand()
    old.point("_periodic", FIRST)
    store.advance(LEASE_S + 1)
    assert isinstance(new.stand(), Won)
    with pytest.raises(LeadershipLost):
        old.point("_periodic", SECOND)
    assert new.pointer("_periodic") == FIRST


def test_a_leader_that_has_not_read_the_highest_generation_moves_no_pointer() -> None:
    leader = leads(store := MemoryStore())
    write_key(store, "/elastic/job/top", b"7", timeout_s=1.0)
    with pytest.raises(CompareFailed):
        leader.point("_periodic", FIRST)
    assert leader.pointer("_periodic") is None


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("lost", range(3))
def test_whatever_call_is_lost_the_pointer_is_moved_by_asking_again(lost: int, after: bool) -> None:
    store = LossyStore()
    leader = leads(store)
    leader.point("_periodic", FIRST)
    store.fail_in, store.after = lost, after
    try:
        leader.point("_periodic", SECOND)
    except StoreUnavailable:
        store.fail_in = None
        assert leader.point("_periodic", SECOND) == SECOND
    store.fail_in = None
    assert leader.pointer("_periodic") == SECOND


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"entry": "best", "holder": "", "since": 0}'])
def test_a_damaged_pointer_is_named(content: bytes) -> None:
    leader = leads(store := MemoryStore())
    write_key(store, "/elastic/job/checkpoints/_periodic", content, timeout_s=1.0)
    with pytest.raises(CheckpointCorrupt):
        leader.pointer("_periodic")


def test_a_leader_of_a_restored_store_gives_way_to_a_term_above_all_that_were_seen() -> None:
    store = MemoryStore()
    first = candidate(store, "first")
    won = first.stand()
    assert isinstance(won, Won)
    because = first.surpass(won.term + 50)
    assert because == f"term {won.term + 50} was seen before this one, {won.term}: etcd was restored from a backup"
    first.resign()
    again = first.stand()
    assert isinstance(again, Won) and again.term > won.term + 50
    assert first.surpass(again.term + election.SURPASSED_AT_MOST * 2) == "", "no etcd can be so far behind"


def test_a_leader_that_was_replaced_does_not_take_the_store_for_a_restored_one() -> None:
    store = MemoryStore()
    first, second = candidate(store, "first"), candidate(store, "second")
    assert isinstance(first.stand(), Won)
    store.advance(store.next_expiry_s())
    later = second.stand()
    assert isinstance(later, Won)
    assert first.surpass(later.term) == ""
    assert store.get("/elastic/job/surpassed", timeout_s=1.0) is None
