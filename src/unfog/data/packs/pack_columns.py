"""Columns of a pack: a file for each, and their facts in the manifest.

Labels are labels.npy, with their classes in the manifest. Column k of the others, from 0 in the order of their names,
is column-k.npy, [N, …], and entry k of "columns" in the manifest, which is absent if there are labels alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.file_rows import is_local
from unfog.files.safe_files import regular_file
from unfog.text import sanitize
from unfog.values.columns import CLASS, MOST_COLUMNS, Column, columns_digest, name_problem, of_labels, without_class

_LABELS = "labels.npy"
# Types of the values, in the byte order of x86 and ARM.
_TYPES = frozenset(["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"])
COLUMN_FILES = (_LABELS, *(f"column-{k}.npy" for k in range(MOST_COLUMNS)))
"""Every file that a column may have."""


def column_arrays(columns: Mapping[str, Column]) -> dict[str, NDArray[Any]]:
    """Return file name -> array to write."""
    arrays = {_LABELS: columns[CLASS].values.astype(np.int64)} if CLASS in columns else {}
    return arrays | {f"column-{k}.npy": column.values for k, column in enumerate(without_class(columns).values())}


def column_facts(columns: Mapping[str, Column], of_source: Mapping[str, Column]) -> dict[str, Any]:
    """Return the entries of the manifest for the columns but that of the labels; {} if there are none.

    `of_source` are the columns of all images of the source, by which a later call knows whether they have changed.
    """
    facts = [
        {
            "name": column.name,
            "kind": column.kind,
            "categories": list(column.categories),
            "dtype": column.values.dtype.str,
            "shape": list(column.values.shape[1:]),
        }
        for column in without_class(columns).values()
    ]
    return {"columns": facts, "columns_digest": columns_digest(of_source)} if facts else {}


def open_columns(path: Path, manifest: Mapping[str, Any]) -> dict[str, Column]:
    """Map the columns of a pack. Raises ValueError, RequestError and others unless all files fit the manifest."""
    n = manifest["shape"][0]
    labels = mapped(path / _LABELS, (n,), np.int64) if manifest["labelled"] else None
    columns = of_labels(labels, tuple(manifest["classes"]))
    for k, facts in enumerate(_checked_facts(manifest.get("columns", []))):
        values = mapped(path / f"column-{k}.npy", (n, *facts["shape"]), np.dtype(facts["dtype"]))
        categories = tuple(map(sanitize, facts["categories"]))
        columns[facts["name"]] = Column(facts["name"], facts["kind"], values, categories)
    return columns


def _checked_facts(facts: Any) -> list[dict[str, Any]]:
    """Return the entries of the manifest unchanged. ValueError unless each is one that `column_facts` writes."""
    if type(facts) is not list or len(facts) > MOST_COLUMNS:
        raise ValueError(f"more than {MOST_COLUMNS:,} columns, or no list of them")
    for one in facts:
        match one:
            case {"name": str(), "kind": str(), "dtype": str(dtype), "categories": list(named), "shape": list(sides)}:
                valid = dtype in _TYPES and all(isinstance(name, str) for name in named)
                valid = valid and all(type(side) is int and 0 < side < 2**48 for side in sides)
            case _:
                valid = False
        if not valid:
            raise ValueError("a column is not described by name, kind, dtype, categories and shape")
        if problem := name_problem(one["name"], one["kind"]):
            raise ValueError(f"a column {one['name'][:100]!r}: {problem}")
    names = [one["name"] for one in facts]
    if CLASS in names or names != sorted(set(names)):
        raise ValueError("its columns are not in the order of their names")
    return facts


def mapped(path: Path, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return the array in a file of a pack. ValueError if it has another shape or type; OSError if it is not there."""
    # Mapping reads the header alone, and fails for a file that is shorter than its header says.
    file = regular_file(path, path.parent)
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{path.name} holds something else")
    # All but the pixels take a few bytes an image, so that they are read whole where mapping is not safe.
    return np.asarray(array if is_local(path) else np.load(file, allow_pickle=False))
