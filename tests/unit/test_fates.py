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
    assert {extra for program in programs for extra in program.extras} == set(draw.EXTRAS)
    assert {strike.act for strike in strikes} == {*draw.ACTS, *draw.WHOLE}
    assert {strike.victim for strike in strikes} == {*draw.VICTIMS, ""}
    assert {strike.event for strike in strikes if strike.when == "event"} == set(draw.EVENTS)
    assert {strike.when for strike in strikes} == {"start", "step", "after", "event"}


def test_what_excludes_each_other_is_never_in_one_script() -> None:
    for seed in SEEDS:
        extras = set(draw.draw(seed).program.extras)
        assert all(len(extras & group) <= 1 for group in draw.EXCLUSIVE), extras
