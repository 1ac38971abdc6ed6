"""What members say once, and what they say in each step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.allreduce.reduction import entries
from runtime.allreduce.reduction.entries import MAX_HEADER_BYTES, Said, Term, encoded_json
from runtime.allreduce.reduction.over_mesh import ReductionRequest, exchange
from runtime.allreduce.reduction.partial_sum import Json, Partial, Scalars, fold_meta
from runtime.allreduce.reduction.schedule import add_metas, along_tree
from runtime.allreduce.ring.frames import Frame, FrameKind, PeerLink
from runtime.allreduce.ring.ring import PARTS, Ring
from tests.unit.rings import everyone, rings

AGREED = entries.digest(b"agreed")


def root(note: Json = None, **scalars: tuple[str, float, float]) -> Partial:
    return Partial(2, 4, {}, 5, 3.0, dict(scalars), note)


def through(partial: Partial, last: Said | None, leaves: list[int] | None = None) -> tuple[bytes, Said, Partial]:
    entry = entries.encode(AGREED, {"worker_id": "a"}, [partial], leaves, last)
    agreed, said, numbers = entries.decode(entry, last)
    assert agreed == AGREED and said.fields == {"worker_id": "a"} and said.terms[0].leaves == tuple(leaves or ())
    return entry, said, entries.with_numbers(said.terms[0], numbers)


def test_an_entry_says_once_what_stays_as_it_is() -> None:
    first, said, got = through(root(loss=("mean", 0.5, 8.0)), None, [2, 3])
    assert got == root(loss=("mean", 0.5, 8.0))
    second, same, got = through(root(loss=("mean", -0.0, 7.0)), said, [2, 3])
    assert str(got) == str(root(loss=("mean", -0.0, 7.0))) and same is said
    assert len(second) == 16 + 4 + 3 * 8 < len(first)
    for other in (root(loss=("sum", 0.5, 8.0)), root({"b": [3]}, loss=("mean", 0.5, 8.0)), root()):
        entry, changed, got = through(other, said, [2, 3])
        assert got == other and changed is not said and len(entry) > len(second)


def test_who_says_the_same_as_before_has_to_have_said_something() -> None:
    _, said, _ = through(root(), None)
    entry = entries.encode(AGREED, {"worker_id": "a"}, [root()], None, said)
    with pytest.raises(ValueError, match="said nothing"):
        entries.decode(entry, None)


def test_over_a_ring_the_json_goes_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an operation has two parts, which say other things."""
    ops = [PARTS * number + part for number in range(4) for part in (0, PARTS - 1)]
    sent: list[tuple[int, int]] = []
    queue = PeerLink.send

    def noted(link: PeerLink, frame: Frame, payload: bytes = b"") -> int:
        if frame.kind is FrameKind.HEADER:
            sent.append((frame.op, frame.length))
        return queue(link, frame, payload)

    monkeypatch.setattr(PeerLink, "send", noted)

    def member(ring: Ring) -> None:
        for number, op in enumerate(ops):
            name = "early" if op % PARTS else "loss" if number < 4 else "error"
            scalars: Scalars = {name: ("mean", float(op + ring.rank), 1.0)}
            mine = Partial(ring.rank, ring.rank + 1, weight=1.0, scalars=scalars)
            headers, total = exchange(
                ring,
                ReductionRequest(
                    op=op, header={"who": ring.rank, "part": op % PARTS}, roots=[mine], units=9, groups={}
                ),
            )
            assert [header["who"] for header in headers.values()] == list(range(9))
            assert total.scalars == {next(iter(scalars)): ("mean", 9.0 * op + 36, 9.0)}

    with rings(9) as built:
        everyone([lambda ring=ring: member(ring) for ring in built])  # type: ignore[misc]
    one_member = 4 + 16 + 4 + 3 * 8
    in_full = [max(length for of, length in sent if of == op) > 2 * one_member for op in ops]
    again = [max(length for of, length in sent if of == op) == one_member for op in ops]
    assert in_full == [True, True, False, False, True, False, False, False]
    assert again == [not full for full in in_full]


numbers = st.floats(allow_nan=False, width=32)


@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=9), st.data())
def test_rows_of_numbers_are_added_as_partial_sums_are(
    rows: list[tuple[float, float, float]], data: st.DataObject
) -> None:
    has_grad = data.draw(st.lists(st.integers(0, 7), min_size=len(rows), max_size=len(rows)))
    metas = [
        Partial(n, n + 1, {}, bits, weight, {"loss": ("mean", total, counted)})
        for n, (bits, (weight, total, counted)) in enumerate(zip(has_grad, rows, strict=True))
    ]
    blank = [Partial(n, n + 1, {}, bits, 0.0, {"loss": ("mean", 0.0, 0.0)}) for n, bits in enumerate(has_grad)]
    folds = along_tree(tuple(meta.node for meta in metas), len(metas), (0,) * len(metas))
    for left, right in folds:
        metas.append(Partial(0, 0, {}, *fold_meta(metas[left], metas[right])))
    got = add_metas([Term(meta, (), 3) for meta in blank], rows, folds)
    wanted = metas[-1]
    assert str((got.has_grad, got.weight, got.scalars, got.note)) == str(
        (wanted.has_grad, wanted.weight, wanted.scalars, wanted.note)
    )


def test_scalars_that_members_name_in_another_order_are_added_by_name() -> None:
    """A member whose first shard lacks a scalar that its second one has names it last."""
    scalars = {"loss": ("sum", 0.0, 0.0), "right": ("sum", 0.0, 0.0)}
    one, other = Partial(0, 1, {}, scalars=scalars), Partial(1, 2, {}, scalars=dict(reversed(scalars.items())))
    found = add_metas([Term(one, (), 5), Term(other, (), 5)], [(1, 2, 0, 7, 0), (1, 5, 0, 3, 0)], [(0, 1)]).scalars
    assert found == {"loss": ("sum", 5.0, 0.0), "right": ("sum", 12.0, 0.0)}


def test_a_header_may_have_as_many_bytes_as_there_may_be_and_no_more() -> None:
    largest = "x" * (MAX_HEADER_BYTES - 2)
    assert len(encoded_json(largest)) == MAX_HEADER_BYTES
    with pytest.raises(ValueError, match="header of"):
        encoded_json(largest + "x")
