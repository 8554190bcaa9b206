"""The NVIDIA and AMD GPUs of this machine: which one a run takes, and why torch cannot use one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

OTHER_BUILD = "install a build of torch that has it; pytorch.org, under Get started, lists them"
_NVIDIA = Path("/proc/driver/nvidia/version")  # a file of the driver, on Linux
_WSL = "/usr/lib/wsl/lib"  # where WSL keeps the programs of the driver
_PATIENCE = 10.0  # seconds
_DRIVERS = {"12": "525", "13": "580"}  # the oldest ones that a version of CUDA works with, by its major number


class Gpu(NamedTuple):
    """A CUDA GPU that was chosen among those of the machine."""

    name: str
    """As in `--device`."""
    reason: str
    """Why it was chosen; "" if there is one GPU alone."""


def choose_gpu() -> Gpu | None:
    """Return the GPU that "cuda" and "auto" stand for; None if torch can use none, or has code for none.

    Of several it is the current one if this process has chosen or used it, else the one with the most free memory.
    """
    if not torch.cuda.is_available():
        return None
    count = torch.cuda.device_count()
    usable = [i for i in range(count) if not missing_code(torch.device("cuda", i))]
    if count == 1 or not usable:
        return Gpu("cuda", "") if usable else None
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
    return Gpu(f"cuda:{best}", f"of {count} GPUs, {reason}")


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


def missing_code(device: torch.device) -> str:
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
        missing = [missing_code(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]
        return f"{missing[0]}; {OTHER_BUILD}" if missing and all(missing) else ""
    if not _NVIDIA.exists() and not _ask_nvidia_smi("name"):  # under WSL and Windows there is no such file
        return ""
    if torch.version.cuda is None:
        return f"this build of torch, {torch.__version__}, is for CPUs"
    driver = _DRIVERS.get(torch.version.cuda.partition(".")[0])
    needed = f", which needs {driver} or newer" if driver else ""
    return f"its driver may be too old for the CUDA {torch.version.cuda} of torch {torch.__version__}{needed}"
