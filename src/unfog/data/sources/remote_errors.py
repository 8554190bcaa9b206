"""Errors of remote files: retries of those that may pass, a classification of others, and messages with a remedy."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from unfog.data.sources.base import ImageError
from unfog.text import without_secrets

_TRIES = 3
_FIRST_PAUSE = 0.5  # seconds before the second try; then twice that, and up to half more

_T = TypeVar("_T")


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


def describe_remote_error(error: Exception) -> str:
    """Return the problem with a remote file, and the remedy."""
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
    if isinstance(error, TimeoutError):
        return f"did not answer in time in {_TRIES} tries; check the network and try again"
    status = http_status(error)
    reason = f"the server answers {status}" if status >= 300 else f"{name}: {text}" if text else name
    return f"could not be reached in {_TRIES} tries ({reason}); check the network and try again"
