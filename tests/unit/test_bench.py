"""What the benchmark computes from its measurements, on values that can be checked by hand."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from tests.bench import checkpoints, nodes, report, stamps, state
from tests.bench.copying import Copies
from tests.bench.intervals import median_interval, ratios
from tests.bench.kills import STEADY_STEPS, first_full, judge
from tests.bench.node_deaths import judge as judge_node
from tests.bench.nodes import Change, Nodes
from tests.bench.replacements import Replacements
from tests.bench.report import Row
from tests.bench.stamps import Shards, Stamp, Stamps

S = 1_000_000_000


def stamp(t_s: float, step: int, began: int = 1, group: int | None = None, world: int = 3) -> Stamp:
    return Stamp(int(t_s * S), step, began, began if group is None else group, world, 0.0)


def test_an_interval_of_ten_values_reaches_from_the_second_to_the_ninth() -> None:
    """Binomial(10, 1/2): 2 * (1 + 10) / 1024 of all cases miss."""
    found = median_interval([10, 1, 9, 2, 8, 3, 7, 4, 6, 5])
    assert (found.median, found.low, found.high, found.n) == (5.5, 2, 9, 10)
    assert found.confidence == pytest.approx(1 - 22 / 1024)


def test_an_interval_of_few_values_says_that_it_is_less_sure() -> None:
    found = median_interval([1, 2, 3, 4])
    assert (found.low, found.high) == (1, 4)
    assert found.confidence == pytest.approx(1 - 2 / 16)
    assert median_interval([5]).confidence == 0


def test_an_interval_covers_the_true_median_as_often_as_it_says() -> None:
    """Of 500 samples of 24 values about 2.3 % miss; 5 % is four standard deviations away."""
    dice = random.Random(3)
    found = [median_interval([dice.expovariate(1.0) for _ in range(24)]) for _ in range(500)]
    true_median = 0.6931471805599453
    missed = sum(not interval.low <= true_median <= interval.high for interval in found)
    assert found[0].confidence >= 0.95
    assert missed / len(found) <= 0.05


def test_without_values_there_is_no_median() -> None:
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


def test_ratios_need_a_partner_for_each_value() -> None:
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])


def test_stamps_are_read_as_written_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    written = Stamps(tmp_path, "a")
    written.write(7, 2, 3, 3, 0.5)
    with (tmp_path / "a.stamps").open("ab") as file:
        file.write(b"torn")
    ((name, (only,)),) = stamps.read(tmp_path).items()
    assert (name, only.step, only.began, only.group, only.world, only.loss) == ("a", 7, 2, 3, 3, 0.5)
    assert only.t_ns > 0


def elastic_kill() -> dict[str, list[Stamp]]:
    """c is killed at 10.4 s inside step 10, which a and b finish in generation 2; d joins with step 13."""
    steps = [stamp(t, t) for t in range(5, 11)]
    redone = stamp(11.0, 10, began=1, group=2)
    alone = [stamp(12.0, 11, 2, world=2), stamp(14.5, 12, 2, 3, world=2)]
    full = [stamp(15.5 + n, 13 + n, 3) for n in range(STEADY_STEPS + 1)]
    newcomer = [stamp(14.6, 12, began=0, group=3, world=3), *full]
    survivors = [*steps[:-1], redone, *alone, *full]
    return {"a": survivors, "b": survivors, "c": steps[:-1], "d": newcomer}


def test_a_kill_is_judged_by_the_steps_of_the_group_that_goes_on() -> None:
    found = elastic_kill()
    full = first_full(found, {"c"}, group=1)
    assert full is not None
    assert full.step == 13
    kill = judge(found, "c", {"a", "b"}, 1, int(10.4 * S), full, step_s=1.0)
    assert kill.to_step_s == pytest.approx(0.6)
    assert kill.to_full_s == pytest.approx(5.1)
    assert kill.pause_s == pytest.approx(2.5)
    assert kill.lost_steps == 0


def test_a_step_that_the_victim_had_applied_and_the_survivors_just_then_is_neither_next_nor_done_again() -> None:
    found = elastic_kill()
    found["c"].append(stamp(10.35, 10))
    full = first_full(found, {"c"}, group=1)
    assert full is not None
    kill = judge(found, "c", {"a", "b"}, 1, int(10.4 * S), full, step_s=1.0)
    assert kill.to_step_s == pytest.approx(1.6)
    assert kill.lost_steps == 0


def test_a_step_that_a_survivor_does_again_is_lost() -> None:
    found = elastic_kill()
    found["a"].insert(5, stamp(10.3, 10))
    full = first_full(found, {"c"}, group=1)
    assert full is not None
    assert judge(found, "c", {"a", "b"}, 1, int(10.4 * S), full, step_s=1.0).lost_steps == 1


def test_a_step_that_the_full_world_began_before_the_kill_is_not_its_return() -> None:
    found = {name: [of for of in worker if of.step <= 10] for name, worker in elastic_kill().items()}
    assert first_full(found, {"c"}, group=1) is None


def test_steps_that_a_restarted_group_does_again_are_lost() -> None:
    before = [stamp(t, t, 0) for t in range(17)]
    after = [stamp(30 + n, 10 + n, 1) for n in range(20)]
    found = {"rank0-1": before, "rank1-2": before, "rank0-3": after, "rank1-4": after}
    full = first_full(found, {"rank0-1"}, group=0)
    assert full is not None
    kill = judge(found, "rank0-1", {"rank1-2"}, 0, int(16.5 * S), full, step_s=1.0)
    assert (kill.lost_steps, kill.pause_s) == (7, 0.0)
    assert kill.to_step_s == kill.to_full_s == pytest.approx(13.5)


def node_death(*, restarts: bool) -> dict[str, list[Stamp]]:
    """Steps of a second until 10.0 s, in which c dies; a and b go on at 12.0 s, and all at 20.5 s, after a pause of
    1.5 s. restarts: with new processes, which do two steps again each time, and are not told apart by their group."""

    def of(first_s: float, step: int, count: int, world: int, group: int) -> list[Stamp]:
        return [stamp(first_s + n, step + n, group, world=world) for n in range(count)]

    if restarts:
        alone, together = of(12.0, 9, 8, 2, 1), of(20.5, 15, 10, 3, 1)
        parts = {"first": of(0.0, 0, 11, 3, 1), "second": alone, "third": together}
        return {f"{name}-{part}": list(told) for name in "ab" for part, told in parts.items()} | {
            "c-first": list(parts["first"]), "c-third": list(together)
        }  # fmt: skip
    whole = [*of(0.0, 0, 11, 3, 1), *of(12.0, 11, 8, 2, 2), *of(20.5, 19, 10, 3, 3)]
    return {"a": list(whole), "b": list(whole), "c": of(0.0, 0, 11, 3, 1), "c2": of(20.5, 19, 10, 3, 3)}


@pytest.mark.parametrize("restarts", [False, True])
def test_the_death_of_a_node_is_judged_alike_with_and_without_new_processes(restarts: bool) -> None:
    told = node_death(restarts=restarts)
    gone = {"c-first"} if restarts else {"c"}
    found = judge_node(told, gone, int(10.4 * S), int(16.4 * S))
    assert found is not None
    assert [found.next_s, found.full_s, found.pause_s, found.batch_s] == pytest.approx([1.6, 4.1, 1.5, 1.5])
    assert found.step_s == pytest.approx(1.0)


def test_a_step_without_the_samples_of_one_of_three_nodes_is_two_thirds_of_a_batch() -> None:
    told = node_death(restarts=False)
    for name in "ab":
        told[name] = [one for one in told[name] if one.t_ns != 17 * S]  # the step before took two seconds
    found = judge_node(told, {"c"}, int(10.4 * S), int(16.4 * S), own_parts=True)
    assert found is not None
    assert found.pause_s == pytest.approx(2.0) and found.batch_s == pytest.approx(3.0)


@pytest.mark.parametrize("until_s", [10.2, 19.5, 24.0])
def test_the_death_of_a_node_is_not_judged_before_all_are_steady_again(until_s: float) -> None:
    told = {name: [one for one in of if one.t_ns < until_s * S] for name, of in node_death(restarts=False).items()}
    assert judge_node(told, {"c"}, int(10.4 * S), int(16.4 * S)) is None


def test_a_step_that_was_begun_by_all_before_an_agent_died_is_not_the_return_of_all() -> None:
    told = node_death(restarts=False)
    told["a"].insert(11, stamp(10.6, 11, 1, world=3))
    found = judge_node(told, {"c"}, int(10.4 * S), int(10.4 * S))
    assert found is not None and found.full_s == pytest.approx(10.1)


def test_only_the_section_between_the_markers_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nafter\n")
    report.write_section(page, "new")
    assert page.read_text() == f"# Title\n\n{report.BEGIN}\nnew\n{report.END}\n\nafter\n"


@pytest.mark.parametrize("text", ["", report.BEGIN, f"{report.END}\n{report.BEGIN}"])
def test_a_page_without_markers_is_refused_and_stays_as_it_is(tmp_path: Path, text: str) -> None:
    page = tmp_path / "performance.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="missing"):
        report.write_section(page, "new")
    assert page.read_text() == text


def test_each_section_has_markers_of_its_own(tmp_path: Path) -> None:
    page, (begin, end) = tmp_path / "performance.md", state.BENCH.markers
    page.write_text(f"{report.BEGIN}\nkills\n{report.END}\n{begin}\n{end}\n")
    report.write_section(page, "copies", state.BENCH.markers)
    assert page.read_text() == f"{report.BEGIN}\nkills\n{report.END}\n{begin}\ncopies\n{end}\n"


def test_a_row_is_missed_if_any_of_its_targets_is() -> None:
    both = Row("both", "1 s", target=f"{report.target(False, 'median <= 1 s')}, {report.target(True, 'worst <= 3 s')}")
    rows = [Row("none", "1 s"), Row("met", "1 s", target=report.target(True, "<= 1 s")), both]
    assert report.missed(rows) == [both]


def test_a_table_has_as_many_columns_in_each_line() -> None:
    lines = report.table([Row("a", "1 s"), Row("long name", "2 s", "1 to 3 s", "<= 3 s: met")]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert {line.count("|") for line in lines} == {5}
    assert all(a < b for a, b in itertools.pairwise(i for i, c in enumerate(lines[0]) if c == "|"))


def test_the_machine_is_described() -> None:
    about = report.machine()
    assert {"date", "cpu", "memory", "torch"} <= about.keys()
    assert all(about.values())


def test_shards_are_read_as_written_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    written = Shards(tmp_path, "a")
    written.write(7, 2)
    written.write(7, 3)
    with (tmp_path / "a.shards").open("ab") as file:
        file.write(b"torn")
    assert stamps.read_shards(tmp_path) == {"a": [(7, 2), (7, 3)]}


BLOCK = 4


def checkpoint_run(lengths_s: dict[int, float], drift_s: float = 0.0) -> tuple[list[float], list[dict[str, object]]]:
    """20 steps of a second and drift_s more each, but for some; checkpoints before steps 8 and 16, two parts each, done
    after half a second."""
    ended_s, journal, now_s = [], [], 0.0
    for step in range(24):
        if step in (8, 16):
            for _ in range(2):
                part = {"event": "checkpoint_part_written", "entry": f"step-{step}", "stall_ms": float(step)}
                journal.append({**part, "seconds": 0.4, "t_mono_ns": (now_s + 0.4 + step / 1000) * S})
            whole = {"event": "checkpoint_complete", "entry": f"step-{step}", "step": step}
            journal.append({**whole, "t_mono_ns": (now_s + 0.5) * S})
        now_s += lengths_s.get(step, 1.0) + drift_s * step
        ended_s.append(now_s)
    return ended_s, journal


@pytest.mark.parametrize("drift_s", [0.0, 0.25])
def test_a_checkpoint_costs_what_its_block_takes_longer_than_those_beside_it(drift_s: float) -> None:
    """The first one, before step 8, is left out; a machine that gets slower all the time costs nothing."""
    found = checkpoints.figures(*checkpoint_run({8: 9.0, 16: 1.25, 18: 1.5}, drift_s), BLOCK)
    assert found.extra_s == pytest.approx([0.75])
    assert found.cost == pytest.approx(0.75 / 30)
    assert found.stalls_ms == [16.0, 16.0]
    assert found.seconds_s == pytest.approx([0.5])
    if not drift_s:
        assert found.step_s == pytest.approx(1.0)


def test_a_checkpoint_that_outlasts_its_block_is_not_measured() -> None:
    ended_s, journal = checkpoint_run({})
    late = [{**line, "t_mono_ns": 19.5 * S} if line["event"] == "checkpoint_complete" else line for line in journal]
    with pytest.raises(RuntimeError, match="was not complete 4 steps later"):
        checkpoints.figures(ended_s[:16] + [ended_s[15] + 0.1 * n for n in range(1, 9)], late, BLOCK)


def left_node() -> list[Stamp]:
    """Steps of a second in a world of three; one leaves after a gap of 2.5 s, and those of two take 1.5 s."""
    before = [stamp(t, t) for t in range(nodes.STEADY_STEPS)]
    end_s = before[-1].t_ns / S + 2.5
    return before + [stamp(end_s + 1.5 * n, len(before) + n, 2, world=2) for n in range(nodes.STEADY_STEPS)]


def test_a_gap_is_judged_by_the_steps_before_the_change() -> None:
    steps = left_node()
    begun_ns = steps[nodes.STEADY_STEPS - 1].t_ns + S // 2
    assert nodes.judge([steps, steps], begun_ns, world=2) == Change(gap_s=2.5, step_s=1.0, to_world_s=2.0)


def test_a_world_is_steady_once_its_steps_are_the_last_of_all() -> None:
    steps = left_node()
    change_ns = steps[nodes.STEADY_STEPS - 1].t_ns
    assert nodes.is_steady([steps, steps], 2, change_ns)
    assert not nodes.is_steady([steps, steps[:-1]], 2, change_ns)
    assert not nodes.is_steady([steps, []], 2, change_ns)
    assert not nodes.is_steady([steps, steps], 2, steps[nodes.STEADY_STEPS].t_ns)
    assert nodes.is_steady([steps[: nodes.STEADY_STEPS]], 3, -1)


def test_rehearsed_shards_are_not_computed_again() -> None:
    rehearsed = [(0, 0), (0, 1)]
    shards = {"a": [*rehearsed, (0, 0), (0, 1), (1, 0)], "b": [*rehearsed, (0, 2), (1, 1)], "c": [*rehearsed]}
    assert nodes.redone(shards) == 0
    assert nodes.redone({**shards, "d": [(1, 0), (1, 1), (1, 0), (1, 1), (1, 0)]}) == 3


def measured(redone: int) -> state.Measured:
    """All targets are met, but shards were computed again."""
    one, other = Change(1.0, 1.0, 3.0), Change(2.8, 2.0, 4.0)
    return state.Measured(
        sizes=state.SMALL,
        waiting=Nodes([one], [one, other], redone),
        busy=Nodes([one], [Change(9.0, 1.0, 9.0)], redone),
        copies=Copies([4.0, 8.0], [2.0, 4.8], [1.0, 1.0]),
        replacements=Replacements([0.5, 1.0], [2.0, 6.0]),
        checkpoints=checkpoints.Figures([30.0, 20.0, 70.0], [0.6, 0.9], [1.0, 2.0], 0.1),
        snapshots=checkpoints.Figures([19.0], [0.1], [0.5], 0.1),
    )


def test_the_last_line_tells_the_worst_gap_and_all_shards() -> None:
    found = measured(redone=2)
    assert state.summary(found) == "state: join_gap=1.40 drain_redone=4 ckpt_stall_ms=30.0 ckpt_cost=0.0250"
    assert [row.target for row in report.missed(state.rows_of(found))] == ["0: MISSED"]
