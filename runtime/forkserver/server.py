"""The fork server's side of its channel to the agent. elastic/agent/process/forkserver_client.py has the agent's side,
and the protocol.

It imports what the script will import, checks that the process can still be forked, and then only waits: it runs no
thread and uses no accelerator, so a fork of it is equivalent to a new interpreter that has just done these imports.
"""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing.process
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from elastic.agent.worker import held_signals
from elastic.agent.worker.import_scan import Import, Program, leading_imports, names_in, program_of
from elastic.errors import ColdStart
from elastic.process import stop_signals
from runtime.forkserver import clone_parent, process_title, script_runner
from runtime.forkserver.without_dynamo import DYNAMO, asks_for_dynamo, defer_dynamo
from runtime.script_end import exit_now

ALWAYS = ("torch", "torch.utils.data", "runtime.loop.job", "runtime.worker.worker_session")

ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
"""Prefixes of files that a process has open after it has used a device; such a process must not be forked."""

THREADLESS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Variables for libraries that would start a thread when they are imported: pyarrow, which `datasets` imports, and so
transformers.Trainer. Workers do not get them."""

LEFT_OUT_MAX = 3
"""The most modules that are left out: for each of them the imports before it are repeated."""

MESSAGE_BYTES = 2**16
DESCRIPTORS = 3


def main(channel: str, restarts: str, without: str, *command: str) -> None:
    """Run the fork server. channel: descriptor of the socket to the agent. restarts: "1" if the workers run torchrun's
    scripts as they are, again and again. without: modules left to the script, separated by commas. Never returns; a
    forked worker ends by SystemExit.
    """
    held_signals.hold()
    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # garbage collection took a fifth of the time of torch's import, and found 8 MB
    agent = socket.socket(fileno=int(channel))
    inherited = dict(os.environ)
    left_out = without.split(",") if without else []
    os.environ.update({name: value for name, value in THREADLESS.items() if name not in inherited})
    try:
        wanted = program_of(command)
        prepare(wanted, left_out, restarts=restarts == "1")
    except Unsuitable as found:
        if len(left_out) < LEFT_OUT_MAX:
            _tell(agent, "fork_server_without", module=found.module, because=found.because)
            left_out.append(found.module)
            again = [sys.executable, "-c", sys.orig_argv[2], channel, restarts, ",".join(left_out), *command]
            with stop_signals.blocked():
                os.execve(sys.executable, again, inherited)
        _leave(agent, str(found))
    except ColdStart as refused:
        _leave(agent, str(refused))
    for name in THREADLESS.keys() - inherited.keys():
        del os.environ[name]
    if _reports_leaks():
        atexit.register(gc.unfreeze)
    gc.freeze()
    if gc.get_threshold()[0] == 0:  # no import has set another threshold
        gc.set_threshold(*thresholds)
    _tell(agent, "fork_server_ready", modules=len(sys.modules), cpu_s=round(time.process_time(), 3))
    order = _serve(agent)
    agent.close()
    _become(order, command)
    script_runner.run(wanted, command)


def _reports_leaks() -> bool:
    """Whether an imported library would report what gc.freeze() keeps alive, at the end of each worker and behind its
    last words: those made with nanobind do, such as Triton 3.9, which comes with CUDA builds of torch 2.15."""
    return any(type(one).__module__ == "nanobind" for one in gc.get_objects() if issubclass(type(one), type))


class Unsuitable(ColdStart):
    """Try again without this module: an effect of its import cannot be undone."""

    def __init__(self, module: str, because: str) -> None:
        super().__init__(f"importing {module} beforehand: {because}")
        self.module = module
        self.because = because


def prepare(wanted: Program, without: Sequence[str] = (), *, restarts: bool = False) -> None:
    """Do the imports beforehand. Raises ColdStart if the process could not be forked afterwards."""
    clone_parent.check()
    sources = script_runner.sources(wanted)
    imports = leading_imports(sources)
    chosen = [one for one in imports if one.module not in without and script_runner.is_installed(one.outermost, wanted)]
    dynamo = restarts or asks_for_dynamo({one.outermost for one in chosen}, names_in(sources))
    for one in (*chosen, *map(Import, (*ALWAYS, DYNAMO) if dynamo else ALWAYS)):
        try:
            __import__(one.module, fromlist=one.names)
        except Exception as error:
            raise Unsuitable(one.module, repr(error)) from error
        if unfit():
            clone_parent.settle()
            if because := unfit():
                raise Unsuitable(one.module, because)
    defer_dynamo()


def unfit() -> str:
    """Why this process cannot be forked, or ""."""
    if (threads := clone_parent.threads()) > 1:
        return f"threads beside the main one: {threads - 1}"
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:  # the descriptor of the directory itself
            continue
        if target.startswith(ACCELERATORS):
            return f"{target} is open"
    return ""


class ForkOrder:
    """A worker to fork. settings: its own environment variables. control: a socket, which the agent closes if it does
    not want the worker any more. out, log: the worker's stdout and stderr."""

    def __init__(self, message: bytes, descriptors: Sequence[int]) -> None:
        self.settings: dict[str, str] = json.loads(message)
        control, self.out, self.log = descriptors
        self.control = socket.socket(fileno=control)

    def close(self) -> None:
        self.control.close()
        os.close(self.out)
        os.close(self.log)


def _serve(agent: socket.socket) -> ForkOrder:
    """Fork a worker for each order of the agent, until the agent is gone. Returns in the workers."""
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(agent, MESSAGE_BYTES, DESCRIPTORS)
        except ConnectionResetError:  # it was killed before it had read what this process has written
            message = b""
        if not message:
            os._exit(0)
        order = ForkOrder(message, descriptors)
        if because := unfit():
            _leave(agent, because)
        with stop_signals.blocked():
            if clone_parent.fork() == 0:
                held_signals.hold()
                return order
        order.close()


def _become(order: ForkOrder, command: Sequence[str]) -> None:
    """Change everything in which a new process would differ from the fork server."""
    os.setsid()
    os.dup2(order.out, 1)
    os.dup2(order.log, 2)
    order.control.send(str(os.getpid()).encode())
    if not order.control.recv(1):
        os._exit(0)
    order.close()
    os.environ.update(order.settings)
    process_title.show(command)
    # random reseeds itself after a fork; numpy and torch do not.
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    multiprocessing.process.current_process().authkey = os.urandom(32)


def _tell(agent: socket.socket, event: str, **fields: object) -> None:
    agent.send(json.dumps({"event": event, **fields}).encode())


def _leave(agent: socket.socket, because: str) -> NoReturn:
    _tell(agent, "fork_server_unusable", because=because)
    exit_now(0)
