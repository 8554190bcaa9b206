"""The columns that `data.condition` names, of a table beside the images, or of the source itself."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from unfog.data.columns.captions import caption_column, caption_files, captions_counted
from unfog.data.columns.image_setting import split_images
from unfog.data.columns.kinds import column_of
from unfog.data.dataset import Dataset
from unfog.data.settings import TEXT_NAMES, Data, parse_condition
from unfog.data.sources.base import LabelTable, Source
from unfog.data.sources.label_tables import MissingColumnError, match_images, read_cells
from unfog.data.sources.labels import AUTO_TABLES, refuse_few_matches
from unfog.errors import RequestError
from unfog.text import sanitize, suggest
from unfog.values.columns import CLASS, Column, without_class
from unfog.values.condition_format import TEXT

_Source = TypeVar("_Source", bound=Source)
_Rows: TypeAlias = Mapping[str, tuple[Any, ...]]
"""File name -> its cells of the columns that are asked for."""


def with_conditions(
    source: _Source,
    setting: str,
    warn: Callable[[str], None] = lambda line: None,
    training: Callable[[], NDArray[np.int64]] | None = None,
) -> _Source:
    """Return the source with the columns that `data.condition` names, and no others but the class; "" changes nothing.

    Args:
        source: the source.
        setting: `data.condition`.
        warn: called with a line on images without a row in the table, and on captions.
        training: returns the indices of the training images, from which a tokenizer is learned; None for all images.

    Raises:
        RequestError: a column is nowhere, is of another kind, or is refused: see `column_of`; or the table names fewer
            than half of the images, or other images for half of its rows; or there are two columns of captions.
    """
    place, wanted = parse_condition(setting)
    if not wanted:
        return source
    images = {} if place else source.images_of(wanted)  # which `pair_sources` takes
    wanted = {name: kind for name, kind in wanted.items() if name not in images}
    found = {name: source.columns[name] for name in wanted if not place and name in source.columns}
    cells = _cells(source, place, [name for name in wanted if name not in found], warn)
    for name, each in cells.items():
        if wanted[name] == TEXT or (name in TEXT_NAMES and not wanted[name]):
            rows = training or (lambda: np.arange(len(source.names)))
            found[name] = caption_column(name, each, source.names, rows, warn)
        else:
            found[name] = column_of(name, each, source.names, wanted[name])
    for name, kind in wanted.items():
        _check_kind(found[name], kind)
    if len(texts := [name for name in wanted if found[name].kind == TEXT]) > 1:
        raise RequestError(f"condition = {setting}: {' and '.join(texts)} are captions, and a run has one such column")
    changed = copy.copy(source)  # as the source may be opened for other settings as well
    changed.ignored = captions_counted(source.ignored, cells)
    changed.columns = {name: column for name, column in source.columns.items() if name == CLASS} | found
    if not place and source.label_column in wanted:  # else it would also be the class
        changed.classes, changed.labels = (), None
    return changed


def _cells(source: Source, place: str, names: Sequence[str], warn: Callable[[str], None]) -> dict[str, Sequence[Any]]:
    """Return the cell of each image in each column: of the source, of a table, or of the text files beside the images.

    RequestError if a column is nowhere, or the table does not fit the images.
    """
    # Members of shards are values of the name of their suffix, asked for at once, as shards are read for them.
    beside = ["txt"] * (not place and "txt" not in names and any(name in TEXT_NAMES for name in names))
    found: dict[str, Sequence[Any]] = {} if place or not names else dict(source.values_of([*names, *beside]))
    texts = found.pop("txt", None) if beside else found.get("txt")
    if not (rest := [name for name in names if name not in found]):
        return found
    try:
        return found | _matched(source, *_read_table(source, place, rest), rest, warn)
    except MissingColumnError:
        captions = [name for name in rest if name in TEXT_NAMES]
        if place or len(captions) != 1:
            raise
        files = texts or caption_files(source)
        if files is None:
            raise
    others = [name for name in rest if name not in captions]
    return found | {captions[0]: files} | _cells(source, place, others, warn)


def resolved_condition(setting: str) -> str:
    """Return `data.condition` with absolute paths of its table, if that is a file beside no source, and its sources."""
    place, _ = parse_condition(setting)
    path = os.path.abspath(os.path.expanduser(place))
    images, words, is_table = split_images(setting)[0], setting.split(","), bool(place) and os.path.isfile(path)
    for k, word in enumerate(words):
        name, equals, source = word.partition("=")
        if equals and name.strip() in images.second:
            given = images.second[name.strip()][0]
            there = os.path.abspath(os.path.expanduser(given))
            words[k] = word if not os.path.exists(there) else f"{name}={source.replace(given, there, 1)}"
        elif is_table and word.lstrip().startswith(place):
            words[k], is_table = word.replace(place, path, 1), False
    return ",".join(words)


def select_conditions(dataset: Dataset, settings: Data) -> Dataset:
    """Return a dataset that was decoded before with the columns that `data.condition` names; "" keeps all of them.

    RequestError if it has not got a column, or has it of another kind.
    """
    _, wanted = parse_condition(settings.condition)
    wanted |= {name: kind for name, (_, kind) in split_images(settings.condition)[0].second.items()}
    held = without_class(dataset.train.columns)
    for name, kind in wanted.items():
        if name not in held:
            raise RequestError(
                f"{sanitize(dataset.report.source)} has no column {name!r}"
                f"{suggest(name, held) if held else ''}; pack the originals with --condition {settings.condition}"
            )
        _check_kind(held[name], kind)
    if not wanted or wanted.keys() == held.keys():
        return dataset

    def selected(columns: Mapping[str, Column]) -> dict[str, Column]:
        return {name: column for name, column in columns.items() if name == CLASS or name in wanted}

    # Without the fingerprints of the pack, which are of all columns.
    train, held_out = dataset.train, dataset.held_out
    return replace(
        dataset,
        train=replace(train, columns=selected(train.columns), known_fingerprint=""),
        held_out=replace(held_out, columns=selected(held_out.columns), known_fingerprint=""),
    )


def _check_kind(column: Column, kind: str) -> None:
    if kind and column.kind != kind:
        raise RequestError(f"the column {column.name} is of kind {column.kind} here, and not {kind}; omit :{kind}")


def _read_table(source: Source, place: str, names: Sequence[str]) -> tuple[LabelTable, _Rows]:
    """Return the table of that path, or the first one at the top of the source that has the columns, and its rows."""
    if place:
        inside = None if os.path.isfile(os.path.expanduser(place)) else source.table(os.path.basename(place))
        named = inside or LabelTable.find(place)
        return named, read_cells(named, names, source.second_names)
    tables = [table for name in AUTO_TABLES if (table := source.table(name)) is not None]
    if not tables:
        has = [*without_class(source.columns), *source.value_names()]
        told = f"it has {', '.join(map(sanitize, has[:12]))}; or " if has else ""
        files = " and no text files beside the images" * any(name in TEXT_NAMES for name in names)
        raise MissingColumnError(
            f"condition = {', '.join(map(sanitize, names))}: {sanitize(source.name)} has no such column, and no "
            f"metadata.csv, .jsonl or .parquet{files}; {told}give a table with a row for each image: --condition "
            f"TABLE.csv:{','.join(sanitize(name.removesuffix('.npy')) for name in names)}"
        )
    errors = list[RequestError]()
    for table in tables:
        try:
            return table, read_cells(table, names, source.second_names)
        except RequestError as error:
            errors.append(error)
    raise errors[0]


def _matched(
    source: Source, table: LabelTable, rows: _Rows, names: Sequence[str], warn: Callable[[str], None]
) -> dict[str, list[Any]]:
    """Return the cells of each column, in the order of the images; None if an image has no row."""
    row_of, unmatched = match_images(source, rows)
    refuse_few_matches(source, table, rows, row_of)
    said, count = sanitize(table.base_name), len(source.names)
    if 2 * len(unmatched) >= len(rows):
        raise RequestError(
            f"{said} has {len(rows):,} rows, and {len(unmatched):,} of them name no image of {sanitize(source.name)}, "
            f"such as {sanitize(min(unmatched))}: it is probably the table of other images; delete those rows"
        )
    if unmatched:
        warn(f"{said} has {len(unmatched):,} rows without an image, such as {sanitize(min(unmatched))}")
    if missing := count - len(row_of):
        first = next(name for i, name in enumerate(source.names) if i not in row_of)
        warn(f"{said} has no row for {missing:,} of {count:,} images, such as {sanitize(first)}: unknown for them")
    none = (None,) * len(names)
    cells = [rows[row_of[i]] if i in row_of else none for i in range(count)]
    return {name: [each[k] for each in cells] for k, name in enumerate(names)}
