"""The torch device that a `--device` name stands for, and the memory that it has, in all and free."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import torch

from unfog.config.validate import check_device
from unfog.device.cores import control_groups, describe_quota, threads_are_given, usable_cores
from unfog.errors import RequestError
from unfog.process.gpus import OTHER_BUILD, choose_gpu, missing_code
from unfog.process.torch_flags import compute_fp32_exactly
from unfog.settings import AUTO

_UNTOLD = 4 * 2**30  # bytes assumed if the system does not report them
# Of a control group of version 2 and 1: limit, use, and what of the use can be reclaimed.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def choose_device(name: str) -> torch.device:
    """Return the device called `name`, and make it torch's current one.

    "auto" is the GPU that "cuda" stands for (`choose_gpu`), else MPS, else the CPU. Under a CPU quota, torch has as
    many threads as that allows from here on, unless the environment says how many.

    Raises:
        RequestError: torch does not have that device here, or no code for it.
    """
    check_device(name)
    if name in (AUTO, "cuda") and (gpu := choose_gpu()):
        name = gpu.name
    elif name == AUTO:
        name = "mps" if torch.backends.mps.is_available() else "cpu"
    if describe_quota() and not threads_are_given():
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    device = torch.device(name)
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= count.get(device.type, 0):
        raise RequestError(f"device = {name} is not available to torch {torch.__version__}; try --device auto")
    if device.type == "cuda":
        if missing := missing_code(device):
            raise RequestError(f"device = {name}: {missing}; {OTHER_BUILD}, or give --device cpu")
        torch.cuda.set_device(device)  # some of torch's questions are answered for the current device alone
        compute_fp32_exactly()
    return device


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all work that it was given; a clock would time the calls alone without it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system does not report it."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had; 0 if the system does not report it."""
    return _status("VmHWM")


def resource_use(device: torch.device, folder: Path) -> dict[str, float]:
    """Return `memory_mib` of this process and `disk_free_mib` of a folder; on a GPU also two peaks of the process.

    `memory_device_mib` is what its tensors took, `memory_reserved_mib` what torch reserved, workspaces included. What
    the system does not report is left out.
    """
    found = {"memory_mib": used} if (used := resident_bytes()) else {}
    if device.type == "cuda":
        found["memory_device_mib"] = torch.cuda.max_memory_allocated(device)
        found["memory_reserved_mib"] = torch.cuda.max_memory_reserved(device)
    with suppress(OSError):
        found["disk_free_mib"] = shutil.disk_usage(folder).free
    return {name: round(size / 2**20, 1) for name, size in found.items()}


def _status(name: str) -> int:
    with suppress(OSError, ValueError):
        return _field(Path("/proc/self/status"), name) * 1024
    return 0


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
    return min(limit for limit in (_system(), control_group_memory(), _addresses()) if limit is not None)


def total_memory(device: torch.device) -> int:
    """Return the bytes that a device has, within the limits of this process: the same however much of them is free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    # Of addresses, what is left: no other process takes any.
    return min(
        limit for limit in (_system("MemTotal"), control_group_memory(free=False), _addresses()) if limit is not None
    )


def _system(name: str = "MemAvailable") -> int:
    """Memory available without swapping; if unknown, half of the installed memory, or _UNTOLD."""
    with suppress(OSError, ValueError):
        return _field(Path("/proc/meminfo"), name) * 1024
    with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return _UNTOLD


def control_group_memory(
    root: Path = Path("/sys/fs/cgroup"), me: Path = Path("/proc/self/cgroup"), free: bool = True
) -> int | None:
    """Memory that the control groups of this process leave, or allow if not `free`, version 2 or 1; None: no limit."""
    groups = list(control_groups("memory", root, me))
    left = [found for group in groups for files in _MEMORY_FILES if (found := _left(group, free, files)) is not None]
    return min(left) if left else None


def _left(group: Path, free: bool, files: tuple[str, str, str]) -> int | None:
    """Bytes left in a group; `files` hold limit and usage, the last is a field of memory.stat."""
    limit, usage, reclaimable = files
    with suppress(OSError, ValueError):  # no such group, no limit ("max"), or no permission
        allowed = int((group / limit).read_text())
        if allowed < 2**60:  # version 1 has a huge number for no limit
            used = int((group / usage).read_text()) - _field(group / "memory.stat", reclaimable) if free else 0
            return max(0, allowed - used)
    return None


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
