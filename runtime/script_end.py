"""Closes a job when its script ends, or lets it fail when the script fails, without a call in the script."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import ClassVar, NoReturn

from elastic.errors import ExitCode
from runtime.script_files import is_library

RAISED_AT = "_elastic_raised_at"
"""Attribute of an error that comes from another process: the place where it was raised there."""


class TorchThread(threading.Thread):
    """A daemon thread in which torch waits or computes. Before Python 3.14 such a thread must not come back from torch
    while the interpreter ends: it would be ended in the middle of C++ code, and with it the process, by SIGABRT."""

    def __init__(self, *, target: Callable[..., object], args: Sequence[object] = (), name: str) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)


ENDS_S = 5.0
"""Seconds for which the end of a script that has not failed waits for each TorchThread to end."""


def raised_at(error: BaseException) -> str:
    """File and line of the last frame in the script's own files; without such a frame, of the last frame."""
    if place := error.__dict__.get(RAISED_AT):
        return str(place)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)] or list(frames)
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "unknown"


def exit_now(code: int) -> NoReturn:
    """End the process at once: what it has printed is shown, and no exit handler runs."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed or taken away by the script, or nobody reads it any more
            stream.flush()
    os._exit(code)


def run_to_end(script: Callable[[], object]) -> NoReturn:
    """Run the script, and end the process with its status, after its threads and exit handlers, as the interpreter
    does. Raises SystemExit, or what else the script raised, which was shown; but if a TorchThread is left, the process
    ends here, without the rest of what an interpreter does at its end."""
    end: BaseException = SystemExit()
    try:
        script()
    except SystemExit as error:
        end = error
    except BaseException as error:  # most often KeyboardInterrupt
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *shown: None  # the interpreter, which chooses the status, would show it again
        end = error
    code = 1 if not isinstance(end, SystemExit) else end.code if end.code is not None else 0
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code, end = 1, SystemExit(1)
    threading._shutdown()  # type: ignore[attr-defined]  # these two are what the interpreter itself calls now
    atexit._run_exitfuncs()
    until_s = time.monotonic() + (0.0 if code else ENDS_S)  # others wait for the end of a worker that fails
    threads = [thread for thread in threading.enumerate() if isinstance(thread, TorchThread)]
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        _flush_files()
        if isinstance(end, KeyboardInterrupt):  # as the interpreter does, for who has started this process
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        exit_now(code & 0xFF)
    raise end


def _flush_files() -> None:
    """Write what files that the script has not closed still hold back, as their finalizers would."""
    for held in gc.get_objects():
        if issubclass(type(held), io.IOBase):
            with contextlib.suppress(Exception):
                held.flush()


class ScriptEnd:
    """Watches the end of the script, until `ignore`. close, fail: called when the script ends, or fails.

    The interpreter does not report a SystemExit that ends it; script_runner.run(), below the script, does.
    """

    current: ClassVar[ScriptEnd | None] = None
    refused: ClassVar[bool] = False
    """Whether `close` has raised at the end of the script."""

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
            traceback.print_exc()
            ScriptEnd.refused = True


@atexit.register
def _exit_as_failed() -> None:
    """Runs behind all exit handlers that were registered since this module was imported. After an exception in one of
    them the interpreter would exit with 0."""
    if ScriptEnd.refused:
        _flush_files()
        exit_now(ExitCode.SCRIPT_FAILED)
