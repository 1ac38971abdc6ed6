"""`elastic.launch(function, ...)`: `elastic run` of a function, as a child of a notebook's kernel or of a program."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from elastic.agent.worker import function_file
from elastic.agent.worker.environment import AGENT_SOCKET
from elastic.errors import ConfigError, ExitCode, LaunchFailed
from elastic.platforms.local.cell_output import OWN, CellStream, LiveTable, in_notebook
from elastic.platforms.local.live import TABLE_S, JobWatcher, LiveView
from elastic.process import children
from elastic.records import temp_dirs
from elastic.records.job_directory import DEFAULT_PARENT, default_name, next_free, read_json

MODULE = "runtime.launched"
PREFIX = "elastic-launch-"
STOP_S = 15.0
"""`elastic run` ends everything within 5 s of Ctrl-C; after this long it is killed, and what it has started with it."""

CHUNK = 65_536
REFUSED = ("ranks", "restart")
"""Options that are about scripts."""

T = TypeVar("T")
Option = str | int | float | bool


def launch(
    function: Callable[..., T],
    *arguments: object,
    workers: int = 2,
    job_dir: str | os.PathLike[str] | None = None,
    **options: Option,
) -> T:
    """Call a function in several workers on this machine, as `elastic run` runs a script, and return what rank 0
    returns.

    function: calls elastic.join() and trains; it may be defined in a notebook. It and its arguments are pickled into a
    file of this user's alone, and so is what it returns. workers: how many. job_dir: as --job-dir (default:
    ./elastic-jobs/<name of the function>-<n>); that of an interrupted job goes on. options: of `elastic run`, with _
    for -, such as min_workers=2, checkpoint_every="500 steps", fresh=True.

    In a notebook a table shows the job while it runs. Ctrl-C, or an interrupt of the kernel, stops all workers; when
    this returns or raises, no process is left.

    Raises ConfigError for what cannot be started, LaunchFailed if the job ends in another way than by its end, with the
    traceback of the function as a note.
    """
    if refused := [name for name in REFUSED if options.get(name)]:
        raise ConfigError(f"{refused[0]}= is for scripts; write the loop with job.steps(), or use `elastic run`")
    return launch_for_all(function, arguments, {"workers": workers, **options}, job_dir)[0]


def launch_for_all(
    function: Callable[..., T],
    arguments: Sequence[object],
    options: Mapping[str, Option],
    job_dir: str | os.PathLike[str] | None,
) -> list[T]:
    """As launch(), and return what the function has returned on each rank. options: "workers" among them."""
    function_file.check_installed("elastic.launch()", "notebook")
    if os.environ.get(AGENT_SOCKET):
        raise ConfigError("elastic.launch() was called in a worker; call it in the notebook or the program alone")
    name = default_name(getattr(function, "__name__", ""))
    own = temp_dirs.in_tmp(PREFIX)
    try:
        path = function_file.write_function(own.path, function, arguments)
        chosen = next_free(Path.cwd() / DEFAULT_PARENT, name) if job_dir is None else Path(job_dir).absolute()
        words = _words({"name": name, **options, "job_dir": str(chosen)})
        try:
            _run([*words, "-m", MODULE], path, chosen, quiet=bool(options.get("quiet")))
        except ConfigError:
            if job_dir is None:
                with contextlib.suppress(OSError):  # there is something in it
                    chosen.rmdir()
            raise
        return cast(list[T], function_file.read_values(own.path))
    finally:
        own.remove()


def _words(options: dict[str, Option]) -> list[str]:
    """The options as words of a command line. A flag that is False is left out."""
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not False:
            words.append(f"{option}={value}")
    return words


def _run(words: list[str], function: Path, job_dir: Path, *, quiet: bool) -> None:
    """Raises ConfigError, LaunchFailed, KeyboardInterrupt."""
    shown, reason = in_notebook(), function.with_name("reason")
    pipe = subprocess.PIPE if shown else None
    command = children.python("elastic.cli", "run", *(["--quiet"] if shown and not quiet else []), *words)
    own = {**children.own_environment(), function_file.VARIABLE: str(function), children.REASON_FILE: str(reason)}
    process = children.start(children.dying_with_this(*command), obeys=False, env=own, stdout=pipe, stderr=pipe)
    errors = CellStream(sys.stderr, sorts=True)
    try:
        if shown:
            _show(process, errors, None if quiet else job_dir)
        code = process.wait()
    except KeyboardInterrupt:
        _stop(process)
        print(f"{OWN}stopped; elastic.launch(..., job_dir={str(job_dir)!r}) goes on", file=sys.stderr, flush=True)
        raise
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for stream in filter(None, (process.stdout, process.stderr)):
            stream.close()
    if code == ExitCode.DONE:
        sys.stderr.write(errors.kept)
        return
    raise _failure(code, job_dir, reason)


def _show(process: subprocess.Popen[bytes], errors: CellStream, job_dir: Path | None) -> None:
    """Until both outputs of the process are closed. job_dir: of which a table is shown; None: none is."""
    assert process.stdout is not None and process.stderr is not None
    streams = {process.stdout: CellStream(sys.stdout), process.stderr: errors}
    table, view = LiveTable(), None if job_dir is None else LiveView(job_dir)
    told: list[dict[str, Any]] = []
    watcher = None if view is None else JobWatcher(view, TABLE_S, told.append)
    try:
        with selectors.DefaultSelector() as selector:
            for stream in streams:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(TABLE_S):
                    _forward(selector, cast(IO[bytes], key.fileobj), streams)
                if told:
                    table.show(told[-1])
                    told.clear()
    finally:
        if watcher is not None:
            watcher.close()
    if view is not None:
        view.gather()
        table.show(view.facts())


def _forward(selector: selectors.BaseSelector, stream: IO[bytes], streams: dict[IO[bytes], CellStream]) -> None:
    data = os.read(stream.fileno(), CHUNK)
    streams[stream].write(data, final=not data)
    if not data:
        selector.unregister(stream)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """In order, and without more patience at a second interrupt."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=STOP_S)  # it may be in the middle of writing what nobody reads any more
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        process.kill()
        process.wait()


def _failure(code: int, job_dir: Path, reason: Path) -> Exception:
    """reason: the file that says why the command has refused the job; there is none if the job has begun."""
    if reason.exists():
        refused = reason.read_text()
        return ConfigError(refused) if code == ExitCode.BAD_INPUT else LaunchFailed(refused, code)
    result: dict[str, Any] = read_json(job_dir / "result.json") or {}
    because, _, traceback = str(result.get("because") or f"`elastic run` ended with {code}").partition("\n")
    error = LaunchFailed(f"{because}; see {job_dir}", code)
    if traceback:
        error.add_note(traceback)
    return error
