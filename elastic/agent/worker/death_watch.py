"""How an agent learns of a worker's death before the kernel has freed the worker's memory.

On SIGKILL the kernel first frees the address space of a process - a tenth of a second for a trainer's - and only then
closes its sockets and signals its pidfd. Before both it walks the list of *robust* mutexes that the ending thread
holds, and wakes their waiters (Documentation/locking/robust-futexes.rst of Linux; pthread_mutexattr_setrobust(3)). So a
worker's main thread locks such a mutex, for ever, in a page that it shares with its agent: its *lifeline*.

A lifeline only saves time: the pidfd also tells of the end of a worker, with or without a lifeline. The lifeline tells
that the main thread has ended and that the other threads are ending.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable

DEATH_WATCH_VARIABLE = "ELASTIC_LIFELINE"
"""Environment variable of a worker: the file to map."""

SIZE = mmap.PAGESIZE
MUTEX_AT, ATTRIBUTES_AT, HELD_AT = 0, 256, 512
"""Offsets in the shared page. glibc's mutex takes 40 to 48 bytes, its attributes 4 to 8."""

PROCESS_SHARED = ROBUST = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.pthread_mutexattr_init.argtypes = (ctypes.c_void_p,)
_libc.pthread_mutexattr_setpshared.argtypes = (ctypes.c_void_p, ctypes.c_int)
_libc.pthread_mutexattr_setrobust.argtypes = (ctypes.c_void_p, ctypes.c_int)
_libc.pthread_mutex_init.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_libc.pthread_mutex_lock.argtypes = (ctypes.c_void_p,)
_libc.pthread_mutex_trylock.argtypes = (ctypes.c_void_p,)


class DeathWatch:
    """The agent's end of one worker's lifeline. `path`: the file that the worker has to `hold`, while this process
    lives."""

    def __init__(self) -> None:
        self._watched = False
        self._file = os.memfd_create("lifeline", os.MFD_CLOEXEC)
        os.ftruncate(self._file, SIZE)
        self._page = _map(self._file)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        attributes, mutex = self._page + ATTRIBUTES_AT, self._page + MUTEX_AT
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, PROCESS_SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, ROBUST))
        _check(_libc.pthread_mutex_init(mutex, attributes))

    def watch(self, on_death: Callable[[], None]) -> bool:
        """Call `on_death`, on a thread, when the holder ends. False, and nothing happens, unless a process holds it."""
        if self._watched or ctypes.c_ubyte.from_address(self._page + HELD_AT).value == 0:
            return False
        self._watched = True
        threading.Thread(target=self._wait, args=(on_death,), name="lifeline", daemon=True).start()
        return True

    def close(self) -> None:
        """The worker is gone. A page that is watched stays mapped until its thread has seen the end too."""
        os.close(self._file)
        if not self._watched:
            _libc.munmap(self._page, SIZE)

    def _wait(self, on_death: Callable[[], None]) -> None:
        if _libc.pthread_mutex_lock(self._page + MUTEX_AT) == errno.EOWNERDEAD:
            on_death()
        _libc.munmap(self._page, SIZE)


def hold(path: str) -> None:
    """Tie this process's life to the lifeline at `path`; once, on the main thread, because that thread's end is
    reported. Raises OSError if the page cannot be mapped, or if a process holds it already."""
    if threading.current_thread() is not threading.main_thread():
        return
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        page = _map(file)
    finally:
        os.close(file)
    # Never unmapped: the kernel walks the list of held mutexes through this page when the thread ends.
    _check(_libc.pthread_mutex_trylock(page + MUTEX_AT))
    ctypes.c_ubyte.from_address(page + HELD_AT).value = 1


def _map(file: int) -> int:
    """The address of the shared page, mapped through libc because Python's own mapping ends with its object."""
    page = _libc.mmap(None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if page in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(page)


def _check(code: int) -> None:
    """Raise OSError for the error code that a pthread function has returned."""
    if code:
        raise OSError(code, os.strerror(code))
