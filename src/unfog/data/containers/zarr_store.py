"""Images in an array of a Zarr store of version 2 or 3, a folder or a zip archive: `file.zarr:ARRAY`. Needs zarr."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.data.containers.source import ContainerSource, file_bytes, unreadable
from unfog.data.containers.store_files import FolderFiles, StoreFiles, ZipFiles
from unfog.data.containers.stored_array import Key, StoredArray, check_type, choose
from unfog.data.sources.arrays import sampled_digest
from unfog.errors import RequestError, install_command
from unfog.text import sanitize

_ZIP = ".zarr.zip"
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
    """Images in an array of a Zarr store, a folder or FILE.zarr.zip. Links in a folder are not followed."""

    suffixes = (_ZIP,)
    marks = re.compile(r"(.+\.zarr(?:/|\.zip)?):(.+)", re.IGNORECASE)

    @classmethod
    def is_container(cls, path: str) -> bool:
        if os.path.isdir(path):
            return any(os.path.isfile(os.path.join(path, mark)) for mark in _MARKS)
        return super().is_container(path)

    @classmethod
    def open_array(cls, path: str, name: str) -> StoredArray:
        files = _files_of(path)
        if ".." in name.split("/"):
            raise RequestError(f"{sanitize(path)}:{sanitize(name)} leads out of the store; give the name of an array")
        place = sanitize(f"{path}:{name}" if name else path)
        try:
            if not name and not _is_array(files):
                name = choose(dict(_listed(files)), sanitize(path))
                place = sanitize(f"{path}:{name}")
            described = _described(files, name)
            if described is None:
                listed = ", ".join([one for one, _ in _listed(files)][:8])
                raise RequestError(f"{sanitize(path)} has no array {sanitize(name)}; it has {listed or 'none'}")
            _check_codecs(described.version, described.metadata, place)
            return _open(files, name, place, described)
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
        path = Path(self.path)
        return (
            FolderFiles(path).stamp(self.array_name) if path.is_dir() else (sampled_digest(path), file_bytes(self.path))
        )


def _files_of(path: str) -> StoreFiles:
    return FolderFiles(Path(path)) if os.path.isdir(path) else ZipFiles(Path(path), _MARKS)


class _Described(NamedTuple):
    """Description of an array by its store."""

    version: int
    """Of the format of Zarr: 2 or 3."""
    metadata: Mapping[str, Any]
    attributes: Mapping[str, Any]


def _open(files: StoreFiles, name: str, place: str, described: _Described) -> StoredArray:
    zarr, (version, metadata, attributes) = _import_zarr(), described
    from unfog.data.containers.read_only_store import ReadOnlyStore
    from unfog.data.containers.zarr_bounds import most_stored, with_bounds

    store = ReadOnlyStore(files, _key(name, "zarr.json" if version == 3 else ".zarray"), _LARGEST_METADATA)
    opened = with_bounds(zarr.open_array(store, path=name, mode="r", zarr_format=version))
    shape, dtype = tuple(opened.shape), np.dtype(opened.dtype)
    parts = tuple(getattr(opened, "shards", None) or opened.chunks)  # each of which is a file
    if len(parts) != len(shape) or 0 in parts:
        raise ValueError(f"chunks {parts} of the shape {shape}")
    store.most = most_stored(parts, dtype)
    expected = math.prod(-(-length // part) for length, part in zip(shape, parts))
    sizes = [size for one, size in files.sizes(name) if os.path.basename(one) not in _METADATA]
    names = metadata.get("dimension_names") if version == 3 else attributes.get("_ARRAY_DIMENSIONS")
    known = {key: attributes[key] for key in ("scale_factor", "add_offset", "missing_value") if key in attributes}
    # xarray writes the number for missing values as fill value in version 2, and as an attribute in version 3.
    missing = attributes.get("_FillValue") if version == 3 else metadata.get("fill_value") if names else None
    if isinstance(missing, int | float) and not isinstance(missing, bool):
        known["_FillValue"] = missing
    return StoredArray(
        *(
            place,
            shape,
            dtype,
            tuple(opened.chunks),
            sum(sizes),
            (min(len(sizes), expected), expected),
            _reader(opened),
        ),
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


def _key(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _read_json(files: StoreFiles, folder: str, name: str) -> dict[str, Any] | None:
    """Return an object of JSON; None if the file is missing. OSError for a link, ValueError if it is not an object."""
    try:
        found = json.loads(files.read(_key(folder, name), _LARGEST_METADATA))
    except FileNotFoundError:
        return None
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no object")
    return found


def _described(files: StoreFiles, folder: str) -> _Described | None:
    """Return the description of the array in a folder; None without an array."""
    three = _read_json(files, folder, "zarr.json")
    if three is not None and three.get("node_type") == "array":
        attributes = three.get("attributes") or {}
        return _Described(3, three, attributes if isinstance(attributes, dict) else {})
    two = _read_json(files, folder, ".zarray")
    return None if two is None else _Described(2, two, _read_json(files, folder, ".zattrs") or {})


def _is_array(files: StoreFiles) -> bool:
    return files.has(".zarray") or _described(files, "") is not None


def _listed(files: StoreFiles) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Yield (name, (shape, type)) of the arrays of a store; not the coordinates of one dimension."""
    pending, looked = [("", 0)], 0
    while pending and looked < _MOST_FOLDERS:
        folder, depth = pending.pop()
        looked += 1
        with suppress(OSError, ValueError):
            if (described := _described(files, folder)) is not None:
                metadata = described.metadata
                shape = metadata.get("shape")
                if isinstance(shape, list) and all(type(one) is int for one in shape) and len(shape) > 1:
                    kind = metadata.get("data_type", metadata.get("dtype"))
                    yield sanitize(folder), (tuple(shape), sanitize(str(kind))[:40])
                continue
        if depth < _MOST_DEPTH:
            pending += [(_key(folder, one), depth + 1) for one in reversed(files.folders(folder))]


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
