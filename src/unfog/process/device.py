"""The torch device that a `--device` name stands for, its memory, and the GPUs of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unfog.config.validate import check_device
from unfog.device.cores import control_groups, describe_quota, threads_are_given, usable_cores
from unfog.errors import RequestError
from unfog.process.torch_flags import compute_fp32_exactly
from unfog.settings import AUTO

_UNTOLD = 4 * 2**30  # bytes assumed if the system does not report them
# Of a control group of version 2 and 1: limit, use, and what of the use can be reclaimed.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_OTHER_BUILD = "install a build of torch that has it; pytorch.org, under Get started, lists them"
_NVIDIA = Path("/proc/driver/nvidia/version")  # a file of the driver, on Linux
_WSL = "/usr/lib/wsl/lib"  # where WSL keeps the programs of the driver
_PATIENCE = 10.0  # seconds
_DRIVERS = {"12": "525", "13": "580"}  # the oldest ones that a version of CUDA works with, by its major number


def choose_device(name: str) -> torch.device:
    """Return the device called `name`, of GPUs with its number, and make it torch's current one.

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
        if missing := _missing_code(device):
            raise RequestError(f"device = {name}: {missing}; {_OTHER_BUILD}, or give --device cpu")
        device = torch.device("cuda", device.index or 0)  # `set_device` refuses a GPU without a number
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


class _Gpu(NamedTuple):
    """A CUDA GPU that was chosen among those of the machine."""

    name: str
    """As in `--device`."""
    reason: str
    """Why it was chosen; "" if there is one GPU alone."""


def choose_gpu() -> _Gpu | None:
    """Return the GPU that "cuda" and "auto" stand for; None if torch can use none, or has code for none.

    Of several it is the current one if this process has chosen or used it, else the one with the most free memory.
    """
    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    usable = [i for i in range(count) if not _missing_code(torch.device("cuda", i))]
    if count == 1 or not usable:
        return _Gpu("cuda", "") if usable else None
    free = free_memory_of_gpus()
    best = most = max(usable, key=lambda i: free.get(i, 0))
    current = torch.cuda.current_device()
    if current in usable and (current or torch.cuda.memory_reserved(current)):
        best = current  # another one would cost a second context, and copies between both
    if best != most:
        reason = "as this process uses it already"
    elif best in free:
        reason = f"with {free[best] / 2**30:.1f} GiB of free memory, the most"
    else:
        reason = "the first that torch has code for; nvidia-smi does not say which has the most free memory"
    return _Gpu(f"cuda:{best}", f"of {count} GPUs, {reason}")


@cache  # as it was before this process took memory itself
def free_memory_of_gpus() -> dict[int, int]:
    """Return the bytes that are free on each GPU, by torch's number, without GPUs that nvidia-smi does not list.

    torch itself would create a context on every GPU to learn it, which takes memory there.
    """
    free = {uuid.removeprefix("GPU-"): int(mib) for uuid, mib in _ask_nvidia_smi("uuid,memory.free") if mib.isdigit()}
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    found = {i: str(getattr(one, "uuid", "")).removeprefix("GPU-") for i, one in enumerate(properties)}
    return {i: free[uuid] * 2**20 for i, uuid in found.items() if uuid in free}


def _ask_nvidia_smi(columns: str) -> list[list[str]]:
    """Return a row for each GPU that NVIDIA's program lists; nothing if there is no such program, or it fails."""
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=_WSL)
    if program is None:
        return []
    command = [program, f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == 1 + columns.count(",")]  # not what it warns of


def _missing_code(device: torch.device) -> str:
    """Return that this build of torch has no code for a CUDA GPU, as a sentence; "" if it has."""
    built_for = torch.cuda.get_arch_list()
    if not built_for:  # a build that does not say
        return ""
    properties = torch.cuda.get_device_properties(device)
    own = architecture(properties)
    if torch.version.hip is not None:
        fits = own in built_for
    else:
        fits = has_code_for((properties.major, properties.minor), built_for)
    if fits:
        return ""
    return f"torch {torch.__version__} has no code for {properties.name} ({own}), but for {' '.join(built_for)}"


def architecture(properties: Any) -> str:
    """Return the name of the architecture that code for a GPU is built for: "sm_90", or "gfx942" on AMD's."""
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def has_code_for(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Return whether a list such as "sm_80 sm_90 compute_90" has code that runs on a GPU of this capability.

    Machine code (sm) runs on later GPUs of the same major number; PTX (compute) is translated for any later one.
    """
    for name in built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if match is None:
            continue
        kind, major, minor, special = match[1], int(match[2]), int(match[3]), match[4]
        if special == "a":  # code for one GPU alone
            fits = (major, minor) == capability
        else:
            fits = (major, minor) <= capability and (kind == "compute" or major == capability[0])
        if fits:
            return True
    return False


def unused_gpu() -> str:
    """Return why torch cannot use the NVIDIA GPU of this machine; "" if it can, or there is none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return ""
    if torch.cuda.is_available():
        missing = [_missing_code(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
        return f"{missing[0]}; {_OTHER_BUILD}" if missing and all(missing) else ""
    if not _NVIDIA.exists() and not _ask_nvidia_smi("name"):  # under WSL and Windows there is no such file
        return ""
    if torch.version.cuda is None:
        return f"this build of torch, {torch.__version__}, is for CPUs"
    driver = _DRIVERS.get(torch.version.cuda.partition(".")[0])
    needed = f", which needs {driver} or newer" if driver else ""
    return f"its driver may be too old for the CUDA {torch.version.cuda} of torch {torch.__version__}{needed}"
