"""`import elastic` must stay light: agents and the command line never pay for torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import elastic


def loaded_by(code: str) -> set[str]:
    """Names of the modules a fresh interpreter holds after running the code."""
    listing = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return set(listing.stdout.split())


def test_import_elastic_loads_neither_torch_nor_grpc() -> None:
    assert (
        loaded_by("import elastic, elastic.config, elastic.store.base") & {"torch", "numpy", "grpc", "runtime"} == set()
    )


def test_join_and_job_come_from_the_runtime() -> None:
    from runtime.loop import job

    assert elastic.join is job.join
    assert elastic.Job is job.Job


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'jion'"):
        elastic.jion  # noqa: B018


def test_dir_names_the_lazy_ones() -> None:
    assert {"Job", "errors", "join"} <= set(dir(elastic))
