"""The arguments of a call become a job."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.config import Reduction
from elastic.errors import ConfigError
from elastic.platforms.common.job_request import JOIN_WINDOW_S, JobRequest


def train_all(lr: float) -> None:
    """Never called."""


def request(**more: Any) -> JobRequest:
    return JobRequest(**{"what": train_all, "workers": (2, 5), "checkpoint_dir": "/shared", **more})


def test_a_function_becomes_a_job_that_calls_it_under_a_name_of_its_own() -> None:
    first, second = request().spec(), request().spec()
    assert first.command == ("python", "-m", "runtime.launched") and first.name.startswith("train-all-")
    assert first.name != second.name
    assert (first.min_workers, first.workers, first.timing.join_window_s) == (2, 5, JOIN_WINDOW_S)


def test_a_job_with_a_name_has_that_very_name_each_time() -> None:
    assert request(name="long").spec().name == request(name="long").spec().name == "long"
    with pytest.raises(ConfigError, match="lower-case"):
        request(name="My job").spec()


def test_a_script_keeps_its_words_and_options_are_fields_of_a_job_file() -> None:
    options = {"env": {"A": "b=c"}, "spares": 1, "timing": {"join_window_s": 3.0}}
    spec = request(what=["jobs/My Train.py", "--lr", "1"], workers=3, workers_per_node=2, options=options).spec()
    assert spec.command == ("python", "jobs/My Train.py", "--lr", "1") and spec.name.startswith("my-train-")
    assert (spec.min_workers, spec.workers, spec.env, spec.spares) == (3, 3, ("A=b=c",), 1)
    assert spec.timing.join_window_s == 3.0


@pytest.mark.parametrize(("workers", "per_node", "nodes"), [(1, 1, 1), ((2, 5), 2, 3), ((1, 8), 8, 1)])
def test_the_largest_world_says_how_many_tasks_there_are(workers: Any, per_node: int, nodes: int) -> None:
    assert request(workers=workers, workers_per_node=per_node).nodes == nodes


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"workers": 0}, "at least 1"),
        ({"workers": (3, 2)}, "at least, at most"),
        ({"workers": (1, 2, 3)}, "at least, at most"),
        ({"workers": "two"}, "at least, at most"),
        ({"workers_per_node": 0}, "workers_per_node=0"),
        ({"workers_per_node": 1.5}, "workers_per_node=1.5"),
        ({"what": "train.py", "arguments": (1,)}, "for a function"),
        ({"options": {"min_workers": 1}}, "unknown option min_workers"),
    ],
)
def test_what_cannot_be_a_job_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        request(**more)


def test_an_empty_script_is_refused() -> None:
    with pytest.raises(ConfigError, match="script is empty"):
        request(what=[]).spec()


def test_options_may_be_the_constants_of_the_package_or_their_names() -> None:
    for reduction in (Reduction.FIXED, "fixed"):
        spec = request(options={"reduction": reduction, "retain_results": False}).spec()
        assert spec.reduction is Reduction.FIXED and not spec.retain_results


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reduction": "nonsense"}, "reduction='nonsense' must be 'exact' or"),
        ({"ring": "tpc"}, "ring='tpc' must be"),
        ({"spares": "1"}, "spares='1' must be a whole number"),
        ({"checkpoint_every": 5}, "checkpoint_every=5 must be a string"),
        ({"timing": {"nonsense": 1}}, "unknown field timing.nonsense"),
        ({"timing": {"pause_limit_s": "3600"}}, "timing.pause_limit_s='3600' must be a number"),
        ({"timing": 3}, "timing must be a table"),
        ({"env": {"A": 1}}, "env.A=1 must be a string"),
        ({"reduction": "allreduce", "retain_results": False}, "retain_results=False needs"),
    ],
)
def test_an_option_of_another_type_is_refused_by_its_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        request(options=options).spec()
