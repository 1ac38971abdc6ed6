"""Averaging in pairs: the sum over all workers stays, whoever asks whom and when; distances shrink."""

from __future__ import annotations

from random import Random

import torch

from runtime.asynchronous.gossip import Mixture
from runtime.asynchronous.gossip_schedule import partner


def test_an_exchange_leaves_both_with_the_mean() -> None:
    mine, theirs = Mixture(), Mixture()
    a, b = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0])
    mine.show(a), theirs.show(b)
    answer = theirs.asked(a)
    assert answer is not None and torch.equal(answer, b)
    mine.answered(a, answer)
    assert torch.equal(mine.show(a), torch.tensor([2.0, 3.0]))
    assert torch.equal(theirs.show(b), torch.tensor([2.0, 3.0]))


def test_who_is_asked_while_it_trains_keeps_what_it_has_learned() -> None:
    mixture, own = Mixture(), torch.tensor([4.0])
    mixture.show(own)
    mixture.asked(torch.tensor([0.0]))
    seen = mixture.asked(torch.tensor([2.0]))
    assert seen is not None and seen.tolist() == [2.0], "the second one sees the first one's mean"
    own += 10  # an inner step
    assert mixture.show(own).tolist() == [12.0]


def test_nobody_is_asked_between_two_phases() -> None:
    mixture, own = Mixture(), torch.tensor([4.0])
    assert mixture.asked(own) is None
    mixture.show(own)
    mixture.asked(torch.tensor([0.0]))
    assert mixture.hide(own).tolist() == [2.0]
    assert mixture.asked(own) is None


def test_the_sum_stays_and_all_come_together() -> None:
    drawn, generator = Random(3), torch.Generator().manual_seed(3)
    names = [f"n.{slot}.0" for slot in range(6)]
    own = {name: torch.randn(5, generator=generator, dtype=torch.float64) for name in names}
    mixtures = {name: Mixture() for name in names}
    before = sum(own.values())
    counts = dict.fromkeys(names, 0)
    for name in names:
        mixtures[name].show(own[name])
    for _ in range(300):
        me = drawn.choice(names)
        other = partner(1, counts[me], me, names)
        counts[me] += 1
        assert other is not None
        sent = mixtures[me].show(own[me]).clone()
        if (third := drawn.choice(names)) not in (me, other):  # it is asked while it waits for its answer
            theirs = mixtures[third].show(own[third]).clone()
            if (seen := mixtures[me].asked(theirs)) is not None:
                mixtures[third].answered(theirs, seen)
        answer = mixtures[other].asked(sent)
        assert answer is not None
        mixtures[me].answered(sent, answer)
    for name in names:
        mixtures[name].hide(own[name])
    torch.testing.assert_close(sum(own.values()), before)
    spread = torch.stack(list(own.values())).std(0).max()
    assert spread < 1e-3


def test_parameters_that_are_not_finite_reach_nobody() -> None:
    mixture, own = Mixture(), torch.tensor([4.0])
    mixture.show(own)
    assert mixture.asked(torch.tensor([float("nan")])) is None
    mixture.show(torch.tensor([float("inf")]))
    assert mixture.asked(torch.tensor([1.0])) is None
