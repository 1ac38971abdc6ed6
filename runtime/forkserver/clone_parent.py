"""fork(), except that the child's parent is our parent.

An agent wants its workers as its own children: it reaps them itself, sees exactly how they ended, and the kernel ends
them with the agent and not with the fork server. Linux can do that (CLONE_PARENT), but no function of the C library
offers it. So this module makes the system call, and does what glibc's fork() does around it:

- the child's thread id is stored where glibc keeps the main thread's id (CLONE_CHILD_SETTID), an address that glibc
  gave the kernel at the start of the process; mutexes that know their owner depend on it;
- the list of robust mutexes is registered again (death_watch.py depends on it);
- handlers of pthread_atfork do not run. They exist for other threads, and the caller has none; `settle` lets them run
  once before.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import warnings

from elastic.errors import ColdStart
from elastic.process.children import die_with

PR_GET_TID_ADDRESS = 40
SYS_CLONE3 = 435
ROBUST_LIST_CALLS = {"x86_64": (273, 274), "aarch64": (99, 100)}
"""Machine -> numbers of set_robust_list and get_robust_list."""

CLONE_PARENT = 0x0000_8000
CLONE_CHILD_CLEARTID = 0x0020_0000
CLONE_CHILD_SETTID = 0x0100_0000

# PyDLL holds the interpreter's lock during the call, as os.fork() does.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _CloneArgs(ctypes.Structure):
    """struct clone_args of Linux, in its first version."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls")
    ]


def check() -> None:
    """Raise ColdStart if `fork` cannot work here."""
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        raise ColdStart("forking workers needs glibc")
    if platform.machine() not in ROBUST_LIST_CALLS:
        raise ColdStart(f"forking workers is not known to work on {platform.machine()}")
    _libc.syscall(SYS_CLONE3, None, 0)
    if ctypes.get_errno() != errno.EINVAL:
        raise ColdStart(f"clone3 is not allowed here ({os.strerror(ctypes.get_errno())})")
    if ctypes.c_int.from_address(_tid_address()).value != os.getpid():
        raise ColdStart("the C library does not keep its thread id where the kernel was told")


def settle() -> None:
    """Let libraries prepare for a fork: OpenBLAS, for example, ends its threads, and starts new ones when needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about a fork with threads, which is intended
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def threads() -> int:
    """The number of threads of this process, also those of libraries."""
    return len(os.listdir("/proc/self/task"))


def fork() -> int:
    """Fork. Returns 0 in the child, which dies with the parent of both; its pid here. Only for a single-threaded
    process."""
    parent = os.getppid()
    set_robust_list, get_robust_list = ROBUST_LIST_CALLS[platform.machine()]
    head, size = ctypes.c_void_p(), ctypes.c_size_t()
    _check(_libc.syscall(get_robust_list, 0, ctypes.byref(head), ctypes.byref(size)))
    flags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID
    arguments = _CloneArgs(flags=flags, child_tid=_tid_address())
    ctypes.pythonapi.PyOS_BeforeFork()
    child = int(_libc.syscall(SYS_CLONE3, ctypes.byref(arguments), ctypes.c_size_t(ctypes.sizeof(arguments))))
    if child == 0:
        _libc.syscall(set_robust_list, head, size)
        ctypes.pythonapi.PyOS_AfterFork_Child()
        die_with(parent)
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    _check(child)
    return child


def _tid_address() -> int:
    address = ctypes.c_long()
    _check(_libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0))
    return address.value


def _check(result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
