from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from elastic.config import Compression, JobSpec, Overlap, Reduction, RingKind, Timing, check_name, job_from_toml
from elastic.errors import ConfigError

JOB = JobSpec(name="gpt", command=("python", "train.py"), workers=3)

MINIMAL = 'name = "gpt"\ncommand = ["python", "train.py"]\nworkers = 3\n'


def test_defaults_hold_every_relation() -> None:
    timing = Timing()
    assert (timing.beat_s, timing.suspect_s, timing.evict_s) == (0.25, 1.0, 2.5)
    assert (timing.orphan_limit_s, timing.orphan_margin_s) == (600, 30)


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        JOB.workers = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("suspect_s", 0.7, "timing.suspect_s=0.7 must be >= 3 \\* beat_s; set it to 0.75"),
        ("evict_s", 1.0, "timing.evict_s=1.0 must be > suspect_s; set it to 2.5"),
        ("control_silence_s", 2.5, "timing.control_silence_s=2.5 must be > evict_s; set it to 10"),
        ("progress_s", 1.0, "timing.progress_s=1.0 must be > evict_s"),
        ("fence_grace_s", 2.0, "timing.fence_grace_s=2.0 must be > evict_s"),
        ("orphan_limit_s", 60.0, "timing.orphan_limit_s=60.0 must be > control_silence_s; set it to 600"),
        ("orphan_margin_s", 5.0, "timing.orphan_margin_s=5.0 must be >= max.*set it to 6"),
        ("stop_grace_s", 5.0, "timing.stop_grace_s=5.0 must be < 5; set it to 3"),
        ("backoff_max_s", 0.1, "timing.backoff_max_s=0.1 must be >= backoff_min_s; set it to 0.5"),
        ("beat_s", 0.0, "timing.beat_s=0.0 must be a positive number of seconds"),
        ("build_s", float("nan"), "timing.build_s=nan must be a positive number of seconds"),
        ("join_window_s", float("inf"), "timing.join_window_s=inf must be a positive"),
    ],
)
def test_a_broken_relation_names_field_value_and_fix(name: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(Timing(), **{name: value})


@pytest.mark.parametrize("name", ["suspect_s", "evict_s", "control_silence_s", "orphan_limit_s", "orphan_margin_s"])
def test_the_fix_that_a_message_offers_is_accepted(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(Timing(), **{name: 0.3})
    fix = float(str(caught.value).rpartition(" ")[2])
    assert getattr(replace(Timing(), **{name: fix}), name) == fix


def test_few_agents_leave_the_timing_as_it_is() -> None:
    assert Timing().scaled(500) == Timing()


@pytest.mark.parametrize(
    ("n_agents", "beats_a_second"), [(501, 2000), (750, 1333), (1000, 1000), (10_000, 1000), (1_000_000, 1000)]
)
def test_many_agents_beat_less_often_and_keep_the_proportions(n_agents: int, beats_a_second: int) -> None:
    """1000 beats a second in all, however many agents; construction checks every other relation again."""
    timing = Timing().scaled(n_agents)
    assert n_agents / timing.beat_s == pytest.approx(beats_a_second, rel=0.01)
    assert timing.evict_s == pytest.approx(n_agents / 200)
    assert timing.suspect_s >= 3 * timing.beat_s * (1 - 1e-9)
    assert timing.evict_s >= 5 * timing.beat_s * (1 - 1e-9)


def test_beats_that_evict_s_hardly_leaves_time_for_become_no_rarer_than_evict_s_longer() -> None:
    plain = Timing(beat_s=0.5, suspect_s=1.5, evict_s=2.0)
    assert plain.scaled(5000).beat_s == pytest.approx(2.5)


def test_scaling_never_breaks_a_relation_by_rounding() -> None:
    tight = Timing(beat_s=0.1, suspect_s=3 * 0.1)
    for n_agents in range(200, 2000, 7):
        tight.scaled(n_agents)


@pytest.mark.parametrize("name", ["gpt", "a", "run-7", "0", "a" * 63])
def test_a_good_name_is_returned(name: str) -> None:
    assert check_name("name", name) == name


@pytest.mark.parametrize("name", ["", "GPT", "a.b", "a/b", "-a", "a-", "a" * 64, "ä", "a\n", ".."])
def test_a_bad_name_is_refused_with_one_that_would_do(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_name("node", name)
    assert str(caught.value).startswith(f"node={name!r} must be")
    offered = str(caught.value).rpartition("example ")[2].strip("'")
    assert check_name("node", offered) == offered


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 2, "min_workers": 3}, "workers=2 must be >= min_workers=3; raise workers or lower min_workers"),
        ({"min_workers": 0}, "min_workers=0 must be >= 1"),
        ({"max_workers": 2}, "max_workers=2 must be >= workers=3"),
        ({"spares": -1}, "spares=-1 must be >= 0"),
        ({"spares": 1, "replace": False}, "replace=False forbids it"),
        ({"restart": True, "ranks": 2}, "ranks=2: 3 workers need a rank each; raise ranks"),
        ({"threads": 0}, "threads=0 must be >= 1"),
        ({"max_restarts": -1}, "max_restarts=-1 must be >= 0"),
        ({"command": ()}, "command is empty"),
        ({"command": ("",)}, "command is empty"),
        ({"command": ("python", "a\0b")}, "NUL"),
        (
            {"compression": Compression.BF16, "reduction": Reduction.FIXED64},
            "compression='bf16' rounds each sum of two, and reduction='fixed64' takes sums in any order; use "
            "reduction='exact', or leave one out",
        ),
        ({"name": "My Job"}, "name='My Job' must be .* for example 'my-job'"),
    ],
)
def test_an_impossible_job_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(JOB, **change)  # type: ignore[arg-type]


def test_the_limit_is_the_number_of_workers_unless_given() -> None:
    assert JOB.workers_limit == 3
    assert replace(JOB, max_workers=8).workers_limit == 8


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({}, "in place: the shards of a lost worker go to the others, and no bit changes"),
        (
            {"restart": True, "ranks": 4},
            "restarted: each change of the workers ends the script on all of them and starts it again, always with 4 "
            "ranks; only what the script saves itself, or gives to elastic.keep, is kept",
        ),
        ({"ranks": 1}, "in place, 1 rank: the ranks of a lost worker go to the others, and no bit changes"),
        (
            {"ranks": 8, "reduction": Reduction.ALLREDUCE},
            "in place, 8 ranks: the ranks of a lost worker go to the others, and the last bits of a sum may change",
        ),
        (
            {"restart": True},
            "restarted: each change of the workers ends the script on all of them and starts it again; only what the "
            "script saves itself, or gives to elastic.keep, is kept",
        ),
    ],
)
def test_a_job_says_what_survives_a_change_of_its_workers(chosen: dict[str, Any], said: str) -> None:
    assert replace(JOB, **chosen).level == said


def test_a_short_document_gives_the_defaults() -> None:
    assert job_from_toml(MINIMAL, "job.toml") == JOB


def test_spares_can_be_set_from_toml_where_lost_workers_are_replaced() -> None:
    assert job_from_toml(f"{MINIMAL}\nspares = 1", "job.toml") == replace(JOB, spares=1)


def test_every_field_can_be_set_from_toml() -> None:
    text = """
        name = "run-7"
        command = ["python", "-m", "pkg"]
        workers = 4
        min_workers = 2
        max_workers = 8
        reduction = "allreduce"
        ring = "tcp"
        threads = 2
        replace = false
        max_restarts = 0
        [timing]
        beat_s = 1
        suspect_s = 4.0
        evict_s = 9.0
    """
    timing = Timing(beat_s=1.0, suspect_s=4.0, evict_s=9.0)
    assert job_from_toml(text, "job.toml") == JobSpec(
        name="run-7",
        command=("python", "-m", "pkg"),
        workers=4,
        min_workers=2,
        max_workers=8,
        reduction=Reduction.ALLREDUCE,
        ring=RingKind.TCP,
        threads=2,
        replace=False,
        max_restarts=0,
        timing=timing,
    )


def test_a_job_file_can_say_how_gradients_are_summed() -> None:
    assert job_from_toml(MINIMAL + 'compression = "bf16"', "job.toml").compression is Compression.BF16
    job = job_from_toml(MINIMAL + 'reduction = "fixed64"\noverlap = "on"', "job.toml")
    assert (job.reduction, job.overlap) == (Reduction.FIXED64, Overlap.ON)


def test_results_are_computed_again_only_where_that_gives_the_same_bits() -> None:
    assert not job_from_toml(MINIMAL + "retain_results = false", "job.toml").retain_results
    with pytest.raises(ConfigError, match="retain_results=False needs reduction='exact' or 'fixed', not 'allreduce'"):
        job_from_toml(MINIMAL + 'retain_results = false\nreduction = "allreduce"', "job.toml")


def test_the_environment_of_workers_is_a_table() -> None:
    job = job_from_toml(f'{MINIMAL}labels = ["gpu=h100"]\n[env]\nLR = "3e-4"\nEMPTY = ""', "job.toml")
    assert (job.env, job.labels) == (("LR=3e-4", "EMPTY="), ("gpu=h100",))
    assert job.environment == {"LR": "3e-4", "EMPTY": ""}


def test_every_field_of_timing_can_be_set_from_toml() -> None:
    lines = "\n".join(f"{spec.name} = {getattr(Timing(), spec.name)}" for spec in fields(Timing))
    assert job_from_toml(f"{MINIMAL}[timing]\n{lines}", "job.toml") == JOB


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = \nworkers = 1", "job.toml: not valid TOML: .*line 1"),
        ('name = "gpt"\nworkers = 1', "job.toml: command is missing"),
        (MINIMAL + "wokers = 2", "job.toml, line 4: unknown field wokers; did you mean workers?"),
        (MINIMAL + "[timing]\nbeat = 1", "job.toml, line 5: unknown field timing.beat; did you mean timing.beat_s?"),
        (MINIMAL + "zzz = 2", "job.toml, line 4: unknown field zzz; known are .*workers"),
        (MINIMAL + "timing = 3", "job.toml, line 4: timing must be a table"),
        (MINIMAL + "threads = true", "job.toml, line 4: threads=True must be a whole number"),
        (MINIMAL + "threads = 1.5", "job.toml, line 4: threads=1.5 must be a whole number"),
        (MINIMAL + "replace = 1", "job.toml, line 4: replace=1 must be true or false"),
        (MINIMAL + 'reduction = "fast"', "job.toml, line 4: reduction='fast' must be 'exact' or 'allreduce'"),
        (
            MINIMAL + 'compression = "topk"',
            "job.toml, line 4: compression='topk' must be 'none' or 'bf16' or 'fp16' or 'int8'",
        ),
        (MINIMAL + 'overlap = "yes"', "job.toml, line 4: overlap='yes' must be 'auto' or 'on' or 'off'"),
        (MINIMAL + "ring = 3", "job.toml, line 4: ring=3 must be 'tcp' or 'nccl' or 'mpi'"),
        (MINIMAL + '[timing]\nbeat_s = "1"', "job.toml, line 5: timing.beat_s='1' must be a number of seconds"),
        (MINIMAL + "[timing]\nbeat_s = inf", "job.toml, line 5: timing.beat_s=inf must be a positive"),
        (MINIMAL + "min_workers = 4", "job.toml, line 3: workers=3 must be >= min_workers=4"),
        (
            'name = "gpt"\ncommand = "python"\nworkers = 1',
            "job.toml, line 2: command='python' must be a list of strings",
        ),
        ('name = "gpt"\ncommand = [1]\nworkers = 1', r"job.toml, line 2: command=\[1\] must be a list of strings"),
        ('name = 3\ncommand = ["a"]\nworkers = 1', "job.toml, line 1: name=3 must be a string"),
        (MINIMAL + "[env]\nLR = 3", "job.toml, line 5: env.LR=3 must be a string"),
        (MINIMAL + "env = 3", r"job.toml, line 4: env must be a table; write \[env\]"),
        (MINIMAL + '[env]\n"A B" = "1"', "job.toml, line 4: env: 'A B' cannot be the name"),
        (MINIMAL + 'labels = ["gpu"]', "job.toml, line 4: labels: 'gpu' must be NAME=VALUE"),
        (MINIMAL + 'labels = ["a=1", "a=2"]', "job.toml, line 4: labels: a is given twice"),
        ('directory = """\nthreads = 1\n"""\n' + MINIMAL + "threads = 0", "job.toml, line 7: threads=0 must be >= 1"),
        ("[timing]\nthreads = 1", "job.toml: name is missing"),
    ],
)
def test_a_wrong_document_is_refused_with_file_and_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job_from_toml(text, "job.toml")
