"""What elastic.keep fills objects from is in memory: the kernel sees no other file opened."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.sources import ROOT

CODE = (".py", ".pyc", ".so")
"""Of modules that are imported then."""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_nothing_is_read_from_a_disk(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    tracer = ["strace", "-f", "--seccomp-bpf", "-e", "trace=open,openat,creat,stat,newfstatat", "-o", str(log)]
    program = [sys.executable, "-m", "tests.unit.runtime.recovery.kept.opened"]
    done = subprocess.run([*tracer, *program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    memory = done.stdout.strip()
    assert memory.startswith("/dev/shm/")
    within = re.findall(r'"/elastic\.keep begins"(.*?)"/elastic\.keep ends"', log.read_text(), re.DOTALL)
    assert len(within) == 2
    opened = re.findall(r'open(?:at)?\([^"]*"([^"]+)", [^)]*\) = \d', within[1])
    assert [path for path in opened if path.startswith(memory)], "the segment is read"
    kernels = ("/proc/", "/sys/")
    others = [path for path in opened if not path.startswith((memory, *kernels)) and not path.endswith(CODE)]
    assert [path for path in others if not Path(path).is_dir()] == []
