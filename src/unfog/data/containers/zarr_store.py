"""Images in an array of a Zarr store, a folder of version 2 or 3: `file.zarr:ARRAY`. Needs zarr."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.containers.source import ContainerSource, unreadable
from unfog.data.containers.stored_array import Key, StoredArray, check_type, choose
from unfog.data.sources.folder import files_digest
from unfog.errors import RequestError, install_command
from unfog.files.safe_files import read_file
from unfog.text import sanitize

_MARKS = (".zarray", ".zgroup", "zarr.json")
_METADATA = (*_MARKS, ".zattrs", ".zmetadata")
_LARGEST_METADATA = 2**26  # bytes
_MOST_FOLDERS, _MOST_DEPTH = 10_000, 16  # of a store, that are looked at for a list of its arrays
# Codecs that decompress, and do nothing else. Others are refused by name, such as pickle, which runs code.
_CODECS = {
    *("bytes", "endian", "transpose", "gzip", "zstd", "blosc", "crc32c", "sharding_indexed", "zlib", "bz2", "lzma"),
    *("lz4", "shuffle", "delta", "fixedscaleoffset", "bitround", "quantize", "packbits", "astype", "adler32", "crc32"),
    "fletcher32",
}
_TYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")  # of version 3


class ZarrSource(ContainerSource):
    """Images in an array of a Zarr store, which is a folder. Links in it are not followed."""

    marks = re.compile(r"(.+\.zarr/?):(.+)", re.IGNORECASE)

    @classmethod
    def is_container(cls, path: str) -> bool:
        return os.path.isdir(path) and any(os.path.isfile(os.path.join(path, mark)) for mark in _MARKS)

    @classmethod
    def open_array(cls, path: str, name: str) -> StoredArray:
        root = Path(path)
        if not name and not any((root / mark).is_file() for mark in (".zarray",)) and not _is_array(root):
            name = choose(dict(_listed(root)), sanitize(path))
        if ".." in name.split("/"):
            raise RequestError(f"{sanitize(path)}:{sanitize(name)} leads out of the store; give the name of an array")
        place = sanitize(f"{path}:{name}" if name else path)
        folder = root / name
        try:
            described = _described(root, folder)
            if described is None:
                listed = ", ".join([one for one, _ in _listed(root)][:8])
                raise RequestError(f"{sanitize(path)} has no array {sanitize(name)}; it has {listed or 'none'}")
            version, metadata, attributes = described
            _check_codecs(version, metadata, place)
            return _open(root, name, place, version, metadata, attributes)
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RuntimeError,
        ) as error:  # any JSON is possible
            raise unreadable(place, error, "restore the store, or write it anew") from None

    def stamp(self) -> tuple[str, int]:
        folder = Path(self.path) / self.array_name
        return files_digest(folder, sorted(_files(folder)))


def _open(
    root: Path, name: str, place: str, version: int, metadata: Mapping[str, Any], attributes: Mapping[str, Any]
) -> StoredArray:
    zarr = _import_zarr()
    from unfog.data.containers.folder_store import FolderStore

    mark = os.path.join(name, "zarr.json" if version == 3 else ".zarray")
    opened = zarr.open_array(FolderStore(root, mark), path=name, mode="r", zarr_format=version)
    shape, dtype = tuple(opened.shape), np.dtype(opened.dtype)
    files = tuple(getattr(opened, "shards", None) or opened.chunks)  # each of which is a file
    if len(files) != len(shape) or 0 in files:
        raise ValueError(f"chunks {files} of the shape {shape}")
    expected = math.prod(-(-length // part) for length, part in zip(shape, files))
    stored, size = 0, 0
    for one in _files(root / name):
        if os.path.basename(one) not in _METADATA:
            stored += 1
            size += _size(root / name / one)
    names = metadata.get("dimension_names") if version == 3 else attributes.get("_ARRAY_DIMENSIONS")
    known = {key: attributes[key] for key in ("scale_factor", "add_offset", "missing_value") if key in attributes}
    # xarray writes the number for missing values as fill value in version 2, and as an attribute in version 3.
    missing = attributes.get("_FillValue") if version == 3 else metadata.get("fill_value") if names else None
    if isinstance(missing, int | float) and not isinstance(missing, bool):
        known["_FillValue"] = missing
    return StoredArray(
        *(place, shape, dtype, tuple(opened.chunks), size, (min(stored, expected), expected), _reader(opened)),
        names=_names(names, len(shape)),
        attributes=known,
    )


def _reader(array: Any) -> Any:
    def read(key: Key) -> NDArray[Any]:
        return np.asarray(array[key])

    return read


def _names(names: Any, count: int) -> tuple[str, ...]:
    if not isinstance(names, Sequence) or len(names) != count:
        return ()
    return tuple(sanitize(str(name or "")) for name in names)


def _import_zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise RequestError(f"Zarr stores need zarr, which is not installed: {install_command('science')}") from None
    return zarr


def _read_json(root: Path, path: Path) -> dict[str, Any] | None:
    """Return an object of JSON; None if the file is not there. OSError for a link, ValueError if it is none."""
    try:
        found = json.loads(read_file(path, root, _LARGEST_METADATA))
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no object")
    return found


def _described(root: Path, folder: Path) -> tuple[int, dict[str, Any], dict[str, Any]] | None:
    """Return (version, metadata, attributes) of the array in a folder; None if there is none."""
    three = _read_json(root, folder / "zarr.json")
    if three is not None and three.get("node_type") == "array":
        attributes = three.get("attributes") or {}
        return 3, three, attributes if isinstance(attributes, dict) else {}
    two = _read_json(root, folder / ".zarray")
    return None if two is None else (2, two, _read_json(root, folder / ".zattrs") or {})


def _is_array(root: Path) -> bool:
    with suppress(OSError, ValueError):
        return _described(root, root) is not None
    return False


def _listed(root: Path) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Yield (name, (shape, type)) of the arrays of a store; not the coordinates of one dimension."""
    pending, looked = [(root, 0)], 0
    while pending and looked < _MOST_FOLDERS:
        folder, depth = pending.pop()
        looked += 1
        with suppress(OSError, ValueError):
            if (described := _described(root, folder)) is not None:
                _, metadata, _ = described
                shape = metadata.get("shape")
                if isinstance(shape, list) and all(type(one) is int for one in shape) and len(shape) > 1:
                    kind = metadata.get("data_type", metadata.get("dtype"))
                    yield sanitize(str(folder.relative_to(root))), (tuple(shape), sanitize(str(kind))[:40])
                continue
        if depth < _MOST_DEPTH:
            with suppress(OSError), os.scandir(folder) as entries:
                below = sorted(one.path for one in entries if one.is_dir(follow_symlinks=False))
                pending += [(Path(one), depth + 1) for one in reversed(below)]


def _files(folder: Path) -> Iterator[str]:
    """Yield the paths of the regular files below a folder, relative to it."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        with suppress(OSError), os.scandir(folder / prefix) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{prefix}{entry.name}/")
                elif entry.is_file(follow_symlinks=False):
                    yield f"{prefix}{entry.name}"


def _size(path: Path) -> int:
    with suppress(OSError):
        status = os.lstat(path)
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


def _check_codecs(version: int, metadata: Mapping[str, Any], place: str) -> None:
    """Raise RequestError for values that are not numbers, and codecs that are not known to decompress alone."""
    if version == 2:
        kind, text = metadata.get("dtype"), str(metadata.get("dtype"))[:40]
        check_type(np.dtype([("0", "u1")]) if isinstance(kind, list) else np.dtype(kind), place)
        codecs = [metadata.get("compressor"), *(metadata.get("filters") or [])]
        names = [one.get("id") if isinstance(one, dict) else one for one in codecs if one is not None]
    else:
        text = sanitize(str(metadata.get("data_type")))[:40]
        if not _TYPES.fullmatch(text):
            raise RequestError(f"{place} holds {text}; give an array of numbers")
        check_type(np.dtype(text), place)
        names = list(_codecs_of(metadata.get("codecs") or []))
        if metadata.get("storage_transformers"):
            names.append("a storage transformer")
    for name in names:
        if str(name).removeprefix("numcodecs.") not in _CODECS:
            raise RequestError(
                f"{place} is written with {sanitize(str(name))[:40]}, which is not read; write it anew with zstd, gzip "
                "or blosc"
            )


def _codecs_of(codecs: Sequence[Any]) -> Iterator[str]:
    """Yield the names of codecs, also of those inside of shards."""
    pending = list(codecs)
    while pending:
        one = pending.pop()
        yield str(one.get("name") if isinstance(one, dict) else one)
        inside = one.get("configuration") if isinstance(one, dict) else None
        if isinstance(inside, dict):
            pending += [*(inside.get("codecs") or []), *(inside.get("index_codecs") or [])]
