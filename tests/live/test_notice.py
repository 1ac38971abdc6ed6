"""A loop asks whether its node has to go: what it hears is true of its own node, while it is true."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic import cli
from elastic.errors import ExitCode
from elastic.store.embedded import EmbeddedEtcd
from tests.live.jobs import SCRIPTS, Job
from tests.live.spread import Spread
from tests.live.test_last_node import give_notice

ASKING = SCRIPTS / "asking.py"


def answers(gates: Path, worker_id: str) -> list[Any]:
    path = gates / f"asked.{worker_id}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ends_with(gates: Path, *wanted: Any) -> Callable[[], bool]:
    """Whether both workers of a job of one machine were last given these answers, but for the seconds."""

    def reached() -> bool:
        found = [answers(gates, worker_id) for worker_id in ("local.0.0", "local.1.0")]
        return all([one and one[:3] for one in there] == list(wanted) for there in found)

    return reached


@pytest.mark.parametrize("words", [("asking.py",), ("--ranks", "2", "asking_ranks.py")], ids=["steps", "ranks"])
def test_a_notice_is_there_while_it_stands(tmp_path: Path, words: tuple[str, ...]) -> None:
    """All nodes have to go, so training goes on until shortly before the end."""
    notice = tmp_path / "notice"
    options = ("--workers", "2", "--notices", f"file:{notice}", *words[:-1])
    with Job(tmp_path, *options, str(SCRIPTS / words[-1])) as job:
        job.pace(0.01)
        job.await_world(2)
        job.until("no notice", ends_with(job.gates, None))
        give_notice(job, 300.0)
        said = ["reclaim", "rack 7 is switched off", f"file {notice}"]
        job.until("the notice", ends_with(job.gates, None, said))
        for worker_id in ("local.0.0", "local.1.0"):
            assert 200 <= answers(job.gates, worker_id)[-1][3] <= 300
        notice.unlink()
        job.until("it was taken back", ends_with(job.gates, None, said, None))
        job.await_steps(len(job.steps()) + 5)


def test_only_the_workers_of_the_node_that_goes_have_a_notice(tmp_path: Path) -> None:
    """They have it before they leave; a newcomer that comes when it is taken back has none."""
    command = (sys.executable, str(ASKING))
    with EmbeddedEtcd() as etcd, Spread(tmp_path, etcd, "asking", command=command, max_workers=2) as job:
        job.pace(0.02)
        job.rendezvous()
        job.agent("a")
        job.agent("b")
        job.await_members("a.0.0", "b.0.0")
        (job.gates / "noticed").write_text("b.0.0")
        words = ["drain", "--job-dir", str(job.dir), "--node", "b"]
        assert cli.main([*words, "--budget", "90"]) == ExitCode.DONE
        first, then = answers(job.gates, "b.0.0")
        assert (first, then[:3]) == (None, ["asked", "asked for by `elastic drain`", "operator"])
        assert 0 < then[3] <= 90
        assert cli.main([*words, "--cancel"]) == ExitCode.DONE
        job.await_members("a.0.0", "b.0.1")
        (job.gates / "stop").touch()
        assert job.await_result()["exit_code"] == 0
        assert answers(job.gates, "a.0.0") == answers(job.gates, "b.0.1") == [None]
