"""Which files belong to the training script, and which to libraries.

The frames, classes and errors of the script are watched; those of libraries are not. Libraries are found by where
distributions are installed, and not by a list of directories of this interpreter: torch may lie in another environment
(`--system-site-packages`, a .pth file, PYTHONPATH, `pip install --target`, conda, a source checkout).
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from urllib.parse import unquote, urlsplit

OURS = tuple(
    f"{os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), package)}{os.sep}"
    for package in ("runtime", "elastic", "chaos_tests")
)
"""Prefixes of the files of this program."""
_OUR_DISTRIBUTION = "elastic-ring"
_SITE_NAMES = frozenset({"site-packages", "dist-packages"})
"""Names of directories that hold installed distributions, of whatever environment."""
_BASE = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
_STANDARD = frozenset(
    {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *(sysconfig.get_path(name, vars=_BASE) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)
"""The standard library and the site directories of this interpreter and of that below a virtual environment."""


def innermost_frame() -> str:
    """File, line and function of the script's innermost frame that stands now; "" if none does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


@functools.cache
def is_library(file: str) -> bool:
    """Whether a file does not belong to the script: the name of a code object's file, or `__file__` of a module.

    The nearest directory around the file decides. A site directory, the standard library and torch's own directory hold
    libraries, and the directory of the script holds the script's files. A distribution that is installed in editable
    mode is a library unless the script lies in its project. What remains is the script's.
    """
    return file.startswith(("<", *OURS)) or is_installed(file) or any(map(_in_other_project, _spellings(file)))


def is_installed(path: str) -> bool:
    """Whether a file or directory is in the standard library, of a distribution that is installed in a site directory,
    or torch's own. A distribution in editable mode is not: its files may change at any time."""
    return any(map(_is_installed, _spellings(path)))


def _is_installed(path: str) -> bool:
    scripts, script = _script_directories(), frozenset(_script_spellings())
    below = path
    for directory in _ancestors(path):
        if _is_site(directory):
            return True
        name = os.path.relpath(below, directory)
        if directory in sys.path and name in _recorded(directory, script):
            return True
        if directory in scripts:
            return False
        if directory == _torch():
            return True
        below = directory
    return path == _torch()


def _is_site(directory: str) -> bool:
    return directory in _STANDARD or os.path.basename(directory) in _SITE_NAMES


def _ancestors(path: str) -> Iterator[str]:
    """The directories around a path, the nearest first."""
    while (directory := os.path.dirname(path)) != path:
        yield directory
        path = directory


def _spellings(path: str) -> set[str]:
    """A path as it is named, and without symbolic links: a site directory may be known by either."""
    return {os.path.abspath(path), os.path.realpath(path)}


@functools.cache
def _recorded(directory: str, script: frozenset[str]) -> frozenset[str]:
    """The outermost names of what distributions have installed in a directory of sys.path (`pip install --target`).

    Files beside them, as of a script that is shipped with its libraries in one directory, are of no distribution. The
    distribution that holds the script (its spellings) is left out.
    """
    names: set[str] = set()
    for found in importlib.metadata.distributions(path=[directory]):
        record = found.read_text("RECORD") or ""
        files = {line.split(",")[0].strip('"') for line in record.splitlines()}
        if not any(os.path.join(directory, file) in script for file in files):
            names.update(file.split("/")[0] for file in files)
    return frozenset(names)


def _torch() -> str | None:
    """torch's directory, once it is imported."""
    torch = sys.modules.get("torch")
    file = getattr(torch, "__file__", None)
    return os.path.dirname(file) if file else None


def _script_spellings() -> set[str]:
    """Empty before the script runs, and for a program without a file, such as a notebook."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return _spellings(file) if file else set()


def _script_directories() -> set[str]:
    """The script's directory as it is named, and without symbolic links; not a site directory in which it lies."""
    return {directory for directory in map(os.path.dirname, _script_spellings()) if not _is_site(directory)}


def _in_other_project(file: str) -> bool:
    """Whether a file is of a distribution in editable mode whose project does not hold the script."""
    scripts = [f"{directory}{os.sep}" for directory in _script_directories() or (os.getcwd(),)]
    others = (root for root in _editable_projects() if not any(script.startswith(root) for script in scripts))
    return file.startswith(tuple(others))


@functools.cache
def _editable_projects() -> tuple[str, ...]:
    """The directories of projects that are installed in editable mode, each with a separator at its end.

    The record direct_url.json is specified at packaging.python.org, "Recording the Direct URL Origin of installed
    distributions".
    """
    roots: set[str] = set()
    for found in importlib.metadata.distributions():
        record = found.read_text("direct_url.json")
        if record is None or found.name == _OUR_DISTRIBUTION:
            continue
        try:
            where = json.loads(record)
            if where["dir_info"].get("editable"):
                path = unquote(urlsplit(where["url"]).path)
                roots |= {f"{path}{os.sep}", f"{Path(path).resolve()}{os.sep}"}
        except (ValueError, LookupError, AttributeError, TypeError):
            continue  # an archive, a repository, or a record of a tool that does not follow the specification
    return tuple(sorted(roots))


def drawn_by_hand(frame: FrameType, models: Sequence[object]) -> list[str]:
    """The lines of the frame's function in which a call gives what a model gets, as "train.py:12: x, y = draw()".

    models: the DistributedDataParallel models. Lines are found where the function calls a model, and draws a batch, by
    plain names.
    """
    file = frame.f_code.co_filename
    try:
        tree: ast.AST = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    if frame.f_code.co_name != "<module>":
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        tree = next((node for node in functions if node.name == frame.f_code.co_name), ast.Module([], []))
    nodes = list(_of_one_function(tree))
    known = {**frame.f_globals, **frame.f_locals}
    names = {name for name, value in known.items() if any(value is model for model in models)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", None) in names]
    given = {argument.id for call in calls for argument in call.args if isinstance(argument, ast.Name)}
    return [
        f"{os.path.basename(file)}:{node.lineno}: {ast.unparse(node)}"
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value not in calls
        if given & _named(node.targets) and not given & _named([node.value])  # no x = x.to(device)
    ]


def _named(nodes: Sequence[ast.AST]) -> set[str]:
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def _of_one_function(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, but those within functions and classes that are defined there; in the order of the lines."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield node
            yield from _of_one_function(node)
