"""One mutant against its tests, in a process of its own, which is forked once pytest and torch are imported."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch  # noqa: F401

from tests.mutation.mutate import mutated

HANGS_S = 40
"""A single test that takes longer does not end: the slowest of them takes a few seconds."""

PASSED = int(pytest.ExitCode.OK)
FAILED = int(pytest.ExitCode.TESTS_FAILED)


def begin(module: str, number: int, tests: Sequence[str], output: Path) -> int:
    """Start the tests; -1: of the module as it is. Returns the pid of their process, which leads its own group."""
    if (pid := os.fork()) != 0:
        return pid
    code = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        os.setsid()
        written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(written, 1)
        os.dup2(written, 2)
        if number >= 0:
            if module in sys.modules:
                raise RuntimeError(f"{module} is imported already")
            sys.meta_path.insert(0, _Finder(module, number))
        # Most mutants are noticed by the first tests, and to collect the others would take longer.
        for part in (tests[:1], tests[1:]):
            if part and (code := _run(part)) != PASSED:
                break
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(tests: Sequence[str]) -> int:
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--timeout={HANGS_S}", *tests]))


def ended(pid: int, until_s: float) -> int | None:
    """The exit code; None: it still runs. After until_s it is killed, and has failed: it does not end."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if done:
        _end_group(pid)
        return os.waitstatus_to_exitcode(status)
    if time.monotonic() < until_s:
        return None
    _end_group(pid)
    os.waitpid(pid, 0)
    return FAILED


def _end_group(pid: int) -> None:
    """Also what a test has started and the mutant has left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


class _Finder(MetaPathFinder):
    def __init__(self, module: str, number: int) -> None:
        self._module, self._number = module, number

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin, self._number)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, number: int) -> None:
        super().__init__(name, path)
        self._number = number

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        return compile(mutated(source, self._number), self.path, "exec", dont_inherit=True)
