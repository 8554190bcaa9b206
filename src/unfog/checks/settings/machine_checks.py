"""Checks of what the machine has to bear: precision, disk space, time of previews and evaluation, and checkpoints."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch

from unfog.config.schema import Config
from unfog.device.cores import describe_quota, usable_cores
from unfog.planning.disk import disk_space_needed
from unfog.planning.flops import matmul_seconds
from unfog.planning.timing import forward_passes, repetitions
from unfog.reporting.findings import Finding
from unfog.reporting.progress import format_duration, format_number
from unfog.text import format_bytes, plural
from unfog.training.checkpoints.writer import free_bytes
from unfog.training.precision import DTYPES, gpu_has_bf16

_SIDE = {"cpu": 384, "cuda": 2048, "mps": 1024}  # of the matrices that are multiplied: about a millisecond in fp32
# Times fp32 that a half precision may take before it is called slow; on a busy machine clocks are a little off.
_SLOWER = 1.25
# Share of the time that previews and evaluation may take.
_MOST_ASIDE = 0.2
# Steps below which that share is only mentioned, as it is over soon.
_SHORT_RUN = 500


def check_machine(
    config: Config, parameters: int, device: torch.device, seconds_per_step: float | None, folder: Path
) -> list[Finding]:
    """Check checkpoints, precision and disk space; the arguments are those of `check_settings`."""
    return [
        _check_checkpoints(config, seconds_per_step),
        _check_precision(config, device),
        _check_disk(config, parameters, folder),
        *_check_cores(),
    ]


def _check_cores() -> list[Finding]:
    """settings.cores: what a CPU quota leaves, and the threads that compute; nothing without a quota."""
    if not (quota := describe_quota()):
        return []
    threads, usable = torch.get_num_threads(), usable_cores()
    return [
        Finding.graded(
            "settings.cores",
            f"{quota}, and {plural(threads, 'thread')} compute",
            (threads > usable, "hint", ", which wait for each other", f"OMP_NUM_THREADS={usable} suits the quota"),
            facts={"usable": usable, "threads": threads},
        )
    ]


def _check_precision(config: Config, device: torch.device) -> Finding:
    """Measure whether the device computes in the precision of the run, and faster than in fp32."""
    finding, name = partial(Finding, "settings.precision"), config.training.precision
    dtype = DTYPES.get(name)
    if dtype is None:
        if gpu_has_bf16(device):
            return finding("hint", f"fp32 on {device}, which has bf16", "--precision bf16 is about twice as fast")
        return finding("fine", f"fp32 on {device}")
    try:
        ours, fp32 = _multiply_seconds(dtype, device), _multiply_seconds(torch.float32, device)
    except RuntimeError as error:  # torch says so where a device has no such arithmetic
        reason = str(error).splitlines()[0]
        return finding("fatal", f"{device} does not compute in {name}: {reason}", "--precision fp32")
    slow, bf16 = ours > _SLOWER * fp32, name == "fp16" and _bf16_pays(device, fp32)
    better = "--precision bf16" if bf16 else "--precision fp32"
    return Finding.graded(
        "settings.precision",
        f"a {name} matrix product takes {format_number(ours / fp32)} times as long as in fp32 on {device}",
        (slow, "warning", f", which has no fast {name} arithmetic", better),
        (bf16, "hint", ", and bf16 is fast here as well", f"{better} needs no loss scaling, so no steps are skipped"),
        facts={"precision": name, "seconds": ours, "seconds_fp32": fp32, "times_fp32": ours / fp32},
    )


def _bf16_pays(device: torch.device, fp32: float) -> bool:
    if device.type == "cuda":
        return gpu_has_bf16(device)
    return _multiply_seconds(torch.bfloat16, device) < fp32


def _multiply_seconds(dtype: torch.dtype, device: torch.device) -> float:
    return matmul_seconds(dtype, device, _SIDE[device.type])


def _check_disk(config: Config, parameters: int, folder: Path) -> Finding:
    """Check that the checkpoints of the run fit on the disk of `folder`."""
    steps = config.training.images // config.training.batch
    room, free = disk_space_needed(parameters, config.checkpoint, steps, config.ema_snapshots), free_bytes(folder)
    one, most = format_bytes(room.checkpoint), format_bytes(room.checkpoints * room.checkpoint)
    said = f"{room.checkpoints} checkpoints of {one} take at most {most}, and {format_bytes(free)} are free"
    said += f"; EMA snapshots take {format_bytes(room.snapshots)}" if room.snapshots else ""
    remedy = "free some space, give another --out, or lower --checkpoint.keep or raise --checkpoint.milestones"
    return Finding.graded(
        "settings.disk",
        said,
        (free <= room.maximum and free < room.minimum, "fatal", "", remedy),
        (free <= room.maximum, "warning", "", remedy),
        facts={"checkpoint_bytes": room.checkpoint, "checkpoints": room.checkpoints, "free_bytes": free},
    )


def check_run_costs(config: Config, held_out: int, seconds_per_step: float | None) -> Finding:
    """Check the share of the time that previews, evaluation and metrics take, by their forward passes."""
    costs, steps = forward_passes(config, held_out), config.training.images // config.training.batch
    whole = sum(costs.values())
    shares = {name: cost / whole for name, cost in costs.items()}
    percent = {name: f"{format_number(100 * share)}%" for name, share in shares.items()}
    facts = {f"{name}_share": share for name, share in shares.items()}
    said = f"previews take about {percent['preview']} of the time and evaluation {percent['evaluate']}"
    if costs["metrics"]:
        said += f", generating for metrics {percent['metrics']}"
    if seconds_per_step:
        spent = steps * seconds_per_step * (whole / costs["training"] - 1)
        said, facts["seconds"] = f"{said}, {format_duration(spent)} in all", spent
    if 1 - shares["training"] <= _MOST_ASIDE:
        return Finding("settings.asides", "fine", said, facts=facts)
    name = max(("preview", "evaluate", "metrics"), key=costs.__getitem__)
    if name == "metrics":
        remedy = f"lower --evaluate.samples, or --evaluate.metrics-every {steps}: once, at the end"
    else:
        # Half of the share that all may take is for each of previews and evaluation, which run at both ends as well.
        one, most = costs[name] / repetitions(getattr(config, name).every, steps), costs["training"] * _MOST_ASIDE / 2
        interval = math.ceil(steps / max(1.0, most / one - 2))
        remedy = f"--{name}.every {interval}" if 2 * one < most else f"lower --{name}.images"
    return Finding("settings.asides", "warning" if steps >= _SHORT_RUN else "hint", said, remedy, facts)


def _check_checkpoints(config: Config, seconds_per_step: float | None) -> Finding:
    """Check how much training a crash can lose."""
    every, steps = config.checkpoint.every, config.training.images // config.training.batch
    lost = min(every, steps) if every > 0 else steps
    hours = None if seconds_per_step is None else lost * seconds_per_step / 3600
    said = f"a crash loses {lost:,} of {plural(steps, 'step')} at most"
    said += "" if hours is None else f", {format_duration(hours * 3600)}"
    # Without a measured pace steps stand for hours.
    long = steps > 2000 and lost > steps / 2 if hours is None else hours > 1
    # Every twenty minutes, which is what a crash then costs.
    often = max(1, min(1000, int(1200 / seconds_per_step))) if seconds_per_step else 1000
    return Finding.graded(
        "settings.checkpoints",
        said,
        (long, "warning", "", f"--checkpoint.every {often}"),
        facts={"every": every, "steps_to_lose": lost, "hours_to_lose": hours},
    )
