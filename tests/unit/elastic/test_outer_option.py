"""--outer: what it says, and that a wrong word is named before anything starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.config import JobSpec, OuterKind, OuterOption, job_from_toml
from elastic.errors import ConfigError

JOB = JobSpec(name="gpt", command=("python", "train.py"), workers=3)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", None),
        ("diloco:H=50", OuterOption(OuterKind.DILOCO, 50, lr=0.7, momentum=0.9, moments="own")),
        ("diloco:momentum=0,H=1,lr=1e-1", OuterOption(OuterKind.DILOCO, 1, lr=0.1, momentum=0.0)),
        ("diloco:H=8,moments=reset", OuterOption(OuterKind.DILOCO, 8, moments="reset")),
        ("localsgd:H=25", OuterOption(OuterKind.LOCAL_SGD, 25)),
        ("localsgd:H=25,moments=mean", OuterOption(OuterKind.LOCAL_SGD, 25, moments="mean")),
    ],
)
def test_the_words_that_there_are(text: str, meant: OuterOption | None) -> None:
    assert OuterOption.parse(text) == meant
    assert replace(JOB, outer=text).outer == text
    assert meant is None or OuterOption.parse(str(meant)) == meant


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("diloco", "H=, the number of inner steps"),
        ("diloco:", "H=, the number of inner steps"),
        ("diloco:lr=0.7", "H=, the number of inner steps"),
        ("H=50", "'H=50' is neither diloco nor localsgd"),
        ("DiLoCo:H=50", "'DiLoCo' is neither"),
        (" diloco:H=50", "' diloco' is neither"),
        ("diloco:H=0", "H='0' is no whole number"),
        ("diloco:H=-1", "H='-1' is no whole number"),
        ("diloco:H=2.5", "H='2.5' is no whole number"),
        ("diloco:H=", "H='' is no whole number"),
        ("diloco:H=²", "H='²' is no whole number"),
        (f"diloco:H={'9' * 5000}", "is no whole number"),
        ("diloco:H=5,", "'' is none of H=, lr=, momentum=, moments="),
        ("diloco:H=5,rate=1", "'rate=1' is none of H=, lr=, momentum=, moments="),
        ("diloco:H=5,lr", "'lr' is none of"),
        ("diloco:H=5,H=6", "H= is given twice"),
        ("diloco:H=5,lr=0", "lr='0' is no number above 0"),
        ("diloco:H=5,lr=nan", "lr='nan' is no number above 0"),
        ("diloco:H=5,lr=inf", "lr='inf' is no number above 0"),
        ("diloco:H=5,momentum=1", "momentum='1' is no number from 0 to below 1"),
        ("diloco:H=5,momentum=x", "momentum='x' is no number from 0 to below 1"),
        ("diloco:H=5,moments=all", "moments='all' is none of own, mean, reset"),
        ("localsgd:H=5,lr=1", "'lr=1' is none of H=, moments="),
    ],
)
def test_a_wrong_part_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(JOB, outer=text)
    assert named in str(caught.value)
    assert str(caught.value).startswith("outer=") and len(str(caught.value)) < 600


@pytest.mark.parametrize(("other", "said"), [({"ranks": 4}, "--ranks"), ({"restart": True}, "--restart")])
def test_a_script_whose_ranks_step_together_has_no_replicas(other: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=f"in a script of {said} all ranks make each step together"):
        replace(JOB, outer="diloco:H=50", **other)  # type: ignore[arg-type]


def test_a_job_file_has_it_too_and_names_the_line() -> None:
    text = 'name = "gpt"\ncommand = ["python", "train.py"]\nworkers = 3\n'
    assert job_from_toml(f'{text}outer = "localsgd:H=5"', "job.toml").outer == "localsgd:H=5"
    with pytest.raises(ConfigError, match=r"job.toml, line 4: outer='adam:H=5': 'adam' is neither"):
        job_from_toml(f'{text}outer = "adam:H=5"', "job.toml")
