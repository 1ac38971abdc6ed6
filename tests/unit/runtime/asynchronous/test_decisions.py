"""Who holds a piece, who takes a unit, who averages with whom, when a phase ends, what notes say: pure decisions."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from random import Random

import pytest

from elastic.protocol.local_phase import LOST, PIECES_FELL_BACK, STALENESS, STALENESS_MOST, UPDATES
from elastic.protocol.worker_id import node_of
from runtime.asynchronous import phase_notes
from runtime.asynchronous.gossip_schedule import matching, partner
from runtime.asynchronous.loop import is_over
from runtime.asynchronous.ownership import PIECES_MAX, cut, holders, order
from runtime.asynchronous.units_left import UnitsLeft, finished_by

WORKERS = [f"n{node}.{slot}.0" for node in range(3) for slot in range(2)]


@pytest.mark.parametrize("elements", [1, 15, 16, 17, 10_000, 3 << 18, 1 << 30])
def test_pieces_cover_all_elements_once(elements: int) -> None:
    pieces = cut(elements)
    assert pieces[0].start == 0 and pieces[-1].stop == elements
    assert all(one.stop == other.start for one, other in pairwise(pieces))
    assert 1 <= len(pieces) <= PIECES_MAX
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


def test_owner_and_mirror_are_on_two_nodes_and_pieces_are_spread() -> None:
    orders = [order(piece, WORKERS) for piece in range(256)]
    assert all(sorted(one) == sorted(WORKERS) for one in orders)
    assert all(node_of(one[0]) != node_of(one[1]) for one in orders)
    assert max(Counter(one[0] for one in orders).values()) <= 2 * 256 / len(WORKERS)
    assert order(3, ["a.0.0", "a.1.0"]) in (("a.0.0", "a.1.0"), ("a.1.0", "a.0.0"))


def test_a_worker_that_comes_takes_pieces_and_moves_no_other() -> None:
    one_node = [f"n.{slot}.0" for slot in range(4)]
    before = [order(piece, one_node)[0] for piece in range(256)]
    after = [order(piece, [*one_node, "n.4.0"])[0] for piece in range(256)]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"n.4.0"} and 20 < len(moved) < 90


def test_the_mirror_becomes_the_owner_whoever_dies_in_whatever_order() -> None:
    drawn = Random(1)
    for piece in range(64):
        ordered = order(piece, WORKERS)
        alive = set(WORKERS)
        now = holders(ordered, alive)
        while len(alive) > 1:
            alive.discard(drawn.choice(sorted(alive)))
            then = holders(ordered, alive)
            assert then.owner == (
                now.owner if now.owner in alive else now.mirror if now.mirror in alive else then.owner
            )
            assert then.owner in alive and (then.mirror in alive) == (len(alive) > 1)
            now = then
    with pytest.raises(ValueError, match="none of"):
        holders(("a", "b"), {"c"})


def test_every_unit_is_taken_once_whatever_the_speeds_and_the_workers() -> None:
    drawn = Random(2)
    for _ in range(200):
        left, begun = UnitsLeft.of(drawn.randrange(1, 60)), dict[str, int]()
        done: list[int] = []
        while left.count:
            roster = drawn.sample(WORKERS, drawn.randint(1, len(WORKERS)))
            shares = {worker: list(left.share(worker, roster, begun)) for worker in roster}
            dealt = [unit for share in shares.values() for unit in share]
            assert sorted(dealt) == sorted({*dealt}) and len(dealt) == left.count
            made = {worker: share[: drawn.randint(0, len(share))] for worker, share in shares.items()}
            begun = {
                worker: shares[worker][len(made[worker])]
                for worker in roster
                if len(made[worker]) < len(shares[worker]) and drawn.random() < 0.7
            }
            for worker, units in made.items():
                assert finished_by(worker, len(units), left, roster, {}) == list(
                    islice(left.share(worker, roster, {}), len(units))
                )
                done += units
            left = left.without(unit for units in made.values() for unit in units)
            assert UnitsLeft.from_json(left.total, left.to_json()) == left
        assert sorted(done) == list(range(left.total))


def test_what_a_worker_has_begun_comes_first_and_is_nobody_elses() -> None:
    left = UnitsLeft.of(10).without([0, 1, 4])
    begun = {"a": 5, "gone": 2}
    assert list(left.share("a", ["a", "b"], begun)) == [5, 3, 7, 9]
    assert list(left.share("b", ["a", "b"], begun)) == [2, 6, 8], "who has nothing to do comes first"
    assert finished_by("a", 2, left, ["a", "b"], begun) == [5, 3]


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_pairs_are_mutual_and_all_occur(count: int) -> None:
    members = [f"n.{slot}.0" for slot in range(count)]
    seen = Counter[frozenset[str]]()
    for number in range(400):
        pairs = matching(7, number, members[::-1])
        assert pairs == matching(7, number, members)
        assert len({worker for pair in pairs for worker in pair}) == 2 * (count // 2)
        seen.update(map(frozenset, pairs))
        for me in members:
            other = partner(7, number, me, members)
            assert (other is None) == all(me not in pair for pair in pairs)
            assert other is None or partner(7, number, other, members) == me
    assert len(seen) == count * (count - 1) // 2
    assert min(seen.values()) > 0.5 * max(seen.values())
    assert [matching(8, number, members) for number in range(9)] != [
        matching(7, number, members) for number in range(9)
    ] or (count == 2)


def test_a_dead_partner_is_in_no_pair() -> None:
    members = [f"n.{slot}.0" for slot in range(4)]
    assert all("n.2.0" not in pair for number in range(50) for pair in matching(0, number, {*members} - {"n.2.0"}))


def test_a_phase_ends_by_its_clock_or_for_others_and_trains_most_of_the_time() -> None:
    assert not is_over(59.0, 60.0, 1.0, due=False, asked=False)
    assert is_over(60.0, 60.0, 1.0, due=False, asked=False)
    assert is_over(0.0, 60.0, 1.0, due=False, asked=True)
    assert not is_over(4.3, 60.0, 1.0, due=True, asked=False)
    assert is_over(4.5, 60.0, 1.0, due=True, asked=False)


def said(done: list[int], begun: int | None = None, **counts: object) -> dict[str, object]:
    blank: dict[str, object] = {"applied": {}, "sums": {}, "most": {}, "values": {}}
    return dict(phase_notes.note(done, begun, {"loss": (float(len(done)), len(done))} if done else {}, blank | counts))


def ended(*names: str, **losses: object) -> dict[str, dict[str, object]]:
    """What workers say behind the sum, the first one after a second, the next one after two."""
    return {name: {"ended_s": float(1 + number), **losses} for number, name in enumerate(names)}


def test_the_units_of_a_dead_worker_are_done_as_far_as_its_updates_came() -> None:
    left, roster = UnitsLeft.of(9), ["a", "b", "c"]
    notes = {"a": said([0, 3], 6, applied={"c": 1}), "b": said([1], None, applied={"c": 2, "a": 2})}
    found = phase_notes.summary(notes, ended("a", "b"), roster, left, {})
    assert found.gone == ("c",)
    assert found.left == UnitsLeft.of(9).without([0, 3, 1, 2, 5])
    assert found.begun == {"a": 6}
    assert found.end_s == 1.0
    assert found.metrics == {"loss": 1.0, LOST: 1.0}


def test_a_worker_that_leaves_behind_the_sum_has_lost_nothing() -> None:
    notes = {"a": said([0, 3], 6), "b": said([1, 4])}
    found = phase_notes.summary(notes, ended("a"), ["a", "b"], UnitsLeft.of(9), {})
    assert found.gone == ()
    assert found.left == UnitsLeft.of(9).without([0, 3, 1, 4])
    assert found.metrics[LOST] == 0.0


def test_lost_updates_of_a_piece_are_counted_by_the_newest_version_that_was_seen() -> None:
    notes = {"a": said([0]), "b": said([1])}
    ends = {
        **ended("a", fell_back=[[3, 7, 10]], seen=[[3, 0, 12], [3, 7, 99]]),
        **ended("b", seen=[[3, 0, 14], [2, 0, 50]]),
    }
    metrics = phase_notes.summary(notes, ends, ["a", "b"], UnitsLeft.of(4), {}).metrics
    assert (metrics[LOST], metrics[PIECES_FELL_BACK]) == (4.0, 1.0)


def test_staleness_is_a_mean_over_updates() -> None:
    sums = {UPDATES: 2.0, STALENESS: 3.0}
    notes = {"a": said([0], sums=sums, most={STALENESS_MOST: 2}), "b": said([1], sums=sums)}
    found = phase_notes.summary(notes, ended("a", "b"), ["a", "b"], UnitsLeft.of(4), {}).metrics
    assert (found[STALENESS], found[STALENESS_MOST]) == (1.5, 2.0)
