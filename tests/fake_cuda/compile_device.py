"""Compile the device of `fakes.py` against the torch that is installed, which is not imported for it."""

import subprocess
from importlib.util import find_spec
from pathlib import Path


def compile_device(made: Path, source: str = "device.cpp") -> Path:
    """Compile a source of this folder to the library `made`, and return its path. FileNotFoundError without g++."""
    home, written = Path(find_spec("torch").origin).parent, Path(__file__).parent / source
    compiler = ["g++", "-w", "-shared", "-fPIC", "-std=c++20", str(written), f"-I{home / 'include'}"]
    libraries = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}", "-o", str(made)]
    subprocess.run([*compiler, *libraries], check=True, capture_output=True, timeout=200)
    return made
