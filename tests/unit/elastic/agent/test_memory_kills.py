"""Counters of the kernel, from which an agent knows that a worker was ended for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.agent.process import memory_kills
from elastic.agent.process.memory_kills import MemoryKills

BYTES = 2_000_000_000


class Kernel:
    """Its files. version: of the memory cgroups, in which a process is two deep; 0: there are none."""

    def __init__(self, home: Path, version: int) -> None:
        self.proc, self.cgroups = home / "proc", home / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text("MemTotal:       16000000 kB\nMemFree: 1 kB\n")
        lines = {0: "3:cpu:/\n", 1: "4:memory:/pod/own\n0::/\n", 2: "0::/pod/own\n"}
        (self.proc / "self" / "cgroup").write_text(lines[version])
        self.version = version
        self.pod = self.cgroups / ("memory/pod" if version == 1 else "pod")
        (self.pod / "own").mkdir(parents=True)
        limit = "memory.limit_in_bytes" if version == 1 else "memory.max"
        (self.pod / limit).write_text(f"{BYTES}\n")
        (self.pod / "own" / limit).write_text("9223372036854771712\n" if version == 1 else "max\n")
        self.counts(0, 0, 0)

    def counts(self, machine: int, pod: int, own: int) -> None:
        (self.proc / "vmstat").write_text(f"pgfault 7\noom_kill {machine}\n")
        for directory, count in ((self.pod, pod), (self.pod / "own", own)):
            file = "memory.oom_control" if self.version == 1 else "memory.events"
            (directory / file).write_text(f"oom 9\noom_kill {count}\noom_group_kill 9\n")

    def watched(self) -> MemoryKills:
        return MemoryKills(self.proc, self.cgroups)


@pytest.mark.parametrize("version", [1, 2])
def test_the_innermost_limit_that_was_reached_is_named(tmp_path: Path, version: int) -> None:
    kernel = Kernel(tmp_path, version)
    kills = kernel.watched()
    assert kills.take() == ""
    kernel.counts(1, 1, 0)
    assert kills.take() == "no memory was left within the limit of its cgroup, 2.0 GB"
    assert kills.take() == "", "it is told once"
    kernel.counts(2, 2, 1)
    assert kills.take() == "no memory was left within the limit of its cgroup, 2.0 GB", "of the one around it"
    kernel.counts(3, 2, 1)
    assert kills.take().endswith("probably this one")
    (kernel.pod / ("memory.limit_in_bytes" if version == 1 else "memory.max")).unlink()
    kernel.counts(4, 3, 2)
    assert kills.take() == "no memory was left on the machine"


def test_two_that_end_at_once_are_both_told_of(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, 0)
    kills = kernel.watched()
    kernel.counts(2, 0, 0)
    assert kills.take() and kills.take() and not kills.take()


def test_what_was_counted_long_before_is_about_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("elastic.agent.process.memory_kills.time.monotonic", lambda: now_s[0])
    kernel = Kernel(tmp_path, 2)
    kills = kernel.watched()
    kernel.counts(1, 0, 0)
    kills.note()
    now_s[0] += memory_kills.SOON_S + 0.1
    assert kills.take() == ""


def test_a_machine_that_counts_nothing_tells_nothing(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path, tmp_path).take() == ""
