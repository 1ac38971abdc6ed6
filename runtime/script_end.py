"""Closes a job when its script ends, or lets it fail when the script fails, without a call in the script."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, NoReturn

from elastic.errors import ExitCode
from runtime.script_files import is_library

RAISED_AT = "_elastic_raised_at"
"""Attribute of an error that comes from another process: the place where it was raised there."""


def raised_at(error: BaseException) -> str:
    """File and line of the last frame in the script's own files; without such a frame, of the last frame."""
    if place := error.__dict__.get(RAISED_AT):
        return str(place)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)] or list(frames)
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "unknown"


def exit_now(code: int) -> NoReturn:
    """End the process at once: what it has printed is shown, and no exit handler runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class ScriptEnd:
    """Watches the end of the script, until `ignore`. close, fail: called when the script ends, or fails.

    The interpreter does not report a SystemExit that ends it; script_runner.run(), below the script, does.
    """

    current: ClassVar[ScriptEnd | None] = None

    def __init__(self, close: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        self._close = close
        self._fail = fail
        self._outer_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        ScriptEnd.current = self
        atexit.register(self._at_exit)

    def ignore(self) -> None:
        """Stop watching, because the job was closed before."""
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._outer_hook
        ScriptEnd.current = None

    def on_exit(self, error: SystemExit) -> None:
        """The script ends with this error: a status other than 0 counts as a failure."""
        if error.code not in (None, 0):
            self._fail(error)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._fail(error)
        self._outer_hook(kind, error, trace)

    def _at_exit(self) -> None:
        try:
            self._close()
        except BaseException as error:
            self._fail(error)
            # After an exception in an exit handler the interpreter would exit with 0.
            traceback.print_exc()
            exit_now(ExitCode.SCRIPT_FAILED)
