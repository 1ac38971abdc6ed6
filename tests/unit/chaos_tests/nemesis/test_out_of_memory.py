"""What becomes of a process that does not ask for memory, on paper: no cgroup of this machine is touched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chaos_tests.nemesis import out_of_memory
from chaos_tests.nemesis.signals import Impossible


@pytest.mark.parametrize("ended", [Impossible("it asked for no memory"), KeyboardInterrupt(), SystemExit(143)])
def test_who_is_not_killed_is_back_in_its_cgroup_before_the_other_one_is_removed(
    ended: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hierarchy, home, cell = tmp_path / "memory", tmp_path / "memory" / "home", tmp_path / "memory" / "chaos-0"
    for directory in (home, cell):
        directory.mkdir(parents=True)
        (directory / "memory.limit_in_bytes").touch()

    def left(pid: int) -> int:
        assert (cell / "cgroup.procs").read_text() == str(pid)
        raise ended

    def removed(gone: Path) -> None:
        assert gone == cell and (home / "cgroup.procs").read_text() == "7"
        shutil.rmtree(gone)

    monkeypatch.setattr(out_of_memory, "_where", lambda pid, names: "/home")
    monkeypatch.setattr(out_of_memory, "_cell", lambda *_: cell)
    monkeypatch.setattr(out_of_memory, "_until_killed", left)
    monkeypatch.setattr(out_of_memory, "_remove", removed)
    with pytest.raises(type(ended)):
        out_of_memory.starve(7, tmp_path)
    assert not cell.exists() and hierarchy.exists()
