"""Tensors over a transport beside the mesh: the bits of a local fold, and an end to every wait."""

from __future__ import annotations

import gc
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore, PrefixStore

from elastic.errors import Disagree, RingBroken
from runtime.allreduce.reduction import over_transport
from runtime.allreduce.reduction.over_mesh import ReductionRequest
from runtime.allreduce.reduction.over_transport import exchange_over
from runtime.allreduce.reduction.partial_sum import Partial, total
from runtime.allreduce.reduction.schedule import ALIGN, DTYPES
from runtime.allreduce.ring.listener import Listener
from runtime.allreduce.ring.process_group import ProcessGroupTransport
from runtime.allreduce.ring.ring import Ring
from tests.trees import fold_nodes
from tests.unit.gloo import GlooGroup
from tests.unit.rings import GENEROUS_S, build_all, everyone, listeners, rings, wait_until
from tests.unit.runtime.allreduce.reduction.test_over_mesh import (
    FLOATS,
    INTEGERS,
    LENGTHS,
    assert_same,
    in_blocks,
    leaf,
    sum_of,
    worlds,
)

CPU = torch.device("cpu")
GENERATIONS = iter(range(1000, 100_000))
"""Of one process: see GlooGroup."""


def connect(built: Sequence[Ring], generation: int = 0) -> None:
    """Give each of these views of one ring its transport."""
    store, number = HashStore(), generation or next(GENERATIONS)

    def member(ring: Ring) -> None:
        group = GlooGroup(PrefixStore(str(number), store), ring.rank, ring.world_size, number, CPU)
        ring.transport = ProcessGroupTransport(group, number, ring.rank, ring.world_size, CPU)

    everyone([lambda ring=ring: member(ring) for ring in built])  # type: ignore[misc]


@contextmanager
def connected(world_size: int, hosts: Sequence[str] | None = None) -> Iterator[list[Ring]]:
    with rings(world_size, hosts) as built:
        connect(built)
        yield built


def run(
    built: Sequence[Ring],
    owners: Sequence[int],
    groups: dict[str, int],
    *,
    op: int = 0,
    folded: bool = True,
    native: bool = False,
    merged: bool = False,
) -> list[Partial]:
    """One reduction; owners[unit] is the rank that computed it. Also asserts that no root was changed."""

    def member(ring: Ring) -> Partial:
        assert ring.transport is not None
        leaves = [(unit, unit + 1) for unit, owner in enumerate(owners) if owner == ring.rank]
        roots = [sum_of(node, groups, op) for node in (fold_nodes(leaves, len(owners)) if folded else leaves)]
        before = [{group: flat.clone() for group, flat in root.flats.items()} for root in roots]
        out = {group: torch.empty(length, dtype=DTYPES[group]) for group, length in groups.items()}
        _, result = exchange_over(
            ring,
            ReductionRequest(
                op=op,
                roots=[total(roots)] if native and roots else roots,
                leaves=[unit for unit, _ in leaves] if native else None,
                units=len(owners),
                groups=groups,
                merged=[total(roots).flats for _ in roots[:1]] if merged else None,
            ),
            transport=ring.transport,
            out=out,
        )
        assert all(result.flats[group] is out[group] for group in groups)
        for root, flats in zip(roots, before, strict=True):
            assert all(root.flats[group].equal(flat) for group, flat in flats.items())
        return result

    return everyone([lambda ring=ring: member(ring) for ring in built])  # type: ignore[misc]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rounds of little data."""
    monkeypatch.setattr(over_transport, "PIECE_BYTES", 1000)


@pytest.mark.parametrize("owners", [[0, 0, 0, 0, 1, 1, 1, 1], [0, 1] * 4, [1] * 8, [0] * 7 + [1]])
def test_two_members_get_the_bits_of_one(owners: list[int]) -> None:
    with connected(2) as built:
        for result in run(built, owners, LENGTHS):
            assert_same(result, sum_of((0, 8), LENGTHS))


@pytest.mark.parametrize("hosts", [[1, 1, 1], [1, 1, 2, 2]], ids=["host", "nodes"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_part_is_waited_for_before_anything_of_it_is_sent(hosts: list[int], merged: bool) -> None:
    """Until then it is NaN."""
    group, length, world_size = "float32", 8 * ALIGN, len(hosts)
    cuts = tuple(((group, lo, lo + ALIGN),) for lo in range(0, length, ALIGN))

    def member(ring: Ring) -> None:
        assert ring.transport is not None
        flat, whole = torch.full((length,), math.nan), leaf(ring.rank, {group: length}).flats[group]
        awaited: list[int] = []

        def wait_for(number: int) -> None:
            awaited.append(number)
            ((_, lo, hi),) = cuts[number]
            flat[lo:hi] = whole[lo:hi]

        _, result = exchange_over(
            ring,
            ReductionRequest(
                op=0,
                roots=[Partial(ring.rank, ring.rank + 1, {} if merged else {group: flat})],
                merged=[{group: flat}] if merged else None,
                units=world_size,
                groups={group: length},
                cuts=cuts,
            ),
            transport=ring.transport,
            wait_for=wait_for,
            out={group: torch.full((length,), math.nan)},
        )
        assert awaited == sorted(awaited) and set(awaited) == set(range(len(cuts)))
        assert result.flats[group].isfinite().all()
        assert merged or result.flats[group].equal(sum_of((0, world_size), {group: length}).flats[group])

    with connected(world_size, [f"127.0.0.{host}" for host in hosts]) as built:
        everyone([lambda ring=ring: member(ring) for ring in built])  # type: ignore[misc]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_ownership_gives_the_bits_of_a_local_fold(data: st.DataObject) -> None:
    """Random V, nodes and members of each, ownership (members without a leaf included), lengths down to nothing,
    several operations a ring."""
    hosts = data.draw(worlds(), "hosts")
    world_size = len(hosts)
    with connected(world_size, hosts) as built:
        for op in range(data.draw(st.integers(1, 3), "operations")):
            units = data.draw(st.integers(1, 12), "units")
            adds = data.draw(st.booleans(), "the transport adds integers itself")
            owners = data.draw(st.lists(st.integers(0, world_size - 1), min_size=units, max_size=units), "owners")
            merged = data.draw(st.booleans(), "merged")
            names = st.sampled_from(INTEGERS if merged else FLOATS)
            groups = data.draw(st.dictionaries(names, st.integers(0, 1500)).map(in_blocks), "groups")
            folded = data.draw(st.booleans(), "folded")
            for ring in built:
                assert ring.transport is not None
                ring.transport.adds = adds
            wanted = sum_of((0, units), groups, op)
            for result in run(built, owners, groups, op=op, folded=folded, merged=merged):
                assert_same(result, wanted)


def test_the_native_sum_is_the_same_on_all_members_and_nearly_the_canonical_one() -> None:
    with connected(3) as built:
        first, *others = run(built, [0, 1, 2, 1, 0], LENGTHS, native=True)
        wanted = sum_of((0, 5), LENGTHS)
        for group, flat in first.flats.items():
            torch.testing.assert_close(flat, wanted.flats[group], rtol=1e-4, atol=1.0)
            assert all(other.flats[group].equal(flat) for other in others)
        assert first.weight == pytest.approx(wanted.weight)


def test_scratch_shrinks_the_pieces_alike_on_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_transport, "SCRATCH_BYTES", 900)
    with connected(3) as built:
        for result in run(built, [0, 1, 2, 0, 0, 0, 2], LENGTHS, folded=False):
            assert_same(result, sum_of((0, 7), LENGTHS))


def test_members_with_different_groups_disagree() -> None:
    def member(ring: Ring, elements: int) -> None:
        with pytest.raises(Disagree, match=r"w0.*9000.*w1.*9001"):
            run_alone(ring, elements)

    with connected(2) as built:
        everyone([lambda: member(built[0], 9000), lambda: member(built[1], 9001)])


def run_alone(ring: Ring, elements: int = 4000, *, op: int = 0) -> Partial:
    """This member's side of a reduction with a unit from each member. Also asserts that its root was not changed."""
    assert ring.transport is not None
    groups = {"float32": elements}
    root = leaf(ring.rank, groups)
    try:
        return exchange_over(
            ring,
            ReductionRequest(op=op, roots=[root], units=ring.world_size, groups=groups),
            transport=ring.transport,
            out={"float32": torch.empty(elements)},
        )[1]
    finally:
        assert_same(root, leaf(ring.rank, groups))  # it is needed again if this was broken off


def test_roots_of_another_shape_are_the_callers_mistake() -> None:
    with connected(1) as (ring,):
        assert ring.transport is not None
        with pytest.raises(ValueError, match="wanted"):
            exchange_over(
                ring,
                ReductionRequest(
                    op=0, roots=[Partial(0, 1, {"float32": torch.zeros(9)})], units=1, groups={"float32": 10}
                ),
                transport=ring.transport,
                out={"float32": torch.zeros(10)},
            )


@pytest.mark.parametrize("first", [0, 1])
def test_an_abort_in_the_middle_frees_whoever_waits_in_the_transport(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Member 1 does not come to its second exchange, as if it were frozen; member 0 waits for it."""
    reached, thaw = threading.Event(), threading.Event()
    sound = ProcessGroupTransport.exchange

    with connected(2) as built:
        frozen = built[1].transport

        def exchange(self: ProcessGroupTransport, *tensors: dict[int, torch.Tensor]) -> None:
            sound(self, *tensors)
            if self is frozen:
                reached.set()
                assert thaw.wait(GENEROUS_S)

        monkeypatch.setattr(ProcessGroupTransport, "exchange", exchange)
        freed = [threading.Event(), threading.Event()]

        def member(ring: Ring) -> None:
            with pytest.raises(RingBroken):
                run_alone(ring)
            freed[ring.rank].set()
            with pytest.raises(RingBroken):
                run_alone(ring, op=1)

        def control() -> None:
            assert reached.wait(GENEROUS_S)
            for rank in (first, 1 - first):
                built[rank].abort()
                if rank == 1:
                    thaw.set()
                assert freed[rank].wait(GENEROUS_S)

        everyone([lambda: member(built[0]), lambda: member(built[1]), control])


def test_an_exception_inside_ends_the_attempt_and_the_transport() -> None:
    with connected(1) as (ring,):
        assert ring.transport is not None
        with pytest.raises(KeyError), ring.transport.attempt():
            raise KeyError("the script's")
        with pytest.raises(RingBroken, match="aborted"), ring.transport.attempt():
            pass


def test_rings_are_built_and_broken_in_place_without_a_leak() -> None:
    """Each one is aborted while a member waits in it."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def break_one(opened: dict[str, Listener], number: int) -> None:
        built = build_all(opened, number)
        connect(built, number)
        begun = threading.Barrier(3)

        def waiter(ring: Ring) -> None:
            assert ring.transport is not None
            with pytest.raises(RingBroken), ring.transport.attempt():
                begun.wait(GENEROUS_S)
                others = [rank for rank in range(3) if rank != ring.rank]
                ring.transport.exchange({}, {rank: torch.empty(100) for rank in others})

        def control() -> None:
            begun.wait(GENEROUS_S)
            built[2].abort()

        everyone([lambda: waiter(built[0]), lambda: waiter(built[1]), control])
        for ring in built:
            ring.close()

    with listeners(["w0", "w1", "w2"]) as opened:
        for _ in range(3):
            break_one(opened, next(GENERATIONS))
        gc.collect()
        fds, threads = descriptors(), threading.active_count()
        for _ in range(20):
            break_one(opened, next(GENERATIONS))
        gc.collect()
        wait_until(lambda: descriptors() <= fds)
        wait_until(lambda: threading.active_count() <= threads)
