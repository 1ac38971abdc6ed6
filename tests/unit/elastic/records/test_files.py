"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from elastic.records.files import create_atomically
from elastic.records.job_directory import lock_identity


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_created_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not links:  # as on exFAT and in some network file systems
        monkeypatch.setattr(os, "link", refuse)
    create_atomically(tmp_path / "id", b"first")
    with pytest.raises(FileExistsError):
        create_atomically(tmp_path / "id", b"second")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("id", b"first")]


def test_all_that_hold_a_lock_one_after_the_other_are_known_by_one_text(tmp_path: Path) -> None:
    here, there = tmp_path / "a.lock.id", tmp_path / "b.lock.id"
    first = lock_identity(here)
    assert lock_identity(here) == first != lock_identity(there)
    assert here.stat().st_mode & 0o777 == 0o600
