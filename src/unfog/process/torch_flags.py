"""Flags of torch that a run sets for its process, and how the process of a caller gets its own back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from unfog.errors import RequestError

WORKSPACE, REPEATABLE_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"  # set where unfog is imported

_open: list[_Kept] = []  # the innermost last


class _Kept(ExitStack):
    """Flags that were set since a context began, each with the value that it had before."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[tuple[int, str]] = set()


@contextmanager
def caller_flags_kept() -> Iterator[None]:
    """Inside, flags may be set by this module. At the end they have the values from before, also after an error."""
    with _Kept() as kept:
        _open.append(kept)
        try:
            yield
        finally:
            _open.remove(kept)


def set_flag(owner: Any, name: str, value: object) -> None:
    """Set an attribute of torch, or of a module of torch, until the innermost `caller_flags_kept` ends."""
    old = getattr(owner, name)
    _remember((id(owner), name), lambda: setattr(owner, name, old))
    setattr(owner, name, value)


def compute_fp32_exactly() -> None:
    """Let products and convolutions of fp32 on CUDA take no TF32, by whichever interface of torch it was chosen."""
    cudnn: Any = torch.backends.cudnn
    parts = cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul
    before = [part.fp32_precision for part in parts]
    old = ""
    with suppress(RuntimeError):  # torch's older interface cannot be read where the newer one was used
        old = torch.get_float32_matmul_precision()

    def undo() -> None:
        cudnn.allow_tf32 = before[0] == "tf32"
        if before[2] == "tf32":
            torch.set_float32_matmul_precision(old or "high")
        _set_precision(parts, before)

    _remember((id(cudnn), "fp32"), undo)
    cudnn.allow_tf32 = False
    if before[2] == "tf32":
        torch.set_float32_matmul_precision("highest")
    # A precision of all backends holds beside the flags of the older interface.
    _set_precision(parts, ["ieee" if part.fp32_precision == "tf32" else part.fp32_precision for part in parts])


def _set_precision(parts: Iterable[Any], wanted: Iterable[str]) -> None:
    for part, precision in zip(parts, wanted, strict=True):
        if part.fp32_precision != precision:
            part.fp32_precision = precision


def set_repeatable(device: torch.device, on: bool) -> None:
    """Make torch deterministic on CUDA, or else as fast as it can; the CPU is always deterministic.

    Raises:
        RequestError: cuBLAS does not repeat, by the value of its variable, or as it started in this process already.
    """
    if device.type != "cuda":
        return
    # A resumed run must repeat the first one bit by bit; by default cuDNN picks kernels by timing them.
    set_flag(torch.backends.cudnn, "benchmark", not on)
    set_flag(torch.backends.cudnn, "deterministic", on)
    _use_deterministic_algorithms(on)
    # It would also fill every new tensor with NaN, hundreds of kernels a step, to find reads of unwritten memory.
    set_flag(torch.utils.deterministic, "fill_uninitialized_memory", False)
    if on and not _products_repeat(device):
        given = os.environ.get(WORKSPACE, REPEATABLE_WORKSPACE)
        if given not in (REPEATABLE_WORKSPACE, ":16:8"):
            raise RequestError(
                f"with {WORKSPACE} = {given!r} matrix products on the GPU do not repeat to the bit; unset it, or set it"
                f" to {REPEATABLE_WORKSPACE}, before starting Python, or give --training.deterministic off"
            )
        raise RequestError(
            f"a matrix product ran on the GPU before {WORKSPACE} was set, so that products cannot repeat to the bit in "
            f"this process; restart Python and import unfog first, or set {WORKSPACE}={REPEATABLE_WORKSPACE} before "
            "starting it, or give --training.deterministic off"
        )


def _use_deterministic_algorithms(on: bool) -> None:
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    _remember((id(torch), "deterministic"), lambda: torch.use_deterministic_algorithms(before, warn_only=warned))
    # warn_only would leave attention its non-deterministic backward pass, whatever it warns of.
    torch.use_deterministic_algorithms(on)


def _products_repeat(device: torch.device) -> bool:
    """Return whether torch, in its deterministic mode, multiplies matrices; it reads the variable only once."""
    matrix = torch.ones(2, 2, device=device)
    try:
        torch.mm(matrix, matrix)
    except RuntimeError as error:
        if WORKSPACE not in str(error):
            raise
        return False
    return True


def _remember(key: tuple[int, str], undo: Callable[[], object]) -> None:
    if _open and key not in _open[-1].known:
        _open[-1].known.add(key)
        _open[-1].callback(undo)
