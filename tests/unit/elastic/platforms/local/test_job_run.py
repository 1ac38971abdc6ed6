"""What `elastic run` passes on to its agents."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from elastic.config import JobSpec
from elastic.platforms.local import job_run
from elastic.platforms.local.interrupts import Signals
from elastic.process import children

AGENT = "import signal, sys; signal.sigwait([signal.SIGUSR1]); sys.exit(9)"


class Etcd:
    """None; on its first start comes the signal of a batch system."""

    endpoint = ""
    starts = 0

    def __init__(self) -> None:
        self.process = subprocess.Popen(["sleep", "1000"])
        type(self).starts += 1
        if self.starts == 1:
            signal.raise_signal(signal.SIGUSR1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        children.wait_or_kill(self.process, 0.0)


@pytest.fixture
def unset() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("unset")
def test_a_notice_that_comes_before_an_agent_lives_reaches_it_and_each_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agent(self: object, *words: str) -> subprocess.Popen[bytes]:
        return children.start([sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def no_rendezvous(self: Any) -> None:
        self._rendezvous = subprocess.Popen(["sleep", "1000"])

    monkeypatch.setattr(job_run, "EmbeddedEtcd", Etcd)
    monkeypatch.setattr(job_run._Children, "_spawn_keeper", agent)
    monkeypatch.setattr(job_run._Children, "_start_rendezvous", no_rendezvous)
    spec = JobSpec(name="job", command=("train",), workers=1)
    (tmp_path / "job.json").touch()
    with Signals() as signals:
        for _ in range(2):
            outcome = job_run.attempt(spec, tmp_path, signals, notices="slurm", grace_s=None, quiet=True, as_json=False)
            assert outcome.exit_code == 9, outcome.because
