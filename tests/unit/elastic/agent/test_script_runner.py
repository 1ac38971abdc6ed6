"""A script's files and what is around them, as the fork server sees them before anything of it is run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elastic.agent.worker.import_scan import Program
from elastic.errors import ColdStart
from runtime.forkserver import script_runner

BOOBY_TRAP = "raise AssertionError('this was run')\n"


def script(path: Path) -> Program:
    return Program(str(path), False, ())


def module(name: str) -> Program:
    return Program(name, True, ())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """outer.inner.train, and outer itself, which can be run too; importing any of it would fail."""
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for path in (inner.parent / "__init__.py", inner.parent / "__main__.py", inner / "__init__.py", inner / "train.py"):
        path.write_text(BOOBY_TRAP)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_packages_around_a_module_come_before_it_and_none_is_run(package: Path) -> None:
    files = [str(Path(where).relative_to(package)) for where, _ in script_runner.sources(module("outer.inner.train"))]
    assert files == ["outer/__init__.py", "outer/inner/__init__.py", "outer/inner/train.py"]


def test_of_a_package_its_main_module_is_run(package: Path) -> None:
    files = [str(Path(where).relative_to(package)) for where, _ in script_runner.sources(module("outer"))]
    assert files == ["outer/__init__.py", "outer/__main__.py"]


def test_what_is_not_there_or_no_text_is_left_to_a_cold_start(package: Path) -> None:
    with pytest.raises(ColdStart, match=r"outer\.nothing"):
        script_runner.sources(module("outer.nothing"))
    with pytest.raises(ColdStart, match="cannot be read as text"):
        script_runner.sources(script(package / "missing.py"))
    (package / "latin.py").write_bytes(b"name = '\xe9'\n")
    with pytest.raises(ColdStart, match="cannot be read as text"):
        script_runner.sources(script(package / "latin.py"))
    with pytest.raises(ColdStart, match="cannot be read as text"):
        script_runner.sources(script(package / "outer"))


def test_a_file_in_another_encoding_that_says_so_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes("# coding: latin-1\nname = 'é'\n".encode("latin-1"))
    assert script_runner.sources(script(tmp_path / "train.py")) == [
        (str(tmp_path / "train.py"), "# coding: latin-1\nname = 'é'\n")
    ]


def test_modules_of_the_library_and_of_site_packages_are_installed_and_the_users_own_are_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "mymodel.py").write_text(BOOBY_TRAP)
    (tmp_path / "colorsys.py").write_text(BOOBY_TRAP)
    asked = script(tmp_path / "train.py")
    names = ("sys", "json", "numpy", "torch", "mymodel", "colorsys", "no_such_module")
    assert [name for name in names if script_runner.is_installed(name, asked)] == ["sys", "json", "numpy", "torch"]


def test_a_script_is_looked_for_beside_the_file_that_it_is_a_link_to(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "train.py").write_text("")
    (tmp_path / "train.py").symlink_to(real / "train.py")
    assert script_runner.first_on_path(script(tmp_path / "train.py")) == [str(real)]
    assert script_runner.first_on_path(module("train")) == [os.getcwd()]


def test_nothing_of_this_is_imported_for_being_looked_at(package: Path) -> None:
    before = set(sys.modules)
    script_runner.sources(module("outer.inner.train"))
    assert not {name for name in set(sys.modules) - before if name.startswith("outer")}
