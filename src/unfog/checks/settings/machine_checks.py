"""Checks of the machine: precision that the device supports, and disk space for checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from unfog.config.schema import Config
from unfog.planning.disk import disk_space_needed
from unfog.reporting.findings import Finding
from unfog.reporting.progress import format_bytes
from unfog.training.checkpoints.writer import free_bytes
from unfog.training.precision import DTYPES

_SIDE = {"cpu": 384, "cuda": 2048, "mps": 1024}  # of the matrices that are multiplied: about a millisecond in fp32
_ROUNDS = 5
_SLOWER = 1.25
"""Times fp32 that a half precision may take before it is called slow; on a busy machine clocks are a little off."""


def check_precision(config: Config, device: torch.device) -> Finding:
    """Measure whether the device computes in the precision of the run, and faster than in fp32."""
    name = config.training.precision
    dtype = DTYPES.get(name)
    if dtype is None:
        return _fp32(device)
    try:
        ours, fp32 = multiply_seconds(dtype, device), multiply_seconds(torch.float32, device)
    except RuntimeError as error:  # torch says so where a device has no such arithmetic
        reason = str(error).splitlines()[0]
        return Finding(
            "settings.precision", "fatal", f"{device} does not compute in {name}: {reason}", "--precision fp32"
        )
    facts = {"precision": name, "seconds": ours, "seconds_fp32": fp32, "times_fp32": ours / fp32}
    compared = f"a {name} matrix product takes {ours / fp32:.2g} times as long as in fp32 on {device}"
    if ours > _SLOWER * fp32:
        remedy = f"--precision {'bf16' if name == 'fp16' and _bf16_pays(device, fp32) else 'fp32'}"
        return Finding(
            "settings.precision", "warning", f"{compared}, which has no fast {name} arithmetic", remedy, facts
        )
    if name == "fp16" and _bf16_pays(device, fp32):
        remedy = "--precision bf16 needs no loss scaling, so no steps are skipped"
        return Finding("settings.precision", "hint", f"{compared}, and bf16 is fast here as well", remedy, facts)
    return Finding("settings.precision", "fine", compared, facts=facts)


def _fp32(device: torch.device) -> Finding:
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return Finding(
            "settings.precision", "hint", f"fp32 on {device}, which has bf16", "--precision bf16 is about twice as fast"
        )
    return Finding("settings.precision", "fine", f"fp32 on {device}")


def _bf16_pays(device: torch.device, fp32: float) -> bool:
    """Return True where bf16 is native to the device, or faster than fp32."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return multiply_seconds(torch.bfloat16, device) < fp32


def multiply_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of one product of two square matrices, the fastest of several.

    Raises:
        RuntimeError: the device has no such arithmetic.
    """
    side = _SIDE[device.type]
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    fastest = float("inf")
    for _ in range(_ROUNDS + 1):  # the first one also prepares
        _wait(device)
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        _wait(device)
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def check_disk(config: Config, parameters: int, folder: Path) -> Finding:
    """Check that the checkpoints of the run fit on the disk of `folder`."""
    steps = config.training.images // config.training.batch
    room, free = disk_space_needed(parameters, config.checkpoint, steps, config.ema_snapshots), free_bytes(folder)
    facts = {"checkpoint_bytes": room.checkpoint, "checkpoints": room.checkpoints, "free_bytes": free}
    most = format_bytes(room.checkpoints * room.checkpoint)
    said = (
        f"{room.checkpoints} checkpoints of {format_bytes(room.checkpoint)} make {most} at most, and "
        f"{format_bytes(free)} are free"
    )
    said += f"; EMA snapshots take {format_bytes(room.snapshots)}" if room.snapshots else ""
    if free > room.maximum:
        return Finding("settings.disk", "fine", said, facts=facts)
    remedy = "free some space, give another --out, or lower --checkpoint.keep or raise --checkpoint.milestones"
    return Finding("settings.disk", "fatal" if free < room.minimum else "warning", said, remedy, facts)
