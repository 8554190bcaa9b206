"""Match the rows of a label table to images, whose paths the two may write differently."""

from __future__ import annotations

import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from unfog.data.sources.image_files import SUFFIXES
from unfog.data.sources.labels import strip_shard

_Spelling = Callable[[str], str]


def match_rows(names: Sequence[str], rows: Collection[str]) -> tuple[dict[int, str], set[str]]:
    """Return (index of an image -> its row; rows without an image). The rows must be in Unicode NFC.

    Whole paths are compared if any is in both; else one spelling of them, the one that matches most rows.
    """
    # Only one spelling, as a mix would take the row of an image elsewhere, of the same base name, for one here. For the
    # same reason a row that names another folder, val/0.png for train/0.png, is not that image's. NFC, as macOS writes
    # file names in another form than people type.
    names = [unicodedata.normalize("NFC", name) for name in names]
    found = _match_by(names, rows, str, str) or _match_by(names, rows, strip_shard, strip_shard)
    found = found or max((_match_by(names, rows, *pair) for pair in _spellings(names, rows)), key=len)
    return dict(sorted(found.items())), set(rows) - set(found.values())


def _match_by(
    names: Sequence[str], rows: Collection[str], spell_name: _Spelling, spell_row: _Spelling
) -> dict[int, str]:
    """Return image -> row where the spellings of both are equal, and no other image's or row's."""
    of_images, of_rows = _unique(names, spell_name), _unique(rows, spell_row)
    return {
        i: row
        for key, (i, name) in of_images.items()
        if (row := of_rows.get(key, (0, ""))[1]) and _same_folder(strip_shard(name), row)
    }


def _spellings(names: Sequence[str], rows: Collection[str]) -> Iterator[tuple[_Spelling, _Spelling]]:
    """Yield (spelling of images, spelling of rows) to compare instead of whole paths, the surest first."""
    yield _below_shared(names, rows)
    yield _base, _base
    yield _stem, _stem


def _below_shared(names: Sequence[str], rows: Collection[str]) -> tuple[_Spelling, _Spelling]:
    """Return spellings without the leading folders that all rows, or all images, share: as many as match the most."""
    members = {strip_shard(name) for name in names}
    fits = [(sum(row[cut:] in members for row in rows), 0, cut) for cut in _shared(rows)]
    fits += [(sum(name[cut:] in rows for name in members), cut, 0) for cut in _shared(members)]
    _, of_name, of_row = max(fits, key=lambda fit: fit[0], default=(0, 0, 0))
    return lambda name: strip_shard(name)[of_name:], lambda row: row[of_row:]


def _shared(paths: Collection[str]) -> list[int]:
    """Return the lengths of the first, the first two, … leading folders that all paths share."""
    first, last = min(paths), max(paths)
    return [i for i, character in enumerate(first, 1) if character == "/" and last.startswith(first[:i])]


def _unique(names: Iterable[str], spelling: _Spelling) -> dict[str, tuple[int, str]]:
    """Return spelling -> (index, name) of the names whose spelling no other name has."""
    keys = list(map(spelling, names))
    counts = Counter(keys)
    return {key: (i, name) for i, (key, name) in enumerate(zip(keys, names)) if counts[key] == 1}


def _same_folder(name: str, row: str) -> bool:
    """Return whether two paths may be of one file: the folders of one are the last of the other's."""
    one, other = sorted((name.split("/")[:-1], row.split("/")[:-1]), key=len)
    return one == other[len(other) - len(one) :]


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _stem(name: str) -> str:
    stem, suffix = os.path.splitext(_base(name))
    return stem if suffix.lower() in SUFFIXES else _base(name)
