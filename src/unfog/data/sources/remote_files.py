"""Files far away, read by range with fsspec: S3, http and others. An extra."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from unfog.data.sources.byte_storage import FileState
from unfog.data.sources.image_files import ImageError, TransientImageError
from unfog.errors import RequestError
from unfog.text import sanitize, without_secrets

_TRIES = 3
_FIRST_PAUSE = 0.5
"""How often something is tried in all, and seconds before the second time; then twice that, and up to half more."""

_AT_ONCE = 16
_MANY = 8  # files of one folder, from which on its listing is asked for

_SILENCE = 30.0
"""Seconds without a word from a web server that count as a failure."""

_SLOWEST = 2**15
"""Bytes a second: who sends a part of a file more slowly than that, once SILENCE is over, has failed as well."""

_T = TypeVar("_T")


class RemoteStorage:
    """Files that fsspec reads. Where they are and with which credentials comes from the environment, as
    AWS_ENDPOINT_URL and AWS_ACCESS_KEY_ID do for S3. What fails is tried again, a few times."""

    remote = True

    def __init__(self, url: str) -> None:
        self._protocol = url.partition("://")[0]
        self._web = self._protocol.startswith("http")
        self._prefix = "" if self._web else f"{self._protocol}://"
        self._made: tuple[int, Any] = (0, None)
        self._probed = False

    @property
    def _system(self) -> Any:
        """fsspec's own; another in a process that was forked, as its loop does not run there."""
        if self._made[0] != os.getpid():
            try:
                self._made = (os.getpid(), self._make())
            except (ImportError, ValueError) as error:
                extra = "s3" if self._protocol == "s3" else "http"
                raise RequestError(
                    f"{self._protocol}:// cannot be read: {error}; pip install 'unfog[{extra}]'"
                ) from None
        return self._made[1]

    def _make(self) -> Any:
        import fsspec

        if not self._web:
            return fsspec.filesystem(self._protocol)
        from aiohttp import ClientTimeout

        # Of its own accord it waits five minutes for a server that says nothing.
        timeout = ClientTimeout(total=None, sock_connect=_SILENCE, sock_read=_SILENCE)
        return fsspec.filesystem(self._protocol, client_kwargs={"timeout": timeout})

    def states(self, paths: Iterable[str], absent: dict[str, str] | None = None) -> dict[str, FileState]:
        """See Storage. Of one folder with many files, its listing is asked for once.

        What cannot be looked at goes into `absent`, where that is given, with the reason.
        """
        paths = dict.fromkeys(paths)
        self._system.invalidate_cache()  # what it remembers of folders it listed before
        listed = self._listings(paths)
        found: dict[str, FileState] = {}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for infos in pool.map(lambda path: listed.get(path) or self._look_up(path, absent), paths):
                found |= {name: self._state(name, info) for name, info in infos.items()}
        if self._web and found and not self._probed:
            self._probe(min(found))
            self._probed = True
        return dict(sorted(found.items()))

    def read(self, path: str, start: int, size: int) -> bytes:
        """See Storage. TransientImageError where it may be otherwise another time."""
        if size <= 0:
            return b""
        try:
            data: bytes = _again(lambda: self._part(path, start, size))
        except Exception as error:
            said = _what(error).partition(";")[0]
            raise (ImageError if _is_final(error) else TransientImageError)(said) from error
        if len(data) > size:
            raise ImageError("on a server that does not serve parts of a file")
        return data

    def _part(self, path: str, start: int, size: int) -> bytes:
        """These bytes of a file, or TimeoutError: a server may also send nothing, or a byte now and then, for ever."""
        from fsspec.asyn import sync

        system, end = self._system, start + size
        limit = _SILENCE + size / _SLOWEST
        data: bytes = sync(system.loop, system._cat_file, path, start=start, end=end, timeout=limit)
        return data

    def _look_up(self, path: str, absent: dict[str, str] | None = None) -> dict[str, dict[str, Any]]:
        """What is known of the file of that URL, or of each that a pattern stands for; see `states`."""
        try:
            if not _is_pattern(path):
                return {path: _again(lambda: self._system.info(path))}
            matches: dict[str, dict[str, Any]] = _again(lambda: self._system.glob(path, detail=True))
        except Exception as error:  # each protocol has errors of its own
            if absent is not None:
                absent[path] = _what(error).partition(";")[0]
                return {}
            raise RequestError(f"{sanitize(path)} {_what(error)}") from error
        if not matches:
            raise RequestError(f"nothing is there under {sanitize(path)}; give a URL or pattern of .tar shards")
        return {self._prefix + name: info for name, info in matches.items()}

    def _listings(self, paths: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
        """What `_look_up` says of those that are in a folder with many of them; a web server has no listings."""
        folders = Counter(path.rpartition("/")[0] for path in paths if not _is_pattern(path))
        many = [f"{folder}/*" for folder, count in folders.items() if count >= _MANY and not self._web]
        found = {name: info for folder in many for name, info in self._look_up(folder).items()}
        return {name: {name: info} for name, info in found.items() if name in paths}

    def _probe(self, url: str) -> None:
        """RequestError if a web server sends whole files only, found without letting it."""

        def served() -> bool:
            try:
                with self._system.open(url, block_size=1, cache_type="none") as file:
                    file.seek(1)
                    file.read(1)
            except ValueError:
                return False
            return True

        try:
            in_parts = _again(served)
        except Exception as error:  # each protocol has errors of its own
            raise RequestError(f"{sanitize(url)} {_what(error)}") from error
        if not in_parts:
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
        versions = (
            info.get(key) for key in ("ETag", "etag", "LastModified", "Last-Modified", "last_modified", "mtime")
        )
        return FileState(size, str(next(filter(None, versions), "")))


def _is_pattern(url: str) -> bool:
    return "*" in url.partition("?")[0]


def _again(action: Callable[[], _T]) -> _T:
    """What an action gives, tried a few times unless what went wrong will not change."""
    for attempt in range(_TRIES):
        try:
            return action()
        except Exception as error:  # each protocol has errors of its own
            if attempt == _TRIES - 1 or _is_final(error):
                raise
            time.sleep(_FIRST_PAUSE * 2**attempt * random.SystemRandom().uniform(1, 1.5))
    raise AssertionError


def _is_final(error: Exception) -> bool:
    """Whether it would be the same another time."""
    if status := _status(error):
        return 400 <= status < 500 and status not in (408, 429)
    cause = error.__cause__ or error
    if type(cause).__module__.startswith("aiohttp") or isinstance(error.__cause__, OSError):
        return False  # the connection broke
    return isinstance(error, FileNotFoundError | PermissionError) or "Credentials" in type(error).__name__


def _status(error: Exception) -> int:
    """What a web server answered, 0 if it did not."""
    # Either is said to be a file that was not found; the cause tells.
    status = getattr(error.__cause__ or error, "status", None)
    return status if isinstance(status, int) else 0


def _what(error: Exception) -> str:
    """What went wrong with a file far away, and the remedy."""
    name, text = type(error).__name__, " ".join(without_secrets(str(error)).split())[:120]
    if _is_final(error) and _status(error) not in (0, 404, 410):
        return f"is refused (the server answers {_status(error)}); check the URL, whose signature may have expired"
    if isinstance(error, FileNotFoundError) and _is_final(error):
        return "is not there; check the URL and, for S3, AWS_ENDPOINT_URL"
    if isinstance(error, PermissionError) or "Credentials" in name:
        return f"may not be read ({text or name}); check the credentials in the environment, such as AWS_PROFILE"
    if isinstance(error, TimeoutError):
        return f"did not answer in time in {_TRIES} tries; check the network and try again"
    return f"could not be reached in {_TRIES} tries ({name}{': ' * bool(text)}{text}); check the network and try again"
