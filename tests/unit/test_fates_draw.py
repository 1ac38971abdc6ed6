"""What the random trials of tests/fates draw: everything that they name, and no script that would be refused."""

from __future__ import annotations

from tests.fates import draw

TRIALS = [draw.draw(seed) for seed in range(1500)]


def test_each_kind_of_script_each_feature_and_each_option_is_drawn() -> None:
    assert {trial.program.kind for trial in TRIALS} == set(draw.KINDS)
    assert {trial.sums for trial in TRIALS} == {(), *draw.SUMMED}
    known = {
        "steps": draw.EXTRAS,
        "outer": draw.OUTER_EXTRAS,
        "ranks": draw.RANKS_EXTRAS,
        "units": draw.UNITS_EXTRAS,
        "replayed": draw.REPLAYED_EXTRAS,
    }
    for kind, extras in known.items():
        drawn = {extra for trial in TRIALS if trial.program.kind == kind for extra in trial.program.extras}
        assert drawn == set(extras), kind


def test_no_trial_asks_for_what_is_refused() -> None:
    for trial in TRIALS:
        program, options = trial.program, " ".join(trial.options)
        assert all(len(group & set(program.extras)) <= 1 for group in draw.EXCLUSIVE), trial
        assert draw.INEXACT not in program.extras
        assert program.kind not in draw.IN_ROUNDS or not trial.sums
        assert program.kind != "outer" or ("--verify" not in options and program.every % 2 == 0)
        assert program.every == 1 or program.kind == "outer" or program.steps % program.every == 0, "no digest"
        assert program.kind != "replayed" or trial.workers <= program.shards
        assert draw.Program.from_json(program.to_json()) == program
        assert all(strike.victim != "script" for strike in trial.strikes) or program.kind in draw.IN_ROUNDS


def test_one_seed_is_one_trial() -> None:
    assert [draw.draw(seed) for seed in range(20)] == TRIALS[:20]
