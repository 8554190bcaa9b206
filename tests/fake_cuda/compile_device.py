"""Compile the device of `fakes.py` against the torch that is installed, which is not imported for it."""

import subprocess
from importlib.util import find_spec
from pathlib import Path


def compile_device(folder: Path, source: str = "device.cpp") -> Path:
    """Return the library, compiled into a folder. FileNotFoundError without g++."""
    home, made = Path(find_spec("torch").origin).parent, folder / "device.so"
    compiler = [
        "g++",
        "-w",
        "-shared",
        "-fPIC",
        "-std=c++20",
        str(Path(__file__).parent / source),
        f"-I{home / 'include'}",
    ]
    libraries = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}", "-o", str(made)]
    subprocess.run([*compiler, *libraries], check=True, capture_output=True, timeout=200)
    return made
