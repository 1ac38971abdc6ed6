"""Which files are the script's: in each layout in which people install torch, and with libraries in every place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from runtime import script_files

ROOT = Path(__file__).resolve().parents[3]
ASK = """
import importlib, json, sys
sys.path[:0] = {paths!r}
from runtime.script_files import is_installed, is_library
for module in {imported!r}:
    importlib.import_module(module)
print(json.dumps([[is_library(file), is_installed(file)] for file in {files!r}]))
"""


def ask(script: Path, *files: Path, paths: tuple[Path, ...] = (), imported: tuple[str, ...] = ()) -> list[list[bool]]:
    """[is_library, is_installed] of each file, in a program at `script` whose sys.path begins with `paths`."""
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(ASK.format(paths=[*map(str, paths)], imported=imported, files=[*map(str, files)]))
    done = subprocess.run(
        [sys.executable, str(script)], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[bool]] = json.loads(done.stdout)
    return answers


LIBRARY, SCRIPTS, EDITABLE = [True, True], [False, False], [True, False]


def install(directory: Path, name: str, *, project: Path | None = None) -> Path:
    """A distribution of one package, as pip leaves it; project: in editable mode. Returns a file of the package."""
    about = directory / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    record = f"{name}-1.0.dist-info/METADATA,,\n"
    if project is None:
        package = directory / name
        record += f"{name}/__init__.py,,\n"
    else:
        package = project / "src" / name
        (about / "direct_url.json").write_text(json.dumps({"url": project.as_uri(), "dir_info": {"editable": True}}))
        (directory / f"{name}.pth").write_text(f"{project}/src\n")
    (about / "RECORD").write_text(record)
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    return package / "__init__.py"


def test_the_scripts_directory_and_what_lies_elsewhere_without_a_distribution_are_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "project" / "train.py"
    beside, below, elsewhere = script.parent / "model.py", script.parent / "lib" / "a.py", tmp_path / "code" / "b.py"
    assert ask(script, script, beside, below, elsewhere, paths=(elsewhere.parent,)) == [SCRIPTS] * 4


def test_site_directories_of_any_environment_hold_libraries(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    files = [
        tmp_path / "venv" / "lib" / "python3.11" / "site-packages" / "torch" / "_tensor.py",  # within the script's
        tmp_path / "usr" / "lib" / "python3" / "dist-packages" / "yaml" / "__init__.py",
        Path(sysconfig.get_path("stdlib")) / "json" / "__init__.py",
        Path(sysconfig.get_path("purelib")) / "a.py",
    ]
    assert ask(script, *files) == [LIBRARY] * 4


def test_a_link_to_a_site_directory_holds_libraries_too(tmp_path: Path) -> None:
    (tmp_path / "env" / "site-packages" / "one").mkdir(parents=True)
    (tmp_path / "libs").symlink_to(tmp_path / "env" / "site-packages")
    assert ask(tmp_path / "train.py", tmp_path / "libs" / "one" / "a.py") == [LIBRARY]


def test_what_pip_has_installed_into_any_directory_of_the_path_is_a_library(tmp_path: Path) -> None:
    library = install(tmp_path / "target", "one")
    assert ask(tmp_path / "project" / "train.py", library, paths=(tmp_path / "target",)) == [LIBRARY]


def test_libraries_that_are_shipped_in_the_scripts_own_directory_are_told_from_it_by_their_records(
    tmp_path: Path,
) -> None:
    library = install(tmp_path, "one")
    assert ask(tmp_path / "train.py", library, tmp_path / "model.py", tmp_path / "own" / "a.py") == [
        LIBRARY,
        SCRIPTS,
        SCRIPTS,
    ]


def test_what_is_installed_with_the_script_itself_is_the_scripts(tmp_path: Path) -> None:
    library = install(tmp_path, "one")
    own = install(tmp_path, "mine").parent
    script, record = tmp_path / "train.py", tmp_path / "mine-1.0.dist-info" / "RECORD"
    record.write_text("mine/__init__.py,,\ntrain.py,sha256=abc,7\nmodel.py,,\n")
    files = (script, tmp_path / "model.py", own / "loop.py", library)
    assert ask(script, *files) == [SCRIPTS, SCRIPTS, SCRIPTS, LIBRARY]


def test_torch_of_a_source_checkout_is_a_library(tmp_path: Path) -> None:
    torch = tmp_path / "pytorch" / "torch" / "__init__.py"
    torch.parent.mkdir(parents=True)
    torch.write_text("")
    script = tmp_path / "project" / "train.py"
    found = ask(script, torch, tmp_path / "pytorch" / "tools" / "a.py", paths=(torch.parents[1],), imported=("torch",))
    assert found == [LIBRARY, SCRIPTS]


def test_a_project_in_editable_mode_is_a_library_of_scripts_elsewhere_and_the_scripts_own_inside(
    tmp_path: Path,
) -> None:
    library = install(tmp_path / "site", "one", project=tmp_path / "a project")
    outside, inside = tmp_path / "experiment" / "train.py", tmp_path / "a project" / "tools" / "train.py"
    assert ask(outside, library, outside, paths=(tmp_path / "site",)) == [EDITABLE, SCRIPTS]
    assert ask(inside, library, inside, paths=(tmp_path / "site",)) == [SCRIPTS, SCRIPTS]


def test_a_record_of_another_kind_of_installation_is_passed_over(tmp_path: Path) -> None:
    install(tmp_path / "site", "one")
    for number, text in enumerate(('{"url": "https://a.example/b.zip", "archive_info": {}}', "[]", "no JSON")):
        about = tmp_path / "site" / f"n{number}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: n{number}\nVersion: 1.0\n")
        (about / "direct_url.json").write_text(text)
    assert ask(tmp_path / "train.py", tmp_path / "train.py", paths=(tmp_path / "site",)) == [SCRIPTS]


def test_a_script_that_is_installed_itself_has_its_own_package(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    script = site / "mine" / "train.py"
    found = ask(script, script, script.parent / "loop" / "a.py", site / "torch" / "a.py", site / "b.py")
    assert found == [SCRIPTS, SCRIPTS, LIBRARY, LIBRARY]


def test_a_package_that_is_linked_into_a_site_directory_is_that_of_its_script(tmp_path: Path) -> None:
    source, site = tmp_path / "source" / "mine", tmp_path / "site-packages"
    source.mkdir(parents=True)
    site.mkdir()
    (site / "mine").symlink_to(source)
    script = site / "mine" / "train.py"
    assert ask(script, script, source / "model.py", site / "one" / "a.py") == [SCRIPTS, SCRIPTS, LIBRARY]


@pytest.mark.parametrize(
    "file", ["<string>", "<frozen runpy>", script_files.__file__, os.path.abspath("elastic/ddp.py")]
)
def test_what_is_not_a_file_and_what_is_of_this_program_is_not_the_scripts(file: str) -> None:
    assert script_files.is_library(file)
