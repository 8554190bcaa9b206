"""Packages that the benchmark needs, with what these need in turn; and wheels that are brought along."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from rows import Row

NEEDED = ("torch", "numpy", "pillow", "safetensors", "rich", "jinja2")
"""Distributions without which Unfog does not start."""
WANTED = {
    "diffusers": "its training step is not timed",
    "triton": "nothing can be compiled",
}
_MODULES = {"pillow": "PIL", "importlib-metadata": "importlib_metadata"}
# What a distribution needs that is not installed, so that its own list cannot be read.
_NEEDS = {
    "rich": ("markdown-it-py", "pygments"),
    "jinja2": ("markupsafe",),
    "diffusers": ("importlib-metadata", "filelock", "huggingface-hub", "numpy", "regex", "requests", "safetensors"),
}
_WHOLE = ("torch",)  # lists packages that other builds of it bring along in themselves
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?[^;]*(?:;(.*))?$")


def unpack(wheels: Path, into: Path) -> list[Row]:
    """Unpack the wheels whose distributions are missing here, for this process and those that it starts.

    A wheel works where it is unpacked, so that neither pip nor an index is needed.
    """
    rows, used = [], []
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0]
        if _requires(name) is not None:
            continue
        if not _fits(wheel.name):
            said = f"is made neither for Python {sys.version.split()[0]} here nor for any, and is not used"
            rows.append(Row("packages", wheel.name, said, "failed"))
            continue
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
        used.append(wheel.name)
    if used:
        # Behind Unfog's own folder, and before nothing else: no wheel replaces what is installed.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(into))))
        sys.path.append(str(into))
        importlib.invalidate_caches()
        rows.append(Row("packages", "wheels", f"unpacked {', '.join(used)}"))
    return rows


def _fits(wheel: str) -> bool:
    """Return whether a wheel is of pure Python, or made for this one; without `packaging` only the former is known."""
    if wheel.endswith("-none-any.whl"):
        return True
    try:
        from packaging.tags import sys_tags
        from packaging.utils import parse_wheel_filename
    except ImportError:
        return False
    return not parse_wheel_filename(wheel)[3].isdisjoint(sys_tags())


def check_packages(cpu: bool) -> Iterator[Row]:
    """Yield a row about the packages that are missing, and what is left out without each."""
    if gone := missing_distributions(NEEDED):
        said = f"{' '.join(gone)}: bring wheels with --wheels, as README.md says; the parts that need them are skipped"
        yield Row("packages", "needed", said, "failed")
    for name, loss in WANTED.items():
        if not (cpu and name == "triton") and (gone := missing_distributions([name])):
            yield Row("packages", name, f"{' '.join(gone)} is not installed, so {loss}", "skipped")


def missing_distributions(names: Iterable[str]) -> list[str]:
    """Return the distributions that are missing: of these, of what they need, of what that needs, …"""
    left, seen, gone = list(names), set[str](), []
    while left:
        name = _normal(left.pop(0))
        if name in seen:
            continue
        seen.add(name)
        needs = _requires(name)
        if needs is None and importlib.util.find_spec(_MODULES.get(name, name)) is None:
            gone.append(name)
        if name not in _WHOLE:
            left += _NEEDS.get(name, ()) if needs is None else needs
    return gone


def _requires(name: str) -> list[str] | None:
    """Return what an installed distribution needs, without its extras; None if it is not installed."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return None
    found = (_REQUIREMENT.match(line) for line in lines)
    return [match[1] for match in found if match and _applies(match[2] or "")]


def _applies(marker: str) -> bool:
    """Return whether the condition of a requirement holds here; one that is not understood does not."""
    if not marker.strip():
        return True
    try:
        from packaging.markers import Marker
    except ImportError:
        return False
    return "extra" not in marker and bool(Marker(marker).evaluate())


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
