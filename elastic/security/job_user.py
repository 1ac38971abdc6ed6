"""Running all processes of a node's jobs, agents and workers, as another user than the daemon's.

A job owns its directory and may put there what it likes, links to the daemon's own files too. So the daemon, which is
root, uses the directory with the rights of that user (setfsuid: for one thread, for as long as it takes).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import pwd
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic.errors import ConfigError

SETGROUPS = {"x86_64": 116, "aarch64": 159}
"""The numbers of the system call setgroups, which is for one thread; the function of the C library is for all
threads."""

_UNCHANGED = -1


@dataclass(frozen=True, slots=True)
class JobUser:
    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str

    def start(self) -> dict[str, Any]:
        """The user's arguments for subprocess.Popen."""
        return {"user": self.uid, "group": self.gid, "extra_groups": self.groups}

    def environment(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def give(self, path: Path) -> None:
        """Make the job's user the owner of the path, which must be in a directory that only the daemon can write to."""
        os.chown(path, self.uid, self.gid, follow_symlinks=False)


def find(name: str) -> JobUser:
    """The user of that name. Raises ConfigError if there is none, or if this process cannot start others as that
    user."""
    if os.geteuid() != 0:
        raise ConfigError(f"--job-user {name} needs an agent that runs as root: only root starts jobs as others")
    if platform.machine() not in SETGROUPS:
        raise ConfigError(f"--job-user is for {' and '.join(SETGROUPS)}, and this machine is {platform.machine()}")
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"--job-user {name!r:.64}: there is no such user on this machine") from None
    if entry.pw_uid == 0:
        raise ConfigError("--job-user root is the user of this agent; leave the option out, or name another one")
    groups = tuple(os.getgrouplist(name, entry.pw_gid))
    return JobUser(name, entry.pw_uid, entry.pw_gid, groups, entry.pw_dir)


def check(user: JobUser, jobs_dir: Path) -> None:
    """Raise ConfigError if no job of that user could run here, or if a job could reach the daemon's files."""
    facts = jobs_dir.stat()
    if facts.st_uid != 0 or facts.st_mode & 0o022:
        raise ConfigError(
            f"--job-user {user.name}: {jobs_dir} can be written by others than root, who could put their files in the "
            "place of the agent's; give another --jobs-dir"
        )
    for path, what in ((Path(sys.executable), "run"), (Path(__file__), "read"), (jobs_dir, "enter")):
        try:
            with acting(user):
                os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise ConfigError(
                f"--job-user {user.name} cannot {what} {path} ({error.strerror}); open the way there with `chmod o+rx`"
            ) from error


@contextlib.contextmanager
def acting(user: JobUser | None) -> Iterator[None]:
    """In the block this thread opens, makes and removes files as that user; None: as itself. The block must not await
    anything; a thread that is started in it stays that user."""
    if user is None:
        yield
        return
    own = os.getgroups()
    try:
        _be(user.uid, user.gid, user.groups)
        yield
    finally:
        _be(0, os.getegid(), tuple(own))


def _be(uid: int, gid: int, groups: tuple[int, ...]) -> None:
    """Give this thread the rights of a user. Raises OSError. Going back to root the user is set first: only root may
    set the rest."""
    libc = ctypes.CDLL(None, use_errno=True)
    if uid == 0:
        libc.setfsuid(uid)
    if libc.syscall(SETGROUPS[platform.machine()], len(groups), (ctypes.c_uint32 * len(groups))(*groups)) != 0:
        raise OSError(ctypes.get_errno(), "setgroups")
    libc.setfsgid(gid)
    libc.setfsuid(uid)
    if libc.setfsuid(_UNCHANGED) != uid or libc.setfsgid(_UNCHANGED) != gid:
        raise RuntimeError(f"this thread cannot touch files as user {uid}")  # the calls have no other way to fail
