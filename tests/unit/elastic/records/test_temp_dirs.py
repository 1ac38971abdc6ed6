"""Directories that go with their process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from elastic.records import temp_dirs
from elastic.records.temp_dirs import TempDirectory

PROGRAM = """
import sys
from pathlib import Path
from elastic.records.temp_dirs import TempDirectory
print(TempDirectory(Path(sys.argv[1]), sys.argv[2]).path, flush=True)
sys.stdin.read()
"""


def test_one_goes_at_the_word_of_its_process_or_after_its_death_and_no_other_does(tmp_path: Path) -> None:
    strangers = [tmp_path / name for name in ("mine-", "mine-notes", f"other-{0:016x}")]
    for path in strangers:
        path.mkdir()
    own = TempDirectory(tmp_path, "mine-")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "mine-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        (left / "content").write_text("content")
        temp_dirs.sweep(tmp_path, "mine-")
        assert {*strangers, own.path, left} == set(tmp_path.iterdir())
        process.send_signal(signal.SIGKILL)
    temp_dirs.sweep(tmp_path, "mine-")
    assert {*strangers, own.path} == set(tmp_path.iterdir())
    own.remove()
    assert set(strangers) == set(tmp_path.iterdir())
