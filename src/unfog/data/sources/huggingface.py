"""A Hugging Face dataset: a folder that `save_to_disk` wrote, parquet files, or the name of one on the hub."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from unfog.data.cache import cache_folder
from unfog.data.report import SkippedFile
from unfog.data.sources.arrays import NumberedNames
from unfog.data.sources.fingerprint import files_digest, sample_digest
from unfog.data.sources.image_files import ImageError, open_bytes, open_image
from unfog.errors import RequestError
from unfog.text import sanitize

_LABELS = ("label", "labels", "class", "fine_label")
"""What a column of labels may be called where its type does not say it."""


class HuggingFaceSource:
    """Images of a map-style dataset of the `datasets` library (`pip install 'unfog[hf]'`).

    The image column is the first of type Image, or of files' bytes; the label column the first of type ClassLabel,
    whose names are the classes, or one called label. One that lacks values is left out, which `left_out` says. Of
    several splits, "train", else the first, unless `split` says; `resolved` names it. What `datasets` makes of parquet
    files is kept in the folder `hf` of the cache.

    Args:
        place: a folder that `save_to_disk` wrote, a parquet file, a folder of those, or a name on the hub.
        name: for messages.
        split: which of the dataset's splits; "" to choose.

    Raises:
        RequestError: there is no such dataset or split, it has no images, or `datasets` is not installed.
    """

    remote = False
    held_out: frozenset[str] | None = None
    ignored: Mapping[str, int] = {}
    unreadable: Sequence[SkippedFile] = ()
    classes: tuple[str, ...] = ()
    labels: NDArray[np.int64] | None = None

    def __init__(self, place: str, name: str, split: str = "") -> None:
        datasets = _library()
        place, split = _parted(f"{place}:{split}" if split else place)
        local = Path(place).expanduser()
        there = local.exists()
        try:
            loaded = _load(datasets, local if there else None, place, split)
        except RequestError:
            raise
        except Exception as error:  # the library raises of everything: no network, no such name, damaged files
            why = " ".join(sanitize(f"{type(error).__name__}: {error}").split())[:200]
            raise RequestError(f"{sanitize(name)} cannot be loaded ({why}); check its name and the network") from None
        self.name, dataset = name, loaded
        if isinstance(loaded, dict):
            split = _pick(name, loaded, split)
            self.name, dataset = f"{name} (split {split} of {', '.join(map(str, loaded))})", loaded[split]
        elif there and split:
            raise RequestError(
                f"{sanitize(name)} has no splits, and so no {sanitize(split)!r}; leave :{sanitize(split)} out"
            )
        where = str(local.resolve()) if there else place
        self.resolved = where if there and not split else f"hf:{where}{f':{split}' * bool(split)}"
        self._column = _image_column(name, dataset, datasets)
        self._images = dataset.select_columns([self._column]).cast_column(self._column, datasets.Image(decode=False))
        if not len(dataset):
            raise RequestError(f"{sanitize(self.name)} is empty; give another split")
        self.names: Sequence[str] = NumberedNames(range(len(dataset)))
        self.classes, self.labels, self.left_out = _labels(dataset, datasets)
        self._roots = [_root(local)] if there else _roots(datasets)
        state = _parquet_state(local) if there and is_parquet(local) else str(dataset._fingerprint)
        self._stamp = state, int(dataset.data.nbytes)
        self._beside = _files(_column(self._images, self._column), self._roots[0]) if there else []

    def open(self, i: int) -> Image.Image:
        """Image i, its pixels read on use."""
        one = self._images[i][self._column]
        if one is None or (one.get("bytes") is None and not one.get("path")):
            raise ImageError("empty")
        if one.get("bytes") is not None:
            return open_bytes(one["bytes"], str(one.get("path") or ""))
        path = (self._roots[0] / str(one["path"])).resolve()
        if not any(path.is_relative_to(root) for root in self._roots):
            raise ImageError(
                "a path that leads out of its dataset"
            )  # which may be anybody's: it reads no file of yours
        return open_image(path)

    def stamp(self) -> tuple[str, int]:
        """The library's own fingerprint of the data and of what was done to it, or of parquet files their names, sizes,
        times of change and a sample of their bytes; the state of images that are files beside them; size of its table.
        """
        fingerprint, size = self._stamp
        if self._beside:
            fingerprint = f"{fingerprint} {files_digest(self._roots[0], self._beside)[0]}"
        return hashlib.sha256(fingerprint.encode()).hexdigest(), size

    @property
    def earlier_stamp(self) -> str:
        """The digest in `stamp` as an earlier version had it, without the files beside the table."""
        return hashlib.sha256(self._stamp[0].encode()).hexdigest()


def is_parquet(path: Path) -> bool:
    """Whether this is a parquet file, or a folder of nothing but those and their descriptions."""
    if path.is_file():
        return path.suffix.lower() == ".parquet"
    suffixes = {one.suffix.lower() for one in path.iterdir() if one.is_file() and not one.name.startswith(".")}
    return ".parquet" in suffixes and suffixes <= {".parquet", ".md", ".json"}


def _parted(text: str) -> tuple[str, str]:
    """(place, split) of PLACE:SPLIT or PLACE, which may be a path that has colons of its own."""
    place, colon, split = text.rpartition(":")
    return (place, split) if colon and not Path(text).expanduser().exists() else (text, "")


def _root(local: Path) -> Path:
    """The folder of a dataset."""
    return (local if local.is_dir() else local.parent).resolve()


def _roots(datasets: Any) -> list[Path]:
    """Where `datasets` puts what it downloads."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return [Path(folder).resolve() for folder in (datasets.config.HF_DATASETS_CACHE, HF_HUB_CACHE)]


def _files(images: Any, root: Path) -> list[str]:
    """Paths of those of a column of images that are files below a folder rather than bytes in the table."""
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
    """What parquet files hold; the library's fingerprint is another whenever it reads them anew."""
    states = [
        (file.name, file.stat().st_size, file.stat().st_mtime_ns, sample_digest(file)) for file in _parquet_files(local)
    ]
    return repr(states)


def _library() -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise RequestError(
            "a Hugging Face dataset needs datasets, which is not installed: pip install 'unfog[hf]'"
        ) from None
    datasets.disable_progress_bars()
    library: ModuleType = datasets
    return library


def _load(datasets: Any, local: Path | None, place: str, split: str) -> Any:
    """A Dataset, or a dictionary of them by split."""
    if local is None:
        return datasets.load_dataset(place, split=split or None)
    if (local / "dataset_info.json").exists() or (local / "dataset_dict.json").exists():
        return datasets.load_from_disk(str(local))
    files = _parquet_files(local)
    if not files:
        raise RequestError(f"{sanitize(place)} holds neither a saved dataset nor parquet files")
    return datasets.Dataset.from_parquet([str(file) for file in files], cache_dir=str(cache_folder() / "hf"))


def _pick(name: str, splits: Mapping[Any, Any], wanted: str) -> str:
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


def _labels(dataset: Any, datasets: Any) -> tuple[tuple[str, ...], NDArray[np.int64] | None, str]:
    """(classes, label of each image, which columns are left out and why), or ((), None, …) where no column tells."""
    for column, feature in dataset.features.items():
        if isinstance(feature, datasets.ClassLabel) and feature.names:
            values = _column(dataset, column).fill_null(-1).to_numpy()
            if unknown := int(np.sum((values < 0) | (values >= len(feature.names)))):
                return (), None, _without_values(column, unknown, len(values))
            return tuple(feature.names), values.astype(np.int64), ""
    left_out = []
    for column in (name for name in _LABELS if name in dataset.features):
        stored = _column(dataset, column)
        if stored.null_count:
            left_out.append(_without_values(column, stored.null_count, len(stored)))
            continue
        values = stored.to_numpy()
        if values.dtype.kind == "O" and all(isinstance(value, str) for value in values):
            values = values.astype(str)
        if values.dtype.kind in "iubUT":
            present, index = np.unique(values, return_inverse=True)
            names = [str(value).lower() if isinstance(value, bool) else str(value) for value in present.tolist()]
            return tuple(names), index.astype(np.int64), "; ".join(left_out)
        left_out.append(
            f"column {column} is left out: its values are {sanitize(str(stored.type))[:60]}, not whole numbers or text"
        )
    return (), None, "; ".join(left_out)


def _without_values(column: str, count: int, of: int) -> str:
    """What to say of a column of labels that lacks some: to train on the others would be to drop images unasked."""
    return (
        f"column {sanitize(column)} is left out: {count:,} of {of:,} images have no value in it; fill it, or leave "
        "those images out of the dataset"
    )


def _column(dataset: Any, column: str) -> Any:
    """A column as Arrow has it, which tells what is missing."""
    return dataset.with_format("arrow")[:][column]
