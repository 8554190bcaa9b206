"""Class labels: those that folders give, and the spelling and order of labels in tables and shards."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.sources.base import Source
from unfog.errors import RequestError
from unfog.text import sanitize

SPLITS = frozenset(["train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"])
"""Folder names that are splits of a data set rather than classes."""

_SHARD = re.compile(r"\.tar/", re.IGNORECASE)
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,18}")


def strip_shard(name: str) -> str:
    """Return an image's name without the shard it is in: "s-000.tar/cats/1.jpg" -> "cats/1.jpg"."""
    return _SHARD.split(name, 1)[-1]


def normalize_label(value: Any) -> str:
    """Return a label as text, "" for what is no label. Spellings of a whole number agree: 3, "3", 3.0 and "03"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        return ""
    text = str(value).strip() if isinstance(value, str) or abs(value) < 2**63 else ""
    return str(int(text)) if _WHOLE_NUMBER.fullmatch(text) else text


def sort_labels(labels: set[str]) -> list[str]:
    """Return labels sorted as numbers if all are whole numbers ("2" before "10"), else as text."""
    return sorted(labels, key=int if all(map(_WHOLE_NUMBER.fullmatch, labels)) else None)


def read_labels(source: Source, mode: str) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
    """Return (classes, label of each image int64 [N]), or ((), None) without classes.

    Args:
        source: its own labels are used where it has some, except in mode "none".
        mode: "none": no classes. "folders": a class is a top folder below the folders that all images share
            ("photos/cats/a.jpg", "photos/dogs/1/b.jpg": cats, dogs). "auto": the same, if there are at least two such
            folders, no image lies beside them, each has four images on average, and they are not a train/test split.
            Below such a split the classes are one level down ("train/cats", "val/cats") in both modes.

    Raises:
        RequestError: mode "folders", and an image is in no sub-folder.
    """
    if mode == "none":
        return (), None
    if source.labels is not None:
        return tuple(sanitize(name) for name in source.classes), source.labels
    parts, codes = _folders(source)
    first, last = min(parts), max(parts)
    shared = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), min(len(first), len(last)))
    tops = [folder[shared] if len(folder) > shared else "" for folder in parts]
    found = sorted(set(tops))
    if mode == "folders" and shared and found[0] == "":
        # All images lie in one folder, or in it and below: that folder is the class.
        shared, tops = shared - 1, [folder[shared - 1] for folder in parts]
        found = sorted(set(tops))
    if mode == "folders" and found[0] == "":
        loose = sanitize(source.names[int(np.argmax(np.array([top == "" for top in tops])[codes]))])
        raise RequestError(
            f"labels = folders needs every image in a sub-folder, and {loose} is in none; move it or use labels = none"
        )
    split = not source.classes and all(name.lower() in SPLITS for name in found)
    if split and all(len(folder) > shared + 1 for folder in parts):
        tops = [folder[shared + 1] for folder in parts]
        found, split = sorted(set(tops)), False
    unclear = len(found) < 2 or found[0] == "" or split or len(codes) < 4 * len(found)
    if mode == "auto" and not source.classes and unclear:
        return (), None
    classes = source.classes or tuple(found)
    index = {name: i for i, name in enumerate(classes)}
    labels = np.array([index[top] for top in tops], np.int64)[codes]
    # Class names end up in files, figures and terminals, so control characters must not act there.
    return tuple(sanitize(name) for name in classes), labels


def _folders(source: Source) -> tuple[list[tuple[str, ...]], NDArray[np.int64]]:
    """Return (each folder as its parts, [N] index of the folder of each image). Folders are few beside the images."""
    known = source.folders
    if known is None:
        found = dict[str, int]()
        folders = (strip_shard(name).rpartition("/")[0] for name in source.names)
        codes = np.fromiter((found.setdefault(folder, len(found)) for folder in folders), np.int64, len(source.names))
        known = list(found), codes
    return [tuple(folder.split("/")) if folder else () for folder in known[0]], known[1]
