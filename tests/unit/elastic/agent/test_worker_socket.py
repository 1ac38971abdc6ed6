"""Where the socket of an agent's workers is, and what is left of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest

from elastic.agent.worker_socket import WorkerSocket
from elastic.records.journal import Journal


def test_the_directory_of_a_killed_agent_goes_when_the_next_one_starts_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    program = f"""
import sys, time
from pathlib import Path
from elastic.agent.worker_socket import WorkerSocket
from elastic.agent.workers import WorkerManager
print(WorkerSocket("job", Path({str(deep)!r}), "a", None, None, None).path, flush=True)
time.sleep(600)
"""
    short = Path(tempfile.mkdtemp(prefix="sock"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    environment = {**os.environ, "TMPDIR": str(short)}
    command = [sys.executable, "-P", "-c", program]
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    living = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        with killed, living:
            first, other = (Path(one.stdout.readline().strip()).parent for one in (killed, living) if one.stdout)
            assert first.parent == short and first.exists() and other.exists() and first != other
            killed.kill()
            killed.wait()
            journal = Journal(tmp_path / "journal.jsonl", "", "agent", "here")
            WorkerSocket("job", deep, "a", journal, cast(Any, None), cast(Any, None))
            journal.close()
            assert not first.exists() and other.exists()
            living.kill()
    finally:
        shutil.rmtree(short)


@pytest.mark.parametrize("name", ["absent", "x" * 100])
def test_where_there_is_no_room_for_temporary_files_the_socket_is_in_the_directory_of_the_job(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    if name != "absent":
        (tmp_path / name).mkdir()
    job_dir = Path("/job")  # which nobody makes here
    assert WorkerSocket("job", job_dir, "a", cast(Any, None), cast(Any, None), cast(Any, None)).path == "/job/a.sock"
    assert name == "absent" or not list((tmp_path / name).iterdir())
