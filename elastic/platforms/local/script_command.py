"""What `elastic run SCRIPT` starts in a worker: the script or module that somebody has named, if it is there."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic.errors import ConfigError


def command(words: Sequence[str], module: bool, verb: str = "run") -> tuple[str, tuple[str, ...]]:
    """What to run: its name for people, and the command of a worker. Raises ConfigError if there is no such thing.

    verb: with which it was asked for.
    """
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise ConfigError(f"no script given: write `elastic {verb} train.py`, or `elastic {verb} -m package.train`")
    program, arguments = words[0], tuple(words[1:])
    if module:
        _check_module(program)
        return program, (sys.executable, "-m", program, *arguments)
    path = Path(program)
    if not path.exists():
        raise ConfigError(f"the script {program} does not exist (looked from {Path.cwd()})")
    if not (path.is_file() or (path / "__main__.py").is_file()):
        raise ConfigError(f"{program} is no script but a directory; give the file, or a module with -m")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"the script {program} cannot be read; check its permissions")
    # Python would take a name with a dash for an option.
    return program, (sys.executable, f"./{program}" if program.startswith("-") else program, *arguments)


def _check_module(name: str) -> None:
    # Only the outermost package: looking for the rest would run its code here.
    package = name.split(".", 1)[0]
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"-m {name}: not the name of a module; for a file, leave out -m")
    search = [str(Path.cwd()), *sys.path]
    if importlib.machinery.PathFinder.find_spec(package, search) is None and package not in sys.stdlib_module_names:
        raise ConfigError(f"there is no module {package} in {Path.cwd()} or on Python's path")
