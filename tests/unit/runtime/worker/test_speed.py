"""How long a step is said to take."""

from __future__ import annotations

from runtime.worker.speed import ShardPace, Speed


def after(*begun_s: float) -> float:
    pace = ShardPace()
    for now_s in begun_s:
        pace.begin(now_s)
    return pace.step_s


def test_two_steps_have_to_pass_before_it_is_known() -> None:
    assert (after(), after(5.0), after(5.0, 7.0), after(5.0, 7.0, 9.0)) == (0.0, 0.0, 0.0, 2.0)


def test_what_comes_between_two_steps_now_and_then_does_not_count() -> None:
    assert after(0.0, 1.0, 2.0, 603.0) == 1.0  # an evaluation of ten minutes
    assert after(0.0, 1.0, 2.0, 603.0, 604.0) == 1.0


def test_steps_that_stay_slower_are_slower() -> None:
    assert after(0.0, 1.0, 2.0, 5.0, 8.0) == 3.0


def test_the_wait_for_a_copy_is_no_part_of_a_step() -> None:
    pace = ShardPace()
    pace.waited(1.0)
    for now_s, waited_s in ((0.0, 0.0), (2.0, 0.5), (4.5, 0.5), (7.0, 0.0)):
        pace.begin(now_s)
        pace.waited(waited_s)
    assert pace.step_s == 2.0


def speed_of(*steps: tuple[float, ...], on_host: bool = True) -> int:
    """shard_us after steps whose shards took so many seconds; between two shards 9 s go by."""
    speed, now_s = Speed(on_host=on_host), 0.0
    for shards in steps:
        speed.begin_step()
        for took_s in shards:
            speed.handed_out(now_s)
            speed.done(now_s + took_s)
            now_s += took_s + 9.0
    speed.begin_step()
    return speed.shard_us


def test_a_worker_says_nothing_of_its_speed_before_it_knows() -> None:
    assert speed_of(*3 * [(0.1, 0.1)]) == 0
    assert speed_of(*4 * [(0.1, 0.1)]) == 100_000


def test_what_happens_in_some_steps_only_makes_a_worker_not_slow() -> None:
    assert speed_of(*10 * [(0.1,)], *6 * [(5.0,)]) == 100_000
    assert speed_of(*10 * [(0.1,)], *10 * [(5.0,)]) == 5_000_000, "that is no exception any more"


def test_passes_of_different_cost_count_with_their_mean() -> None:
    assert speed_of(*4 * [(0.1, 0.1, 0.5, 0.5)]) == speed_of(*4 * [(0.1, 0.5)]) == 300_000


def test_a_step_without_a_shard_says_nothing_about_speed() -> None:
    assert speed_of(*4 * [(0.1,)], *30 * [()]) == 100_000


def test_a_gradient_of_which_nobody_knows_when_its_shard_began_does_not_count() -> None:
    speed = Speed()
    for _ in range(5):
        speed.begin_step()
        speed.done(7.0)
    assert speed.shard_us == 0


def test_where_gradients_stay_on_a_gpu_nobody_says_how_fast_it_is() -> None:
    assert speed_of(*9 * [(0.1,)], on_host=False) == 0


def test_a_reduction_counts_from_the_moment_when_all_are_there() -> None:
    speed = Speed()
    for pass_s in (3.0, 1.0, 2.0):
        speed.begin_step()
        for took_s in (pass_s, pass_s + 1.0):
            speed.gathered(50.0)
            speed.reduced(50.0 + took_s)
    assert speed.exchange_us == 2_500_000, "of the steps that are over, the median of their means"
    speed.begin_step()
    assert speed.exchange_us == 2_500_000


def test_a_reduction_that_overlaps_counts_from_the_moment_when_only_the_rest_is_left() -> None:
    speed = Speed()
    speed.begin_step()
    speed.rest_left(10.0)
    speed.broken()
    speed.gathered(50.0)
    speed.reduced(51.0)
    speed.begin_step()
    assert speed.exchange_us == 1_000_000, "what was broken off does not count"
    for _ in range(8):
        speed.rest_left(50.0)
        speed.gathered(53.0)
        speed.reduced(53.5)
        speed.begin_step()
    assert speed.exchange_us == 3_500_000
