"""`Column`: what a source knows about each of its images, beside the image. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from unfog.errors import RequestError
from unfog.text import sanitize

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASS = "class"
"""Name and kind of the column that holds class labels."""
MOST_COLUMNS = 1000
"""Largest number of columns of a set."""
_LONGEST_NAME = 100
# Not in a name, as it is written in NAME=VALUE, in lists of names, and in names of files.
_NOT_IN_NAMES = frozenset("/\\,=")


@dataclass(frozen=True, eq=False)
class Column:
    """One property of all images of a set, in the order of the images."""

    name: str
    kind: str
    """The kind of condition that it can become, such as "class"."""
    values: NDArray[Any]
    """[N, …], the value of each image, in the units of the source; of "class" int64 [N], an index into `categories`."""
    categories: tuple[str, ...] = ()
    """Names of the values, if they are numbers of categories."""

    def rows(self, index: Any) -> Column:
        """Return the column of some of the images, by whatever indexes an array; a slice shares the memory."""
        return replace(self, values=self.values[index])


def of_labels(labels: NDArray[Any] | None, classes: tuple[str, ...]) -> dict[str, Column]:
    """Return the column "class" of labels [N], indices into `classes`; {} for None."""
    return {} if labels is None else {CLASS: Column(CLASS, CLASS, labels, classes)}


def labels_of(columns: Mapping[str, Column]) -> NDArray[Any] | None:
    """Return the class labels [N]; None without classes."""
    return columns[CLASS].values if CLASS in columns else None


def classes_of(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the names of the classes; () without classes."""
    return columns[CLASS].categories if CLASS in columns else ()


def without_class(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return all columns but that of the class labels."""
    return {name: column for name, column in columns.items() if name != CLASS}


def rows_of(columns: Mapping[str, Column], index: Any) -> dict[str, Column]:
    """Return the columns of some of the images; see `Column.rows`."""
    return {name: column.rows(index) for name, column in columns.items()}


def columns_digest(columns: Mapping[str, Column]) -> str:
    """Return a digest of all columns but that of the class labels; "" without any."""
    digest, others = hashlib.sha256(), without_class(columns)
    update_digest(digest, others)
    return digest.hexdigest() if others else ""


def update_digest(digest: hashlib._Hash, columns: Mapping[str, Column]) -> None:
    """Add columns to a digest, in their order; class labels by their values alone, all others with their facts."""
    import numpy as np

    for column in columns.values():
        if getattr(column.values, "is_made", False):  # of the images, which have a digest of their own
            continue
        if column.name != CLASS:  # digests of labels alone are older than other columns, and stay valid
            facts = column.name, column.kind, column.categories, column.values.dtype.str, column.values.shape
            digest.update(repr(facts).encode("utf-8", "surrogateescape"))
        for part in parts_of(column.values):
            digest.update(np.ascontiguousarray(part).data)


def parts_of(values: Any) -> list[NDArray[Any]]:
    """Return the arrays that the values of a column consist of: one for each size of images, or `values` alone."""
    return getattr(values, "parts", [values])


def in_order(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return the columns in the order of a set: "class" first, then the others by their names."""
    return {name: columns[name] for name in sorted(columns, key=lambda name: (name != CLASS, name))}


def check_columns(columns: Mapping[str, Column], count: int, subject: str) -> dict[str, Column]:
    """Return the columns of `count` images in the order of a set; see `in_order`.

    Values become contiguous arrays in the byte order of this machine. `subject` names the source in messages.
    RequestError if a column does not fit the images, or has a name or values that no column may have.
    """
    if len(columns) > MOST_COLUMNS:
        raise RequestError(
            f"{subject} has {len(columns):,} columns, and the most are {MOST_COLUMNS:,}; leave out those that are not "
            "needed, or put numbers that belong together into one column [N, K]"
        )
    return {name: _checked(name, column, count, subject) for name, column in in_order(columns).items()}


def _checked(name: str, column: Column, count: int, subject: str) -> Column:
    if problem := name_problem(name, column.kind):
        raise RequestError(f"{subject} has a column {sanitize(str(name))[:_LONGEST_NAME]!r}: {problem}")
    if name != column.name:
        raise RequestError(f"{subject} has the column {column.name!r} under the name {name!r}; give both the same name")
    values = _plain_values(column, count, f"the column {name} of {subject}")
    # Names of categories end up in files, figures and terminals, so control characters must not act there.
    return replace(column, values=values, categories=tuple(sanitize(str(one)) for one in column.categories))


def name_problem(name: str, kind: str) -> str:
    """Return why a column of this kind may not have this name; "" if it may."""
    if not name or name != sanitize(name).strip() or len(name) > _LONGEST_NAME or not _NOT_IN_NAMES.isdisjoint(name):
        return f"a name has 1 to {_LONGEST_NAME} characters, no space at its ends, and none of / \\ , ="
    if (name == CLASS) != (kind == CLASS):
        return f"labels are the one column of name and kind {CLASS!r}, and other columns have another kind"
    return ""


def _plain_values(column: Column, count: int, said: str) -> NDArray[Any]:
    import numpy as np

    try:
        values = np.asarray(column.values)
    except (TypeError, ValueError):
        raise RequestError(f"{said} has values of different lengths; give one array [N, …]") from None
    if values.dtype.kind not in "biuf" or values.dtype.itemsize > 8:
        raise RequestError(
            f"{said} holds {values.dtype}, and values are numbers or booleans; give categories as their numbers, int64 "
            "[N], and their names as `categories`"
        )
    if values.shape[:1] != (count,):
        given = f"{len(values):,} values" if values.ndim else "one value"
        raise RequestError(f"{said} has {given} for {count:,} images; give one for each image, in the order of `names`")
    if column.name == CLASS and (values.ndim != 1 or values.dtype.kind not in "iu"):
        raise RequestError(f"{said} holds {values.dtype} {list(values.shape)}, and labels are whole numbers [N]")
    if 0 in values.shape[1:]:
        raise RequestError(f"{said} has empty values, {list(values.shape)}; leave it out, or give at least one number")
    return np.ascontiguousarray(values, values.dtype.newbyteorder("="))
