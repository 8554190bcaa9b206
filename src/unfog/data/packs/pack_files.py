"""Read the files of a pack. Damaged or hostile ones raise errors, and are never trusted with an allocation."""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import DataReport
from unfog.data.dataset import ImageSet
from unfog.data.settings import Data
from unfog.data.sources.base import LazyNames
from unfog.errors import RequestError
from unfog.text import sanitize

MANIFEST = "pack.json"
JOURNAL = "journal.jsonl"
FORMAT = 1

_LARGEST_MANIFEST = 2**28
_LONGEST_HEADER = 2**16
_LARGE_SHARE = 4  # a pack above 1/4 of the memory is read without read-ahead, which would evict needed pages

PACK_SETTINGS = ("size", "channels", "background", "labels", "held_out")
"""Settings that the content of a pack depends on; the others act on its images."""


def is_pack(path: Path) -> bool:
    """Return True if the folder is a finished pack."""
    return (path / MANIFEST).is_file()


def is_unfinished_pack(path: Path) -> bool:
    """Return True if the folder is an unfinished pack: it has a journal with our header, or an empty one."""
    try:
        with open(path / JOURNAL, "rb") as file:
            line = file.readline(_LONGEST_HEADER)
        header = json.loads(line) if line else {"format": FORMAT, "key": "", "stamp": ""}
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and {"format", "key", "stamp"} <= header.keys()


def seal(manifest: Mapping[str, Any]) -> bytes:
    """Return the content of pack.json: the manifest and its digest."""
    return json.dumps({**manifest, "digest": _digest(manifest)}, indent=1, sort_keys=True).encode()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, indent=1, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Return the sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read pack.json and check it. Raises RequestError, ValueError and others if it is damaged."""
    file = path / MANIFEST
    if not file.is_file():
        raise RequestError(
            f"{sanitize(str(path))} is no pack: it has no {MANIFEST}; make one with unfog pack SOURCE OUT"
        )
    if file.stat().st_size > _LARGEST_MANIFEST:
        raise ValueError(f"{MANIFEST} is too large to be one")
    manifest = json.loads(file.read_text("utf-8"))
    if manifest.get("format") != FORMAT:
        raise RequestError(
            f"{sanitize(str(path))} is a pack of format {str(manifest.get('format'))[:20]}, and this Unfog reads "
            f"format {FORMAT}; pack the originals again"
        )
    content = {name: value for name, value in manifest.items() if name != "digest"}
    if manifest.get("digest") != _digest(content):
        raise ValueError(f"{MANIFEST} is not as it was written")
    _check_manifest(manifest)
    return content | {"digest": manifest["digest"]}


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    """Raise ValueError, or another error, unless the entries have their types and fit together."""
    shape, train, classes = manifest["shape"], manifest["train"], manifest["classes"]
    labelled, fingerprints = manifest["labelled"], manifest["fingerprints"]
    valid = len(shape) == 4 and all(type(side) is int and 0 < side < 2**48 for side in shape)
    valid = valid and type(train) is int and 0 <= train <= shape[0]
    valid = valid and type(classes) is list and all(type(name) is str for name in classes)
    valid = valid and type(labelled) is bool and labelled == bool(classes)
    if not (valid and len(fingerprints) == 2 and all(type(text) is str for text in fingerprints)):
        raise ValueError("shape, split or classes are none")
    _check_settings({name: manifest["settings"][name] for name in PACK_SETTINGS}, shape)


def _check_settings(settings: dict[str, Any], shape: list[int]) -> None:
    """Raise ValueError unless the settings have their types and fit the shape of the pixels."""
    Data(**settings)  # raises RequestError for values out of range
    types = {name: type(getattr(Data(), name)) for name in settings}
    allowed = {name: (int, float) if kind is float else (kind,) for name, kind in types.items()}  # 0 is a number too
    typed = all(type(value) in allowed[name] for name, value in settings.items())
    if not typed or [settings["channels"], settings["size"], settings["size"]] != shape[1:]:
        raise ValueError("its settings are not those of its pixels")
    if settings["labels"] not in ("folders", "none"):
        raise ValueError("its labels are not resolved")


def open_files(path: Path, manifest: Mapping[str, Any]) -> tuple[DataReport, ImageSet]:
    """Map report and images. Raises ValueError and others unless all files fit the manifest."""
    n, files = manifest["shape"][0], manifest["files"]
    for name, file in files.items():
        if type(file["sha256"]) is not str or (path / name).name != name or name in ("", ".", ".."):
            raise ValueError(f"no file {name!r}")
        if (found := (path / name).stat().st_size) != file["bytes"]:
            raise ValueError(f"{name} has {found:,} bytes instead of {file['bytes']:,}")
    if files["pixels.u8"]["bytes"] != math.prod(manifest["shape"]):
        raise ValueError("pixels.u8 does not have that shape")
    offsets = _mapped(path / "names.npy", (n + 1,), np.int64)
    size = files["names.bin"]["bytes"]
    text = np.memmap(path / "names.bin", np.uint8, "r") if size else np.zeros(0, np.uint8)
    if offsets[0] != 0 or offsets[-1] != size:
        raise ValueError("names.npy does not fit names.bin")
    images = ImageSet(
        _mapped_pixels(path / "pixels.u8", tuple(manifest["shape"])),
        _mapped(path / "labels.npy", (n,), np.int64) if manifest["labelled"] else None,
        LazyNames(partial(_name_at, np.asarray(text), offsets), range(n)),
        tuple(manifest["classes"]),
        sides=_mapped(path / "sides.npy", (n, 2), np.int32),
        grey=_mapped(path / "grey.npy", (n,), np.bool_),
    )
    report = DataReport.from_dict({**manifest["ledger"], "treatment": _mapped(path / "treatment.npy", (n,), np.int32)})
    if report.used != n or report.held_out != n - manifest["train"] or sum(report.counts) != n:
        raise ValueError("its report is not of these images")
    return report, images


def _name_at(text: NDArray[np.uint8], offsets: NDArray[np.int64], i: int) -> str:
    begin, end = offsets[i : i + 2].tolist()
    # Negative offsets, in a damaged file, would count from the end.
    return text[max(0, begin) : max(0, end)].tobytes().decode("utf-8", "surrogateescape")


def _mapped(path: Path, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{path.name} holds something else")
    return np.asarray(array)


def _mapped_pixels(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM") and len(mapped) * _LARGE_SHARE > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, np.uint8).reshape(shape)
