"""From a trace to the memory that a machine will need for it, and what the machine has."""

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
"""glibc gives larger blocks memory of their own, and takes it back at once (malloc.c, DEFAULT_MMAP_THRESHOLD_MAX)."""

HOLES = 0.30
"""Share that resident memory is larger than what is alive, of the tensors up to HEAP_LIMIT that come and go: they lie
in one heap, where what was freed between others stays resident, and is often a little too small for the next. Fitted on
four configurations of benchmarks/plan/measure_peaks.py and checked on the others; it varies by 10% from run to run."""

HOLES_ACCUMULATING = 0.42
"""The same where a step takes several passes: the gradients of the first stay, between what the next ones need. Chosen
with five configurations in view, of which repeats of one differed by 7%."""

HOLES_RECOMPUTING = 1.05
"""The same with gradient checkpointing, under which blocks of many sizes take turns. Fitted on one, checked on two."""

ONEDNN_HALF = 17 * MB
"""What oneDNN keeps for itself once it computed in bf16 on a CPU; measured on one machine, with one thread."""

LASTING = ("parameters", "average", "moments", "exchange", "library")
"""Allocated at the beginning, side by side, for good: no holes there."""

UNTOLD = 4 * 2**30  # bytes taken to be there where the system does not say

CUDA_BLOCK = 512  # bytes that PyTorch's CUDA allocator rounds up to
CUDA_CONTEXT = 500 * MB
"""What a process has on a CUDA card besides tensors: context, kernels, handles. 300 to 700 MB; not measured here. What
the driver says is free is without it already; of a card that is not at hand it is taken off what is available."""
CUDNN_WORKSPACE = 64 * MB
"""Of a convolution, and cuBLAS's 8 to 32 MB. With deterministic kernels cuDNN seldom asks for more. Not measured."""

PARTS = (
    *("parameters", "gathered", "gradients", "exchange", "moments", "average", "activations", "workspace", "library"),
    "allocator",
)
"""In which a peak is told; gathered are the blocks of a divided network that are whole at the moment, exchange what
gradients travel from, workspace what comes and goes, library what kernels keep for themselves, and allocator what is
lost between blocks."""


@dataclass(frozen=True)
class Peak:
    """The highest point of a computation."""

    total: int
    """Bytes."""
    parts: Mapping[str, int]
    """Bytes by PARTS; they add up to the total."""


def find_peak(trace: Trace, device: str, holes: float = HOLES) -> Peak:
    """The most memory that a trace holds at once, on a device of this type, without the CUDA context."""
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
    """Bytes that a storage of this size takes."""
    if device != "cpu":
        return -(-size // CUDA_BLOCK) * CUDA_BLOCK
    return size if size > HEAP_LIMIT or kind in LASTING else size * (1 + holes)


def available_memory(device: torch.device) -> int:
    """Bytes that this process can still take on a device: free now, and allowed.

    On a CPU the least of what the system can give, what the control group (a container) leaves, and the process's own
    limit of addresses (`ulimit -v`); on CUDA what the driver says is free, and what PyTorch holds without using it.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    return min(limit for limit in (_system(), _control_group(), _addresses()) if limit is not None)


def _system() -> int:
    """What the system can give without swapping; where it does not say, half of what is installed, or UNTOLD."""
    with suppress(OSError, ValueError):
        return _field(Path("/proc/meminfo"), "MemAvailable") * 1024
    with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return UNTOLD


def _control_group(root: Path = Path("/sys/fs/cgroup"), me: Path = Path("/proc/self/cgroup")) -> int | None:
    """What the control groups of this process leave, version 2 or 1; None where there is no limit."""
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
    """Bytes left in a group and each that it is in. Within a container the path may not exist; its own is the root."""
    left = []
    folder = root / path.strip("/")
    for group in [folder, *folder.parents]:
        with suppress(OSError, ValueError):  # no such group, no limit ("max"), or none of our business
            allowed = int((group / limit).read_text())
            cached = _field(group / "memory.stat", reclaimable)
            if allowed < 2**60:  # what version 1 says for no limit
                left.append(max(0, allowed - int((group / usage).read_text()) + cached))
        if group == root:
            break
    return left


def _addresses() -> int | None:
    """What the limit on this process's address space leaves; None where there is none."""
    if sys.platform != "linux":
        return None
    import resource  # which Windows does not have

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - _field(Path("/proc/self/status"), "VmSize") * 1024)


def _field(path: Path, name: str) -> int:
    """The number after a name in a file of lines like "MemAvailable:   1234 kB". ValueError if there is none."""
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) > 1 and words[0].rstrip(":") == name:
            return int(words[1])
    raise ValueError(f"{path} does not say {name}")
