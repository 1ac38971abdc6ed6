"""The reduction over a ring of threads gives the bits of a local fold, whoever holds which leaves."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import Disagree, RingBroken
from elastic.protocol.reduction_tree import Node, split
from runtime.allreduce.fixed_point.int8_blocks import BLOCK_BYTES, CODES, pack
from runtime.allreduce.reduction import entries, over_mesh
from runtime.allreduce.reduction.dissemination import encode
from runtime.allreduce.reduction.entries import Said
from runtime.allreduce.reduction.headers import Headers
from runtime.allreduce.reduction.over_mesh import ReductionRequest, Sums, exchange
from runtime.allreduce.reduction.partial_sum import Json, Partial, fold, total
from runtime.allreduce.reduction.schedule import ALIGN, DTYPES, Cut, pieces
from runtime.allreduce.reduction.topology import topology
from runtime.allreduce.ring.frames import Frame, FrameKind, Payload, SendQueue
from runtime.allreduce.ring.ring import Ring
from tests.trees import fold_nodes
from tests.unit.rings import GENEROUS_S, build_all, everyone, listeners, rings, wait_until

LENGTHS = {"float32": 1000, "float64": 77}
INTEGERS = ["int16", "int32", "int64"]
FLOATS = ["int8", "bfloat16", "float16", "float32", "float64"]


def in_blocks(groups: dict[str, int]) -> dict[str, int]:
    """Of int8, whole blocks."""
    return {
        group: length // BLOCK_BYTES * BLOCK_BYTES if group == "int8" else length for group, length in groups.items()
    }


def leaf(unit: int, groups: dict[str, int], seed: int = 0) -> Partial:
    """Values of very different size, so that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(1000 * seed + unit)
    flats = {}
    for group, length in groups.items():
        dtype = getattr(torch, group)
        if group == "int8":
            floats = torch.randn(length // BLOCK_BYTES * CODES, generator=generator)
            flats[group] = torch.empty(length, dtype=dtype)
            pack(floats, flats[group])
            continue
        if group.startswith("int"):  # sums of int32 and int64 go round here, which is the same in any order
            most = torch.iinfo(dtype).max
            flats[group] = torch.randint(-most, most, (length,), generator=generator, dtype=dtype)
            continue
        most = 8 if dtype is torch.float16 else 20
        exponent = torch.randint(-most, most, (length,), generator=generator).to(dtype)
        flats[group] = torch.randn(length, generator=generator, dtype=dtype) * torch.pow(2.0, exponent)
    scalars = {"loss": ("mean", math.pi * 10.0 ** (unit % 9 - 4), 1.0)}
    if unit % 2:
        scalars["odd"] = ("sum", 1e16 / (unit + 1), 1.0)
    return Partial(unit, unit + 1, flats, 1 << unit, 0.1 * (unit + 1), scalars, {"first": unit} if unit else None)


def sum_of(node: Node, groups: dict[str, int], seed: int = 0) -> Partial:
    """The node's sum, computed in one place."""
    if node[1] - node[0] == 1:
        return leaf(node[0], groups, seed)
    left, right = (sum_of(child, groups, seed) for child in split(node))
    return fold(left, right)


def assert_same(got: Partial, wanted: Partial) -> None:
    assert got.flats.keys() == wanted.flats.keys()
    for group, flat in wanted.flats.items():
        assert got.flats[group].dtype == flat.dtype
        assert got.flats[group].view(torch.uint8).equal(flat.view(torch.uint8))
    assert (got.node, got.meta()) == (wanted.node, wanted.meta())


def run(
    built: Sequence[Ring],
    owners: Sequence[int],
    groups: dict[str, int],
    *,
    op: int = 0,
    seed: int = 0,
    check: Callable[[Headers], None] = lambda headers: None,
    folded: bool = True,
    merged: bool = False,
) -> list[tuple[Headers, Partial]]:
    """One exchange; owners[unit] is the rank that computed it. Also asserts that no root was changed."""

    def member(ring: Ring) -> tuple[Headers, Partial]:
        leaves = [(unit, unit + 1) for unit, owner in enumerate(owners) if owner == ring.rank]
        roots = [sum_of(node, groups, seed) for node in (fold_nodes(leaves, len(owners)) if folded else leaves)]
        before = [{group: flat.clone() for group, flat in root.flats.items()} for root in roots]
        out = {group: torch.empty(length, dtype=DTYPES[group]) for group, length in groups.items()}
        headers, result = exchange(
            ring,
            ReductionRequest(
                op=op,
                header={"rank": ring.rank},
                roots=roots,
                units=len(owners),
                groups=groups,
                check=check,
                merged=[total(roots).flats for _ in roots[:1]] if merged else None,
            ),
            sums=Sums(out),
        )
        assert all(
            result.flats[group] is out[group] or result.flats[group].data_ptr() == out[group].data_ptr()
            for group in groups
        )
        for root, flats in zip(roots, before, strict=True):
            assert all(root.flats[group].equal(flat) for group, flat in flats.items())
        return headers, result

    return everyone([lambda ring=ring: member(ring) for ring in built])  # type: ignore[misc]


def words(
    fields: dict[str, Json], units: int, groups: dict[str, int], roots: Sequence[Partial] = (), last: Said | None = None
) -> bytes:
    """The message of one member of two, as it is sent."""
    agreed = json.dumps({"units": units, "groups": groups}, separators=(",", ":")).encode()
    return encode([entries.encode(entries.digest(agreed), fields, roots, None, last)])


def cut_of(lengths: dict[str, int]) -> tuple[Cut, ...]:
    return (tuple((group, 0, length) for group, length in sorted(lengths.items())),)


def worlds(least: int = 1) -> st.SearchStrategy[list[str]]:
    """The hosts of one to six members, in any order."""
    return st.lists(st.integers(1, 3).map("127.0.0.{}".format), min_size=least, max_size=6)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces of little data, so that windows, stalls and several pieces in flight are reached."""
    monkeypatch.setattr(over_mesh, "PIECE_BYTES", 512)


@pytest.mark.parametrize("owners", [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1] * 4, [1] * 8, [0] * 7 + [1]])
def test_two_members_get_the_bits_of_one(owners: list[int]) -> None:
    with rings(2) as built:
        for _, result in run(built, owners, LENGTHS):
            assert_same(result, sum_of((0, 8), LENGTHS))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_ownership_gives_the_bits_of_a_local_fold(data: st.DataObject) -> None:
    """Random V, nodes and members of each, ownership (members without a leaf included), lengths down to nothing,
    several operations a ring."""
    hosts = data.draw(worlds(), "hosts")
    world_size = len(hosts)
    with rings(world_size, hosts) as built:
        for op in range(data.draw(st.integers(1, 3), "operations")):
            units = data.draw(st.integers(1, 12), "units")
            owners = data.draw(st.lists(st.integers(0, world_size - 1), min_size=units, max_size=units), "owners")
            merged = data.draw(st.booleans(), "merged")
            names = st.sampled_from(INTEGERS if merged else FLOATS)
            groups = data.draw(st.dictionaries(names, st.integers(0, 1500)).map(in_blocks), "groups")
            folded = data.draw(st.booleans(), "folded")
            wanted = sum_of((0, units), groups, op)
            for _, result in run(built, owners, groups, op=op, seed=op, folded=folded, merged=merged):
                assert_same(result, wanted)


@pytest.mark.parametrize("hosts", [[1, 1, 1], [1, 2, 3], [1, 1, 2, 2]], ids=["host", "hosts", "nodes"])
@pytest.mark.parametrize("merged", [False, True])
def test_nothing_is_sent_or_added_before_it_is_there(hosts: list[int], merged: bool) -> None:
    """Parts of the tensors come while the operation runs, each on another member first; until then they are NaN."""
    length, parts, world_size = 8 * ALIGN, 8, len(hosts)
    group = "float32"
    cuts = tuple(((group, lo, lo + ALIGN),) for lo in range(0, length, ALIGN))
    whole = [leaf(rank, {group: length}).flats[group] for rank in range(world_size)]
    wanted = sum_of((0, world_size), {group: length}).flats[group]
    turn = threading.Condition()
    come = [0] * world_size

    def await_first(number: int) -> None:
        with turn:
            assert turn.wait_for(lambda: come[number % world_size] > number, GENEROUS_S)

    def member(ring: Ring) -> None:
        flat, out = torch.full((length,), math.nan), torch.full((length,), math.nan)

        def bring() -> None:
            for number in range(parts):
                if ring.rank != number % world_size:
                    await_first(number)
                lo = number * ALIGN
                flat[lo : lo + ALIGN] = whole[ring.rank][lo : lo + ALIGN]
                with turn:
                    come[ring.rank] = number + 1
                    turn.notify_all()
                ring.wake()

        thread = threading.Thread(target=bring)
        thread.start()
        exchange(
            ring,
            ReductionRequest(
                op=0,
                roots=[Partial(ring.rank, ring.rank + 1, {} if merged else {group: flat})],
                merged=[{group: flat}] if merged else None,
                units=world_size,
                groups={group: length},
                cuts=cuts,
            ),
            sums=Sums({group: out}),
            ready=lambda: come[ring.rank],
        )
        thread.join()
        assert out.isfinite().all()
        assert merged or out.equal(wanted)

    with rings(world_size, [f"127.0.0.{host}" for host in hosts]) as built:
        everyone([partial(member, ring) for ring in built])


def test_members_of_different_hosts_get_the_same_bits() -> None:
    with rings(3, ["127.0.0.1", "127.0.0.2", "127.0.0.3"]) as built:
        for _, result in run(built, [0, 1, 2, 0, 1, 2, 0, 1], LENGTHS):
            assert_same(result, sum_of((0, 8), LENGTHS))


def test_full_size_pieces_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_mesh, "PIECE_BYTES", 512 * 1024)
    groups = {"float32": 400_003}
    with rings(2) as built:
        for _, result in run(built, [0, 0, 1, 1], groups):
            assert_same(result, sum_of((0, 4), groups))


def test_everybody_holds_everybodys_header_before_the_check() -> None:
    def check(headers: Headers) -> None:
        assert {worker: header["rank"] for worker, header in headers.items()} == {"w0": 0, "w1": 1, "w2": 2}

    with rings(3) as built:
        assert all(list(headers) == ["w0", "w1", "w2"] for headers, _ in run(built, [0, 1], {}, check=check))


def test_an_operation_without_groups_reduces_scalars_and_notes() -> None:
    with rings(2) as built:
        for _, result in run(built, [0, 1, 1, 0, 1], {}):
            assert_same(result, sum_of((0, 5), {}))


def test_values_that_are_no_numbers_travel() -> None:
    def member(ring: Ring) -> Partial:
        scalars = {"loss": ("mean", math.nan if ring.rank else math.inf, 1.0)}
        root = Partial(ring.rank, ring.rank + 1, scalars=scalars)
        _, result = exchange(ring, ReductionRequest(op=0, roots=[root], units=2, groups={}))
        return result

    with rings(2) as built:
        for result in everyone([lambda ring=ring: member(ring) for ring in built]):  # type: ignore[misc]
            assert math.isnan(result.scalars["loss"][1])


def test_new_tensors_are_made_when_none_are_given() -> None:
    with rings(1) as (ring,):
        root = leaf(0, LENGTHS)
        _, result = exchange(ring, ReductionRequest(op=0, roots=[root], units=1, groups=LENGTHS))
        assert_same(result, root)
        assert all(result.flats[group].data_ptr() != root.flats[group].data_ptr() for group in LENGTHS)


def test_what_the_check_raises_reaches_every_member() -> None:
    def check(headers: Headers) -> None:
        raise Disagree("they differ")

    with rings(3) as built:
        barrier = threading.Barrier(3)

        def member(ring: Ring) -> None:
            with pytest.raises(Disagree, match="they differ"):
                run([ring], [0, 1, 2, 0], LENGTHS, check=check)
            ring.abort()  # the others still find this member's header
            barrier.wait(GENEROUS_S)
            with pytest.raises(RingBroken):
                run([ring], [0, 1, 2, 0], LENGTHS, op=1)

        everyone([lambda ring=ring: member(ring) for ring in built])  # type: ignore[misc]


@pytest.mark.parametrize("roots", [[(0, 2)], [(0, 2), (0, 2)], [(0, 2), (2, 3)], [(0, 1), (1, 4)], [(0, 2), (2, 5)]])
def test_roots_that_do_not_make_up_the_tree_are_never_summed(roots: list[Node]) -> None:
    def member(ring: Ring) -> None:
        mine = [Partial(lo, hi, {"float32": torch.zeros(10)}) for lo, hi in roots[ring.rank :: 2]]
        with pytest.raises(RingBroken, match="do not make up"):
            exchange(ring, ReductionRequest(op=0, roots=mine, units=4, groups={"float32": 10}))

    with rings(2) as built:
        everyone([lambda ring=ring: member(ring) for ring in built])  # type: ignore[misc]


def test_members_with_different_groups_or_units_disagree() -> None:
    def member(ring: Ring, groups: dict[str, int], units: int) -> None:
        root = Partial(ring.rank, ring.rank + 1, {name: torch.zeros(length) for name, length in groups.items()})
        with pytest.raises(Disagree, match=r"w0.*w1"):
            exchange(ring, ReductionRequest(op=0, roots=[root], units=units, groups=groups))

    with rings(2) as built:
        everyone([lambda: member(built[0], {"float32": 9000}, 2), lambda: member(built[1], {"float32": 9001}, 2)])
    with rings(2) as built:
        everyone([lambda: member(built[0], {}, 2), lambda: member(built[1], {}, 3)])


def test_the_order_in_which_members_name_their_groups_does_not_matter() -> None:
    def member(ring: Ring, names: tuple[str, ...]) -> None:
        flats = {name: torch.full((9000,), ring.rank + 1.0, dtype=DTYPES[name]) for name in names}
        root = Partial(ring.rank, ring.rank + 1, flats)
        request = ReductionRequest(op=0, roots=[root], units=2, groups=dict.fromkeys(names, 9000))
        _, total = exchange(ring, request)
        assert all(flat.eq(3.0).all() for flat in total.flats.values()) and len(total.flats) == 2

    with rings(2) as built:
        orders = (("float32", "bfloat16"), ("bfloat16", "float32"))
        everyone([partial(member, ring, names) for ring, names in zip(built, orders, strict=True)])


@pytest.mark.parametrize(
    ("flat", "groups"),
    [
        (torch.zeros(9), {"float32": 10}),
        (torch.zeros(10, dtype=torch.float64), {"float32": 10}),
        (torch.zeros(20)[::2], {"float32": 10}),
        (torch.zeros(10), {"int8": 10}),
    ],
    ids=["length", "dtype", "strided", "unknown group"],
)
def test_a_root_that_does_not_fit_is_refused_before_anything_is_sent(
    flat: torch.Tensor, groups: dict[str, int]
) -> None:
    with rings(1) as (ring,), pytest.raises(ValueError, match="float32"):
        root = Partial(0, 1, {"float32": flat})
        exchange(ring, ReductionRequest(op=0, roots=[root], units=1, groups=groups))


def test_a_header_cannot_replace_the_fields_of_the_exchange() -> None:
    with rings(1) as (ring,), pytest.raises(ValueError, match="terms"):
        exchange(ring, ReductionRequest(op=0, header={"terms": 9}, roots=[], units=1, groups={}))


def test_a_peer_lost_in_the_middle_of_the_data_is_named() -> None:
    """w1 sends its header and part of a piece, and dies."""
    with rings(2) as built:
        future = ThreadPoolExecutor(1).submit(run, built[:1], [0, 1], {"float32": 100_000})
        link = built[1].links["w0"]
        header = words({"worker_id": "w1"}, 2, {"float32": 100_000}, [leaf(1, {})])
        link.send(Frame(FrameKind.HEADER, 1, 0, len(header)), header)
        link.send(Frame(FrameKind.SCATTER, 1, 0, 512), bytes(512))
        link.flush()
        wait_until(lambda: not link.unsent)
        built[1].close()
        with pytest.raises(RingBroken) as broken:
            future.result(GENEROUS_S)
        assert broken.value.peer == "w1"


@pytest.mark.parametrize(
    ("frame", "payload"),
    [
        (Frame(FrameKind.SCATTER, 1, 0, 4), b"data"),
        (Frame(FrameKind.GATHER, 1, 0, 4), b"data"),
        (Frame(FrameKind.HEADER, 1, 0, 2), b"{}"),
        (Frame(FrameKind.HEADER, 1, 0, 3), b"[1]"),
        (Frame(FrameKind.HEADER, 1, 0, 1 << 40), b""),
        (Frame(FrameKind.HEADER, 2, 0, 2), b"{}"),
        (Frame(FrameKind.HEADER, 1, 5, 2), b"{}"),
    ],
    ids=["data first", "sum first", "empty header", "a list", "huge", "other generation", "later operation"],
)
def test_a_frame_out_of_place_breaks_the_ring(frame: Frame, payload: bytes) -> None:
    with rings(2) as built:
        link = built[1].links["w0"]
        link.send(frame._replace(length=len(payload)) if frame.length < 100 else frame, payload or b"x")
        link.flush()
        with pytest.raises(RingBroken) as broken:
            run(built[:1], [0, 1], LENGTHS)
        assert broken.value.peer == "w1"


class Breaking(dict[int, int]):
    """What a member holds; its ring is aborted when it gets so many pieces more."""

    def __init__(self, ring: Ring, after: int) -> None:
        self.ring, self.left = ring, after

    def __setitem__(self, part: int, count: int) -> None:
        super().__setitem__(part, count)
        self.left -= 1
        if self.left == 0:
            self.ring.abort()


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_the_same_members_go_on_with_what_was_summed_before_the_ring_broke(data: st.DataObject) -> None:
    """In several attempts, in each of which others may hold the leaves; nothing moves that is there already."""
    hosts = data.draw(worlds(2), "hosts")
    world_size = len(hosts)
    slices = topology(tuple(hosts)).slices
    sums: list[Sums] = []
    moved: list[tuple[str, FrameKind, int]] = []

    merged = data.draw(st.booleans(), "merged")
    lengths = {"int32": 1000, "int64": 77, "int16": 5} if merged else LENGTHS
    table, _ = pieces(cut_of(lengths), len(slices), over_mesh.PIECE_BYTES)

    def attempt(ring: Ring, owners: Sequence[int], again: bool) -> Partial | None:
        leaves = [(unit, unit + 1) for unit, owner in enumerate(owners) if owner == ring.rank]
        roots = [sum_of(node, lengths) for node in fold_nodes(leaves, len(owners))]
        try:
            _, result = exchange(
                ring,
                ReductionRequest(
                    op=0,
                    roots=roots,
                    units=len(owners),
                    groups=lengths,
                    merged=[total(roots).flats for _ in roots[:1]] if merged else None,
                ),
                sums=sums[ring.rank],
                again=again,
            )
        except RingBroken:
            ring.close()  # or the others would wait for this one
            return None
        return result

    def noted(queue: SendQueue, make: Callable[[SendQueue], tuple[Frame, Payload] | None] = SendQueue._next) -> Any:
        item = make(queue)
        if item is not None:
            moved.append((peers[queue], item[0].kind, item[0].piece))
        return item

    with listeners([f"w{rank}" for rank in range(world_size)], hosts) as opened, pytest.MonkeyPatch.context() as patch:
        patch.setattr(SendQueue, "_next", noted)
        for number in range(1, 4):
            first, last = number == 1, number == 3
            # All of it before there are rings: where too much was drawn, the example ends in the middle of a draw.
            breaks = [0 if last else data.draw(st.integers(0, 12), "pieces until it breaks") for _ in opened]
            owners = data.draw(st.lists(st.integers(0, world_size - 1), min_size=8, max_size=8), "owners")
            built = build_all(opened, generation=number)
            peers = {link._queue: link.peer for ring in built for link in ring.links.values()}
            for ring, after in zip(built, breaks, strict=True):
                held = Breaking(ring, after)
                held |= {} if first else sums[ring.rank].held
                out = {group: torch.empty(size, dtype=DTYPES[group]) for group, size in lengths.items()}
                if first:
                    sums.append(Sums(out, held))
                else:
                    sums[ring.rank].held = held
            before = [dict(one.held) for one in sums]
            moved.clear()
            results = everyone([partial(attempt, ring, owners, not first) for ring in built])
            for to, kind, piece in moved:
                if kind in (FrameKind.GATHER, FrameKind.SCATTER):
                    moving = table[piece]
                    lacking = int(to[1:]) if kind is FrameKind.GATHER else slices[moving.slice].owner
                    assert moving.number >= before[lacking].get(moving.slice, 0)
            for ring in built:
                ring.close()
    for result in results:
        assert result is not None
        assert_same(result, sum_of((0, 8), lengths))


@pytest.mark.parametrize(
    "world, owners",
    [
        (3, [0, 1, 2, 0, 1, 2, 0, 1]),
        (3, [0, 0, 0, 1, 1, 1, 2, 2]),
        (3, [2] * 8),
        (5, [unit % 5 for unit in range(8)]),
        (7, [unit % 7 for unit in range(8)]),
    ],
)
def test_of_integers_each_member_sends_one_sum_however_its_leaves_lie(world: int, owners: list[int]) -> None:
    """Twice (P - 1) / P of the tensors, as a ring does, at most, besides frames; a member without a leaf sends none."""
    groups = {"int32": 70_000}
    nbytes, sent = 4 * groups["int32"], dict.fromkeys(range(world), 0)

    def noted(queue: SendQueue, make: Callable[[SendQueue], tuple[Frame, Payload] | None] = SendQueue._next) -> Any:
        item = make(queue)
        if item is not None and item[0].kind in (FrameKind.GATHER, FrameKind.SCATTER):
            sent[ranks[queue]] += item[0].length
        return item

    with rings(world) as built, pytest.MonkeyPatch.context() as patch:
        ranks = {link._queue: ring.rank for ring in built for link in ring.links.values()}
        patch.setattr(SendQueue, "_next", noted)
        for _, result in run(built, owners, groups, merged=True):
            assert_same(result, sum_of((0, len(owners)), groups))
    for rank, count in sent.items():
        sums = 2 if rank in owners else 1  # that of its leaves, and its slice of all
        assert count == pytest.approx(sums * (world - 1) / world * nbytes, rel=0.02)


def test_who_has_lost_what_it_held_gets_all_of_it_from_those_who_have_it() -> None:
    groups, owners = {"float32": 1000}, [0, 0, 1, 1]
    whole = sum_of((0, 4), groups)
    with rings(2) as built:
        _, counts = pieces(cut_of(groups), 2, over_mesh.PIECE_BYTES)
        kept = Sums({"float32": whole.flats["float32"].clone()}, dict(enumerate(counts)))
        sums = [kept, Sums({"float32": torch.empty(1000)})]

        def member(ring: Ring) -> Partial:
            leaves = [(unit, unit + 1) for unit, owner in enumerate(owners) if owner == ring.rank]
            roots = [sum_of(node, groups) for node in fold_nodes(leaves, 4)]
            return exchange(
                ring, ReductionRequest(op=0, roots=roots, units=4, groups=groups), sums=sums[ring.rank], again=True
            )[1]

        for result in everyone([partial(member, ring) for ring in built]):
            assert_same(result, whole)


@pytest.mark.parametrize("held", [None, "x", [1], [0, -1], [0, 9999], [0, "x"]])
def test_a_member_that_holds_what_cannot_be_breaks_the_ring(held: Json) -> None:
    with rings(2) as built:
        alone, other = built

        def honest() -> None:
            sums = Sums({"float32": torch.empty(10)})
            with pytest.raises(RingBroken, match=r"holds|malformed"):
                exchange(
                    alone, ReductionRequest(op=0, roots=[], units=2, groups={"float32": 10}), sums=sums, again=True
                )

        body = words({"worker_id": "w1", "held": held}, 2, {"float32": 10})
        link = other.links["w0"]
        link.send(Frame(FrameKind.HEADER, 1, 0, len(body)), body)
        link.flush()
        honest()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_native_variant_adds_in_rank_order(world_size: int) -> None:
    units = 6
    owned = [list(range(units))[rank::world_size] for rank in range(world_size)]

    def local(rank: int) -> Partial:
        total = leaf(owned[rank][0], LENGTHS)
        for unit in owned[rank][1:]:
            for group, flat in leaf(unit, LENGTHS).flats.items():
                total.flats[group] += flat
        return total

    def member(ring: Ring) -> Partial:
        _, result = exchange(
            ring, ReductionRequest(op=0, roots=[local(ring.rank)], leaves=owned[ring.rank], units=units, groups=LENGTHS)
        )
        return result

    wanted = local(0).flats
    for rank in range(1, world_size):
        wanted = {group: flat + local(rank).flats[group] for group, flat in wanted.items()}
    with rings(world_size) as built:
        for result in everyone([lambda ring=ring: member(ring) for ring in built]):  # type: ignore[misc]
            assert result.node == (0, units)
            assert all(result.flats[group].equal(flat) for group, flat in wanted.items())


def test_the_native_variant_lets_a_member_bring_nothing_but_every_leaf_must_come() -> None:
    def member(ring: Ring, leaves: list[int]) -> Partial:
        _, result = exchange(
            ring,
            ReductionRequest(
                op=0,
                roots=[Partial(0, 0, {"float32": torch.ones(10)})] if leaves else [],
                leaves=leaves,
                units=2,
                groups={"float32": 10},
            ),
        )
        return result

    with rings(2) as built:
        results = everyone([lambda: member(built[0], []), lambda: member(built[1], [0, 1])])
        assert all(result.flats["float32"].equal(torch.ones(10)) for result in results)
    with rings(2) as built, pytest.raises(RingBroken, match="leaves"):
        everyone([lambda: member(built[0], [0]), lambda: member(built[1], [0])])


@given(st.integers(1, 5), st.integers(1, 300), st.sampled_from([64, 256, 4096]))
def test_all_slices_are_the_whole_and_begin_where_processors_read_fast(
    slices: int, length: int, piece_bytes: int
) -> None:
    found, counts = pieces(cut_of({"float32": length}), slices, piece_bytes)
    assert all(piece.size <= piece_bytes for piece in found)
    assert all(piece.lo % ALIGN == 0 for piece in found if piece.number == 0)
    assert sorted(element for piece in found for element in range(piece.lo, piece.hi)) == list(range(length))
    blocks, _ = pieces(cut_of({"int8": length * BLOCK_BYTES}), slices, piece_bytes)
    assert all(piece.lo % BLOCK_BYTES == piece.hi % BLOCK_BYTES == 0 for piece in blocks)
    for index, count in enumerate(counts):
        ends = [(piece.lo, piece.hi) for piece in found if piece.slice == index]
        assert len(ends) == count and all(before[1] == after[0] for before, after in pairwise(ends))
