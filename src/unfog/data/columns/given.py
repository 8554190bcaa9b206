"""Conditions given from Python: a dictionary or table of values, and the table in the cache for images of files."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.cache import remove_stale_entries
from unfog.data.columns.image_setting import SECOND_KINDS
from unfog.data.settings import parse_condition
from unfog.data.sources.image_objects import as_array, is_array
from unfog.data.sources.label_tables import FILE_COLUMNS
from unfog.data.sources.stored_images import plain_value, plain_values
from unfog.errors import RequestError
from unfog.files.cache_folder import cache_folder, hold, make_room
from unfog.files.safe_files import replace_file
from unfog.text import sanitize


def columns_by_name(conditions: Any) -> dict[str, Any]:
    """Return conditions as a dictionary of columns; a table of pandas or polars has one for each of its own.

    RequestError if they are neither.
    """
    if type(conditions).__module__.partition(".")[0] in ("pandas", "polars") and hasattr(conditions, "columns"):
        return {str(name): list(conditions[name]) for name in conditions.columns}
    if not isinstance(conditions, Mapping) or not all(isinstance(name, str) for name in conditions):
        raise RequestError(f'conditions = {conditions!r:.60} must be a dict of arrays, such as {{"age": ages}}')
    return dict(conditions)


def store_images(columns: Mapping[str, Any], named: str) -> tuple[dict[str, Any], str]:
    """Write conditions that are images, [N, H, W] or [N, H, W, C], as arrays into the cache.

    `named` is `data.condition` as it was given; "" for all columns. Returns the other columns, and `data.condition`
    that names them and the arrays. Images that it does not name are left out. Booleans are masks of 0 and 1.
    RequestError if `named` gives such a column another source or a kind that images do not have, or the cache cannot
    be written or has a comma in its path.
    """
    others, words = dict(columns), named.split(",") if named else [*columns]
    for name, values in columns.items():
        array = as_array(values) if is_array(values) else None
        if array is None or array.ndim not in (3, 4) or array.dtype.kind not in "buif":
            continue
        del others[name]
        if (own := next((word for word in words if re.split("[:=]", word)[0].strip() == name), None)) is None:
            continue
        kind = _kind_of(own) or "mask" * (array.dtype == np.bool_)
        path = _stored_array(array)
        words = [*(word for word in words if word != own), f"{name}={path}" + f":{kind}" * bool(kind)]
    return others, ",".join(words)


def _kind_of(word: str) -> str:
    """Return the kind in NAME or NAME:KIND of images; "" without one. RequestError if it is another kind or text."""
    kind = word.partition(":")[2].strip()
    if "=" in word:
        raise RequestError(f"condition = {word.strip()} has a source, and conditions has images too; give one of them")
    if kind and kind not in SECOND_KINDS:
        raise RequestError(f"condition = {word.strip()}: these are images, of kind {' or '.join(SECOND_KINDS)}")
    return kind


def _stored_array(array: NDArray[Any]) -> Path:
    """Write an array into the cache, booleans as bytes, and return its file. RequestError if that cannot be named."""
    if "," in (folder := str(cache_folder())):
        raise RequestError(
            f"the path of the cache, {sanitize(folder)}, has a comma, which separates conditions; set "
            "UNFOG_CACHE to another folder"
        )
    plain = array.view(np.uint8) if array.dtype == np.bool_ else array  # without a copy, as it may have gigabytes
    return _stored(lambda file: np.save(file, plain, allow_pickle=False), "condition", "npy", plain.nbytes)


class _DigestFile(io.RawIOBase):
    """File that keeps the SHA-256 of what is written to it, and nothing else."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.digest.update(data)
        return len(data)


def _stored(save: Callable[[Any], object], what: str, suffix: str, size: int) -> Path:
    """Write with `save` a file of about `size` bytes into the cache, named by its content, and return it.

    `save` is called with a file that takes the digest, and with the file if it is not there yet: its time is part of
    the fingerprint of what is decoded from it. RequestError if it cannot be written.
    """
    folder, named = cache_folder(), _DigestFile()
    save(named)
    path = folder / f"{what}-{named.digest.hexdigest()[:32]}.{suffix}"
    hold(path)
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_entries(folder)
        make_room(size)
        with replace_file(path, folder, shared=True) as file:
            save(file)
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(f"{folder} cannot be written ({reason}); set UNFOG_CACHE to another") from None
    return path


def store_table(columns: Mapping[str, Any], named: str) -> str:
    """Write conditions of files as a table into the cache, and return `data.condition` that names it.

    Args:
        columns: for each condition, a dictionary of file names and values; or sequences, one of them of file names.
        named: `data.condition` as it was given, such as "age:category"; "" for all columns.

    Raises:
        RequestError: nothing names the files, or the cache cannot be written.
    """
    place, _ = parse_condition(named)
    if place:
        raise RequestError(f"condition = {named} names a table, and conditions are given as well; give one of them")
    rows = _rows_by_file(columns)
    if not (others := list(dict.fromkeys(name for row in rows.values() for name in row))):
        raise RequestError("conditions have no value; give at least one for each file, or leave them out")
    content = "".join(json.dumps({"file_name": file, **row}) + "\n" for file, row in rows.items()).encode()
    path = _stored(lambda file: file.write(content), "table", "jsonl", len(content))
    return f"{path}:{named or ','.join(others)}"


def _rows_by_file(columns: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return file name -> its values by name of condition."""
    rows: dict[str, dict[str, Any]] = {}
    if columns and all(isinstance(values, Mapping) for values in columns.values()):
        for name, values in columns.items():
            for file, value in values.items():
                rows.setdefault(str(file), {})[name] = plain_value(value, name)
        return rows
    key = next((name for usual in FILE_COLUMNS for name in columns if name.casefold() == usual), None)
    if key is None:
        first = next(iter(columns), "age")
        raise RequestError(
            "the order of files in a folder is not that of a list, so conditions of files are given by name: "
            f'conditions={{"{first}": {{"0001.png": …}}}}, or with a list "file_name" of them'
        )
    files, others = list(columns[key]), [name for name in columns if name != key]
    lists = {name: plain_values(columns[name], name) for name in others}
    for name, values in lists.items():
        if len(values) != len(files):
            raise RequestError(f"the condition {name} has {len(values):,} values, and there are {len(files):,} files")
    for i, file in enumerate(files):
        if str(file) in rows:
            raise RequestError(f"conditions have two rows of {str(file)!r:.60}; keep one")
        rows[str(file)] = {name: lists[name][i] for name in others}
    return rows
