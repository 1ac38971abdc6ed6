"""What the smaller benchmarks compute and print, on figures that can be checked by hand; and how all of them end."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.bench import (
    frameworks,
    goodput,
    horovod,
    kept,
    node_deaths,
    observation,
    outer,
    ranks,
    recovery,
    report,
    state,
    step,
    storms,
    tiny,
)
from tests.bench.goodput import MIXED
from tests.bench.healthy import BASELINE, KEEPING, NULL
from tests.bench.horovod import HOROVOD, STEPS_AGAIN, death_rows, done_again
from tests.bench.kills import Kill
from tests.bench.launchers import OURS, TORCHRUN
from tests.bench.node_deaths import Outcome
from tests.bench.ranks import RANKS, STEPS
from tests.bench.report import Bench
from tests.bench.stamps import Stamp
from tests.bench.storms import QUIET
from tests.bench.tiny import DDP, DEEP, EXACT, PLAIN, TINY, Figures
from tests.unit import test_bench, test_bench_goodput, test_bench_step

# ---------------------------------------------------------------------------------------------- how all of them end


MODULES: tuple[Any, ...] = (frameworks, goodput, horovod, kept, node_deaths, observation, outer, ranks, recovery)
BENCHES: list[Bench] = [module.BENCH for module in (*MODULES, state, step, storms, tiny)]


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.markers[0])
def test_the_page_has_the_markers(bench: Bench) -> None:
    report.around_section(report.DOCUMENT, bench.markers)


MET_AND_MISSED: dict[str, tuple[Any, Any, Any]] = {
    "state": (state, test_bench.measured(0), test_bench.measured(1)),
    "goodput": (goodput, test_bench_goodput.measured(stall_s=1.0), test_bench_goodput.measured(stall_s=1.1)),
    "step": (step, test_bench_step.measured(1.0), test_bench_step.measured(1.2)),
}


@pytest.mark.parametrize(
    ("name", "missed", "words", "code"),
    [
        *((name, 0, [], 0) for name in MET_AND_MISSED),
        *((name, 1, [], 1) for name in MET_AND_MISSED),
        *((name, 1, ["--no-targets"], 0) for name in MET_AND_MISSED),
        *((name, 1, ["--small"], 0) for name in MET_AND_MISSED),
        ("goodput", 1, ["--only", MIXED], 1),
    ],
)
def test_a_missed_target_is_a_failure_unless_it_was_only_to_measure(
    name: str,
    missed: int,
    words: list[str],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, *both = MET_AND_MISSED[name]
    page, figures, found = tmp_path / "performance.md", tmp_path / "figures.json", both[missed]
    empty = "\n".join(module.BENCH.markers)
    page.write_text(empty)
    monkeypatch.setattr(report, "DOCUMENT", page)
    monkeypatch.setattr(report, "exit_on_signals", lambda: None)
    monkeypatch.setattr(module, "measure", lambda *_: found)
    assert module.main([*words, "--json", str(figures)]) == code
    assert capsys.readouterr().out.splitlines()[-1] == module.summary(found)
    assert json.loads(figures.read_text())["measured"] == json.loads(json.dumps(asdict(found)))
    assert (page.read_text() == empty) == bool({"--small", "--only"} & set(words))


# ----------------------------------------------------------------------------------------------------- make bench-ranks


def killed(of_ranks_s: float) -> dict[str, list[Kill]]:
    """Six pairs, so that the interval is from the least to the greatest."""
    return {name: [Kill("w", 0.2, to_s, 1.0, 0.3, 0)] * 6 for name, to_s in ((STEPS, 0.1), (RANKS, of_ranks_s))}


def healthy(of_ranks_s: float) -> dict[str, list[float]]:
    return {BASELINE: [1.0] * 6, NULL: [1.0] * 6, KEEPING: [0.8] * 6, STEPS: [0.8] * 6, RANKS: [of_ranks_s] * 6}


def test_ratios_are_judged_beside_those_of_steps() -> None:
    assert report.missed([*ranks.step_rows(healthy(0.83)), *ranks.kill_rows(killed(0.119))]) == []
    (missed,) = report.missed(ranks.step_rows(healthy(0.85)))
    assert (missed.what, missed.figure) == ("--ranks / job.steps()", "1.062")
    (missed,) = report.missed(ranks.kill_rows(killed(0.13)))
    assert (missed.what, missed.figure) == ("kill -> next step, --ranks / job.steps()", "1.300")


# ------------------------------------------------------------------------------------------------ make bench-frameworks


def in_place(seconds: float) -> dict[str, list[float]]:
    return {frameworks.TORCHRUN: [0.2] * 6, frameworks.AGAIN: [0.2] * 6, frameworks.IN_PLACE: [seconds] * 6}


def test_the_ratio_is_judged_and_is_the_last_figure() -> None:
    assert report.missed(frameworks.rows_of("hf", in_place(0.209))) == []
    (missed,) = report.missed(frameworks.rows_of("hf", in_place(0.22)))
    assert (missed.what, missed.figure) == ("hf: in place / torchrun", "1.100")
    assert frameworks.ratio(in_place(0.22)) == pytest.approx(1.1)


# ------------------------------------------------------------------------------------------------------ make bench-kept


def leg(samples: int, again: int = 0, rounds_s: tuple[float, ...] = ()) -> kept.KeptLeg:
    return kept.KeptLeg(10.0, samples // 8, samples, 0, again, 0.5, 0.1, 5, rounds_s=rounds_s)


def test_goodput_is_that_of_the_launchers_own_quiet_leg_and_a_median_over_runs() -> None:
    runs = [
        {
            OURS: {QUIET: leg(800), kept.DEATHS: leg(720 + 8 * n, again=1, rounds_s=(1.5 + n, 9.0))},
            TORCHRUN: {QUIET: leg(1000), kept.DEATHS: leg(500, again=30 + n)},
        }
        for n in range(3)
    ]
    assert kept.summary(runs) == f"kept: {OURS}=0.91 {TORCHRUN}=0.50"
    rows = {row.what: row for row in kept.rows_of(runs, 20.0)}
    assert rows[f"{OURS}: goodput"].figure == "0.91" and rows[f"{OURS}: goodput"].spread == "0.90 to 0.92"
    took = rows[f"{OURS}: from SIGKILL to a step of 3 new processes"]
    assert took.figure == "6.2 s" and took.spread == "1.5 to 9.0 s, 6 deaths"
    died = rows[f"{TORCHRUN}, a death each 20 s: steps/s"]
    assert died.figure == "6.20" and "30 to 32 steps again" in died.spread and "5 deaths" in died.spread


def test_a_round_is_timed_to_the_first_step_of_the_last_new_process() -> None:
    told = {
        name: [Stamp(at, 0, 1, 1, 3, 0.5), Stamp(at + 50, 1, 1, 1, 3, 0.5)]
        for name, at in (("a", 1), ("b", 2), ("c", 3), ("d", 17), ("e", 15), ("f", 19))
    }
    assert kept.rounds(told, [10, 18]) == (9e-9,), "behind the second death only one new process has stepped"


# ------------------------------------------------------------------------------------------------------ make bench-tiny


def figures(tiny_s: float, deep_s: float) -> dict[str, Figures]:
    """Six pairs, so that the interval is from the least to the greatest."""
    return {
        TINY: {PLAIN: [0.001] * 6, DDP: [0.002] * 6, EXACT: [tiny_s] * 6},
        DEEP: {PLAIN: [0.040] * 6, DDP: [0.050] * 6, EXACT: [deep_s] * 6},
    }


@pytest.mark.parametrize(
    ("tiny_s", "deep_s", "missed", "line"),
    [
        (0.0024, 0.0512, [], "tiny=1.200 tensors300=1.20"),
        (0.0030, 0.0512, [f"{TINY}: {EXACT} / {DDP}"], "tiny=1.500 tensors300=1.20"),
        (0.0024, 0.0520, [f"{DEEP}: {EXACT} - {DDP}"], "tiny=1.200 tensors300=2.00"),
    ],
)
def test_a_shard_and_a_tensor_are_judged_beside_ddp(tiny_s: float, deep_s: float, missed: list[str], line: str) -> None:
    rows = tiny.rows_of(figures(tiny_s, deep_s))
    assert [row.what for row in report.missed(rows)] == missed
    assert tiny.summary(rows) == line


@pytest.mark.long
def test_all_three_train_the_same() -> None:
    assert tiny.main(["--small"]) == 0


# --------------------------------------------------------------------------------------------------- make bench-horovod


def stamps(*steps: int) -> list[Stamp]:
    return [Stamp(number, step, 1, 1, 3, 0.5) for number, step in enumerate(steps)]


def test_a_step_that_a_worker_applies_twice_is_done_again() -> None:
    assert done_again({"a": stamps(0, 1, 2), "b": stamps(1, 2, 3)}) == 0
    assert done_again({"a": stamps(0, 1, 1, 2), "b": stamps(2, 1, 2)}) == 2


def test_the_targets_are_missed_by_slow_deaths_repeated_steps_and_slow_steps() -> None:
    fast, slow = Outcome(0.3, 5.0, 1.0, 1.0, 0.2), Outcome(0.7, 5.0, 1.0, 1.0, 0.2)
    assert [row.target for row in death_rows([fast], 0) if row.target] == ["median <= 0.5 s: met", "0: met"]
    assert [row.target for row in death_rows([slow], 4) if row.target] == ["median <= 0.5 s: MISSED", "0: MISSED"]
    steps = [0.1] * 12
    for factor, said in ((1.0, "met"), (1.2, "MISSED")):
        rows = horovod.step_rows({horovod.STEPS: steps, STEPS_AGAIN: steps, HOROVOD: [factor * one for one in steps]})
        assert rows[-1].target.endswith(said)
