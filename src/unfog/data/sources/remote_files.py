"""Remote files, read by byte range with fsspec: S3, http and others. An optional extra."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from unfog.data.sources.base import ImageError, TransientImageError
from unfog.data.sources.byte_storage import FileState, LocalStorage, Storage
from unfog.errors import RequestError
from unfog.text import sanitize, without_secrets

_TRIES = 3
_FIRST_PAUSE = 0.5  # seconds before the second try; then twice that, and up to half more
_THREADS = 16
_MIN_LISTED = 8  # files of one folder, from which on its listing costs less than looking at each
_SILENCE = 30.0  # seconds without a byte from a web server that count as a failure
_MIN_RATE = 2**15  # bytes a second; a server that is slower once _SILENCE is over has failed as well

_T = TypeVar("_T")


def open_storage(path: str) -> Storage:
    """Return the storage that reads this path or URL."""
    return _RemoteStorage(path) if "://" in path else LocalStorage()


class _RemoteStorage:
    """Files that fsspec reads, with a few retries.

    Endpoint and credentials come from the environment, such as AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID for S3.
    """

    remote = True

    def __init__(self, url: str) -> None:
        self._protocol = url.partition("://")[0]
        self._web = self._protocol.startswith("http")
        self._prefix = "" if self._web else f"{self._protocol}://"
        self._system_of: tuple[int, Any] = (0, None)  # (process, its file system)
        self._probed = False

    @property
    def _system(self) -> Any:
        """The file system of fsspec; another one in a forked process, as its event loop does not run there."""
        if self._system_of[0] != os.getpid():
            try:
                self._system_of = (os.getpid(), self._make_system())
            except (ImportError, ValueError) as error:
                extra = "s3" if self._protocol == "s3" else "http"
                raise RequestError(
                    f"{self._protocol}:// cannot be read: {error}; pip install 'unfog[{extra}]'"
                ) from None
        return self._system_of[1]

    def _make_system(self) -> Any:
        import fsspec

        if not self._web:
            return fsspec.filesystem(self._protocol)
        from aiohttp import ClientTimeout

        # aiohttp's default waits five minutes for a server that says nothing.
        timeout = ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
        return fsspec.filesystem(self._protocol, client_kwargs={"timeout": timeout})

    def states(self, paths: Iterable[str], absent: dict[str, str] | None = None) -> dict[str, FileState]:
        paths = dict.fromkeys(paths)
        self._system.invalidate_cache()  # fsspec remembers folders that it listed before
        listed = self._list_folders(paths)
        found: dict[str, FileState] = {}
        with ThreadPoolExecutor(_THREADS) as pool:
            for infos in pool.map(lambda path: listed.get(path) or self._look_up(path, absent), paths):
                found |= {name: self._state(name, info) for name, info in infos.items()}
        if self._web and found and not self._probed:
            self._check_ranges(min(found))
            self._probed = True
        return dict(sorted(found.items()))

    def read(self, path: str, start: int, size: int) -> bytes:
        """See Storage. Raises TransientImageError where a later try may succeed."""
        if size <= 0:
            return b""
        try:
            data: bytes = _retry(lambda: self._read_range(path, start, size))
        except Exception as error:
            reason = _describe(error).partition(";")[0]
            raise (ImageError if _is_permanent(error) else TransientImageError)(reason) from error
        if len(data) > size:
            raise ImageError("on a server that does not serve parts of a file")
        return data

    def _read_range(self, path: str, start: int, size: int) -> bytes:
        from fsspec.asyn import sync

        # A limit in all, as a server may also send a byte now and then, for ever. Raises TimeoutError.
        limit = _SILENCE + size / _MIN_RATE
        system = self._system
        data: bytes = sync(system.loop, system._cat_file, path, start=start, end=start + size, timeout=limit)
        return data

    def _look_up(self, path: str, absent: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
        """Return URL -> fsspec's information for a URL, or for each file that a pattern matches; see `states`."""
        try:
            if not _is_pattern(path):
                return {path: _retry(lambda: self._system.info(path))}
            matches: dict[str, dict[str, Any]] = _retry(lambda: self._system.glob(path, detail=True))
        except Exception as error:  # each protocol has errors of its own
            if absent is not None:
                absent[path] = _describe(error).partition(";")[0]
                return {}
            raise RequestError(f"{sanitize(path)} {_describe(error)}") from error
        if not matches:
            raise RequestError(f"nothing is there under {sanitize(path)}; give a URL or pattern of .tar shards")
        return {self._prefix + name: info for name, info in matches.items()}

    def _list_folders(self, paths: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
        """Return what `_look_up` returns, for the paths in folders with many of them. A web server has no listings."""
        folders = Counter(path.rpartition("/")[0] for path in paths if not _is_pattern(path))
        many = [f"{folder}/*" for folder, count in folders.items() if count >= _MIN_LISTED and not self._web]
        found = {name: info for folder in many for name, info in self._look_up(folder).items()}
        return {name: {name: info} for name, info in found.items() if name in paths}

    def _check_ranges(self, url: str) -> None:
        """Raise RequestError if a web server ignores Range requests, without fetching a whole file."""

        def has_ranges() -> bool:
            try:
                with self._system.open(url, block_size=1, cache_type="none") as file:
                    file.seek(1)
                    file.read(1)
            except ValueError:
                return False
            return True

        try:
            ranges = _retry(has_ranges)
        except Exception as error:  # each protocol has errors of its own
            raise RequestError(f"{sanitize(url)} {_describe(error)}") from error
        if not ranges:
            raise RequestError(
                f"the server of {sanitize(url)} serves no parts of a file (no Range requests), as Python's http.server "
                "does not; download the file, or use another server"
            )

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


def _retry(action: Callable[[], _T]) -> _T:
    """Return what an action returns, trying again after errors that may pass."""
    for attempt in range(_TRIES):
        try:
            return action()
        except Exception as error:  # each protocol has errors of its own
            if attempt == _TRIES - 1 or _is_permanent(error):
                raise
            # Random, so that many ranks do not come back at once; the system's generator, as ours are a run's state.
            time.sleep(_FIRST_PAUSE * 2**attempt * random.SystemRandom().uniform(1, 1.5))
    raise AssertionError


def _is_permanent(error: Exception) -> bool:
    """Return whether a later try would fail in the same way."""
    if status := _http_status(error):
        return 400 <= status < 500 and status not in (408, 429)  # timeout, too many requests
    cause = error.__cause__ or error
    if type(cause).__module__.startswith("aiohttp") or isinstance(error.__cause__, OSError):
        return False  # the connection broke
    return isinstance(error, FileNotFoundError | PermissionError) or "Credentials" in type(error).__name__


def _http_status(error: Exception) -> int:
    """Return the status that a web server answered, 0 if it did not."""
    # fsspec raises FileNotFoundError for a broken connection, too; the cause tells.
    status = getattr(error.__cause__ or error, "status", None)
    return status if isinstance(status, int) else 0


def _describe(error: Exception) -> str:
    """Return what went wrong with a remote file, and the remedy."""
    name, text = type(error).__name__, " ".join(without_secrets(str(error)).split())[:120]
    if _is_permanent(error) and _http_status(error) not in (0, 404, 410):
        return f"is refused (the server answers {_http_status(error)}); check the URL, whose signature may have expired"
    if isinstance(error, FileNotFoundError) and _is_permanent(error):
        return "is not there; check the URL and, for S3, AWS_ENDPOINT_URL"
    if isinstance(error, PermissionError) or "Credentials" in name:
        return f"may not be read ({text or name}); check the credentials in the environment, such as AWS_PROFILE"
    if isinstance(error, TimeoutError):
        return f"did not answer in time in {_TRIES} tries; check the network and try again"
    return f"could not be reached in {_TRIES} tries ({name}{': ' * bool(text)}{text}); check the network and try again"
