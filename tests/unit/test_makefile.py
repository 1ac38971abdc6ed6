"""Each target begins from a bare checkout: what it needs is made first, and nothing outside of it is changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.model.__main__ import needs

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = sorted({*re.findall(r"^([a-z0-9-]+):.*## ", MAKEFILE, re.MULTILINE)} - {"help", "clean"})
WITH_PYTHON = [target for target in TARGETS if target != "etcd"]  # which is unpacked while pip works


def plan(target: str, checkout: Path, *options: str) -> str:
    """What make would run there; files that it asks for are empty."""
    shutil.copy(ROOT / "Makefile", checkout)
    for name in ("pyproject.toml", "constraints.txt"):
        (checkout / name).touch()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "--dry-run", target, *options],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", WITH_PYTHON)
def test_a_target_makes_its_environment_before_it_uses_it(target: str, tmp_path: Path) -> None:
    told = plan(target, tmp_path)
    made = told.index("touch .venv")
    used = re.compile(r"\.venv/bin/(python (-X faulthandler )?-m (?!pip|compileall)|ruff|mypy)").search(told)
    assert used is None or made < used.start()
    assert "apt-get install" not in told


@pytest.mark.parametrize("target", WITH_PYTHON)
def test_another_torch_has_a_venv_of_its_own(target: str, tmp_path: Path) -> None:
    told = plan(target, tmp_path, "TORCH=2.15.0", "PYTHON=python3.12")
    assert "python3.12 -m venv .venv-2.15.0" in told
    assert not re.search(r"\.venv/|-c constraints\.txt", told)


def test_each_live_test_is_in_one_part_of_test(tmp_path: Path) -> None:
    patterns = re.findall(r"tests/live/(test_\[\S+)", plan("test", tmp_path))
    assert len(patterns) == 2
    for file in (ROOT / "tests" / "live").glob("test_*.py"):
        assert sum(file.match(pattern) for pattern in patterns) == 1, file


def test_all_but_torch_and_what_it_pins_is_installed_as_in_the_constraints(tmp_path: Path) -> None:
    """A stand-in for pip keeps the constraints that it is given."""
    kept = tmp_path / "kept.txt"
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nif [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi\n'
        f'case "$*" in *" -c "*) while [ "$1" != -c ]; do shift; done; cp "$2" {kept};; esac\n'
    )
    python.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    listed = ["numpy==2.4.6", "nvidia-nccl-cu13==2.29.7", "setuptools==84.2.1", "torch==2.13.0", "torchdata==0.11.0"]
    (tmp_path / "constraints.txt").write_text("".join(f"{line}\n" for line in listed))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    for options, expected in (([], listed), (["TORCH=2.15.0"], ["numpy==2.4.6", "torchdata==0.11.0", "torch==2.15.0"])):
        command = ["make", "setup", f"PYTHON={python}", *options]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=60)
        assert kept.read_text().splitlines() == expected


@pytest.mark.parametrize(
    ("target", "package"),
    [(target, "etcd-server") for target in ("etcd", "test", "live", "test-live", "test-chaos")]
    + [("model", "spin"), ("test-live", "prometheus")],
)
def test_a_target_unpacks_what_pip_does_not_have(target: str, package: str, tmp_path: Path) -> None:
    told = plan(target, tmp_path)
    assert f"apt-get -qq download {package}" in told
    assert f"dpkg-deb -x {package}_" in told


def test_the_models_are_searched_with_the_unpacked_spin_and_say_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(SystemExit, match="C compiler, gcc, which is not installed"):
        needs()
    program(tmp_path / "bin" / "gcc")
    with pytest.raises(SystemExit, match="`make model` could not unpack it"):
        needs()
    installed = program(tmp_path / "bin" / "spin")
    assert needs() == str(installed)
    unpacked = program(tmp_path / "venv" / "spin" / "usr" / "bin" / "spin")
    assert needs() == str(unpacked)
