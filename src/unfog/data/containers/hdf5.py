"""Images in a dataset of an HDF5 or NetCDF file: `file.h5:DATASET`. All but NetCDF of version 3 need h5py."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.containers.netcdf3 import MAGIC, open_netcdf3
from unfog.data.containers.source import ContainerSource, file_bytes, unreadable
from unfog.data.containers.stored_array import Key, StoredArray, check_type, choose
from unfog.data.sources.arrays import sampled_digest
from unfog.data.sources.base import ImageError
from unfog.errors import RequestError, install_command
from unfog.files.deflate import DEFLATE_RATIO, unpacks_to
from unfog.files.safe_files import open_file
from unfog.text import sanitize

_MOST_OBJECTS, _MOST_DEPTH = 10_000, 32  # of a file, that are looked at for a list of its datasets
_LABELS = "labels"
_MOST_LABELS = 2**28  # bytes
_ATTRIBUTES = ("scale_factor", "add_offset", "_FillValue", "missing_value")


class Hdf5Source(ContainerSource):
    """Images in a dataset of an HDF5 file, of which NetCDF-4 files are a kind, or of a NetCDF file of version 3.

    Links to other files, virtual datasets and values that lie in other files are refused, as they could name any file
    of this machine.
    """

    suffixes = (".h5", ".hdf5", ".he5", ".hdf", ".nc", ".nc4")
    marks = re.compile(r"(.+\.(?:h5|hdf5|he5|hdf|nc|nc4)):(.+)", re.IGNORECASE)

    @classmethod
    def open_array(cls, path: str, name: str) -> StoredArray:
        local = Path(path)
        try:
            with open_file(local, "rb", local.parent, follow=True) as file:
                start = file.read(len(MAGIC))
            if start == MAGIC:
                return open_netcdf3(path, name)
            h5py = _import_h5py()
            opened = h5py.File(path, "r", locking=False, rdcc_nbytes=2**24)
        except OSError as error:
            raise unreadable(path, error, "restore it, or write it anew") from None
        try:
            name = name or choose(dict(_listed(h5py, opened)), sanitize(path))
            return _open(h5py, opened, path, name)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:  # of damaged files
            raise unreadable(f"{path}:{name}", error, "restore the file, or write it anew") from None

    def stamp(self) -> tuple[str, int]:
        return sampled_digest(Path(self.path)), file_bytes(self.path)


def _import_h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise RequestError(
            f"HDF5 and NetCDF files need h5py, which is not installed: {install_command('science')}"
        ) from None
    return h5py


def _open(h5py: Any, opened: Any, path: str, name: str) -> StoredArray:
    place = sanitize(f"{path}:{name}")
    found = _step_by_step(h5py, opened, path, name)
    if not isinstance(found, h5py.Dataset):
        inside = dict(_listed(h5py, found)) if isinstance(found, h5py.Group) else {}
        raise RequestError(
            f"{place} is a group; name a dataset in it: {', '.join(list(inside)[:8]) or 'there is none'}"
        )
    check_type(found.dtype, place)
    if found.is_virtual or found.external:
        kind = "a virtual dataset" if found.is_virtual else "a dataset with external storage"
        raise RequestError(
            f"{place} is {kind}, whose values may lie in other files, which are not followed; copy it: "
            "new['x'] = old['x'][:]"
        )
    _check_filters(h5py, found, place)
    bounds = ChunkBounds(h5py, found, place)
    shape, chunk = tuple(found.shape or ()), tuple(found.chunks or ())
    expected = math.prod(-(-length // part) for length, part in zip(shape, chunk)) if chunk else 1
    stored = int(found.id.get_num_chunks()) if chunk else int(found.id.get_storage_size() > 0)
    return StoredArray(
        *(place, shape, found.dtype, chunk, file_bytes(path), (stored, expected), _reader(found, bounds, path)),
        names=_dimensions(h5py, found),
        attributes=_attributes(found),
        labels=_labels(h5py, opened, path, name, shape[:1]),
    )


def _reader(dataset: Any, bounds: ChunkBounds, path: str) -> Any:
    length = file_bytes(path)

    def read(key: Key) -> NDArray[Any]:
        if file_bytes(path) < length:  # HDF5 reads zeros beyond the end of a file
            raise ImageError("truncated since it was opened")
        bounds.check(key)
        return np.asarray(dataset[key])

    return read


def _step_by_step(h5py: Any, opened: Any, path: str, name: str) -> Any:
    """Return the object of a name, along hard links alone. RequestError for others."""
    at, done = opened, ""
    for part in filter(None, name.split("/")):
        link = _link(at, part) if isinstance(at, h5py.Group) else None
        done = f"{done}/{part}".lstrip("/")
        if link is None:
            known = list(dict(_listed(h5py, opened)))
            listed = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
            raise RequestError(f"{sanitize(path)} has no {sanitize(done)}; it has {listed or 'no datasets'}")
        if isinstance(link, h5py.ExternalLink):
            raise RequestError(
                f"{sanitize(path)}:{sanitize(done)} is a link to {sanitize(str(link.path))} in the file "
                f"{sanitize(str(link.filename))}, which is not followed; give that file itself"
            )
        if isinstance(link, h5py.SoftLink):
            raise RequestError(
                f"{sanitize(path)}:{sanitize(done)} is a link, which is not followed; give {sanitize(str(link.path))}"
            )
        at = at[part]
    return at


def _link(group: Any, name: str) -> Any:
    """Return the link of a name; None if it is missing, or of a kind that a program has defined."""
    with suppress(TypeError):
        return group.get(name, getlink=True)
    return None


def _listed(h5py: Any, group: Any) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
    """Yield (name, (shape, type)) of the datasets below a group, along hard links; not the scales of dimensions."""
    pending, seen = [("", group, 0)], set[Any]()
    while pending and len(seen) < _MOST_OBJECTS:
        prefix, at, depth = pending.pop()
        for key in sorted(at):
            if len(seen) >= _MOST_OBJECTS or not isinstance(_link(at, key), h5py.HardLink):
                continue
            child = at[key]
            identity = h5py.h5o.get_info(child.id).addr
            if identity in seen:  # groups may hold each other
                continue
            seen.add(identity)
            if isinstance(child, h5py.Dataset) and not _is_scale(h5py, child):
                yield sanitize(prefix + key), (tuple(child.shape or ()), str(child.dtype))
            elif isinstance(child, h5py.Group) and depth < _MOST_DEPTH:
                pending.append((f"{prefix}{key}/", child, depth + 1))


def _is_scale(h5py: Any, dataset: Any) -> bool:
    return bool(h5py.h5ds.is_scale(dataset.id))


def _check_filters(h5py: Any, dataset: Any, place: str) -> None:
    """Raise RequestError if values are compressed by a filter that is not there."""
    properties = dataset.id.get_create_plist()
    for i in range(properties.get_nfilters()):
        code, _, _, label = properties.get_filter(i)
        if not h5py.h5z.filter_avail(code):
            known = sanitize(label.decode("utf-8", "replace"))[:60] or "without a name"
            raise RequestError(
                f"{place} is compressed by filter {code} ({known}), which is not installed here; write it anew with "
                "gzip: h5repack -f GZIP=4 OLD NEW"
            )


def _dimensions(h5py: Any, dataset: Any) -> tuple[str, ...]:
    """Return the names of the dimensions, as their labels or attached scales say; () without."""
    names = []
    for dimension in dataset.dims:
        name = dimension.label
        with suppress(RuntimeError, OSError, KeyError, ValueError):
            if not name and len(dimension):
                name = str(dimension[0].name).rpartition("/")[2]
        names.append(sanitize(str(name)))
    return tuple(names) if any(names) else ()


def _attributes(dataset: Any) -> Mapping[str, Any]:
    return {name: dataset.attrs[name] for name in _ATTRIBUTES if name in dataset.attrs}


def _labels(h5py: Any, opened: Any, path: str, name: str, count: tuple[int, ...]) -> NDArray[Any] | None:
    """Return the dataset `labels` beside the images, if it is one of numbers or texts of a fixed length."""
    group, _, own = name.rpartition("/")
    beside = _step_by_step(h5py, opened, path, group)
    if own == _LABELS or not isinstance(_link(beside, _LABELS), h5py.HardLink):
        return None
    found = beside[_LABELS]
    plain = isinstance(found, h5py.Dataset) and found.shape == count and found.dtype.kind in "biufS"
    if not plain or found.is_virtual or found.external or found.size * found.dtype.itemsize > _MOST_LABELS:
        return None
    return np.asarray(found[:])


_HARMLESS = 2**29  # bytes that a chunk may unpack to unlooked at
_SLACK = 2**20  # bytes of a chunk beyond its values: checksums, and compression that failed


class ChunkBounds:
    """The chunks of a dataset whose stored bytes could unpack to more than fits into memory.

    `check` unpacks them piece by piece before the library does so at once, which has no limit. RequestError if the
    dataset is compressed by deflate twice.
    """

    def __init__(self, h5py: Any, dataset: Any, place: str) -> None:
        self._dataset, self._most = dataset, 0
        self._deflate: int | None = None  # place of deflate among the filters
        self._suspects = dict[tuple[int, ...], int]()
        if not dataset.chunks:
            return
        properties = dataset.id.get_create_plist()
        filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
        deflates = filters.count(h5py.h5z.FILTER_DEFLATE)
        if deflates > 1:
            raise RequestError(f"{place} is compressed by gzip {deflates} times; write it anew with gzip once")
        if not filters:
            return
        self._deflate = filters.index(h5py.h5z.FILTER_DEFLATE) if deflates else None
        self._most = math.prod(dataset.chunks) * dataset.dtype.itemsize + _SLACK
        if dataset.id.get_storage_size() * DEFLATE_RATIO > _HARMLESS:
            dataset.id.chunk_iter(self._note)

    def _note(self, chunk: Any) -> None:
        if chunk.size > self._most or (self._deflate is not None and chunk.size * DEFLATE_RATIO > _HARMLESS):
            self._suspects[tuple(chunk.chunk_offset)] = chunk.size

    def check(self, key: Key) -> None:
        """Raise ValueError if a chunk that a part of the dataset needs unpacks to too much."""
        if not self._suspects:
            return
        chunks = self._dataset.chunks
        starts = []
        for one, length, part in zip(key, self._dataset.shape, chunks):
            first, last, _ = one.indices(length) if isinstance(one, slice) else (one, one + 1, 1)
            starts.append(range(first - first % part, last, part))
        if math.prod(map(len, starts)) > len(self._suspects):
            wanted = (at for at in list(self._suspects) if all(x in of for x, of in zip(at, starts)))
        else:
            wanted = (at for at in itertools.product(*starts) if at in self._suspects)
        for at in wanted:
            self._check_chunk(at)
            self._suspects.pop(at, None)

    def _check_chunk(self, at: tuple[int, ...]) -> None:
        mask, content = 0, b""
        if self._suspects.get(at, 0) <= self._most:
            mask, content = self._dataset.id.read_direct_chunk(at)
        # A set bit of the mask is a filter that this chunk was stored without.
        if content and mask >> (self._deflate or 0) & 1:
            return
        if not content or unpacks_to(content, self._most + 1):
            raise ValueError(f"a chunk that unpacks to over {self._most:,} bytes, more than its shape has")
