"""Byte ranges of large files, on this machine or remote (S3, http and others, by fsspec). Safe to use from threads.

Errors of remote files are tried again if they may pass, and explained with a remedy otherwise.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from io import RawIOBase
from typing import Any, NamedTuple, Protocol, TypeVar

from unfog.data.outages import KnownFolders
from unfog.data.sources.base import ImageError, TransientImageError
from unfog.data.sources.image_files import CHANGED, MAX_FILE_BYTES, NO_PARTS, os_error_reason
from unfog.device.cores import thread_pool
from unfog.errors import RequestError, install_command
from unfog.files.positions import READ, pread
from unfog.text import sanitize, without_secrets

_MAX_OPEN_FILES = 128
_THREADS = 16
_MIN_LISTED = 8  # files of one folder, from which on its listing costs less than looking at each
_SILENCE = 30.0  # seconds without a byte from a web server that count as a failure
_NO_SUCH_RANGE = 416  # HTTP status
_MIN_RATE = 2**15  # bytes a second; a server that is slower once _SILENCE is over has failed as well

_TRIES = 3  # of one request
_FIRST_PAUSE = 0.5  # seconds before the second try; then twice that, and up to half more

_T = TypeVar("_T")


class FileState(NamedTuple):
    """Size and version of a file, which differ once it has changed."""

    size: int
    version: str
    """Time of change, or ETag."""


class Storage(Protocol):
    """Files that are read by byte range."""

    remote: bool
    """True if each read waits for a network, so that many at once are faster."""

    def states(self, paths: Iterable[str], absent: dict[str, str] | None = None) -> dict[str, FileState]:
        """Return the state of each file, sorted by path, with remote patterns expanded.

        Remote files that cannot be looked at go into `absent`, path -> reason, where that is given.

        Raises:
            RequestError: a file cannot be looked at, or a pattern matches none.
        """

    def read(self, path: str, start: int, size: int) -> bytes:
        """Return up to `size` bytes from `start`, fewer where the file ends. Raises ImageError."""

    def folder_problem(self, path: str) -> str:
        """Return why the folder of a file is not the one that its state was first taken from; "" if it is."""


class _LocalStorage:
    """Storage of files on this machine."""

    remote = False

    def __init__(self) -> None:
        # Safe in threads: a file that is forgotten here is closed by the last thread that reads from it.
        self._open = lru_cache(_most_open_files())(_Descriptor)
        self._folders: dict[str, KnownFolders] = {}
        self._first_states: dict[str, FileState] = {}  # byte ranges of a file that changed since mean nothing

    def states(self, paths: Iterable[str], absent: dict[str, str] | None = None) -> dict[str, FileState]:
        found = {path: self._state(path) for path in sorted(paths)}
        if not self._first_states:
            self._first_states = found
            self._folders = {folder: KnownFolders.of(folder) for folder in {os.path.dirname(path) for path in found}}
        return found

    def read(self, path: str, start: int, size: int) -> bytes:
        try:
            file = self._open(path)
            stat = os.fstat(file.number)  # at each read, as an open file may be written over in place
            if self._first_states.get(path, stat) not in (stat, (stat.st_size, str(stat.st_mtime_ns))):
                raise ImageError(CHANGED)
            parts: list[bytes] = []
            while size > 0 and (part := pread(file.number, size, start)):  # Linux reads at most 2 GB at once
                parts.append(part)
                start, size = start + len(part), size - len(part)
        except OSError as error:
            self._open.cache_clear()  # a descriptor of a mount that died stays dead when the mount is back
            raise ImageError(f"in an archive {os_error_reason(error)}") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def folder_problem(self, path: str) -> str:
        known = self._folders.get(os.path.dirname(path))
        return "" if known is None else known.problem(path)

    @staticmethod
    def _state(path: str) -> FileState:
        try:
            stat = os.stat(path)
        except OSError as error:
            raise RequestError(
                f"{sanitize(path)} is a file {os_error_reason(error)}; restore it, or remove it from the pattern"
            ) from None
        return FileState(stat.st_size, str(stat.st_mtime_ns))


def _most_open_files() -> int:
    """Return the number of files to hold open: few where the system lets a process open few."""
    try:
        import resource  # missing on Windows
    except ImportError:
        return _MAX_OPEN_FILES
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN_FILES if limit == resource.RLIM_INFINITY else min(_MAX_OPEN_FILES, max(1, limit // 8))


class _Descriptor:
    """An open file that is closed with its last reference."""

    number = -1  # until it is open, as __del__ also runs after a failure to open

    def __init__(self, path: str) -> None:
        self.number = os.open(path, READ)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


class BlockReader(RawIOBase):
    """A seekable file of `size` bytes in a storage, for zipfile and tar headers. It reads `block` bytes or more."""

    def __init__(self, storage: Storage, path: str, size: int, block: int) -> None:
        self._storage, self._path, self._size, self._block = storage, path, size, block
        self._position = self._start = 0
        self._held = b""

    def read_at(self, start: int, size: int) -> bytes:
        """Return up to `size` bytes from `start`, fewer where the file ends."""
        size = max(0, min(size, self._size - start))
        if not self._start <= start <= start + size <= self._start + len(self._held):
            want = min(max(size, self._block), self._size - start) if size else 0
            self._start, self._held = start, self._storage.read(self._path, start, want)
        return self._held[start - self._start : start - self._start + size]

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence])
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._size - self._position)
        size = rest if size is None or size < 0 else min(size, rest)
        if size > MAX_FILE_BYTES:  # of which a remote file may say that it has any number
            raise ImageError(f"its directory has over {MAX_FILE_BYTES // 2**20} MB")
        data = self.read_at(self._position, size)
        self._position += len(data)
        return data


def open_storage(path: str) -> Storage:
    """Return the storage that reads this path or URL."""
    return _RemoteStorage(path) if "://" in path else _LocalStorage()


class _RemoteStorage:
    """Storage that fsspec reads. Endpoint and credentials come from the environment, such as AWS_ENDPOINT_URL."""

    remote = True

    def __init__(self, url: str) -> None:
        self._protocol = url.partition("://")[0]
        self._web = self._protocol.startswith("http")
        self._prefix = "" if self._web else f"{self._protocol}://"
        self._system_of: tuple[int, Any] = (0, None)  # (process, its file system)
        self._ranges_checked = False

    @property
    def _system(self) -> Any:
        """The file system of fsspec; another one in a forked process, as its event loop does not run there."""
        if self._system_of[0] != os.getpid():
            try:
                self._system_of = (os.getpid(), self._make_system())
            except (ImportError, ValueError) as error:
                extra = "s3" if self._protocol == "s3" else "http"
                raise RequestError(f"{self._protocol}:// cannot be read: {error}; {install_command(extra)}") from None
        return self._system_of[1]

    def _make_system(self) -> Any:
        if not self._web and self._protocol not in ("s3", "s3a"):
            import fsspec

            return fsspec.filesystem(self._protocol)
        from unfog.data.sources.web import s3_file_system, web_file_system

        return web_file_system(_SILENCE) if self._web else s3_file_system()

    def folder_problem(self, path: str) -> str:
        return ""

    def states(self, paths: Iterable[str], absent: dict[str, str] | None = None) -> dict[str, FileState]:
        paths = dict.fromkeys(paths)
        self._system.invalidate_cache()  # fsspec remembers folders that it listed before
        listed = self._list_folders(paths)
        found: dict[str, FileState] = {}
        with thread_pool(_THREADS) as pool:
            for infos in pool.map(lambda path: listed.get(path) or self._look_up(path, absent), paths):
                found |= {name: self._state(name, info) for name, info in infos.items()}
        if self._web and found and not self._ranges_checked:
            self._check_ranges(min(found))
            self._ranges_checked = True
        return dict(sorted(found.items()))

    def read(self, path: str, start: int, size: int) -> bytes:
        """Raises TransientImageError where a later try may succeed."""
        if size <= 0:
            return b""
        try:
            data: bytes = retry(lambda: self._read_range(path, start, size))
        except ImageError:
            raise
        except Exception as error:
            reason = describe_remote_error(error).partition(";")[0]
            raise (ImageError if is_permanent(error) else TransientImageError)(reason) from error
        if len(data) > size:
            raise ImageError(NO_PARTS)
        return data

    def _read_range(self, path: str, start: int, size: int) -> bytes:
        from fsspec.asyn import sync

        # A limit in all, as a server may also send a byte now and then, for ever. Raises TimeoutError.
        limit = _SILENCE + size / _MIN_RATE
        system = self._system
        data: bytes = sync(system.loop, system._cat_file, path, start=start, end=start + size, timeout=limit)
        return data

    def _look_up(self, path: str, absent: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
        """Return URL -> fsspec's information, for a URL or each file that a pattern matches; see `Storage.states`."""
        if self._web and _is_pattern(path):
            raise RequestError(
                f"{sanitize(path)}: a web server lists no files; name the shards, as in s-{{000..099}}.tar"
            )
        try:
            if not _is_pattern(path):
                # All of an answer's headers may come a byte now and then, too.
                limit = {"timeout": 2 * _SILENCE} if self._web else {}
                return {path: retry(lambda: self._system.info(path, **limit))}
            matches: dict[str, dict[str, Any]] = retry(lambda: self._system.glob(path, detail=True))
        except Exception as error:  # each protocol has errors of its own
            if absent is not None:
                absent[path] = describe_remote_error(error).partition(";")[0]
                return {}
            raise RequestError(f"{sanitize(path)} {describe_remote_error(error, path)}") from error
        if not matches:
            # A bucket that is not there lists nothing, as an empty one does.
            bucket = ", or there is no such bucket" if path.startswith("s3://") else ""
            raise RequestError(f"nothing is there under {sanitize(path)}{bucket}; give a URL or pattern of .tar shards")
        return {self._prefix + name: info for name, info in matches.items()}

    def _list_folders(self, paths: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
        """Call `_look_up` for paths in folders with many of them. A web server has no listings."""
        folders = Counter(path.rpartition("/")[0] for path in paths if not _is_pattern(path))
        many = [f"{folder}/*" for folder, count in folders.items() if count >= _MIN_LISTED and not self._web]
        found = {name: info for folder in many for name, info in self._look_up(folder).items()}
        return {name: {name: info} for name, info in found.items() if name in paths}

    def _check_ranges(self, url: str) -> None:
        """Raise RequestError if a web server ignores Range requests, without fetching a whole file."""

        try:
            retry(lambda: self._read_range(url, 1, 1))
        except ImageError as error:
            raise RequestError(f"{sanitize(url)} is {error}; download it, or use another server") from error
        except Exception as error:  # each protocol has errors of its own
            if http_status(error) != _NO_SUCH_RANGE:  # of a file of a byte
                raise RequestError(f"{sanitize(url)} {describe_remote_error(error, url)}") from error

    def _state(self, path: str, info: dict[str, Any]) -> FileState:
        size = info.get("size")
        if type(size) is not int or info.get("partial") is False:
            raise RequestError(
                f"the server of {sanitize(path)} serves no parts of it; download it, or use another server"
            )
        # The first one that the protocol gives.
        versions = (
            info.get(key) for key in ("ETag", "etag", "LastModified", "Last-Modified", "last_modified", "mtime")
        )
        return FileState(size, str(next(filter(None, versions), "")))


def _is_pattern(url: str) -> bool:
    return "*" in url.partition("?")[0]


def retry(action: Callable[[], _T]) -> _T:
    """Call an action, and again after errors that may pass."""
    for attempt in range(_TRIES - 1):
        try:
            return action()
        except Exception as error:  # each protocol has errors of its own
            if is_permanent(error):
                raise
            # Random, so that many ranks do not come back at once; the system's generator, as ours are a run's state.
            time.sleep(_FIRST_PAUSE * 2**attempt * random.SystemRandom().uniform(1, 1.5))
    return action()


def is_permanent(error: Exception) -> bool:
    """Return False for an error after which the next try may succeed, such as a broken connection."""
    if isinstance(error, ImageError):
        return True
    if status := http_status(error):
        return 400 <= status < 500 and status not in (408, 429)  # timeout, too many requests
    cause = error.__cause__ or error
    if type(cause).__module__.startswith("aiohttp") or isinstance(error.__cause__, OSError):
        return False  # the connection broke
    return isinstance(error, FileNotFoundError | PermissionError) or "Credentials" in type(error).__name__


def http_status(error: Exception) -> int:
    """Return the HTTP status in an error, 0 without one."""
    # fsspec raises FileNotFoundError for a broken connection, too; the cause shows the difference.
    cause = error.__cause__ or error
    if _is_no_http(cause):
        return 0  # aiohttp gives it the status 400, which no server has sent
    status = getattr(cause, "status", None)
    return status if isinstance(status, int) else 0


def _is_no_http(error: BaseException) -> bool:
    """Return True if aiohttp could not parse the answer."""
    return type(error.__cause__).__module__ == "aiohttp.http_exceptions"


def describe_remote_error(error: Exception, path: str = "") -> str:
    """Return the problem with a remote file, at this path if it is known, and the remedy."""
    name, text = type(error).__name__, " ".join(without_secrets(str(error)).split())[:120]
    if isinstance(error, ImageError):
        return f"is {text}"
    if _is_no_http(error.__cause__ or error):
        return "is on a server whose answers are not HTTP; check the host and port of the URL"
    if is_permanent(error) and http_status(error) not in (0, 404, 410):
        return f"is refused (the server answers {http_status(error)}); check the URL, whose signature may have expired"
    if isinstance(error, FileNotFoundError) and is_permanent(error):
        return "is not there; check the URL and, for S3, AWS_ENDPOINT_URL"
    if isinstance(error, PermissionError) or "Credentials" in name:
        return f"may not be read ({text or name}); check the credentials in the environment, such as AWS_PROFILE"
    again = "check the network and try again"
    if path.startswith("s3://") and not (os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL_S3")):
        again += ", or set AWS_ENDPOINT_URL for a server other than Amazon's"
    if isinstance(error, TimeoutError):
        return f"did not answer in time in {_TRIES} tries; {again}"
    status = http_status(error)
    reason = f"the server answers {status}" if status >= 300 else f"{name}: {text}" if text else name
    return f"could not be reached in {_TRIES} tries ({reason}); {again}"
