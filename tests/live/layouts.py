"""Environments in which people have torch: each is made of hard links to the packages of the interpreter that tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from tests.live.jobs import ROOT

PACKAGES = ("elastic", "runtime", "chaos_tests")
PROJECTS = ("*.egg-link", "__editable__*", "_elastic_ring.pth", "elastic_ring-*")
"""This project, where it is installed in the environment of the tests."""


@dataclass(frozen=True, slots=True)
class Layout:
    """python: the interpreter. variables: of its environment. scripts: where the training scripts are copied to."""

    python: str
    scripts: Path
    variables: dict[str, str] = field(default_factory=dict)


def make(name: str, home: Path) -> Layout:
    """Make the environment of that name in an empty directory. It is quick on the file system of the interpreter's
    packages."""
    scripts = home / "project" / "scripts"
    scripts.mkdir(parents=True)
    venv = home / "venv"
    match name:
        case "plain":
            site = _venv(venv)
            _link_libraries(site)
            _link_project(site)
        case "system-site-packages":
            base = _interpreter(home / "base")
            _link_libraries(_site_of(base))
            site = _venv(venv, base, "--system-site-packages")
            _link_project(site)
        case "pth":
            site = _venv(venv)
            other = home / "other" / "packages"  # no directory of this name is known as a site directory
            _link_libraries(other)
            _link_project(site)
            (site / "other.pth").write_text(f"import site; site.addsitedir({str(other)!r})\n")
        case "target":
            target = home / "target"
            _link_libraries(target)
            _link_project(target)
            return Layout(str(_venv(venv).parents[2] / "bin" / "python"), scripts, {"PYTHONPATH": str(target)})
        case "editable":
            site = _venv(venv)
            _link_libraries(site)
            _install_editable(site, "elastic-ring", ROOT)
            _install_editable(site, "project-of-the-script", scripts.parent)
        case _:
            raise ValueError(name)
    return Layout(str(venv / "bin" / "python"), scripts, {"PYTHONPATH": ""})


def _venv(venv: Path, python: str | None = None, *options: str) -> Path:
    """Its site directory."""
    python = python or sys.executable
    subprocess.run([python, "-m", "venv", "--without-pip", *options, str(venv)], check=True)
    return _site_of(str(venv / "bin" / "python"))


def _site_of(python: str) -> Path:
    ask = "import site; print(site.getsitepackages()[0])"
    return Path(subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip())


def _interpreter(base: Path) -> str:
    """A copy of the interpreter below the environment of the tests, with no package installed."""
    real = os.path.realpath(sys.executable)
    (base / "bin").mkdir(parents=True)
    python = base / "bin" / os.path.basename(real)
    shutil.copy2(real, python)
    stdlib = Path(sysconfig.get_path("stdlib"))
    below = base / stdlib.relative_to(sys.base_prefix)
    below.mkdir(parents=True)
    for entry in stdlib.iterdir():
        if entry.name not in ("site-packages", "dist-packages"):
            (below / entry.name).symlink_to(entry)
    return str(python)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def _link_libraries(site: Path) -> None:
    source = sysconfig.get_path("purelib")
    project = shutil.ignore_patterns(*PROJECTS, *PACKAGES)
    shutil.copytree(
        source,
        site,
        copy_function=_link,
        ignore=lambda directory, names: project(directory, names) if directory == source else (),
        dirs_exist_ok=True,
    )


def _link_project(site: Path) -> None:
    """This project, as pip installs it."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, site / package, copy_function=_link)
    _record(site, "elastic-ring", "".join(f"{package}/__init__.py,,\n" for package in PACKAGES))


def _install_editable(site: Path, name: str, project: Path) -> None:
    about = _record(site, name, "")
    (about / "direct_url.json").write_text(json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}}))
    (site / f"__editable__.{name}.pth").write_text(f"{project}\n")


def _record(site: Path, name: str, record: str) -> Path:
    about = site / f"{name.replace('-', '_')}-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (about / "RECORD").write_text(record)
    return about
