"""What docs/fleet.md tells a reader to do, done word by word: from nothing to three nodes with TLS.

Each of its machines is a network namespace with a home directory of its own. What is not as on the page: the first
three numbers of the addresses, the place of /srv and /mnt, that `scp` copies from one home to the other, as there is no
sshd, and that etcd is the one of the tests, not the system's.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos_tests.cluster import Network, sturdy_binary, why_not
from chaos_tests.support.processes import Command
from tests.live import pages
from tests.live.jobs import ROOT
from tests.live.pages import Block, alike

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why := why_not()), reason=why)]

PAGE = ROOT / "docs" / "fleet.md"
MACHINES = ("gpu-1", "gpu-2", "gpu-3")
OWN = "own"

SERVICES = ("etcd ", "elastic rendezvous ", "elastic agent ")
"""Commands that go on until they are ended."""
LOOKS = ("elastic jobs", "elastic status", "elastic doctor")
"""Commands that are given again until they say what the page shows: some of that takes a moment to come about."""

PATIENCE_S = 240.0
LOOK_S = 0.5

SCP = """#!/bin/sh
# scp -rp DIR HOST:PATH
exec cp -rp "$2" "{machines}/${{3%%:*}}/${{3#*:}}"
"""


class Machine:
    """name: as on the page. Its shells share what is exported in one of them."""

    def __init__(self, name: str, network: Network, home: Path, tools: Path) -> None:
        self.name, self.home = name, home
        self._within = network.within(name)
        python = Path(sys.executable).parent
        known = {name: value for name, value in os.environ.items() if not name.startswith(("ELASTIC_", "PYTEST_"))}
        path = f"{tools}:{os.environ['PATH']}"
        self._environment = {**known, "HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT)}
        home.mkdir(parents=True)
        checkout = home / "elastic-ring"
        checkout.mkdir()
        for each in ("docs", ".venv"):
            (checkout / each).symlink_to(python.parent if each == ".venv" else ROOT / each)

    def shell(self, text: str) -> str:
        """What these commands say; what they have exported stays."""
        after = self.home / ".environment"
        script = f"set -e\n{text}\nenv -0 > {shlex.quote(str(after))}\n"
        done = subprocess.run(
            [*self._within, "bash", "-c", script],
            cwd=self.home,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, f"{self.name}: {text}\nexit {done.returncode}\n{done.stdout}"
        self._environment = dict(one.split("=", 1) for one in after.read_text().split("\0") if one)
        return done.stdout

    def asked(self, command: str) -> str:
        """What it says, whatever its exit code."""
        words = [*self._within, "bash", "-c", command]
        done = subprocess.run(
            words, cwd=self.home, env=self._environment, stdin=subprocess.DEVNULL, text=True, timeout=PATIENCE_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.stdout

    def service(self, text: str, number: int) -> Command:
        words = [*self._within, "bash", "-c", text]
        return Command(words, self.home / f"service-{number}.log", environment=self._environment, cwd=self.home)


class Reader:
    """Follows the page with machines of its own. Context manager."""

    def __init__(self, home: Path, network: Network) -> None:
        self._services: list[Command] = []
        self._home = home
        names = (OWN, *MACHINES)
        addresses = {name: network.add(name) for name in names}
        prefix = addresses[OWN].rpartition(".")[0]
        assert [addresses[name] for name in MACHINES] == [f"{prefix}.1{number}" for number in (1, 2, 3)]
        self._prefix = prefix
        tools, machines = home / "tools", home / "machines"
        tools.mkdir()
        (home / "mnt" / "shared").mkdir(parents=True)
        (tools / "scp").write_text(SCP.format(machines=machines))
        (tools / "scp").chmod(0o755)
        etcd = sturdy_binary()
        assert etcd is not None, "`make etcd` unpacks it"
        (tools / "etcd").symlink_to(etcd)
        self.machines = {name: Machine(name, network, machines / addresses[name], tools) for name in names}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for service in reversed(self._services):  # agents before what they attend
            service.stop()

    def follow(self, block: Block) -> None:
        text = self._here(block.text)
        if block.kind == "toml":
            name = re.findall(r"`(\w+\.toml)`", block.before)[-1]
            (self.machines[OWN].home / name).write_text(text)
            return
        assert block.kind == "", block
        if block.shows_output:
            for command, shown in block.commands():
                self._compare(command, self._here(shown))
            return
        for name in MACHINES if "on each machine" in block.before else (OWN,):
            own = text.replace("NODE=gpu-1", f"NODE={name}").replace(
                f"ADDRESS={self._prefix}.11", f"ADDRESS={self._prefix}.1{name[-1]}"
            )
            if text.startswith(SERVICES):
                self._services.append(self.machines[name].service(own, len(self._services)))
            else:
                self.machines[name].shell(own)

    def _here(self, text: str) -> str:
        """As it is on this machine."""
        text = re.sub(r"\b10\.0\.0\.", f"{self._prefix}.", text)
        return re.sub(r"(?<![\w.])/(srv|mnt)/", rf"{self._home}/\1/", text)

    def _compare(self, command: str, shown: str) -> None:
        own, deadline_s = self.machines[OWN], time.monotonic() + PATIENCE_S
        print(f"$ {command}", flush=True)
        while not alike(shown, said := own.asked(command)):
            look = command.startswith(LOOKS) and time.monotonic() < deadline_s
            assert look, f"$ {command}\n{said}\nbut the page says\n{shown}\n{self.story()}"
            time.sleep(LOOK_S)  # other processes, on other machines: there is nothing to wait on

    def story(self) -> str:
        return "\n".join(f"--- {one.output_path}\n{one.output[-1500:]}" for one in self._services)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with Network() as network, Reader(tmp_path, network) as made:
        yield made


def test_a_reader_comes_from_nothing_to_three_nodes_with_tls(reader: Reader) -> None:
    blocks = pages.section(PAGE, "From nothing to three nodes")
    assert len(blocks) > 12
    for block in blocks:
        reader.follow(block)
