"""What a log begins with: versions, the GPU and its driver, and what torch was built for. Needs no Unfog."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata

_PACKAGES = ("torch", "triton", "numpy", "pillow", "safetensors", "rich", "jinja2", "diffusers")
_VARIABLES = ("CUBLAS_", "CUDA_", "NVIDIA_", "PYTORCH_", "TORCH", "TRITON_", "UNFOG_", "OMP_", "NCCL_")


def describe() -> str:
    """Return the lines of all that is known; of what fails, the error."""
    pieces: dict[str, Callable[[], str]] = {
        "python": lambda: f"{sys.version.split()[0]} on {platform.platform()}, {os.cpu_count()} cores",
        "packages": _packages,
        "torch": _torch,
        "compiler": lambda: _first_line("cc", "--version") if shutil.which("cc") else "no cc",
        "environment": lambda: " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)),
        "nvidia-smi": lambda: "\n" + _output("nvidia-smi") if shutil.which("nvidia-smi") else "no nvidia-smi",
    }
    lines = []
    for name, piece in pieces.items():
        try:
            said = piece()
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        lines.append(f"{name}: {said}")
    return "\n".join(lines)


def _packages() -> str:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} missing")
    return ", ".join(found)


def _torch() -> str:
    import torch

    said = f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}, git {torch.version.git_version}"
    if not torch.cuda.is_available():
        return f"{said}; torch finds no GPU"
    said += f", cuDNN {torch.backends.cudnn.version()}, built for {' '.join(torch.cuda.get_arch_list())}"
    for number in range(torch.cuda.device_count()):
        said += f"\n  GPU {number}: {torch.cuda.get_device_properties(number)}"
    return said


def _output(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    return done.stdout + done.stderr


def _first_line(*words: str) -> str:
    return _output(*words).partition("\n")[0]


if __name__ == "__main__":
    print(describe())
