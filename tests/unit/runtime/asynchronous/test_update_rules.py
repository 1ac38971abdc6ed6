"""Numbers of the update rules against references that are computed here."""

from __future__ import annotations

from random import Random

import pytest
import torch

from runtime.asynchronous.update_rules import DelayedNesterov, PieceState, SlowMomentum, StalenessBound


def piece(elements: int = 7) -> PieceState:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    return PieceState(values, torch.zeros(elements), torch.zeros(elements))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("delay", [1, 3, 4])
def test_delayed_nesterov_is_the_published_algorithm(delay: int, momentum: float) -> None:
    """Algorithm 3 of arXiv:2401.09135 with c = 0, in float64 and in its own words."""
    rule, state = DelayedNesterov(0.7, momentum, delay), piece()
    theta, m, buffer = state.values.double().clone(), torch.zeros(7).double(), torch.zeros(7).double()
    drawn = torch.Generator().manual_seed(2)
    for t in range(25):
        g = torch.randn(7, generator=drawn)
        rule.apply(state, g, 1.0)
        buffer = buffer + g.double()
        if (t + 1) % delay == 0:
            m = momentum * m + buffer / delay
            theta = theta - 0.7 * (momentum * m + g.double() / delay)
            buffer = torch.zeros(7).double()
        else:
            theta = theta - 0.7 * g.double() / delay
        torch.testing.assert_close(state.values.double(), theta, rtol=1e-5, atol=1e-5)
    assert state.version == 25


def test_as_many_updates_as_the_delay_are_one_step_of_sgd_with_nesterov_momentum_by_their_mean() -> None:
    delay, rule, state = 4, DelayedNesterov(0.7, 0.9, 4), piece()
    parameter = torch.nn.Parameter(state.values.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    drawn = torch.Generator().manual_seed(3)
    for _ in range(6):
        differences = torch.randn(delay, 7, generator=drawn)
        for one in differences:
            rule.apply(state, one, 1.0)
        parameter.grad = differences.mean(0)
        optimizer.step()
        torch.testing.assert_close(state.values, parameter.detach(), rtol=1e-5, atol=1e-5)


def test_a_dropped_update_is_none_and_a_scaled_one_counts_in_part() -> None:
    rule, state, half = DelayedNesterov(1.0, 0.9, 2), piece(), piece()
    before = state.clone()
    rule.apply(state, torch.ones(7), 0.0)
    assert torch.equal(state.values, before.values) and state.version == 0 and not state.pending.any()
    rule.apply(state, torch.ones(7), 0.5)
    rule.apply(half, torch.full((7,), 0.5), 1.0)
    assert torch.equal(state.values, half.values) and torch.equal(state.pending, half.pending)


def test_pieces_do_what_the_whole_vector_does() -> None:
    rule, whole = DelayedNesterov(0.7, 0.9, 3), piece(12)
    cuts = [[one[at : at + 4].clone() for one in (whole.values, whole.momentum, whole.pending)] for at in (0, 4, 8)]
    parts = [PieceState(values, momentum, pending) for values, momentum, pending in cuts]
    drawn = torch.Generator().manual_seed(4)
    for _ in range(10):
        g = torch.randn(12, generator=drawn)
        rule.apply(whole, g, 1.0)
        for number in Random(5).sample(range(3), 3):
            rule.apply(parts[number], g[4 * number : 4 * number + 4], 1.0)
    assert torch.equal(torch.cat([part.values for part in parts]), whole.values)


@pytest.mark.parametrize(
    ("late", "staleness", "age_s", "weight"),
    [
        ("drop", 0, 0.0, 1.0),
        ("drop", 4, 9.9, 1.0),
        ("drop", 5, 0.0, 0.0),
        ("drop", 0, 10.1, 0.0),
        ("scale", 4, 0.0, 1.0),
        ("scale", 5, 0.0, 1 / 2),
        ("scale", 13, 0.0, 1 / 10),
        ("scale", 5, 10.1, 0.0),
    ],
)
def test_an_update_beyond_the_bound_is_dropped_or_scaled(
    late: str, staleness: int, age_s: float, weight: float
) -> None:
    assert StalenessBound(4, 10.0, late).weight(staleness, age_s) == weight  # type: ignore[arg-type]


def test_slow_momentum_goes_on_by_what_former_units_have_moved() -> None:
    slow, values = SlowMomentum(0.5), torch.tensor([1.0, -1.0])
    slow.begin(values)
    for further in (0.0, 0.5, 0.75, 0.875):
        slow.trained(values + 0.5)
        slow.trained(values + 1)
        slow.pulled(values - 7)  # by another worker
        assert torch.equal(slow.step(), torch.full([2], further)), "half of what it went in the unit before"
        values = values - 7 + further
        slow.pulled(values)
    slow.begin(values)
    slow.trained(values + 1)
    assert not slow.step().any(), "of former units nothing is left"


def test_without_slow_momentum_a_worker_stays_where_its_unit_has_led() -> None:
    slow, values = SlowMomentum(0.0), torch.tensor([1.0])
    slow.begin(values)
    for _ in range(3):
        slow.trained(values := values + 2)
        assert not slow.step().any()


def test_slow_momentum_in_pairs_leaves_all_together() -> None:
    """Workers whose inner steps lead to different places go 10 times as far with a momentum of 0.9, and get no further
    from each other than that."""
    drawn, generator = Random(3), torch.Generator().manual_seed(3)
    own, slow = torch.zeros(6, 4), [SlowMomentum(0.9) for _ in range(6)]
    for worker in slow:
        worker.begin(torch.zeros(4))
    units = 2000
    for _ in range(units):
        trained = own + 1 + torch.randn(6, 4, generator=generator)
        order = drawn.sample(range(6), 6)
        own = trained.clone()
        for one, other in zip(order[::2], order[1::2], strict=True):
            own[one] = own[other] = (trained[one] + trained[other]) / 2
        for at, worker in enumerate(slow):
            worker.trained(trained[at].clone())
            own[at] += worker.step()
            worker.pulled(own[at].clone())
    assert own.mean().item() == pytest.approx(10 * units, rel=0.05)
    assert own.std(0).max() < 60
