"""Compilation for `--compile`: code that is kept in Unfog's cache folder, and functions compiled for a GPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from unfog.errors import Interrupted, RunError
from unfog.files.cache_folder import CacheEntry, cache_folder, hold, is_private, make_room, release

if TYPE_CHECKING:
    import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

NAME = "compiled"
_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_ROOM = 500e6  # bytes kept free for a run: a network takes about 50 MB, in each shape
_MOMENT = 0.5  # seconds
_MOST = 2e9  # the folder is begun anew beyond this, as torch removes nothing from it


def keep_compiled_code() -> None:
    """Let torch store compiled code in the cache folder of Unfog, from now on.

    It stays where torch puts it, usually below /tmp, if TORCHINDUCTOR_CACHE_DIR is set, the cache has no room, or
    others could write there: what is stored is code that later runs load.
    """
    if os.environ.get(_VARIABLE):
        return
    folder = cache_folder() / NAME
    for entry in CacheEntry.all():
        if entry.path == folder and entry.nbytes > _MOST:
            entry.remove()
    with suppress(OSError):
        if not make_room(_ROOM, keep=folder):
            return
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(folder):
            hold(folder)
            os.environ[_VARIABLE] = str(folder.absolute())


@contextmanager
def compile_errors_explained(
    again: str = "repeat the command", stopped: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Raise RunError where torch cannot compile. The remedy is to do it `again`, and then without compiling.

    The stored code is removed first. A killed process may have left half a file, which would fail at every start.
    Interrupted is raised instead, and nothing removed, where a stop was requested: a signal to the whole group of
    processes also ends the compiler.
    """
    try:
        yield
    except Exception as error:
        if not (_is_of_compiling(error) or isinstance(error, BrokenExecutor)):
            raise
        if _comes_true(stopped):
            raise Interrupted("compiling was stopped") from error
        if not _is_of_compiling(error):
            raise
        folder, what = cache_folder() / NAME, "stored code may be damaged and is in use by another process"
        release(folder)
        if all(entry.remove() for entry in CacheEntry.all() if entry.path == folder):
            what = "stored code, which may have been damaged, is removed"
        reason = " ".join(str(error).split())[:200]
        raise RunError(
            f"compiling failed ({reason}); {what}: {again}, with --training.no-compile if this is not the first time"
        ) from error


def _is_of_compiling(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def _comes_true(stopped: Callable[[], bool]) -> bool:
    """Return True if a stop was requested, or is within a moment: the signal may reach the compiler first."""
    end = time.monotonic() + _MOMENT
    while not stopped():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def compiled_with(network: Any, device: torch.device, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function of tensors on `device`, compiled if that is a GPU and `network` is compiled in place."""
    return _compiled(function) if device.type == "cuda" and is_compiled(network) else function


def is_compiled(network: Any) -> bool:
    """Return True if `network.compile` was called, so that its forward pass is compiled."""
    return getattr(network, "_compiled_call_impl", None) is not None


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    return torch.compile(function, dynamic=False)
