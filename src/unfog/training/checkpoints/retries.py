"""Reads that fail now and may work later: such an error of the system is not taken for damage."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

# Nothing, or no regular file, is under the name.
_MISSING = frozenset(
    getattr(errno, name)
    for name in ("ENOENT", "ENOTDIR", "EISDIR", "ELOOP", "EINVAL", "ENXIO", "ENODEV", "ENAMETOOLONG")
)
_RETRY_SECONDS = (0.2, 1.0)

_T = TypeVar("_T")


def is_unreadable(error: BaseException) -> bool:
    """Return True for an error of the system after which a file may still be whole, such as EIO, EACCES or EMFILE."""
    return isinstance(error, OSError) and error.errno is not None and error.errno not in _MISSING


def with_retries(read: Callable[[], _T]) -> _T:
    """Call `read`, and again after an error that may pass. Raises its last error."""
    for pause in _RETRY_SECONDS:
        try:
            return read()
        except OSError as error:
            if not is_unreadable(error):
                raise
        time.sleep(pause)
    return read()
