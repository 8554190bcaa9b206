"""A Hugging Face dataset: a folder that `save_to_disk` wrote, parquet files, or the name of one on the hub."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.file_rows import is_local
from unfog.data.sources.base import ImageError, LazyNames, OpenOptions, Source, SourceLocation
from unfog.data.sources.folder import files_digest, list_only, sample_digest
from unfog.data.sources.image_files import open_bytes, open_image
from unfog.errors import RequestError, install_command
from unfog.files.cache_folder import cache_folder, cache_limit, hold, make_room
from unfog.files.safe_files import LARGEST_TEXT, read_file, regular_file
from unfog.text import sanitize

_LABEL_COLUMNS = ("label", "labels", "class", "fine_label")
_LABEL_TYPES = ("string", "bool", "int8", "int16", "int32", "int64", "uint8")
# An honest file has about its own size unpacked, or ten times that where its images are uncompressed.
_MOST_RATIO, _SMALL_BYTES = 100, 2**28
_ROWS = 64  # of a batch, of which each may have a large image
_MARKERS = ("dataset_info.json", "dataset_dict.json")  # in a folder that `save_to_disk` wrote


class HuggingFaceSource(Source):
    """Images of a map-style dataset of the `datasets` library (`pip install 'unfog[hf]'`).

    The image column is the first of type Image, or of files' bytes. The label column is the first of type ClassLabel,
    whose names are the classes, or one called label; one that lacks values is not used, which `label_warning` says.
    What `datasets` makes of parquet files is in the folder `hf` of the cache.

    Args:
        text: a folder that `save_to_disk` wrote, a parquet file, a folder of those, or a name on the hub. A split may
            follow, as in PLACE:SPLIT; without, it is "train", else the first. `resolved` names it.
        name: the source as the user wrote it, for messages.

    Raises:
        RequestError: there is no such dataset or split, it has no images, or `datasets` is not installed.
    """

    suffixes = (".parquet",)

    def __init__(self, text: str, name: str) -> None:
        datasets = _import_datasets()
        place, split = _parse_split(text)
        local = Path(place).expanduser()
        there = local.exists()
        try:
            loaded = _load(datasets, local if there else None, place, split)
        except RequestError:
            raise
        except Exception as error:  # the library raises errors of every kind: no network, no such name, damaged files
            reason = " ".join(sanitize(f"{type(error).__name__}: {error}").split())[:200]
            raise RequestError(
                f"{sanitize(name)} cannot be loaded ({reason}); check its name and the network"
            ) from None
        self.name, dataset = name, loaded
        if isinstance(loaded, dict):
            split = _choose_split(name, loaded, split)
            self.name, dataset = f"{name} (split {split} of {', '.join(map(str, loaded))})", loaded[split]
        elif there and split:
            raise RequestError(
                f"{sanitize(name)} has no splits, and so no {sanitize(split)!r}; leave :{sanitize(split)} out"
            )
        where = str(local.resolve()) if there else place
        self.resolved = where if there and not split else f"hf:{where}{f':{split}' * bool(split)}"
        self._column = _image_column(name, dataset, datasets)
        # The files' bytes, as `decode` must see the file itself.
        self._images = dataset.select_columns([self._column]).cast_column(self._column, datasets.Image(decode=False))
        if not len(dataset):
            raise RequestError(f"{sanitize(self.name)} is empty; give another split")
        self.names = LazyNames("{:08}".format, range(len(dataset)))
        self._values = dataset
        self.label_column, self.classes, self.labels, self.label_warning = _read_labels(dataset, datasets)
        # The only folders from which images that are files are read.
        self._roots = [(local if local.is_dir() else local.parent).resolve()] if there else _download_folders(datasets)
        state = _parquet_state(local) if there and is_parquet(local) else str(dataset._fingerprint)
        self._stamp = state, int(dataset.data.nbytes)
        self._image_files = _image_files(_column(self._images, self._column), self._roots[0]) if there else []
        self.reading_warnings = _mapping_warnings(self.name, dataset)

    @classmethod
    def match(cls, location: SourceLocation) -> SourceLocation | None:
        if location.form == "folder":
            saved = any(os.path.isfile(os.path.join(location.resolved, marker)) for marker in _MARKERS)
            # Shards come with a table beside each tar file (img2dataset writes them so): those are shards.
            tables = list_only(location.resolved, ".parquet") and not list_only(location.resolved, ".tar")
            return location if saved or tables else None
        if location.form == "name":
            return location if location.resolved.startswith("hf:") else None
        return super().match(location)

    @classmethod
    def load(cls, location: SourceLocation, options: OpenOptions) -> HuggingFaceSource:
        return cls(location.resolved.removeprefix("hf:"), location.name)

    @staticmethod
    def items_of(
        dataset: Any, wanted: Sequence[str] = ()
    ) -> tuple[Iterator[Any], Iterator[Any], tuple[str, ...], dict[str, list[Any]]] | None:
        """Return (files of the images, labels, classes, values of the wanted columns) of a dataset in memory.

        None if it gives images itself: it is a stream, or has a transform.
        """
        datasets = _import_datasets()
        if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
            return None
        # A format, such as that of torch, would give arrays in place of files.
        dataset = dataset.with_format(None)
        column = _image_column("the dataset", dataset, datasets)
        rows = dataset.select_columns([column]).cast_column(column, datasets.Image(decode=False))
        label_column, classes, labels, _ = _read_labels(dataset, datasets)
        values = _values_of(dataset, wanted, column, datasets)
        if label_column in values:  # it is a condition, and no class as well
            classes, labels = (), None
        each = repeat(None) if labels is None else iter(labels.tolist())
        columns = (row[column] for row in rows)
        # The bytes of an image's file, else its path; None if it has neither.
        files = (None if one is None else one.get("bytes") or one.get("path") for one in columns)
        return files, each, classes, values

    def value_names(self) -> Sequence[str]:
        return [name for name in self._values.features if name != self._column]

    def values_of(self, names: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        return _values_of(self._values, names, self._column, _import_datasets())

    def open(self, i: int) -> Image.Image:
        one = self._images[i][self._column]
        if one is None or (one.get("bytes") is None and not one.get("path")):
            raise ImageError("empty")
        if one.get("bytes") is not None:
            return open_bytes(one["bytes"], str(one.get("path") or ""))
        path = (self._roots[0] / str(one["path"])).resolve()
        if not any(path.is_relative_to(root) for root in self._roots):
            # The dataset may be a stranger's, and must not make other files of this machine training data.
            raise ImageError("a path that leads out of its dataset")
        return open_image(path)

    def stamp(self) -> tuple[str, int]:
        fingerprint, size = self._stamp
        if self._image_files:
            fingerprint = f"{fingerprint} {files_digest(self._roots[0], self._image_files)[0]}"
        return hashlib.sha256(fingerprint.encode()).hexdigest(), size


def is_parquet(path: Path) -> bool:
    """Return True for a parquet file, or a folder of parquet files with at most .md and .json beside them."""
    if path.is_file():
        return path.suffix.lower() == ".parquet"
    suffixes = {one.suffix.lower() for one in path.iterdir() if one.is_file() and not one.name.startswith(".")}
    return ".parquet" in suffixes and suffixes <= {".parquet", ".md", ".json"}


def _parse_split(text: str) -> tuple[str, str]:
    place, colon, split = text.rpartition(":")
    # A path may have colons of its own.
    return (place, split) if colon and not Path(text).expanduser().exists() else (text, "")


def _download_folders(datasets: Any) -> list[Path]:
    from huggingface_hub.constants import HF_HUB_CACHE

    return [Path(folder).resolve() for folder in (datasets.config.HF_DATASETS_CACHE, HF_HUB_CACHE)]


def _image_files(images: Any, root: Path) -> list[str]:
    """Return the paths of images that are files below a folder rather than bytes in the table."""
    found = dict[str, None]()
    for chunk in images.chunks:
        if chunk.field("bytes").null_count:
            alone = zip(chunk.field("bytes").is_null().to_pylist(), chunk.field("path").to_pylist())
            found |= dict.fromkeys(path for no_bytes, path in alone if no_bytes and path)
    below = f"{root}{os.sep}"
    return [path for path in found if os.path.normpath(os.path.join(root, path)).startswith(below)]


def _parquet_files(local: Path) -> list[Path]:
    return [local] if local.is_file() else sorted(local.glob("*.parquet"))


def _parquet_state(local: Path) -> str:
    # Not the library's own fingerprint, which is another whenever it reads the files anew.
    states = [(file, file.stat()) for file in _parquet_files(local)]
    return repr([(file.name, state.st_size, state.st_mtime_ns, sample_digest(file)) for file, state in states])


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise RequestError(
            f"a Hugging Face dataset needs datasets, which is not installed: {install_command('hf')}"
        ) from None
    # They would be drawn over our own.
    datasets.disable_progress_bars()
    return datasets


def _load(datasets: Any, local: Path | None, place: str, split: str) -> Any:
    """Return a Dataset, or a dictionary of them by split."""
    if local is None:
        return datasets.load_dataset(place, split=split or None)
    if any((local / marker).exists() for marker in _MARKERS):
        _check_inside(local, place)
        loaded = datasets.load_from_disk(str(local))
        for one in loaded.values() if isinstance(loaded, dict) else [loaded]:
            one.data.table.validate(full=True)  # or a damaged offset would have any memory read
        return loaded
    files = _parquet_files(local)
    if not files:
        raise RequestError(f"{sanitize(place)} holds neither a saved dataset nor parquet files")
    # What `Dataset.from_parquet` calls; here it also says where it unpacks the files.
    from datasets.io.parquet import ParquetDatasetReader

    cache = cache_folder() / "hf"
    hold(cache)
    reader = ParquetDatasetReader([str(file) for file in files], cache_dir=str(cache))
    if not Path(reader.builder.cache_dir).is_dir():  # else it is unpacked already
        _check_unpacked_size(files, place)
    loaded = reader.read()
    make_room()
    return loaded


def _check_unpacked_size(files: Sequence[Path], place: str) -> None:
    """Raise RequestError if parquet files unpack to far more than they are, or than the cache has room for.

    A dictionary lets a file of kilobytes repeat an image a million times. The library would write out each.
    """
    import pyarrow.parquet as pq  # type: ignore[import-untyped, import-not-found, unused-ignore]

    packed = sum(file.stat().st_size for file in files)
    most, unpacked = max(_MOST_RATIO * packed, _SMALL_BYTES), 0
    for file in files:
        with pq.ParquetFile(file) as parquet:
            group, schema = parquet.metadata.row_group, parquet.schema
            column_widths = {schema.column(i).path: schema.column(i).length or 0 for i in range(len(schema.names))}
            columns = [group(g).column(c) for g in range(parquet.num_row_groups) for c in range(group(g).num_columns)]
        texts = {column.path_in_schema for column in columns if column.physical_type == "BYTE_ARRAY"}
        texts -= {column.path_in_schema for column in columns if "DELTA" in " ".join(column.encodings)}  # not for these
        # A text may begin like the one before it, which then takes no bytes: read alone.
        rows = 1 if any("DELTA_BYTE_ARRAY" in column.encodings for column in columns) else _ROWS
        unpacked += sum(max(16, column_widths.get(column.path_in_schema, 0)) * column.num_values for column in columns)
        # Dictionaries are kept as such, so that this takes no more memory than the file.
        with pq.ParquetFile(file, read_dictionary=sorted(texts)) as parquet:
            for batch in parquet.iter_batches(rows) if unpacked <= most else ():
                unpacked += sum(map(_unpacked_bytes, batch.columns))
                if unpacked > most:
                    break
        if unpacked > most:
            raise RequestError(
                f"{sanitize(place)} would unpack to over {most / 1e6:,.0f} MB from {packed / 1e6:,.3g} MB: images are "
                "repeated or blank; write each image once, as a file in a folder"
            )
    if unpacked > _SMALL_BYTES and not make_room(unpacked):
        raise RequestError(
            f"{sanitize(place)} unpacks to {unpacked / 1e9:,.1f} GB, more than the cache has room for "
            f"({cache_limit() / 1e9:,.3g} GB); set UNFOG_CACHE_LIMIT, in GB, or give the images as files in a folder"
        )


def _unpacked_bytes(array: Any) -> int:
    """Return the bytes of an Arrow array without its dictionaries."""
    import pyarrow as pa  # type: ignore[import-untyped, import-not-found, unused-ignore]
    import pyarrow.compute as pc  # type: ignore[import-untyped, import-not-found, unused-ignore]

    if pa.types.is_dictionary(array.type):
        lengths = pc.binary_length(array.dictionary)
        return int(pc.sum(lengths.take(array.indices.drop_null())).as_py() or 0)
    if pa.types.is_struct(array.type) or pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        inner = array.flatten()
        return sum(map(_unpacked_bytes, inner)) if isinstance(inner, list) else _unpacked_bytes(inner)
    return int(array.nbytes)


def _check_inside(folder: Path, place: str) -> None:
    """Raise RequestError if a saved dataset, which may be a stranger's, would have files outside its folder read."""

    def inside(*parts: str) -> Path:
        if os.pardir in Path(*parts).parts:
            raise ValueError(f"it names {sanitize('/'.join(parts))}")
        return regular_file(folder.joinpath(*parts), folder)

    def stored(*parts: str) -> dict[str, Any]:
        return dict(json.loads(read_file(inside(*parts), folder, LARGEST_TEXT)))

    try:
        for split in stored(_MARKERS[1])["splits"] if (folder / _MARKERS[1]).exists() else ["."]:
            inside(split, _MARKERS[0])
            files = [str(inside(split, one["filename"])) for one in stored(split, "state.json")["_data_files"]]
            if len(set(files)) < len(files):
                raise ValueError("it names a file more than once")
            if any(map(_is_packed, files)):
                raise ValueError("its files are compressed, or repeat values by a dictionary")
    except (OSError, ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        reason = f"{error.filename} is {error.strerror}" if isinstance(error, OSError) else str(error)
        raise RequestError(
            f"{sanitize(place)} is not what save_to_disk writes: {sanitize(reason)[:200]}; save it anew, as files in "
            "its own folder"
        ) from None


def _mapping_warnings(name: str, dataset: Any) -> list[str]:
    """Return a line if Arrow files, which `datasets` maps, are on a file system that may be lost."""
    files = (str(one["filename"]) for one in dataset.cache_files)
    served = next((file for file in files if not is_local(Path(file))), "")
    if not served:
        return []
    return [
        f"{sanitize(name)} is mapped from {sanitize(served)}, which is not on a local disk: if its mount is lost, the "
        "process ends with a bus error (SIGBUS); `unfog pack SOURCE OUT` makes a copy that waits for its mount"
    ]


def _is_packed(file: str) -> bool:
    """Return True if an Arrow file has compressed buffers or dictionaries, which may become any size in memory."""
    import pyarrow as pa  # type: ignore[import-untyped, import-not-found, unused-ignore]

    with pa.memory_map(file) as stream, suppress(EOFError):
        for message in pa.ipc.MessageReader.open_stream(stream):
            if message.type == "dictionary":
                return True
            if message.type == "record batch":
                header = _flatbuffer_field(message.metadata, struct.unpack_from("<I", message.metadata)[0], 2)
                if header is None or _flatbuffer_field(message.metadata, header, 3) is not None:  # BodyCompression
                    return True
    return False


def _flatbuffer_field(data: Any, table: int, field: int) -> int | None:
    """Return the position of a table in a field of a table of Arrow's metadata; None if it is not set."""
    layout = table - int(struct.unpack_from("<i", data, table)[0])
    if 4 + 2 * field >= struct.unpack_from("<H", data, layout)[0]:
        return None
    offset = int(struct.unpack_from("<H", data, layout + 4 + 2 * field)[0])
    return table + offset + int(struct.unpack_from("<I", data, table + offset)[0]) if offset else None


def _choose_split(name: str, splits: Mapping[Any, Any], wanted: str) -> str:
    known = [str(split) for split in splits]
    if wanted and wanted not in known:
        raise RequestError(f"{sanitize(name)} has no split {sanitize(wanted)!r}; it has {', '.join(known)}")
    return wanted or ("train" if "train" in known else known[0])


def _image_column(name: str, dataset: Any, datasets: Any) -> str:
    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            return str(column)
    for column, feature in dataset.features.items():
        of_bytes = getattr(feature, "dtype", "") in ("binary", "large_binary")
        if of_bytes or (isinstance(feature, dict) and "bytes" in feature):
            return str(column)
    found = ", ".join(f"{column} ({getattr(kind, 'dtype', kind)})" for column, kind in dataset.features.items())
    raise RequestError(
        f"{sanitize(name)} has no column of images: {sanitize(found)[:200]}; cast one to datasets.Image()"
    )


def _values_of(dataset: Any, names: Sequence[str], images: str, datasets: Any) -> dict[str, list[Any]]:
    """Return the values of those of the columns that the dataset has; classes by their names."""
    found = dict[str, list[Any]]()
    for name in names:
        if name != images and (feature := dataset.features.get(name)) is not None:
            found[name] = _column(dataset.select_columns([name]), name).to_pylist()
            if isinstance(feature, datasets.ClassLabel) and feature.names:
                known = range(len(feature.names))
                found[name] = [feature.names[each] if each in known else None for each in found[name]]
    return found


def _read_labels(dataset: Any, datasets: Any) -> tuple[str, tuple[str, ...], NDArray[np.int64] | None, str]:
    """Return (column, classes, label of each image, reasons for columns that are left out).

    ("", (), None, …) without labels.
    """
    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.ClassLabel) and feature.names:
            # -1 is what the library itself writes for a label that is not known.
            values = _column(dataset, column).fill_null(-1).to_numpy()
            if unknown := int(np.sum((values < 0) | (values >= len(feature.names)))):
                return "", (), None, _missing_values(column, unknown, len(values))
            return str(column), tuple(feature.names), values.astype(np.int64), ""
    left_out = []
    for column in (name for name in _LABEL_COLUMNS if name in dataset.features):
        stored = _column(dataset, column)
        if stored.null_count:
            left_out.append(_missing_values(column, stored.null_count, len(stored)))
            continue
        values = stored.to_numpy()
        if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
            values = values.astype(str)
        if values.dtype.kind in "iubUT":
            # Sorted, so that the numbers of classes do not depend on the order of the rows.
            present, index = np.unique(values, return_inverse=True)
            names = [str(value).lower() if isinstance(value, bool) else str(value) for value in present.tolist()]
            return column, tuple(names), index.astype(np.int64), "; ".join(left_out)
        left_out.append(
            f"column {column} is ignored: its values are {sanitize(str(stored.type))[:60]}, not whole numbers or text"
        )
    plain = [name for name, feature in dataset.features.items() if getattr(feature, "dtype", "") in _LABEL_TYPES]
    number = next((name for name in plain if dataset.features[name].dtype != "string"), "")
    if plain and not left_out:
        left_out.append(
            f"columns that are not used: {', '.join(map(sanitize, plain[:5]))}; classes are in a ClassLabel column, "
            f"or in one called {' or '.join(_LABEL_COLUMNS[:2])}"
            + f", and --condition {sanitize(number)} makes that one a condition"
            * bool(number)
        )
    return "", (), None, "; ".join(left_out)


def _missing_values(column: str, count: int, of: int) -> str:
    # The column is left out rather than the images without a value, which nobody asked for.
    problem = f"{count:,} of {of:,} images have no value in it"
    return f"column {sanitize(column)} is ignored: {problem}; fill it, or remove those images from the dataset"


def _column(dataset: Any, column: str) -> Any:
    """Return a column as an Arrow array, which knows missing values."""
    return dataset.with_format("arrow")[:][column]
