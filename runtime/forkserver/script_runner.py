"""Runs a training script as `python SCRIPT` or `python -m MODULE` would, in an existing process."""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
import tokenize
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from elastic.agent.worker import held_signals
from elastic.agent.worker.environment import RANKS, RESTART
from elastic.agent.worker.import_scan import Program, program_of
from elastic.errors import ColdStart
from runtime import script_files, torch_names
from runtime.forkserver import process_title
from runtime.script_end import ScriptEnd, run_to_end

FOR_TORCHRUN = (
    "This is a script for torchrun. Start it with `elastic run --ranks N ...`, N as in torchrun --nproc-per-node=N: it "
    "trains unchanged, and a dead worker is invisible in the weights. Or with `elastic run --restart ...`, where the "
    "script is started again on all workers when one is lost."
)


def sources(program: Program) -> list[tuple[str, str]]:
    """(file, text) of the files that the program runs first, in order. Nothing is run.

    Raises ColdStart if a file is not found as text.
    """
    paths = _module_files(program.target) if program.is_module else [Path(program.target)]
    try:
        return [(str(path), _text(path)) for path in paths]
    except (OSError, SyntaxError, UnicodeError) as error:
        raise ColdStart(f"{program.target} cannot be read as text: {error}") from error


def is_installed(outermost: str, program: Program) -> bool:
    """Whether that module comes from the standard library or a site directory, and not from the user."""
    if outermost in sys.builtin_module_names:
        return True
    spec = PathFinder.find_spec(outermost, [*first_on_path(program), *sys.path])
    if spec is None:
        return False
    places = spec.submodule_search_locations or [spec.origin or ""]
    return all(map(script_files.is_installed, places))


def main(command: Sequence[str]) -> NoReturn:
    """Run a worker with an interpreter of its own, which has imported nothing else. Raises SystemExit."""
    held_signals.hold()
    process_title.show(command)
    run(program_of(command), command)


def run(program: Program, command: Sequence[str]) -> NoReturn:
    """Run the program as `__main__`, to its end. Exceptions are shown as the interpreter shows them.

    command: the command that a process list shows. Raises SystemExit.
    """
    sys.orig_argv[:] = command
    run_to_end(lambda: _run_as_asked(program))


def _run_as_asked(program: Program) -> None:
    if os.environ.get(RESTART) == "1":
        torch_names.check(torch_names.OF_WORKERS)
        from runtime.frontends.restart import supervisor

        supervisor.run(lambda: _run_in_round(program))
    if os.environ.get(RANKS, "0") != "0":
        torch_names.check({**torch_names.OF_WORKERS, **torch_names.OF_RANKS})
        from runtime.frontends.frameworks.imports import enable

        enable()
    _run(program)


def _run_in_round(program: Program) -> None:
    """Run the script for one round of --restart. With --ranks, its Trainer of transformers or Lightning, or its loop
    over what accelerate prepares, is kept in memory."""
    if os.environ.get(RANKS, "0") != "0":
        from runtime.frontends.frameworks.imports import AfterImport
        from runtime.frontends.restart import kept_accelerate, kept_lightning, kept_trainer

        lightning = dict.fromkeys(("lightning.pytorch", "pytorch_lightning"), kept_lightning.install)
        adapted = {"transformers.trainer": kept_trainer.install, "accelerate": kept_accelerate.install, **lightning}
        AfterImport(adapted).install()
    _run(program)


def _run(program: Program) -> None:
    sys.path[:0] = first_on_path(program)
    for entry in sys.path[:1]:
        sys.path_importer_cache.pop(entry, None)  # the user's files may have changed since it was listed
    main = _fresh_main()
    try:
        if program.is_module:
            sys.argv[:] = ["-m", *program.arguments]
            runpy._run_module_as_main(program.target)  # type: ignore[attr-defined]  # what `python -m` itself calls
        else:
            sys.argv[:] = [program.target, *program.arguments]
            _run_script(os.path.abspath(program.target), main)
    except (Exception, SystemExit) as error:
        trace = error.__traceback__
        for _ in range(1 if program.is_module else 2):
            trace = trace.tb_next if trace is not None else None
        error = error.with_traceback(trace)
        if isinstance(error, ValueError) and "environment variable RANK expected" in str(error):
            error.add_note(FOR_TORCHRUN)
        if isinstance(error, SystemExit):
            if ScriptEnd.current is not None:
                ScriptEnd.current.on_exit(error)
            raise
        sys.excepthook(type(error), error, trace)
        sys.exit(1)


def first_on_path(program: Program) -> list[str]:
    """The directory that Python puts in front of sys.path for the program."""
    if sys.flags.safe_path:
        return []
    return [str(Path.cwd()) if program.is_module else os.path.dirname(os.path.realpath(program.target))]


def _fresh_main() -> ModuleType:
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    if "__mp_main__" in sys.modules:  # the name of the main module in children of multiprocessing
        sys.modules["__mp_main__"] = main
    return main


def _run_script(path: str, main: ModuleType) -> None:
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    main.__dict__["__cached__"] = None
    exec(code, main.__dict__)


def _module_files(name: str) -> list[Path]:
    """Files of the packages around a module, outermost first, and of the module itself."""
    search: list[str] = [str(Path.cwd()), *sys.path]
    files: list[Path] = []
    parts = name.split(".")
    for depth in range(len(parts)):
        spec = _spec(".".join(parts[: depth + 1]), search)
        if spec.origin is not None:
            files.append(Path(spec.origin))
        search = list(spec.submodule_search_locations or [])
    if search and (spec := _spec(f"{name}.__main__", search)).origin is not None:
        files.append(Path(str(spec.origin)))
    return files


def _spec(name: str, search: list[str]) -> ModuleSpec:
    spec = PathFinder.find_spec(name, search)
    if spec is None:
        raise ColdStart(f"no module {name} is found")
    return spec


def _text(path: Path) -> str:
    with tokenize.open(path) as file:
        return file.read()
