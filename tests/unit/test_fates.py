"""What is drawn for random trainings and fates: the same for a seed, and everything there is, sooner or later."""

from __future__ import annotations

from tests.fates import draw

SEEDS = range(3000)


def test_one_seed_is_one_trial_also_as_an_argument_of_a_command() -> None:
    for seed in SEEDS[:200]:
        trial = draw.draw(seed)
        assert draw.draw(seed) == trial
        assert draw.Program.from_json(trial.program.to_json()) == trial.program


def test_everything_that_can_be_drawn_is() -> None:
    trials = [draw.draw(seed) for seed in SEEDS]
    programs = [trial.program for trial in trials]
    strikes = [strike for trial in trials for strike in trial.strikes]
    assert {program.model for program in programs} == set(draw.MODELS)
    assert {program.optimizer for program in programs} == set(draw.OPTIMIZERS)
    assert {program.source for program in programs} == set(draw.SOURCES)
    assert {program.kind for program in programs} == set(draw.KINDS)
    assert {trial.sums for trial in trials} == {(), *draw.SUMMED}
    known = {
        "steps": draw.EXTRAS,
        "outer": draw.OUTER_EXTRAS,
        "ranks": draw.RANKS_EXTRAS,
        "units": draw.UNITS_EXTRAS,
        "replayed": draw.REPLAYED_EXTRAS,
    }
    for kind, extras in known.items():
        assert {extra for program in programs if program.kind == kind for extra in program.extras} == set(extras), kind
    assert {strike.act for strike in strikes} == {*draw.ACTS, *draw.WHOLE}
    assert {strike.victim for strike in strikes} == {*draw.VICTIMS, "script", ""}
    assert {strike.event for strike in strikes if strike.when == "event"} == set(draw.EVENTS)
    assert {strike.when for strike in strikes} == {"start", "step", "after", "event"}


def test_no_trial_asks_for_what_is_refused() -> None:
    for seed in SEEDS:
        trial = draw.draw(seed)
        program, options, in_rounds = trial.program, " ".join(trial.options), trial.program.kind in draw.IN_ROUNDS
        assert all(len(group & set(program.extras)) <= 1 for group in draw.EXCLUSIVE), program.extras
        assert draw.INEXACT not in program.extras
        assert not (in_rounds and trial.sums)
        assert program.kind != "outer" or ("--verify" not in options and program.every % 2 == 0)
        assert program.every == 1 or program.kind == "outer" or program.steps % program.every == 0, "no digest"
        assert program.kind != "replayed" or trial.workers <= program.shards
        assert in_rounds or all(strike.victim != "script" for strike in trial.strikes)
