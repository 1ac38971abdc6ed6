"""Which samples a shard gets: each of an epoch's plan exactly once, from nothing but numbers."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import ConfigError
from elastic.protocol.sampling import LENGTH_MAX, SamplePlan, Weights, permute


def order(seed: int, epoch: int, n: int) -> list[int]:
    samples: list[int] = permute(seed, epoch, n, np.arange(n, dtype=np.int64)).tolist()
    return samples


@given(st.integers(-(2**70), 2**70), st.integers(0, 1000), st.integers(1, 3000))
def test_an_epochs_order_holds_every_sample_once(seed: int, epoch: int, n: int) -> None:
    assert sorted(order(seed, epoch, n)) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9, 1023, 1024, 1025])
def test_the_edges_of_powers_of_two_are_no_exception(n: int) -> None:
    assert sorted(order(0, 0, n)) == list(range(n))


def test_the_order_is_part_of_the_format() -> None:
    """A checkpoint continues an epoch on another machine and in a later version: these numbers must not change."""
    assert order(0, 0, 12) == [3, 10, 11, 9, 0, 6, 1, 8, 5, 4, 2, 7]
    assert permute(7, 3, 10**12, np.arange(3, dtype=np.int64)).tolist() == [383302225523, 561219200831, 867818064940]


def test_a_part_of_an_order_is_computed_alone() -> None:
    whole = order(5, 1, 1000)
    part = np.array([999, 0, 500], dtype=np.int64)
    assert permute(5, 1, 1000, part).tolist() == [whole[999], whole[0], whole[500]]
    assert part.tolist() == [999, 0, 500]


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = {tuple(order(seed, epoch, 100)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize("n", [2, 3, 5, 16, 21])
def test_each_sample_is_equally_likely_in_each_place(n: int) -> None:
    """Chi-square over 400 epochs; five standard deviations, and fixed seeds, so it cannot flicker."""
    epochs = 400
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), order(11, epoch, n)] += 1
    chi_square = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    freedom = (n - 1) ** 2
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbours_do_not_stay_together() -> None:
    shuffled = np.array(order(1, 0, 100_000))
    assert abs(np.corrcoef(shuffled[:-1], shuffled[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(shuffled)) == 1).mean() < 0.001
    assert abs(np.corrcoef(np.arange(100_000), shuffled)[0, 1]) < 0.02


def test_a_dataset_of_any_size_takes_the_memory_of_the_batch() -> None:
    plan = SamplePlan(10**12, 1024, 8, seed=3, shuffle=True)
    plan.indices(0, 0, 0)
    tracemalloc.start()
    samples = [sample for shard in range(8) for sample in plan.indices(0, plan.steps - 1, shard)]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(samples)) == 1024
    assert min(samples) >= 0 and max(samples) < 10**12
    assert peak_bytes < 2**20


@pytest.mark.parametrize("n", [10**12, (1 << 62) - 1, 1 << 62])
def test_places_of_an_order_too_long_to_hold_have_samples_of_their_own(n: int) -> None:
    """At the start, around the middle and at the end; in memory of their own number."""
    places = np.concatenate([np.arange(first, first + 50_000) for first in (0, n // 2, n - 50_000)])
    tracemalloc.start()
    samples = permute(3, 7, n, places)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(samples)) == len(places)
    assert samples.min() >= 0 and samples.max() < n
    assert abs(samples.mean() / n - 0.5) < 0.01
    assert peak_bytes < 12 * places.nbytes


plans = st.builds(
    lambda length, shards, more, seed, shuffle, tail: SamplePlan(
        max(length, shards + more) if tail == "drop" else length, shards + more, shards, seed, shuffle, tail
    ),
    st.integers(1, 200),
    st.integers(1, 9),
    st.integers(0, 30),
    st.integers(0, 5),
    st.booleans(),
    st.sampled_from(["drop", "pad"]),
)


@given(plans, st.integers(0, 3))
def test_an_epochs_plan_hands_out_each_sample_exactly_once(plan: SamplePlan, epoch: int) -> None:
    handed = Counter(
        sample
        for step in range(plan.steps)
        for shard in range(plan.shards)
        for sample in plan.indices(epoch, step, shard)
    )
    assert handed.total() == plan.steps * plan.batch_size
    if plan.tail == "drop":
        assert set(handed.values()) == {1}
        assert plan.length - len(handed) < plan.batch_size
    else:
        assert set(handed) == set(range(plan.length))
        assert max(handed.values()) - min(handed.values()) <= 1


def test_the_padding_is_the_start_of_the_same_order() -> None:
    plan = SamplePlan(10, 4, 2, seed=1, shuffle=True, tail="pad")
    assert plan.steps == 3
    assert plan.indices(0, 2, 1) == plan.indices(0, 0, 0)


def test_without_shuffling_the_order_is_the_datasets() -> None:
    plan = SamplePlan(10, 5, 2)
    assert [plan.indices(epoch, 1, shard) for epoch in (0, 1) for shard in (0, 1)] == [[5, 6, 7], [8, 9]] * 2


@given(st.integers(1, 40), st.integers(0, 300))
def test_the_first_shards_get_one_more(shards: int, more: int) -> None:
    plan = SamplePlan(10**6, shards + more, shards)
    sizes = [len(plan.indices(0, 0, shard)) for shard in range(shards)]
    assert sum(sizes) == shards + more
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_what_is_handed_out_belongs_to_the_caller() -> None:
    plan = SamplePlan(100, 10, 2, shuffle=True)
    mine = plan.indices(0, 0, 0)
    before = list(mine)
    mine.clear()
    assert plan.indices(0, 0, 0) == before
    assert all(type(sample) is int for sample in before)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": 0}, "empty"),
        ({"length": 1 << 63}, "too long"),
        ({"shards": 0}, "shards=0"),
        ({"batch_size": 3}, "batch_size=3 is below shards=4"),
        ({"tail": "wrap"}, "tail='wrap'"),
        ({"length": 7}, "fewer than one step"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replace(SamplePlan(100, 8, 4), **change)


def test_a_small_dataset_can_be_padded() -> None:
    plan = SamplePlan(3, 8, 2, tail="pad")
    assert plan.steps == 1
    assert plan.indices(0, 0, 0) + plan.indices(0, 0, 1) == [0, 1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(("step", "shard"), [(-1, 0), (12, 0), (0, -1), (0, 4)])
def test_places_outside_the_plan_are_refused(step: int, shard: int) -> None:
    with pytest.raises(IndexError):
        SamplePlan(100, 8, 4).indices(0, step, shard)


# Weights


def drawn(weights: Any, epochs: int = 1, seed: int = 0) -> Counter[int]:
    """How often each sample was drawn."""
    plan = SamplePlan(len(weights), len(weights), 1, seed, weights=Weights(weights))
    return Counter(sample for epoch in range(epochs) for sample in plan.indices(epoch, 0, 0))


@pytest.mark.parametrize("weights", [[1, 1, 1, 1], [4, 3, 2, 1], [0, 1, 0, 5, 0], [1e-300, 2e-300], [1e308, 1e308]])
def test_samples_are_drawn_as_often_as_their_weights_say(weights: list[float]) -> None:
    """Five standard deviations of the binomial, and fixed seeds, so it cannot flicker."""
    epochs = 1500
    counts, total = drawn(weights, epochs), epochs * len(weights)
    assert counts.total() == total
    for sample, weight in enumerate(np.array(weights) / max(weights)):
        share = weight / (np.array(weights) / max(weights)).sum()
        assert abs(counts[sample] - total * share) <= 5 * (total * share * (1 - share)) ** 0.5


def test_a_sample_without_weight_is_never_drawn() -> None:
    assert set(drawn([0, 0, 1, 0], 500)) == {2}


def test_weights_in_another_unit_draw_the_same_samples() -> None:
    weights = np.random.default_rng(0).random(300)
    one, other = (
        SamplePlan(300, 300, 1, weights=Weights(weights)),
        SamplePlan(300, 300, 1, weights=Weights(weights * 4)),
    )
    assert one.indices(3, 0, 0) == other.indices(3, 0, 0)


def test_draws_are_part_of_the_format() -> None:
    plan = SamplePlan(6, 6, 2, seed=7, weights=Weights([1, 2, 3, 4, 5, 6]))
    assert [plan.indices(epoch, 0, shard) for epoch in (0, 9) for shard in (0, 1)] == [
        [5, 5, 4],
        [5, 5, 5],
        [2, 1, 1],
        [5, 3, 4],
    ]


@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 3), st.sampled_from(["drop", "pad"]))
def test_a_place_draws_the_same_sample_however_the_batch_is_cut(shards: int, more: int, epoch: int, tail: Any) -> None:
    weights = Weights(np.arange(1, 101))
    plan = SamplePlan(100, shards + more, shards, 5, False, tail, weights)
    one = SamplePlan(100, 100, 1, 5, weights=weights)
    cut = [s for step in range(plan.steps) for shard in range(shards) for s in plan.indices(epoch, step, shard)]
    assert cut[:100] == one.indices(epoch, 0, 0)[: len(cut)]


def test_two_sources_are_mixed_by_rate() -> None:
    """As docs/api.md says it: 3 of 10 samples from the first source, whatever its length."""
    lengths, rates = [50, 2000], [0.3, 0.7]
    weights = np.concatenate([np.full(n, rate / n) for n, rate in zip(lengths, rates, strict=True)])
    plan = SamplePlan(2050, 1000, 4, weights=Weights(weights))
    steps = [(epoch, step) for epoch in range(20) for step in range(plan.steps)]
    first = sum(s < 50 for at in steps for shard in range(4) for s in plan.indices(*at, shard))
    draws = 1000 * len(steps)
    assert abs(first - 0.3 * draws) < 5 * (draws * 0.3 * 0.7) ** 0.5


def test_drawing_takes_the_memory_of_the_batch_beside_that_of_the_weights() -> None:
    plan = SamplePlan(10**6, 1024, 8, weights=Weights(np.ones(10**6)))
    plan.indices(0, 0, 0)
    tracemalloc.start()
    samples = [sample for shard in range(8) for sample in plan.indices(0, plan.steps - 1, shard)]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(samples) == 1024
    assert peak_bytes < 2**18


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0, -0.5, 2.0], r"-0.5 for sample 1, and 1 such"),
        ([1.0, 2.0, float("nan")], "nan for sample 2"),
        ([float("inf"), 1.0, 1.0], "inf for sample 0"),
        ([0, 0, 0], "all 0"),
        ([1.0, 2.0], "2 numbers and the dataset 3 samples"),
        ([], "0 numbers and the dataset 3|all 0"),
        ([[1.0, 2.0, 3.0]], r"shape \(1, 3\)"),
        (3.0, r"shape \(\)"),
        (["a", "b", "c"], "one number for each sample"),
    ],
)
def test_bad_weights_are_refused_by_name(weights: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SamplePlan(3, 3, 1, weights=Weights(weights))


def test_what_is_drawn_cannot_be_shuffled_besides() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        SamplePlan(3, 3, 1, shuffle=True, weights=Weights([1, 2, 3]))


def test_what_a_plan_is_about_says_all_that_decides_the_samples() -> None:
    weights = Weights([1, 2, 3])
    assert SamplePlan(3, 3, 1, seed=5).about() == {
        "order": "in order",
        "samples": 3,
        "batch_size": 3,
        "shards": 1,
        "tail": "drop",
    }
    about = SamplePlan(3, 3, 1, seed=5, weights=weights).about()
    assert (about["order"], about["seed"], about["weights"]) == ("weighted", 5, weights.digest)
    assert weights.digest != Weights([1, 2, 4]).digest


def test_the_longest_dataset_can_be_planned() -> None:
    assert SamplePlan(LENGTH_MAX, 1 << 20, 1, shuffle=True).steps == LENGTH_MAX >> 20
