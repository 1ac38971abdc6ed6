"""How a command ends that is interrupted, that nobody reads any more, or that may not read what it needs."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elastic import cli
from elastic.cli.options import waiting
from elastic.config import JobSpec
from elastic.errors import ConfigError, ElasticError, ExitCode
from elastic.fleet.client import FleetClient
from elastic.records.job_directory import JobLock
from elastic.rendezvous.job_status import job_status
from elastic.wire.codec import to_json


def test_ctrl_c_ends_any_command_with_130_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        with waiting("train-1 goes on"):
            raise KeyboardInterrupt

    monkeypatch.setattr("elastic.cli.fleet.submit._submit", interrupted)
    assert cli.main(["submit", "job.toml", "--rendezvous", "127.0.0.1:1"]) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "elastic: not waited for any more: train-1 goes on\n"


def test_a_command_whose_reader_is_gone_ends_as_by_sigpipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "elastic.cli", "chaos", "list"], stdout=writer, stderr=subprocess.PIPE, check=False
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_command_whose_output_is_closed_does_its_work(closed: str) -> None:
    shell = f'exec "$0" -m elastic.cli chaos list {closed}'
    ended = subprocess.run(["sh", "-c", shell, sys.executable], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


INTERRUPTED_IN_AN_IMPORT = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == sys.argv[0]:
            os.kill(os.getpid(), signal.SIGINT)

sys.argv = sys.argv[1:]
sys.meta_path.insert(0, Interrupts())
from elastic.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["argparse", "elastic.cli.options", "elastic.cli.job.status"])
def test_ctrl_c_in_the_first_moments_ends_a_command_with_130_and_no_traceback(module: str) -> None:
    program = [sys.executable, "-c", INTERRUPTED_IN_AN_IMPORT, module, "status"]
    ended = subprocess.run(program, capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (ExitCode.INTERRUPTED, b"")


def test_what_the_system_refuses_is_one_paragraph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").touch()
    (tmp_path / "result.json").mkdir()  # no file: an error of the system, also for root
    assert cli.main(["status", "--job-dir", str(tmp_path)]) == ExitCode.BAD_INPUT
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith(f"elastic: {tmp_path}/result.json: Is a directory; see that")


def test_the_directory_of_a_job_of_a_fleet_is_asked_for_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_bytes(to_json(JobSpec(name="train-1", command=("train",), workers=1)))
    with pytest.raises(ConfigError, match="of a job of several machines; ask for it with --rendezvous"):
        job_status(tmp_path, wait_s=0.0)


def test_a_second_agent_with_the_same_directory_of_jobs_is_refused_also_as_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-2")
    monkeypatch.setattr("elastic.cli.fleet.daemons._metrics_of_agent", sys.exit)  # where it would begin
    with JobLock(tmp_path / "agent.lock", "", "node gpu-1, on host-1, "):  # perhaps of another machine
        words = ["agent", "--rendezvous", "127.0.0.1:1", "--jobs-dir", str(tmp_path)]
        assert cli.main(words) == ExitCode.BAD_INPUT
    said = " ".join(capsys.readouterr().err.split())
    holder = f"node gpu-1, on host-1, pid {os.getpid()}"
    assert f"in use by a running agent ({holder}); give each node a --jobs-dir of its own, on a disk of its own" in said


def test_a_lock_needs_no_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with JobLock(tmp_path / "lock", ""), pytest.raises(ConfigError, match="in use by a running agent"):
        JobLock(tmp_path / "lock", "")
    with JobLock(tmp_path / "lock", ""):
        pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chaos report absent", "absent holds no chaos run (chaos.json: No such file or directory)"),
        ("chaos run --quiet-run absent -- train.py", "absent holds no job that has ended"),
        ("checkpoints show best --dir .", "has no usable checkpoint best; there are none"),
        ("doctor --exact", "write `elastic doctor --exact train.py`"),
        ("rendezvous --etcd 127.0.0.1:1 --listen 127.0.0.1:{port}", "listen on 127.0.0.1:{port}: Address already in"),
    ],
)
def test_what_cannot_be_used_is_said_with_what_to_do(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(words.format(port=port).split()) == ExitCode.BAD_INPUT
    out, err = capfd.readouterr()
    assert said.format(port=port) in " ".join(err.split())
    assert err.startswith("elastic: ") and "\nE" not in err, "nothing of gRPC's own"
    assert out == "" and not (tmp_path / "elastic-chaos").exists()


def test_a_rendezvous_that_is_not_there_is_named_and_what_tells_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(ElasticError) as told:
        FleetClient([address], wait_s=0.0).overview()
    assert str(told.value) == (
        f"the rendezvous at {address} does not answer: Connection refused; `elastic doctor --rendezvous ...` looks at "
        "each replica"
    )
