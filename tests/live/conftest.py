"""The run to which nothing happens, made once and compared with by all others."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elastic.records import ledger
from elastic.store.embedded import EmbeddedEtcd
from tests.live.fleet import Fleet
from tests.live.jobs import DEADLINE_S, TRAINER, Job, run_alone

BROKEN: set[Path] = set()
"""Directories of jobs of which a test has failed."""

BOUND_S = 600
"""Of a live test: more than of others, because it starts a dozen processes, and one test makes the run they are all
compared with."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        bounded = item.get_closest_marker("timeout") or item.get_closest_marker("long")  # `make test-live` has a bound
        if item.path.is_relative_to(Path(__file__).parent) and bounded is None:
            item.add_marker(pytest.mark.timeout(BOUND_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure tells what the job of several tests had to say; a job that one test makes tells it itself."""
    report = yield
    if report.when == "call" and report.failed and (job := _job_of(item)):
        report.sections.append(("the job", job.story()))
        BROKEN.add(job.dir)
    elif report.when == "call" and report.failed and isinstance(fleet := _fixture(item, "fleet"), Fleet):
        report.sections.append(("the fleet", fleet.story()))
    return report


def pytest_runtest_call(item: pytest.Item) -> None:
    """The rest of the tests of a broken job would only wait for what cannot come."""
    if (job := _job_of(item)) and job.dir in BROKEN:
        pytest.fail("an earlier test has left this job in an unknown state", pytrace=False)


def _fixture(item: pytest.Item, name: str) -> object:
    return getattr(item, "funcargs", {}).get(name)


def _job_of(item: pytest.Item) -> Job | None:
    """What the fixture `job` of its module made."""
    job = _fixture(item, "job")
    return job if isinstance(job, Job) else None


@dataclass(frozen=True)
class Quiet:
    """What scripts/trainer.py comes to in a world of one."""

    dir: Path
    steps: list[dict[str, Any]]
    digest: str
    printed: str


@pytest.fixture(scope="session")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Quiet:
    home = tmp_path_factory.mktemp("quiet")
    with Job(home, "--workers", "1", "--quiet", str(TRAINER)) as job:
        alone = run_alone(home, TRAINER)
        assert job.wait(2 * DEADLINE_S) == 0  # one worker computes what those of other jobs share
        digest = json.loads((job.dir / "result.json").read_bytes())["digest"]
        assert f"digest {digest}" in alone.splitlines(), "the script without an agent has other bits"
        return Quiet(job.dir, ledger.read(job.dir / "steps.jsonl"), digest, job.output)


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server
