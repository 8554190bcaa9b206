"""Post-hoc EMA: an EMA of any length, rebuilt after training from snapshots of two (EDM2, appendix C).

An average with a power-function profile weighs the weights after update n of N with (n/N)^(gamma+1) minus
((n-1)/N)^(gamma+1), the integral of p(t) = (gamma + 1) t^gamma / N^(gamma+1) over that update. A sum of snapshots is an
average whose profile is the same sum of theirs, so the best sum is the one whose profile is nearest to the wanted one.
Its coefficients are divided by their sum (algorithm 3 there): those of few snapshots add up to less than one, which
would shrink all weights.

Snapshots are written while training goes on, as RUN/averages/00001000.safetensors, in float16: that rounds a weight by
at most 0.05%, and a rebuilt EMA by about 0.02% (docs/decisions/0014-averages.md). A run can do without a snapshot, so
one that cannot be written is reported and left out.
"""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unfog.errors import RequestError
from unfog.files.safe_files import check_folder, list_folder, make_folder, move, new_file, remove, tensor_file
from unfog.training.checkpoints.snapshot import sync, system_errors
from unfog.training.settings import MAX_EMA_SNAPSHOTS, EmaSnapshots, PowerEma
from unfog.training.sharded_tensors import all_finite
from unfog.training.state import TrainState

Floats = npt.NDArray[np.float64]
METADATA_KEY = "averages"  # a single one, because safetensors writes several in no fixed order
# Distance between profiles beyond which nothing is rebuilt. The error of the weights is about thirty times smaller.
_MAX_PROFILE_ERROR = 0.25


class EmaSnapshotFile(NamedTuple):
    """A snapshot of EMAs on disk."""

    path: Path
    step: int
    updates: int
    """Optimiser updates up to its step."""
    widths: tuple[float, ...]
    """Widths of its EMAs, in the order of their numbers."""

    @classmethod
    def read_all(cls, folder: Path) -> list[EmaSnapshotFile]:
        """Return the snapshots in a folder, oldest first. Damaged ones are passed over: a sum can do without them."""
        found = []
        for path in list_folder(folder, folder.parent):
            if path.suffix != ".safetensors" or not path.name[0].isdecimal():
                continue
            try:
                with safe_open(tensor_file(path, folder.parent), "pt") as file:
                    said = json.loads((file.metadata() or {})[METADATA_KEY])
                widths = tuple(float(width) for width in said["widths"])
                one = cls(path, int(said["step"]), int(said["updates"]), widths)
                if one.updates > 0 and all(0.01 <= width <= 0.28 for width in widths):
                    found.append(one)
            except (OSError, SafetensorError, KeyError, ValueError, TypeError, RecursionError):
                continue
        # After a roll-back updates count from where it went back to; what was averaged before that is gone by then.
        return [one for one, after in zip(found, [*found[1:], None]) if after is None or one.updates < after.updates]


class Mixture(NamedTuple):
    """Weighted sum of snapshots that makes an EMA."""

    terms: list[tuple[EmaSnapshotFile, int, float]]
    """Snapshot, number of the EMA in it, weight."""
    error: float
    """Distance between its profile and the target, relative to the norm of the target."""
    step: int
    """Step of the EMA: that of a snapshot."""

    @classmethod
    def solve(cls, kept: Sequence[EmaSnapshotFile], width: float, step: int | None = None) -> Mixture:
        """Return the mixture for an EMA of this width at a step; None is that of the last snapshot.

        Raises:
            RequestError: the width is out of range, the step is after the last, or too few snapshots lie before it.
        """
        profile = PowerEma(width)
        if not kept:
            raise RequestError(
                "this run has no EMA snapshots to rebuild another EMA from; runs of 200 steps or more keep "
                "them, and shorter runs with --ema-snapshots.every N"
            )
        last = kept[-1]
        step = last.step if step is None else step
        if not kept[0].step <= step <= last.step:
            raise RequestError(f"step = {step} must be from {kept[0].step} to {last.step}, as snapshots are of these")
        used = [one for one in kept if one.step <= step]
        # Of the snapshot before the step: no snapshot holds the weights since then.
        step, end = used[-1].step, float(used[-1].updates)
        pairs = [(one, number) for one in used for number in range(len(one.widths))]
        gammas = np.array([PowerEma(one.widths[number]).gamma for one, number in pairs])
        weights, error = _coefficients(gammas, np.array([float(one.updates) for one, _ in pairs]), profile.gamma, end)
        if error > _MAX_PROFILE_ERROR:
            raise RequestError(
                f"ema = {width:g} cannot be rebuilt at step {step:,}: the nearest sum of {len(used)} snapshots has a "
                f"profile {100 * error:.0f}% away; give a width nearer to {' or '.join(f'{w:g}' for w in last.widths)}"
            )
        return cls([(one, n, float(w)) for (one, n), w in zip(pairs, weights)], error, step)


def _inner_product(gamma_a: Floats, t_a: Floats, gamma_b: Floats | float, t_b: Floats | float) -> Floats:
    """Integrate the product of two profiles; by logarithms, because the powers alone would overflow."""
    log_m, total = np.log(np.minimum(t_a, t_b)), gamma_a + gamma_b + 1
    logs = total * log_m - (gamma_a + 1) * np.log(t_a) - (gamma_b + 1) * np.log(t_b)
    product: Floats = (gamma_a + 1) * (gamma_b + 1) / total * np.exp(logs)
    return product


def _coefficients(gammas: Floats, ends: Floats, gamma: float, end: float) -> tuple[Floats, float]:
    """Fit the profile (gamma, end) by EMAs with exponents `gammas`, each over its first `ends` updates.

    Returns:
        The least-squares weights [K], divided by their sum, and the relative distance of their profile from the target.
    """
    products = _inner_product(gammas[:, None], ends[:, None], gammas[None], ends[None])
    wanted = _inner_product(gammas, ends, gamma, end)
    length = np.sqrt(np.diag(products))  # to one, or those over few updates would outweigh all others
    # Neighbours are nearly alike; what is below the cut would only add rounding errors of the snapshots to themselves.
    scaled, *_ = np.linalg.lstsq(products / np.outer(length, length), wanted / length, rcond=1e-10)
    found = scaled / length
    found = found / found.sum()  # an average of weights that do not change is those weights
    whole = (gamma + 1) ** 2 / (2 * gamma + 1) / end  # the wanted profile's own
    square = 1 + (found @ products @ found - 2 * found @ wanted) / whole
    return found, math.sqrt(max(0.0, float(square)))


class _EmaSnapshot(NamedTuple):
    """Copy of both EMAs in host memory."""

    step: int
    updates: int
    widths: tuple[float, ...]
    tensors: dict[str, Tensor]
    """float16 under "0/name" and "1/name" for the two EMAs; buffers as they are under "buffer/name"."""


def snapshot_interval(every: int, step: int) -> int:
    """Return the steps between snapshots: `every`, doubled until at most MAX_EMA_SNAPSHOTS lie before `step`."""
    # A function of position alone, so that an interrupted run keeps the same snapshots.
    while every > 0 and step // every > MAX_EMA_SNAPSHOTS:
        every *= 2
    return every


def take_ema_snapshot(state: TrainState, step: int) -> _EmaSnapshot:
    """Copy the EMAs of a state to host memory in float16."""
    assert state.second_ema is not None
    averages = [state.ema, state.second_ema]
    names = [name for name, _ in state.model.named_parameters()]
    tensors = {
        f"{number}/{name}": tensor.to("cpu", copy=True).contiguous()
        for number, average in enumerate(averages)
        for name, tensor in zip(names, to_float16(average.parameters))
    }
    buffers = (name for name, _ in state.model.named_buffers())
    # Without what the network does not store, such as tables that it computes.
    kept = state.model.state_dict().keys()
    tensors |= {f"buffer/{n}": b.to("cpu", copy=True) for n, b in zip(buffers, state.ema.buffers) if n in kept}
    return _EmaSnapshot(step, state.updates, tuple(average.width for average in averages), tensors)


def to_float16(tensors: list[Tensor]) -> list[Tensor]:
    """Cast to float16, except tensors with values that would be infinite there."""
    halves = [tensor.to(torch.float16) for tensor in tensors]
    return [half if good else tensor for half, good, tensor in zip(halves, all_finite(halves), tensors)]


def _write_snapshot(taken: _EmaSnapshot, folder: Path) -> None:
    """Write a snapshot. Raises OSError if that fails, and then leaves nothing."""
    make_folder(folder, folder.parent)  # not its parents: a run that was moved must not be created again
    # Renamed when complete, so that a crash leaves no snapshot that is half written.
    path, partial = folder / f"{taken.step:08d}.safetensors", folder / f".partial-{taken.step:08d}"
    said = {METADATA_KEY: json.dumps({"step": taken.step, "updates": taken.updates, "widths": taken.widths})}
    try:
        with system_errors():
            save_file(taken.tensors, new_file(partial, folder.parent), said)
        partial.chmod(0o666 & folder.stat().st_mode)  # safetensors lets the owner alone read its files
        sync(partial)
        move(partial, path, folder.parent)
        sync(folder)
    finally:
        remove(partial, folder.parent)


def _remove_surplus(folder: Path, every: int, step: int) -> None:
    """Remove the snapshots that a doubled interval skips."""
    apart = snapshot_interval(every, step)
    for one in EmaSnapshotFile.read_all(folder):
        if one.step % apart and one.step != step:
            remove(one.path, folder.parent)


def remove_after(folder: Path, step: int) -> None:
    """Remove snapshots after a step that the run has gone back to, and what a crash left half done."""
    try:
        if not check_folder(folder, folder.parent):
            return
    except OSError:  # somebody's file or link, which holds no snapshots of ours
        return
    for path in folder.glob("[0-9]*.safetensors"):
        if path.stem.isdecimal() and int(path.stem) > step:
            remove(path, folder.parent)
    for path in folder.glob(".partial-*"):
        remove(path, folder.parent)


class EmaSnapshotWriter:
    """Writes snapshots in a thread, one after the other."""

    def __init__(self, settings: EmaSnapshots):
        self.settings = settings
        self._thread: threading.Thread | None = None
        self._failed: deque[tuple[int, str]] = deque()

    def submit(self, taken: _EmaSnapshot, folder: Path) -> None:
        """Begin to write a snapshot, once the one before is done."""
        self.wait()
        self._thread = threading.Thread(target=self._work, args=(taken, folder), name="averages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written: seconds at most, because a full disk is an error here."""
        if self._thread is not None:
            self._thread.join()

    def failures(self) -> list[tuple[int, str]]:
        """Return (step, reason) of the snapshots that could not be written since the last call."""
        return [self._failed.popleft() for _ in range(len(self._failed))]

    def _work(self, taken: _EmaSnapshot, folder: Path) -> None:
        # In this thread, as the answer would hold up training: it reads every number.
        if not all(tensor.isfinite().all() for tensor in taken.tensors.values()):
            self._failed.append((taken.step, "it is not finite"))
            return
        try:
            _write_snapshot(taken, folder)
            with suppress(OSError):
                _remove_surplus(folder, self.settings.every, taken.step)
        except OSError as error:
            self._failed.append((taken.step, error.strerror or str(error)))
