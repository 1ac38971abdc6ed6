"""No update that was acknowledged is lost unless owner and mirror die together, and then the piece is named; none is
applied twice. Deaths are drawn: of whoever asks or is asked, before and after the answer."""

from __future__ import annotations

from random import Random

import pytest
import torch

from runtime.asynchronous import store as store_module
from runtime.asynchronous.piece_copies import AskLater, HeldPiece, Judged, PieceCopies
from runtime.asynchronous.store import MembersNow
from runtime.asynchronous.update_rules import DelayedNesterov, PieceState, StalenessBound
from tests.unit.runtime.asynchronous.store_world import PIECES, UPDATES_MAX, Fate, StoreWorld
from tests.unit.thoroughness import EXAMPLES

SCHEDULES = EXAMPLES or 300


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that has to be asked again is asked again at once."""
    monkeypatch.setattr(store_module, "POLL_S", 0.0005)


def schedule(seed: int, kill: float, together: bool) -> StoreWorld:
    drawn = Random(seed)
    names = [f"n{number // 2}.{number % 2}.0" for number in range(drawn.randint(1, 6))]
    world = StoreWorld(names, Fate(drawn, kill, drawn.randint(0, len(names) - 1)))
    world.begin()
    numbers = dict.fromkeys(names, 0)
    while world.issued < UPDATES_MAX:
        name = drawn.choice(world.living())
        numbers[name] += 1
        world.push(name, numbers[name])
        if drawn.random() < 0.1 and world.fate.kills_left:
            for victim in drawn.sample(world.living(), min(len(world.living()), 2 if together else 1)):
                world.kill(victim)
                world.fate.kills_left -= 1
        for other in world.living():
            if drawn.random() < 0.7:
                world.learn(other)
                world.look(other)
    return world


@pytest.mark.parametrize("together", [False, True])
def test_no_acknowledged_update_is_lost_but_with_owner_and_mirror(together: bool) -> None:
    deaths = losses = 0
    for seed in range(SCHEDULES // 2):
        world = schedule(seed, 0.02, together)
        held = world.held()
        named = {one.piece for one in world.lost}
        for piece in range(PIECES):
            assert held[piece] <= set(range(world.issued))
            if piece not in named:
                assert world.acknowledged[piece] <= held[piece], f"seed {seed}, piece {piece}"
        deaths, losses = deaths + len(world.dead), losses + len(named)
    assert deaths > SCHEDULES // 4
    if together:
        assert losses, "two have never died together"


def test_without_deaths_every_update_is_in_every_piece() -> None:
    for seed in range(20):
        world = schedule(seed, 0.0, False)
        world.fate.kills_left = 0
        if not world.dead:
            assert world.held() == [set(range(UPDATES_MAX))] * PIECES


def piece(version: int) -> PieceState:
    return PieceState(torch.zeros(1), torch.zeros(1), torch.zeros(1), version)


def copies(me: str) -> PieceCopies:
    machine = PieceCopies(me, DelayedNesterov(1.0, 0.9, 2), StalenessBound(2, 10.0, "scale"))
    machine.begin(5, ["a.0.0", "b.0.0", "c.0.0"], [piece(7)])
    machine.enter(1, ["a.0.0", "b.0.0", "c.0.0"])
    return machine


def holders_of(machine: PieceCopies) -> tuple[str, str, str]:
    owner, mirror = machine.holders(0)
    return owner, mirror, ({"a.0.0", "b.0.0", "c.0.0"} - {owner, mirror}).pop()


def test_only_the_owner_judges_and_only_in_its_phase_and_generation() -> None:
    owner, mirror, other = holders_of(copies("a.0.0"))
    for worker in (mirror, other):
        with pytest.raises(AskLater, match="does not own"):
            copies(worker).judge("a.0.0", 1, [0], [7], 0.0)
    machine = copies(owner)
    for phase, generation in ((4, None), (6, None), (5, 2)):
        with pytest.raises(AskLater):
            machine.check(phase, generation)
    machine.check(5, 1)


def test_staleness_is_counted_in_updates_of_the_piece() -> None:
    owner, mirror, _ = holders_of(copies("a.0.0"))
    machine = copies(owner)
    one = torch.ones(1)
    for number, expected in ((1, 1.0), (2, 1.0), (3, 1.0), (4, 0.5), (5, 1 / 3)):
        judged = machine.judge("x", number, [0], [7], 0.0)
        assert judged == [Judged(0, expected, mirror, (0, 6 + number))]
        machine.commit("x", number, judged, {0: one})
    assert machine.judge("x", 5, [0], [7], 0.0)[0].weight is None, "it was applied before"
    assert machine.judge("x", 6, [0], [12], 11.0)[0].weight == 0.0, "it is too old"
    machine.closed = True
    with pytest.raises(AskLater):
        machine.check(5)
    machine.check(5, 1)  # of other owners it is still the mirror


def test_whoever_becomes_the_owner_without_a_copy_says_so() -> None:
    owner, mirror, other = holders_of(copies("a.0.0"))
    assert copies(mirror).enter(2, [mirror, other]) == []
    (lost,) = copies(other).enter(2, [other])
    assert (lost.piece, lost.lineage, lost.version) == (0, 2, 7)
    machine = copies(other)
    assert machine.enter(2, [owner, other]) == []
    machine.take_copy(0, HeldPiece(piece(9)))
    assert machine.enter(3, [other]) == []
    assert machine.own(0).state.version == 9


def test_a_mirror_of_another_lineage_needs_a_copy() -> None:
    owner, mirror, _ = holders_of(copies("a.0.0"))
    machine = copies(mirror)
    one = {0: torch.ones(1)}
    assert machine.mirror("x", 1, [Judged(0, 1.0, "", (0, 7))], one) == []
    assert machine.mirror("x", 1, [Judged(0, 1.0, "", (0, 7))], one) == [], "said twice"
    assert machine.mirror("x", 2, [Judged(0, 1.0, "", (0, 9))], one) == [0], "it lacks one"
    assert machine.mirror("x", 2, [Judged(0, 1.0, "", (4, 8))], one) == [0], "as many updates, and other ones"
    assert machine.mirror("x", 1, [Judged(0, 1.0, "", (4, 8))], one) == [0], "known, but of another lineage"
    assert machine.mirror("", 0, [Judged(0, None, "", (0, 8))], {}) == []
    with pytest.raises(AskLater, match="does not mirror"):
        copies(owner).take_copy(0, HeldPiece(piece(0)))


def test_between_two_phases_nothing_is_said_to_be_lost() -> None:
    """The pieces are summed, so whoever goes then takes nothing along."""
    for paused in (True, False):
        world = StoreWorld(["n0.0.0", "n1.0.0", "n2.0.0"], Fate(Random(1), 0.0, 0))
        world.begin()
        assert world.push("n0.0.0", 1)
        stays = world.copies["n0.0.0"]
        third = next(name for name in world.names if any(name not in stays.holders(piece) for piece in range(PIECES)))
        for name in world.names:
            world.stores[name].end_phase()
            if paused:
                world.stores[name].pause()
        for name in world.names:
            if name != third:
                world.kill(name)
        world.learn(third)
        assert bool(world.lost) != paused


def test_whoever_has_left_and_is_taken_back_says_what_may_be_lost() -> None:
    """It was drained behind the operation with which the phase began. The others trained; then they died, and it is all
    there is. Nobody has told it of their updates."""
    world = StoreWorld(["n0.0.0", "n1.0.0", "n2.0.0"], Fate(Random(1), 0.0, 0))
    taken_back, *others = world.names
    for name in others:
        world.seen[name] = MembersNow(2, tuple(others))
    world.generation = 2
    world.begin()
    assert world.push(others[0], 1) and world.push(others[1], 1)
    for name in others:
        world.kill(name)
    world.generation = 3
    world.seen[taken_back] = MembersNow(3, (taken_back,))
    start = [PieceState(torch.zeros(1), torch.zeros(1), torch.zeros(1)) for _ in range(PIECES)]
    world.stores[taken_back].begin(0, world.names, start, in_step=False)
    assert world.held() == [set()] * PIECES
    assert {one.piece for one in world.lost} == set(range(PIECES))
    world.lost.clear()
    world.stores[taken_back].begin(0, [taken_back], start)
    assert not world.lost, "nobody has trained without it"
