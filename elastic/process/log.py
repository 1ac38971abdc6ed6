"""The log of a process that runs for ever: standard error, through the standard library's `logging`.

It begins once, when the process knows its options. From then on all records go there, of grpc and asyncio too,
and warnings, and exceptions that nobody has caught. A daemon's journal logs its events too (records/journal.py).

DEBUG_ON makes the log say everything, DEBUG_OFF takes it back to the configured level: the signals that systemd itself
takes for that. Records below INFO are of this project only: libraries log headers of requests there, with credentials.

A reader that does not read holds up nobody: what its pipe does not take is left out, and counted.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType, TracebackType

from elastic.process.log_line import LineFormatter, LogFormat

DEBUG_ON = signal.SIGRTMIN + 22
DEBUG_OFF = signal.SIGRTMIN + 23
SIGNALS = (DEBUG_ON, DEBUG_OFF)

LEVELS = {level.lower(): logging.getLevelNamesMapping()[level] for level in ("DEBUG", "INFO", "WARNING", "ERROR")}
LEVEL = "info"

OWN = "elastic"
"""The logger above all of this project."""

_STDERR = 2
_CHUNK = 4096
"""Bytes that a pipe takes at once when poll says that it can be written (PIPE_BUF)."""

_log = logging.getLogger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--log-format` and `--log-level`."""
    parser.add_argument(
        "--log-format",
        choices=[str(form) for form in LogFormat],
        default=str(LogFormat.TEXT),
        help="format of the log on standard error: lines of text, or of JSON (default %(default)s)",
    )
    parser.add_argument(
        "--log-level", choices=list(LEVELS), default=LEVEL, help="lowest level that is logged (default %(default)s)"
    )


def words(form: str, level: str) -> dict[str, str]:
    """Options that give another process this format and level; those that are the default are left out."""
    given = {"--log-format": form, "--log-level": level}
    return {option: value for option, value in given.items() if value not in (LogFormat.TEXT, LEVEL)}


def begin_from(arguments: Sequence[str]) -> None:
    """Begin with the options among these arguments, of which nothing else is looked at: errors in them can be logged
    then."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option, default in (("--log-format", LogFormat.TEXT), ("--log-level", LEVEL)):
        parser.add_argument(option, default=str(default), nargs="?")
    found, _ = parser.parse_known_args(arguments)
    form = LogFormat.JSON if found.log_format == LogFormat.JSON else LogFormat.TEXT
    beginning(form, found.log_level if found.log_level in LEVELS else LEVEL)()


def beginning(form: LogFormat, level: str) -> Callable[[], None]:
    """Call what this returns to log on what standard error is now, until the process ends. Main thread only.

    level: a key of LEVELS.
    """
    return partial(_begin, form, level, os.dup(_STDERR))


def _begin(form: LogFormat, level: str, descriptor: int) -> None:
    handler = _Lines(descriptor)
    handler.setFormatter(LineFormatter(form))
    logging.getLogger().handlers[:] = [handler]
    logging.captureWarnings(True)
    faulthandler.enable(descriptor)  # as text: nothing else can be written when the interpreter is broken
    sys.excepthook = _uncaught
    sys.unraisablehook = _unraisable
    threading.excepthook = _uncaught_in_thread
    _level.configure(level, said=False)
    for number in SIGNALS:
        signal.signal(number, _level.signalled)


def has_begun() -> bool:
    """Whether the log is this process's."""
    return any(isinstance(handler, _Lines) for handler in logging.getLogger().handlers)


def foreign(line: str) -> None:
    """Log a line that a library has written on standard error by itself."""
    of_grpc = re.match(r"[EF]\d{4} [0-9:.]+ +\d+ ", line)
    name, level = ("grpc", logging.ERROR) if of_grpc else ("stderr", logging.WARNING)
    logging.getLogger(name).log(level, "%s", line[of_grpc.end() :] if of_grpc else line)


def configure(level: str) -> None:
    """Change the configured level; it takes effect at once, and ends DEBUG_ON."""
    _level.configure(level, said=True)


class _Level:
    def __init__(self) -> None:
        self._configured = LEVEL

    def configure(self, level: str, *, said: bool) -> None:
        self._configured = level
        self._set(level, "it is configured" if said else "")

    def signalled(self, number: int, frame: FrameType | None) -> None:
        if number == DEBUG_ON:
            self._set("debug", "SIGRTMIN+22 was sent")
        else:
            self._set(self._configured, "SIGRTMIN+23 was sent")

    def _set(self, level: str, because: str) -> None:
        logging.getLogger().setLevel(max(LEVELS[level], logging.INFO))
        logging.getLogger(OWN).setLevel(LEVELS[level])
        if because:
            _log.log(max(LEVELS[level], logging.INFO), "the log level is %s now: %s", level, because)


_level = _Level()


class _Lines(logging.Handler):
    """Writes lines to a descriptor, and never waits until it can be written."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._ready = select.poll()
        self._ready.register(descriptor, select.POLLOUT)
        self._rest = b""
        """The end of the last line, which could not be written yet."""
        self._lost = 0
        self._told = 0
        """How many of the lost lines the present line says to be missing."""
        self._waiting: list[bytes] = []
        self._writing = False

    def emit(self, record: logging.LogRecord) -> None:
        self._waiting.append(self._encoded(record))
        if self._writing:
            return  # in a signal's handler, in the middle of another line, behind which this one is written
        self._writing = True
        try:
            while self._waiting:
                self._write(self._waiting.pop(0))
        finally:
            self._writing = False

    def _write(self, data: bytes) -> None:
        if self._rest and not self._flush():
            self._lost += 1
            return
        self._told = lost = self._lost
        if lost:
            self._lost = 0
            sentence = "%d lines are missing here: nobody read them, or there was no room"
            gap = _log.makeRecord(_log.name, logging.WARNING, "", 0, sentence, (lost,), None)
            data = self._encoded(gap) + data
        self._rest = data
        self._flush()

    def _encoded(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception as error:  # a mistake in a call of ours, or of a library, must not end the daemon
            record.msg, record.args, record.exc_info = f"{record.msg!r} cannot be formatted: {error!r}", (), None
            text = self.format(record)
        return text.encode(errors="backslashreplace") + b"\n"

    def _flush(self) -> bool:
        """Whether nothing is left to be written."""
        begun = False
        try:
            while self._rest and self._ready.poll(0):
                self._rest = self._rest[os.write(self._descriptor, self._rest[:_CHUNK]) :]
                begun = True
        except OSError:  # the disk is full, or the reader is gone: there is no other place to say so
            self._lost += self._told + 1
            self._rest = b"\n" if begun else b""
        return not self._rest


def _uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    logging.getLogger(OWN).critical("the process ends: %r", error, exc_info=(kind, error, traceback))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread is not None else "?"
        about = (args.exc_type, args.exc_value, args.exc_traceback)
        logging.getLogger(OWN).error("thread %s ends: %r", name, args.exc_value, exc_info=about)


def _unraisable(args: sys.UnraisableHookArgs) -> None:
    about = (args.exc_type, args.exc_value, args.exc_traceback) if args.exc_value is not None else None
    logging.getLogger(OWN).error("%s: %r", args.err_msg or "ignored", args.object, exc_info=about)
