"""A generation told as a difference comes out as it was committed, or is asked for anew, in few bytes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.protocol.messages import Generation, Kind, Laggard, Member, Plan, Publish, Quiesce, Share
from elastic.wire import codec
from elastic.wire import elastic_pb2 as pb
from elastic.wire.broadcast import PACK_BYTES, Publisher, Reader
from elastic.wire.generation_delta import KEPT, Delta, Placed, WrongBase, applied, difference
from tests.unit.elastic.wire.test_codec import values

MEMBERS = st.lists(values(Member, ""), max_size=6, unique_by=lambda member: member.worker_id)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Generation, Generation]:
    """A generation and another one: members stay, go, come, change places, or change in themselves."""
    base = replace(draw(values(Generation, "")), members=tuple(draw(MEMBERS)))
    staying = [member for member in base.members if draw(st.booleans())]
    taken = {member.worker_id for member in base.members}
    coming = [member for member in draw(MEMBERS) if member.worker_id not in taken]
    altered = [replace(member, port=(member.port + 1) % 65_536) for member in base.members if member not in staying]
    members = draw(st.permutations([*staying, *coming, *altered]))
    if draw(st.booleans()):
        members = [*staying, *coming]
    paces = [draw(st.lists(st.integers(0, 9), min_size=n, max_size=n)) for n in (len(base.members), len(members))]
    record = draw(values(Generation, ""))
    base = replace(base, plan=replace(base.plan, paces=tuple(paces[0]) if any(paces[0]) else (), all_tasks=""))
    plan = replace(record.plan, paces=tuple(paces[1]), all_tasks="")
    return base, replace(record, members=tuple(members), plan=plan)


@settings(max_examples=25)
@given(pairs())
def test_a_difference_makes_the_record_of_its_base(pair: tuple[Generation, Generation]) -> None:
    base, record = pair
    delta, plan = difference(base, record, 1), record.plan
    whole = applied(base, delta, plan.shares, plan.laggards)
    assert whole.digest() == record.digest()
    assert replace(whole, plan=replace(whole.plan, all_tasks="")) == record
    read = codec.value_from_wire(Delta, pb.Delta.FromString(codec.value_to_wire(delta).SerializeToString()))
    assert applied(base, read) == applied(base, delta)


def ring(number: int, size: int, *, without: int = -1, tasks: bool = False, because: str = "here") -> Generation:
    """Members n0..n<size - 1> of rank order, each with a share if there are tasks."""
    ranks = [rank for rank in range(size) if rank != without]
    members = tuple(Member(f"n{rank}.0.0", f"n{rank}", "10.0.0.1", 4000, rank) for rank in ranks)
    shares = tuple(Share(member.worker_id, (), (rank,)) for rank, member in zip(ranks, members, strict=True))
    laggards = tuple(Laggard(member.worker_id, "n0.0.0") for member in members[1::2])
    plan = Plan(op=5, units=size, shares=shares, laggards=laggards) if tasks else Plan()
    return Generation(number, Kind.LOSS, number, members, plan, because, token=f"{number:032}")


def test_of_all_tasks_a_digest_is_left_where_those_of_few_are_told() -> None:
    base, record = ring(1, 4), ring(2, 4, without=1, tasks=True)
    mine = [share for share in record.plan.shares if share.worker_id == "n2.0.0"]
    told = applied(base, difference(base, record, 1), mine)
    assert told.digest() == record.digest()
    assert [share.worker_id for share in told.plan.shares] == ["n2.0.0"]
    assert told.plan.share_of("n2.0.0") == record.plan.share_of("n2.0.0")
    other = replace(record, plan=replace(record.plan, shares=record.plan.shares[:-1]))
    assert other.digest() != record.digest()


@pytest.mark.parametrize("field", [field.name for field in fields(Generation)])
def test_every_field_of_a_record_is_in_its_digest(field: str) -> None:
    record = ring(3, 3, tasks=True)
    others: dict[type, Any] = {
        int: 77, str: "another", bool: True, Kind: Kind.PLANNED, tuple: record.members[:-1], Plan: Plan(),
    }  # fmt: skip
    assert replace(record, **{field: others[type(getattr(record, field))]}).digest() != record.digest()


@pytest.mark.parametrize("field", [field.name for field in fields(Member)])
def test_every_field_of_a_member_is_in_its_digest(field: str) -> None:
    record = ring(3, 3)
    others: dict[type, Any] = {int: 77, str: "another"}
    member = replace(record.members[1], **{field: others[type(getattr(record.members[1], field))]})
    assert replace(record, members=(record.members[0], member, record.members[2])).digest() != record.digest()


@pytest.mark.parametrize("field", [field.name for field in fields(Plan) if field.name != "all_tasks"])
def test_every_field_of_a_plan_is_in_its_digest(field: str) -> None:
    record = ring(3, 3, tasks=True)
    others: dict[str, Any] = {
        "op": 6, "units": 4, "shares": record.plan.shares[1:], "laggards": (), "newcomers": ("n1.0.0",),
        "paces": (1, 2, 3), "slack": 5,
    }  # fmt: skip
    assert replace(record, plan=replace(record.plan, **{field: others[field]})).digest() != record.digest()


def test_a_difference_against_another_base_is_found_out() -> None:
    delta = difference(ring(1, 4), ring(2, 4, without=1), 1)
    with pytest.raises(WrongBase, match="generation 1"):
        applied(ring(1, 4, because="of another job"), delta)
    with pytest.raises(WrongBase, match="generation 2"):
        applied(ring(1, 4), replace(delta, gone=(2,)))
    with pytest.raises(WrongBase, match="generation 2"):
        applied(ring(1, 4), replace(delta, placed=(Placed(9, ring(1, 9).members[8]),)))
    two = ring(2, 4, without=1)
    with pytest.raises(WrongBase, match="generation 2"):
        applied(ring(1, 4), difference(ring(1, 4), replace(two, plan=replace(two.plan, paces=(1, 2, 3, 4))), 1))


def test_an_agent_that_has_the_generation_before_is_told_what_changed() -> None:
    told: dict[int, int] = {}
    for size in (10, 1000):
        publisher, reader, known = Publisher(), Reader(), dict[int, str]()
        first, second = ring(1, size), ring(2, size, without=size // 2, tasks=True)
        whole = publisher.addressed(Publish(7, first), ["n1.0.0"], known)
        assert reader.read(whole) == Publish(7, first)
        assert whole.WhichOneof("content") == ("packed" if size == 1000 else "order")
        change = publisher.addressed(Publish(7, second), ["n1.0.0"], known)
        order = reader.read(change)
        assert isinstance(order, Publish) and order.generation.digest() == second.digest()
        assert order.generation.plan.source_of("n1.0.0") == second.plan.source_of("n1.0.0") == "n0.0.0"
        told[size] = change.ByteSize()
    assert told[1000] <= told[10] + 8, "numbers are longer, and nothing else"


def test_a_new_leader_tells_an_agent_what_it_has_in_no_more_bytes() -> None:
    reader, record = Reader(), ring(3, 1000, tasks=True)
    reader.read(Publisher().addressed(Publish(7, record), ["n1.0.0"], {}))
    successor = Publisher()
    successor.remember([record])
    again = successor.addressed(Publish(9, record), ["n1.0.0"], reader.known)
    assert again.ByteSize() < 500 and isinstance(order := reader.read(again), Publish)
    assert (order.term, order.generation.digest()) == (9, record.digest())
    assert order.generation.plan.share_of("n1.0.0") == record.plan.share_of("n1.0.0")


def test_an_agent_without_the_base_asks_for_the_whole_and_gets_it() -> None:
    publisher, reader, known = Publisher(), Reader(), dict[int, str]()
    publisher.addressed(Publish(7, ring(1, 4)), ["n1.0.0"], known)  # and was lost
    change = publisher.addressed(Publish(7, ring(2, 4, without=2)), ["n1.0.0"], known)
    with pytest.raises(codec.WireError, match="not known here"):
        reader.read(change)
    assert reader.known == {}
    assert reader.read(publisher.addressed(Publish(7, ring(2, 4, without=2)), ["n1.0.0"], reader.known)) == Publish(
        7, ring(2, 4, without=2)
    )


def test_both_sides_forget_the_same() -> None:
    """Whatever the leader tells it against, the agent has: also after many, and after ones that were not for it."""
    publisher, reader, known = Publisher(), Reader(), dict[int, str]()
    for number in range(1, 4 * KEPT):
        publish = Publish(7, ring(number, 5, because=f"change {number}"))
        if number % 3:
            assert reader.read(publisher.addressed(publish, ["n1.0.0"], known)) == publish
        else:
            publisher.addressed(publish, ["n2.0.0"], {})
        assert reader.known == known and len(known) <= KEPT


def test_an_old_generation_can_be_told_beside_many_newer_ones() -> None:
    """The last loss generation goes to whoever announces itself, however many were planned since."""
    publisher, reader, known = Publisher(), Reader(), dict[int, str]()
    records = [ring(number, 5, because=f"change {number}") for number in range(1, 4 * KEPT)]
    publisher.remember(records)
    for record in (records[0], records[-1], records[0], records[1]):
        assert reader.read(publisher.addressed(Publish(7, record), ["n1.0.0"], known)) == Publish(7, record)
        assert reader.known == known


def test_other_orders_travel_as_they_are() -> None:
    order = Quiesce(7, 1, 2)
    addressed = Publisher().addressed(order, ["n1.0.0"], {})
    assert Reader().read(addressed) == order and list(addressed.to) == ["n1.0.0"]


@pytest.mark.parametrize(
    "addressed",
    [
        pb.Addressed(),
        pb.Addressed(packed=b"nothing of the kind"),
        pb.Addressed(packed=codec.packed(b"x" * PACK_BYTES)[:-5]),
        pb.Addressed(packed=codec.packed(b"\0" * (codec.MESSAGE_LIMIT + 1))),
        pb.Addressed(delta=b"\xff"),
        pb.Addressed(delta=b""),
    ],
    ids=["empty", "not packed", "cut", "a bomb", "no delta", "an empty delta"],
)
def test_what_no_leader_tells_is_refused(addressed: pb.Addressed) -> None:
    with pytest.raises(codec.WireError):
        Reader().read(addressed)
