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
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Self

import pytest

from elastic.fleet.client import FleetClient
from elastic.security.channels import ChannelFactory
from elastic.security.keyring import of_role
from elastic.security.roles import Role
from tests.live.jobs import ROOT, Job
from tests.live.test_ddp import digest

EXAMPLES = ROOT / "docs" / "examples"
EXACT, ELASTIC = (EXAMPLES / name for name in ("train_horovod.py", "train_horovod_elastic.py"))
STEPS = 24


def exact(workers: int, pause: float = 0.0, epochs: int = 3) -> tuple[str, ...]:
    options = ("--epochs", str(epochs), "--images", "1024", "--pause", str(pause))
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
        assert {line["world_size"] for line in job.steps()} == {2, 3}
        rates = set(re.findall(r"workers (\d) lr (\d\.\d+)", job.output))
        assert ("3", "0.030") in rates and rates <= {("2", "0.020"), ("3", "0.030")}
        # Batches of an epoch are counted without a gap, and none a second time.
        batches = [int(found) for found in re.findall(r"Train Epoch: 1 batch (\d+) workers", job.output)]
        assert batches == sorted(set(batches)) and batches


COUNTED = """
import sys
import time

import torch
import elastic.horovod.torch as hvd

hvd.init()
model = torch.nn.Linear(int(sys.argv[1]), 1, bias=False)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9))
calls = 0


@hvd.elastic.run
def train(state):
    global calls
    calls += 1
    hvd.allreduce(torch.tensor(1.0))  # a newcomer makes it, too
    print(f"call {calls} size {hvd.size()} batch {state.batch}", file=sys.stderr)
    while state.batch < 80 or hvd.size() < 3:
        optimizer.zero_grad()
        model(torch.ones(2, model.in_features)).pow(2).mean().backward()
        optimizer.step()
        time.sleep(0.1)
        state.batch += 1
        state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0))
"""


@pytest.mark.long
@pytest.mark.parametrize("numbers", [8, 20_000_000], ids=["8", "20 million"])
def test_the_function_begins_once_for_a_loss_and_once_for_a_newcomer(tmp_path: Path, numbers: int) -> None:
    """Also if the state takes longer to copy than a commit: the commit waits."""
    script = tmp_path / "counted.py"
    script.write_text(COUNTED)
    with Job(tmp_path, "--workers", "3", str(script), str(numbers)) as job:
        job.await_steps(8)
        job.send("local.1.0")
        assert job.wait() == 0, job.output
        said = [
            re.findall(r"call (\d) size (\d)", (job.dir / "logs" / f"{name}.log").read_text())
            for name in ("local.0.0", "local.2.0", "local.1.1")
        ]
        assert said == [[("1", "3"), ("2", "2"), ("3", "3")]] * 2 + [[("1", "3")]]


def until(what: str, reached: Callable[[], bool]) -> None:
    for _ in range(600):
        if reached():
            return
        time.sleep(0.2)
    raise AssertionError(f"not within two minutes: {what}")


class Launched:
    """`elastic horovodrun` with hosts that are listed in a file. A context manager; it and its processes are gone at
    the end."""

    def __init__(self, home: Path, hosts: str, options: str, script: Path, *arguments: str) -> None:
        self.home, self._listed = home, home / "hosts.txt"
        self.list(hosts)
        lists = ("--host-discovery-script", f"cat {shlex.quote(str(self._listed))}")
        words = ("horovodrun", *options.split(), "--checkpoint-dir", str(home / "checkpoints"), *lists)
        self.output: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "elastic.cli", *words, "python", str(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=home,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def list(self, hosts: str) -> None:
        """From now on there are these hosts."""
        fresh = self._listed.with_suffix(".new")
        fresh.write_text(hosts.replace(" ", "\n") + "\n")
        fresh.rename(self._listed)

    def client(self) -> FleetClient:
        """To be asked for once, before any other line is read."""
        words = self.until("to look at it: export ").split()
        told = dict(word.split("=", 1) for word in words if "=" in word)
        rings = ChannelFactory(of_role(Path(told["ELASTIC_CERTS"]), Role.OPERATOR))
        return FleetClient((told["ELASTIC_RENDEZVOUS"],), channels=rings)

    def until(self, said: str) -> str:
        """The next line with these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if said in line:
                return line
        raise AssertionError(f"{said!r} never came: {''.join(self.output)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.long
def test_a_host_is_added_and_another_one_removed_by_the_discovery_script(tmp_path: Path) -> None:
    with Launched(
        tmp_path, "localhost:1", "-np 1 --min-np 1 --max-np 3", ELASTIC, "--epochs", "100", "--pause", "0.1"
    ) as job:
        job.until("workers 1 lr")
        job.list("localhost:1 127.0.0.1:1")
        job.until("workers 2 lr")
        job.list("127.0.0.1:1")
        job.until("has left the job")
        job.until("workers 1 lr")
        assert not any("Epoch: 0 batch 5 " in line for line in job.output[-3:]), "it goes on where it was"


@pytest.mark.long
def test_hosts_that_come_and_go_change_no_bit_in_exact_mode(tmp_path: Path) -> None:
    with Job(tmp_path, *exact(1, epochs=8), name="quiet") as quiet:
        assert quiet.wait() == 0, quiet.output
        wanted = digest(quiet)
    options = "-np 1 --min-np 1 --max-np 2 --ranks 4"
    with Launched(tmp_path, "localhost:1", options, EXACT, *exact(1, 0.3, epochs=8)[5:]) as job:
        client = job.client()
        job.until("Train Epoch: 1 ")
        job.list("localhost:1 127.0.0.1:1")
        until("both hosts have a member", lambda: len(client.status()["members"]) == 2)
        job.list("127.0.0.1:1")
        job.until("host-0-1 has left the job")
        last = job.until("steps, digest ")
        assert last.split()[-1] == wanted and f": {8 * 8} steps" in last, "".join(job.output)
        assert job.process.wait(60) == 0


@pytest.mark.long
def test_a_host_that_has_lost_a_worker_is_left_for_good_if_that_is_wanted(tmp_path: Path) -> None:
    options = "-np 3 --min-np 1 --blacklist-hosts"
    script = (ELASTIC, "--epochs", "100", "--pause", "0.2")
    with Launched(tmp_path, "localhost:2 127.0.0.1:1", options, *script) as job:
        client = job.client()
        job.until("workers 3 lr")
        client.cordon("host-1-1", "maintenance", over=False)
        job.until("workers 2 lr")
        client.cordon("host-1-1", "", over=True)
        job.until("workers 3 lr")
        assert not any("has lost a worker" in line for line in job.output), "it was drained, and has come back"
        client.signal_worker(client.job()["job"], "host-0-1.1.0", kill=True)
        job.until("localhost has lost a worker, and is left for good")
        job.until("workers 1 lr")
        for _ in range(3):
            assert "workers 1 lr" in job.until("workers ")


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
