"""Peak memory of a trace on a device, and the memory that is available there."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from unfog.planning.memory_trace import Trace

MB = 2**20
HEAP_LIMIT = 32 * MB
"""glibc maps larger blocks one by one and unmaps them at once (malloc.c, DEFAULT_MMAP_THRESHOLD_MAX)."""

HOLES = 0.30
"""Gaps in the heap of a CPU process, as a share of the temporary tensors up to HEAP_LIMIT: a freed block stays resident
between others, and is often a little too small for the next. With it, predictions are within 15% of the peaks that
benchmarks/plan/measure_peaks.py measured; repeats of one configuration vary by up to 12%."""

HOLES_RECOMPUTING = 1.3
"""The same with gradient checkpointing, under which blocks of many sizes take turns."""

ONEDNN_HALF = 17 * MB
"""Buffers that oneDNN keeps after computing in bf16 on a CPU; measured on one machine with one thread."""

LASTING = ("parameters", "average", "moments", "exchange", "library")
"""Allocated once at the beginning, so that the heap has no holes there."""

UNTOLD = 4 * 2**30  # bytes assumed where the system does not tell

CUDA_BLOCK = 512  # bytes that PyTorch's CUDA allocator rounds up to
CUDA_CONTEXT = 500 * MB
"""CUDA context, kernels and handles of a process, 300 to 700 MB; not measured here. Only subtracted for a card that is
not at hand: the free memory that the driver reports is without it."""
CUDNN_WORKSPACE = 64 * MB
"""Workspace of cuDNN, and cuBLAS's 8 to 32 MB. Deterministic kernels seldom need more. Not measured."""

PARTS = (
    *("parameters", "gathered", "gradients", "exchange", "moments", "average", "activations", "workspace", "library"),
    "allocator",
)
"""Parts of a peak. "gathered": blocks of a sharded network that are whole at the moment; "exchange": gradient buckets;
"workspace": temporary tensors; "library": buffers of kernels; "allocator": gaps between blocks."""


@dataclass(frozen=True)
class Peak:
    """Peak memory of a computation in bytes, and the parts that it consists of."""

    total: int
    """Bytes."""
    parts: Mapping[str, int]
    """Bytes by PARTS, which add up to the total."""


def find_peak(trace: Trace, device: str, holes: float = HOLES) -> Peak:
    """Return the peak of a trace on a device of this type, without the CUDA context."""
    cost = [_allocated_bytes(size, kind, device, holes) for size, kind in zip(trace.sizes, trace.kinds)]
    live = highest = 0.0
    where = 0
    for place, event in enumerate(trace.events):
        if event >= 0:
            live += cost[event]
            if live > highest:
                highest, where = live, place
        else:
            live -= cost[~event]
    alive: set[int] = set()
    for event in trace.events[: where + 1]:
        (alive.add if event >= 0 else alive.discard)(event if event >= 0 else ~event)
    parts = Counter(dict.fromkeys(PARTS, 0))
    for number in alive:
        parts[trace.kinds[number]] += trace.sizes[number]
    parts["library"] += CUDNN_WORKSPACE if device == "cuda" else 0
    total = round(highest) + (CUDNN_WORKSPACE if device == "cuda" else 0)
    parts["allocator"] = total - sum(parts.values())
    return Peak(total, dict(parts))


def _allocated_bytes(size: int, kind: str, device: str, holes: float) -> float:
    """Return the bytes that the allocator takes for a storage."""
    if device != "cpu":
        return -(-size // CUDA_BLOCK) * CUDA_BLOCK
    return size if size > HEAP_LIMIT or kind in LASTING else size * (1 + holes)


def available_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on a device.

    On a CPU, the least of the free memory of the system, of the control group (container) and of the address space
    (`ulimit -v`); on CUDA, what the driver reports as free and what PyTorch has cached.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min(limit for limit in (_system(), _control_group(), _addresses()) if limit is not None)


def _system() -> int:
    """Memory that the system can give without swapping; half of what is installed, or UNTOLD, if it does not tell."""
    with suppress(OSError, ValueError):
        return _field(Path("/proc/meminfo"), "MemAvailable") * 1024
    with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return UNTOLD


def _control_group(root: Path = Path("/sys/fs/cgroup"), me: Path = Path("/proc/self/cgroup")) -> int | None:
    """Memory that the control groups of this process leave, version 2 or 1; None without a limit."""
    left: list[int] = []
    with suppress(OSError):
        for line in me.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                left += _left(root, path, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                left += _left(root / "memory", path, *v1)
    return min(left) if left else None


def _left(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> list[int]:
    """Bytes left in a group and its parents. In a container the path may not exist; its own group is the root."""
    left = []
    folder = root / path.strip("/")
    for group in [folder, *folder.parents]:
        with suppress(OSError, ValueError):  # no such group, no limit ("max"), or no permission
            allowed = int((group / limit).read_text())
            cached = _field(group / "memory.stat", reclaimable)
            if allowed < 2**60:  # version 1 has a huge number for no limit
                left.append(max(0, allowed - int((group / usage).read_text()) + cached))
        if group == root:
            break
    return left


def _addresses() -> int | None:
    """Address space that the limit of this process leaves; None without a limit."""
    if sys.platform != "linux":
        return None
    import resource  # missing on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - _field(Path("/proc/self/status"), "VmSize") * 1024)


def _field(path: Path, name: str) -> int:
    """Return the number after a name in a file of lines like "MemAvailable:   1234 kB". ValueError if it is missing."""
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) > 1 and words[0].rstrip(":") == name:
            return int(words[1])
    raise ValueError(f"{path} does not say {name}")
