"""The page "from Horovod": its two examples survive deaths, exactly and with workers that come and go."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.live.jobs import ROOT, Job
from tests.live.test_ddp import digest

EXAMPLES = ROOT / "docs" / "examples"
EXACT, ELASTIC = (EXAMPLES / name for name in ("train_horovod.py", "train_horovod_elastic.py"))
STEPS = 24


def exact(workers: int, pause: float = 0.0) -> tuple[str, ...]:
    options = ("--epochs", "3", "--images", "1024", "--pause", str(pause))
    return ("--workers", str(workers), "--ranks", "4", str(EXACT), *options)


def kill_leader(job: Job, step: int) -> None:
    job.await_steps(step)
    job.send(str(job.status()["members"][0]["worker_id"]))
    job.until("full world", lambda: len(job.status()["members"]) == 3)


@pytest.mark.long
def test_the_example_ends_with_the_digest_of_the_quiet_run(tmp_path: Path) -> None:
    with Job(tmp_path, *exact(1), name="quiet") as job:
        assert job.wait() == 0, job.output
        wanted = digest(job)
    with Job(tmp_path, *exact(3, 0.2)) as job:
        for step in (3, 11):
            kill_leader(job, step)
        assert job.wait() == 0, job.output
        assert digest(job) == wanted
        assert [line["step"] for line in job.steps()] == list(range(STEPS))


@pytest.mark.long
def test_workers_come_and_go_and_nothing_goes_back(tmp_path: Path) -> None:
    options = ("--epochs", "2", "--points", "1536", "--pause", "0.1")
    with Job(tmp_path, "--workers", "3", str(ELASTIC), *options) as job:
        for step in (6, 20):
            kill_leader(job, step)
        assert job.wait() == 0, job.output
        numbers = [line["step"] for line in job.steps()]
        assert numbers == list(range(len(numbers)))
        assert "workers 2 lr 0.020" in job.output and "workers 3 lr 0.030" in job.output
        # Batches of an epoch are counted without a gap, and none a second time.
        batches = [int(found) for found in re.findall(r"Train Epoch: 1 batch (\d+) workers", job.output)]
        assert batches == sorted(set(batches)) and batches


@pytest.mark.long
def test_a_host_is_added_and_another_one_removed_by_the_discovery_script(tmp_path: Path) -> None:
    listed = tmp_path / "hosts.txt"
    listed.write_text("localhost:1\n")
    words = (
        "horovodrun",
        "-np",
        "1",
        "--min-np",
        "1",
        "--max-np",
        "3",
        "--checkpoint-dir",
        str(tmp_path / "checkpoints"),
    )
    script = ("--host-discovery-script", f"cat {shlex.quote(str(listed))}")
    command = ("python", str(ELASTIC), "--epochs", "100", "--pause", "0.1")
    process = subprocess.Popen(
        [sys.executable, "-m", "elastic.cli", *words, *script, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    output = []

    def until(said: str) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if said in line:
                return
        raise AssertionError(f"{said!r} never came: {''.join(output)}")

    try:
        until("workers 1 lr")
        listed.write_text("localhost:1\n127.0.0.1:1\n")
        until("workers 2 lr")
        listed.write_text("127.0.0.1:1\n")
        until("has left the job")
        until("workers 1 lr")
        assert not any("Epoch: 0 batch 5 " in line for line in output[-3:]), "it goes on where it was"
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


PROGRAM = """
import sys

import torch
import elastic.horovod


def train(epochs, size=8):
    import elastic.horovod.torch as hvd

    hvd.init()
    hvd.start_timeline("trace.json")
    model = torch.nn.Linear(size, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @hvd.elastic.run
    def body(state):
        while state.epoch < epochs:
            optimizer.zero_grad()
            model(torch.ones(4, size)).pow(2).mean().backward()
            optimizer.step()
            state.epoch += 1
            state.commit()
        return hvd.size(), state.epoch

    found = body(hvd.elastic.TorchState(model, optimizer, epoch=0))
    hvd.stop_timeline()
    return found


def ranks():
    import elastic.horovod.torch as hvd

    hvd.init()
    return hvd.rank(), hvd.size()


if __name__ == "__main__":
    if sys.argv[1] == "here":
        print(elastic.horovod.run(train, (5,), {"size": 6}, num_proc=2, min_num_proc=1))
    else:
        print(elastic.horovod.run(ranks, np=2, hosts="localhost:1,127.0.0.1:1", start_timeout=120))
"""


def printed(home: Path, where: str) -> list[str]:
    """What the program prints."""
    (home / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py", where],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_a_function_is_called_in_several_workers_and_writes_its_trace(tmp_path: Path) -> None:
    assert "[(2, 5), (2, 5)]" in printed(tmp_path, "here")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event["name"].startswith("generation 1") for event in events)


@pytest.mark.long
def test_a_function_is_called_on_hosts(tmp_path: Path) -> None:
    assert "[(0, 2), (1, 2)]" in printed(tmp_path, "hosts")


SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


@pytest.mark.long
@pytest.mark.skipif(not Path(SSHD).exists(), reason="there is no sshd")
def test_another_host_is_reached_by_ssh(tmp_path: Path) -> None:
    """An address of the loopback interface that is no name of this machine, with an sshd of this test."""
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    with closing(socket.create_server(("127.0.0.2", 0))) as free:
        port = free.getsockname()[1]
    settings = {
        "Port": port, "ListenAddress": "127.0.0.2", "HostKey": tmp_path / "host", "StrictModes": "no", "UsePAM": "no",
        "AuthorizedKeysFile": tmp_path / "user.pub", "PidFile": "none", "PermitRootLogin": "yes",
    }  # fmt: skip
    (tmp_path / "sshd").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    (tmp_path / "known").write_text(f"[127.0.0.2]:{port} {(tmp_path / 'host.pub').read_text()}")
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F none -o UserKnownHostsFile={tmp_path}/known "$@"\n')
    ssh.chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(tmp_path / "sshd")])
    try:
        words = ["-np", "2", "-H", "localhost:1,127.0.0.2:1", "-p", str(port), "-i", str(tmp_path / "user")]
        words += ["--start-timeout", "120", "--checkpoint-dir", str(tmp_path / "checkpoints")]
        script = ["python", str(EXACT), "--epochs", "1", "--images", "256"]
        done = subprocess.run(
            [sys.executable, "-m", "elastic.cli", "horovodrun", *words, *script],
            cwd=tmp_path,
            env={**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert "127.0.0.2 with 1 slots is host-1-1" in done.stderr and "steps, digest" in done.stderr
    finally:
        server.terminate()
        server.wait(30)
