"""Says what it finds itself in, or ends in the way that MIRROR asks for. Run in every way a worker can be started."""

import ctypes
import gc
import io
import json
import locale
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from typing import Any, cast

import numpy as np
import torch
import torch._dynamo
import torch.utils.data

import runtime.worker.worker_session  # noqa: F401

PR_GET_PDEATHSIG = 2


class Point:
    """A class of __main__, to be pickled."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __getitem__(self, index: int) -> int:
        return self.x * index

    def __len__(self) -> int:
        return 8


def doubled(point: Point) -> Point:
    return Point(2 * point.x)


def descriptor(number: int) -> str:
    """Its kind."""
    return oct(os.fstat(number).st_mode)


def pdeathsig() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value


def facts() -> dict[str, object]:
    np.ones((700, 700)) @ np.ones((700, 700))
    main: Any = sys.modules["__main__"]
    spec, stdout = main.__spec__, cast(io.TextIOWrapper, sys.stdout)
    return {
        "argv": [sys.argv, sys.orig_argv, sys.path, os.getcwd()],
        "cmdline": open("/proc/self/cmdline").read().rstrip("\0").split("\0"),
        "main": [__name__, __file__, __package__, spec and spec.name, type(main.__loader__).__name__, __doc__],
        "main again": [main.facts is facts, sorted(name for name in vars(main) if name.startswith("__"))],
        "interpreter": [list(sys.flags), sys.executable, sys.getrecursionlimit(), gc.isenabled(), gc.get_threshold()],
        "warnings": [str(one) for one in warnings.filters],
        "locale": [locale.setlocale(locale.LC_ALL), sys.getfilesystemencoding()],
        "group": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getppid(), pdeathsig()],
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "umask": [os.umask(0o77), os.umask(0o22)],
        "limits": [resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE)],
        "descriptors": [descriptor(number) for number in range(3)],
        "stdin": sys.stdin.read(),
        "stdout": [sys.stdout.encoding, sys.stdout.errors, stdout.line_buffering, stdout.write_through],
        "stdout again": [sys.stdout.seekable(), sys.stdout.isatty(), sys.stderr.line_buffering],
        "environment": dict(sorted(os.environ.items())),
        "environment of a child": sorted(os.popen("env").read().splitlines()),
        "threads": [len(os.listdir("/proc/self/task")), threading.active_count(), threading.main_thread().name],
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), str(torch.get_default_dtype())],
        "numerics": torch.backends.cpu.get_cpu_capability(),
        "hook": sys.excepthook is sys.__excepthook__,
        "main thread": threading.current_thread() is threading.main_thread(),
    }


def main() -> None:
    what = os.environ["MIRROR"]
    if what == "facts":
        print(json.dumps(facts()))
    if what == "chance":
        print(json.dumps([random.random(), float(np.random.rand()), torch.initial_seed(), os.getpid()]))
    if what == "raise":
        raise ValueError("on purpose")
    if what == "exit":
        sys.exit(7)
    if what == "words":
        sys.exit("these are the last words")
    if what == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if what == "fault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "wait":
        print("up")
        time.sleep(1000)
    if what == "spawn":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(doubled, (Point(4),)).x)
    if what == "load":
        data: Any = Point(3)
        loader: Any = torch.utils.data.DataLoader(data, num_workers=2)
        print([int(one) for one in loader])


if __name__ == "__main__":
    main()
