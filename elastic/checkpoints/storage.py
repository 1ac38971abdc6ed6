"""The storage of checkpoints: a directory of this machine, or any fsspec path ("s3://bucket/run").

A file under its final name is complete and durable: locally it is written under a temporary name, fsynced, renamed, and
its directory fsynced; an object store shows an object only when it is complete. Errors are OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from elastic.errors import ConfigError
from elastic.process import file_modes

Buffer = bytes | memoryview


class FileSink(Protocol):
    """A file being written."""

    def write(self, data: Buffer, /) -> object: ...


class FileSource(Protocol):
    """A file being read."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...
    def read(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, /) -> int: ...


class Storage(Protocol):
    """Paths are relative to the root, with slashes."""

    @property
    def url(self) -> str:
        """The root, for people and for another process."""

    @property
    def durable(self) -> bool:
        """Whether files have to outlive the machine."""

    def directories(self, path: str) -> list[str]:
        """Names of the directories in a directory; [] if it does not exist."""

    def files(self, path: str) -> dict[str, int]:
        """Path -> size in bytes of every file below a directory, relative to it; {} if it does not exist."""

    def read(self, path: str) -> bytes:
        """The content of a file. Raises FileNotFoundError."""

    def open(self, path: str) -> AbstractContextManager[FileSource]:
        """Open a file. Raises FileNotFoundError."""

    def create(self, path: str) -> AbstractContextManager[FileSink]:
        """A file that appears, complete and durable, when the block is left without an exception."""

    def remove(self, path: str) -> None:
        """Remove a file if it exists."""

    def remove_directory(self, path: str) -> None:
        """Remove a directory with everything in it."""


def put(storage: Storage, path: str, content: bytes) -> None:
    """Write a whole file at once."""
    with storage.create(path) as file:
        file.write(content)


LASTING_KEPT = 64


def storage_at(url: str) -> Storage:
    """The storage at a path or URL. Raises ConfigError for a scheme that is not available here."""
    if "://" not in url:
        return LocalStorage(os.path.abspath(url))
    scheme, _, path = url.partition("://")
    if scheme in ("file", "local"):
        return LocalStorage(os.path.abspath(path))
    return RemoteStorage(url)


class LocalStorage:
    """A directory, which is made when something is written."""

    durable = True

    def __init__(self, root: str) -> None:
        self.url = root
        self._lasting: set[str] = set()
        """Directories whose names this process has made durable."""

    def directories(self, path: str) -> list[str]:
        try:
            with os.scandir(self._at(path)) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self, path: str) -> dict[str, int]:
        root = self._at(path)
        found: dict[str, int] = {}
        for directory, _, names in os.walk(root):
            for name in names:
                full = os.path.join(directory, name)
                with contextlib.suppress(FileNotFoundError):
                    if stat.S_ISREG((status := os.lstat(full)).st_mode):
                        found[os.path.relpath(full, root)] = status.st_size
        return found

    def read(self, path: str) -> bytes:
        with open(self._at(path), "rb") as file:
            return file.read()

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[FileSource]:
        with open(self._at(path), "rb") as file:
            yield file

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[FileSink]:
        full = self._at(path)
        directory, name = os.path.split(full)
        self._make(directory)
        temporary = os.path.join(directory, f".{name}.{secrets.token_hex(6)}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, file_modes.of_file())
        try:
            try:
                yield _LocalSink(descriptor)
                self._sync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, full)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._sync_directory(directory)

    def remove(self, path: str) -> None:
        full = self._at(path)
        try:
            os.unlink(full)
        except (FileNotFoundError, NotADirectoryError):
            return
        self._sync_directory(os.path.dirname(full))

    def remove_directory(self, path: str) -> None:
        root = self._at(path)
        self._lasting = {known for known in self._lasting if known != root and os.path.dirname(known) != root}
        for directory, inner, names in os.walk(root, topdown=False):
            links = (name for name in inner if os.path.islink(os.path.join(directory, name)))
            for name in (*names, *links):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(directory, name))
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(directory)

    def _at(self, path: str) -> str:
        return os.path.join(self.url, path) if path else self.url

    def _make(self, directory: str) -> None:
        """Make a directory with its parents below the root. Each name is durable before anything is put into it, also
        if another process has made it, which may have been killed before it was durable."""
        if os.path.isdir(directory) and (directory in self._lasting or not self._is_below(directory)):
            return
        parent = os.path.dirname(directory)
        self._make(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, file_modes.of_directory())
        self._sync_directory(parent)
        if len(self._lasting) >= LASTING_KEPT:
            self._lasting.clear()  # to sync a directory again does no harm
        self._lasting.add(directory)

    def _is_below(self, directory: str) -> bool:
        return directory.startswith(os.path.join(self.url, ""))

    def _sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def _sync_directory(self, directory: str) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._sync(descriptor)
        finally:
            os.close(descriptor)


class MemoryStorage(LocalStorage):
    """A directory in the memory of this machine, which its owner makes and removes. It is never made again, or a worker
    that outlives its owner for a moment would leave its state there for good. Nothing is fsynced: memory does not
    outlive the machine."""

    durable = False

    def _make(self, directory: str) -> None:
        if directory == self.url:
            if not os.path.isdir(directory):
                raise FileNotFoundError(errno.ENOENT, "the directory in memory has been removed", directory)
            return
        super()._make(directory)

    def _sync(self, descriptor: int) -> None:
        """Do nothing: every process reads the same pages."""


class _LocalSink:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: Buffer) -> None:
        view = memoryview(data)
        while view.nbytes:
            view = view[os.write(self._descriptor, view) :]


@contextlib.contextmanager
def _as_os_errors(url: str) -> Iterator[None]:
    """Raise fsspec's errors as OSError: its file systems have their own errors, as S3's for missing credentials."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", url) from error


class _RemoteFile:
    """A remote file that is read, or written in parts."""

    def __init__(self, file: Any, url: str) -> None:
        self._file = file
        self._url = url

    def write(self, data: Buffer) -> None:
        with _as_os_errors(self._url):
            self._file.write(data)

    def readinto(self, buffer: memoryview) -> int | None:
        with _as_os_errors(self._url):
            count: int | None = self._file.readinto(buffer)
            return count

    def read(self, size: int) -> bytes:
        with _as_os_errors(self._url):
            return bytes(self._file.read(size))

    def seek(self, offset: int) -> int:
        with _as_os_errors(self._url):
            return int(self._file.seek(offset))


class RemoteStorage:
    """An fsspec file system in which a file appears when it is closed."""

    durable = True

    def __init__(self, url: str) -> None:
        import fsspec

        try:
            self._fs: Any
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"the checkpoint directory {url} cannot be used: {error}") from error
        self.url = url

    def directories(self, path: str) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._found(path) if "/" in name})

    def files(self, path: str) -> dict[str, int]:
        return self._found(path)

    def read(self, path: str) -> bytes:
        with _as_os_errors(self.url):
            return bytes(self._fs.cat_file(self._at(path)))

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[FileSource]:
        with _as_os_errors(self.url):
            file = self._fs.open(self._at(path), "rb")
        with file:
            yield _RemoteFile(file, self.url)

    @contextlib.contextmanager
    def create(self, path: str) -> Iterator[FileSink]:
        with _as_os_errors(self.url):
            file = self._fs.open(self._at(path), "wb")
        try:
            yield _RemoteFile(file, self.url)
        except BaseException:
            file.discard()  # a close would make a partial file appear
            raise
        with _as_os_errors(self.url):
            file.close()

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_os_errors(self.url):
            self._fs.rm_file(self._at(path))

    def remove_directory(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _as_os_errors(self.url):
            self._fs.rm(self._at(path), recursive=True)

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}" if path else str(self._root)

    def _found(self, path: str) -> dict[str, int]:
        """The files below a path. An object store has no directories, only names with slashes."""
        self._fs.invalidate_cache()
        root, found = self._at(path).rstrip("/") + "/", dict[str, dict[str, Any]]()
        with contextlib.suppress(FileNotFoundError), _as_os_errors(self.url):
            found = self._fs.find(root.rstrip("/"), detail=True)
        return {name.removeprefix(root): int(entry["size"]) for name, entry in found.items() if name.startswith(root)}
