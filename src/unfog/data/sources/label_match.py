"""Which row of a table is of which image, however the two write the same path."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from unfog.data.sources.image_files import SUFFIXES
from unfog.data.sources.source import strip_shard

Spelling = Callable[[str], str]


def match_rows(names: Sequence[str], rows: Collection[str]) -> tuple[dict[int, str], set[str]]:
    """(row of each image that has one; rows without an image). The rows are in NFC, as what macOS writes is not.

    By whole paths if any is in both; else by the way of writing them that fits the most. Only one way, as else the
    row of an image elsewhere, of the same base name, would be taken for one here; for the same reason a row that names
    another folder than the image's, val/0.png for train/0.png, is not that image's.
    """
    names = [unicodedata.normalize("NFC", name) for name in names]
    found = _matched(names, rows, str, str) or _matched(names, rows, strip_shard, strip_shard)
    found = found or max((_matched(names, rows, *ways) for ways in _ways(names, rows)), key=len)
    return dict(sorted(found.items())), set(rows) - set(found.values())


def _matched(names: Sequence[str], rows: Collection[str], of_name: Spelling, of_row: Spelling) -> dict[int, str]:
    """The row of each image that is spelt like it, and like no other."""
    of_images, of_rows = _unique(names, of_name), _unique(rows, of_row)
    return {
        i: row
        for key, (i, name) in of_images.items()
        if (row := of_rows.get(key, (0, ""))[1]) and _in_one_folder(strip_shard(name), row)
    }


def _ways(names: Sequence[str], rows: Collection[str]) -> Iterator[tuple[Spelling, Spelling]]:
    """How (images, rows) may be spelt where their paths are not the same, the surest first."""
    yield _below_shared(names, rows)
    yield _base, _base
    yield _stem, _stem


def _below_shared(names: Sequence[str], rows: Collection[str]) -> tuple[Spelling, Spelling]:
    """Paths less leading folders that all rows share, or else all images: as many of those as fit the most paths."""
    members = {strip_shard(name) for name in names}
    fits = [(sum(row[cut:] in members for row in rows), 0, cut) for cut in _shared(rows)]
    fits += [(sum(name[cut:] in rows for name in members), cut, 0) for cut in _shared(members)]
    _, of_name, of_row = max(fits, key=lambda fit: fit[0], default=(0, 0, 0))
    return lambda name: strip_shard(name)[of_name:], lambda row: row[of_row:]


def _shared(paths: Collection[str]) -> list[int]:
    """How many characters the one, two, three … leading folders have that all these paths share."""
    first, last = min(paths), max(paths)
    return [i for i, character in enumerate(first, 1) if character == "/" and last.startswith(first[:i])]


def _unique(names: Iterable[str], spelling: Spelling) -> dict[str, tuple[int, str]]:
    """Those names that no other is written like: spelling -> (which, name)."""
    spelt = list(map(spelling, names))
    counts = Counter(spelt)
    return {key: (i, name) for i, (key, name) in enumerate(zip(spelt, names)) if counts[key] == 1}


def _in_one_folder(name: str, row: str) -> bool:
    """Whether two paths may be of one file: the folders of one are the last of the other's."""
    one, other = sorted((name.split("/")[:-1], row.split("/")[:-1]), key=len)
    return one == other[len(other) - len(one) :]


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _stem(name: str) -> str:
    stem, suffix = os.path.splitext(_base(name))
    return stem if suffix.lower() in SUFFIXES else _base(name)
