"""Write a pack. A process that is killed loses the images of at most one chunk; the next attempt goes on from there.

An unfinished pack has a lock, a journal.jsonl with a line for each chunk that is safe on disk, and a facts.bin with a
record of each image. pack.json is written last and makes it a pack. The bytes are the same however often it was
interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import PIL
from numpy.typing import NDArray

from unfog.data.decode_pool import INFO_DTYPE, ColourFoundError, DecodeStatistics, Progress, decode_all
from unfog.data.packs.pack import (
    COLUMN_FILES,
    FORMAT,
    JOURNAL,
    MANIFEST,
    PACK_SETTINGS,
    Pack,
    column_arrays,
    column_facts,
)
from unfog.data.scan import DecodeResult, Scan
from unfog.data.sources.image_files import ARCHIVE_GONE, CHANGED, GONE
from unfog.errors import RequestError, RunError
from unfog.files.locks import LOCK, OwnedError, lock_of
from unfog.files.safe_files import Mode, file_digest, open_file, read_file, remove, replace_file, write_atomic
from unfog.settings import is_auto
from unfog.text import format_bytes, sanitize
from unfog.values.columns import CLASS, classes_of, columns_digest, rows_of, update_digest

_ROOM_PER_IMAGE = 256  # bytes, for its name and all else but its pixels
_BLOCK = 1 << 16  # rows of names that are written at once

FACTS_FILE = "facts.bin"
_LARGEST_JOURNAL = 2**30  # bytes
_CREATED_FIRST = frozenset(["pixels.u8", FACTS_FILE])  # they may exist, empty, before the journal does
_ARRAYS = (*COLUMN_FILES, "treatment.npy", "sides.npy", "grey.npy", "names.npy", "names.bin", "chunks.json")
_PARTIAL = frozenset(f"{name}.partial" for name in (JOURNAL, MANIFEST, *_CREATED_FIRST, *_ARRAYS))
# Every file that an unfinished pack may have.
FILES = frozenset([JOURNAL, *_ARRAYS]) | _CREATED_FIRST | _PARTIAL


def write_pack(scan: Scan, folder: Path, key: str, remedy: str, progress: Progress | None = None) -> Pack:
    """Decode a source into a pack, or finish an interrupted one. Nothing else may be in the folder.

    `key` identifies source and settings, and `remedy` is advice for messages about missing space. `progress` is called
    with (images done, images in all).

    Raises:
        RequestError: no image can be used; the folder cannot be written, has no space or holds something else.
        BusyError: another process is writing the pack.
        RunError: the disk is full or fails; the images disappeared or changed while they were read.
    """
    with pack_folder(folder, remedy), locked(folder):
        if Pack.is_at(folder):  # another process has finished it meanwhile
            pack = Pack.open(folder)
            if pack.manifest["key"] != key:
                raise RequestError(
                    f"{sanitize(str(folder))} was replaced by another pack; give another folder, or remove it"
                )
            return pack
        try:
            writer = _PackWriter(scan, folder, key)
            writer.write_images(remedy, progress)
        except ColourFoundError:
            writer = _PackWriter(scan.as_rgb(), folder, key)
            writer.write_images(remedy, progress)
        writer.finish(progress)
        return Pack.open(folder)


class _PackWriter:
    """An unfinished pack and all that is known of its images so far."""

    def __init__(self, scan: Scan, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        header, found = Journal.header_of(scan, key), Journal.read(folder)
        if found.header == header | {"channels": 3, "proved": True}:
            scan = scan.as_rgb()  # an earlier attempt met an image in colour
            header = Journal.header_of(scan, key)
        self.scan, self._image_bytes = scan, scan.image_format.nbytes
        self.order, self.in_train = scan.split_held_out()
        self.statistics = DecodeStatistics.empty(len(self.order))
        self.journal = Journal(header)
        self.treatments_written = 0
        self.sums: list[list[float]] = [[0] * scan.channels, [0] * scan.channels]  # of values and of their squares
        if found.header != header or not self._resume(found.lines):
            self._begin()

    def _open(self, name: str, mode: Mode) -> BinaryIO:
        return open_file(self.folder / name, mode, self.folder)

    def _begin(self) -> None:
        for name in ("pixels.u8", FACTS_FILE):  # before the journal, which proves that they are ours
            write_atomic(self.folder / name, b"", self.folder, durable=False)
        header = json.dumps(self.journal.header).encode() + b"\n"
        write_atomic(self.folder / JOURNAL, header, self.folder)

    def _resume(self, lines: list[dict[str, Any]]) -> bool:
        """Go on after these chunks. Return False if the files do not hold what the journal says."""
        channels, statistics = self.scan.channels, self.statistics
        # Missing files may be back, so everything from the first chunk that missed some is decoded again.
        lines = list(takewhile(lambda line: not {GONE, CHANGED, ARCHIVE_GONE} & set(line["reasons"].values()), lines))
        if not lines or lines[-1]["done"] > len(self.order) or any(len(sums) != channels for sums in lines[-1]["sums"]):
            return False
        done, rows = int(lines[-1]["done"]), int(lines[-1]["rows"])
        try:
            with (
                open_file(self.folder / FACTS_FILE, "r+b", self.folder) as facts,
                open_file(self.folder / "pixels.u8", "r+b", self.folder) as pixels,
            ):
                # What is behind the last whole chunk goes; files never grow, in case they are shorter.
                facts.truncate(min(done * INFO_DTYPE.itemsize, os.fstat(facts.fileno()).st_size))
                pixels.truncate(min(rows * self._image_bytes, os.fstat(pixels.fileno()).st_size))
                records = np.fromfile(facts, INFO_DTYPE)
                if len(records) != done or os.fstat(pixels.fileno()).st_size != rows * self._image_bytes:
                    return False
        except OSError:
            return False
        statistics.records[:done], statistics.done = records, done
        for line in lines:
            statistics.reasons.update({int(row): reason for row, reason in line["reasons"].items()})
            for treatment in line["treatments"]:
                statistics.treatments.setdefault(tuple(treatment), len(statistics.treatments))
        statistics.modes.update(lines[-1]["modes"])
        statistics.unused_pages = int(lines[-1].get("unused_pages", 0))
        self.sums, self.journal.lines = lines[-1]["sums"], lines
        self.treatments_written = len(statistics.treatments)
        # A last line that was cut off is removed, so that the next one begins a line.
        with self._open(JOURNAL, "r+b") as journal:
            journal.truncate(sum(len(journal.readline()) for _ in range(len(lines) + 1)))
        return True

    def _check_space(self, remedy: str) -> None:
        """Raise RequestError if the disk cannot take the images that are still to be decoded."""
        left = len(self.order) - self.journal.done
        needed = left * self._image_bytes + len(self.order) * _ROOM_PER_IMAGE + 2**20
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise RequestError(
                f"{sanitize(str(self.folder))} lacks space for {format_bytes(needed)} of decoded images "
                f"({format_bytes(free)} free); {remedy}"
            )

    def write_images(self, remedy: str, progress: Progress | None) -> None:
        """Decode and write all images that are not written yet."""
        # Now rather than after hours of decoding.
        self._check_space(remedy)
        with (
            self._open("pixels.u8", "ab") as pixels,
            self._open(FACTS_FILE, "ab") as facts,
            self._open(JOURNAL, "ab") as journal,
            closing(decode_all(self.scan.source, self.order, self.scan.format, self.statistics, progress)) as chunks,
        ):
            for stop, images in chunks:
                start = self.journal.done
                self.scan.check_source_unchanged(self.statistics, start, stop)
                append(pixels, images)
                append(facts, self.statistics.records[start:stop])
                line = self._journal_line(stop, images)
                append(journal, json.dumps(line).encode() + b"\n")  # last, as it vouches for the others
                self.journal.lines.append(line)

    def _journal_line(self, stop: int, images: NDArray[Any]) -> dict[str, Any]:
        start, statistics = self.journal.done, self.statistics
        treatments = [list(actions) for actions in statistics.treatments]
        new, self.treatments_written = treatments[self.treatments_written :], len(treatments)
        skipped = start + np.flatnonzero(~statistics.used[start:stop])
        for channel in range(images.shape[1]):
            values = images[:, channel].astype(np.float64).ravel()  # whose sums are exact far beyond a chunk's
            kind = float if images.dtype.kind == "f" else int
            self.sums[0][channel] += kind(values.sum())
            self.sums[1][channel] += kind(values @ values)
        return {
            "done": stop,
            "rows": self.journal.rows + len(images),
            "sha256": hashlib.sha256(np.ascontiguousarray(images).data).hexdigest(),
            "reasons": {str(row): statistics.reasons[row] for row in skipped.tolist()},
            "treatments": new,
            "modes": dict(statistics.modes),
            "unused_pages": statistics.unused_pages,
            "sums": [list(sums) for sums in self.sums],
        }

    def finish(self, progress: Progress | None) -> None:
        """Write all other files, and last the manifest."""
        result = DecodeResult.create(self.scan, self.order, self.in_train, self.statistics)
        folder, settings = self.folder, self.scan.resolved_settings
        arrays = self._write_arrays(result)
        chunks = [[line["rows"], line["sha256"]] for line in self.journal.lines]
        write_atomic(folder / "chunks.json", json.dumps(chunks, indent=0).encode(), folder)
        fingerprints, pixels_digest = self._fingerprints(result, progress)
        # Not the path of a table that the labels came from, which need not be there later.
        labelled = CLASS in result.columns
        manifest = {
            "format": FORMAT,
            "key": self.key,
            "stamp": self.scan.stamp,
            "shape": [self.journal.rows, *self.scan.image_format.shape],
            "train": result.train,
            "settings": {name: getattr(settings, name) for name in PACK_SETTINGS}
            | {"labels": "folders" if labelled else "none"}
            | settings.later,
            "classes": list(classes_of(result.columns)),
            "labelled": labelled,
            **column_facts(result.columns, self.scan.columns),
            "ledger": {key: value for key, value in result.report.to_dict().items() if key != "treatment"},
            "fingerprints": fingerprints,
            "statistics": self._pixel_statistics(),
            "files": {
                name: {
                    "bytes": (folder / name).stat().st_size,
                    "sha256": pixels_digest if name == "pixels.u8" else file_digest(folder / name, folder),
                }
                for name in sorted(["pixels.u8", "names.bin", "chunks.json", *arrays])
            },
        }
        # Last of all: until now the folder is an unfinished pack, which the next attempt goes on with.
        write_atomic(folder / MANIFEST, Pack.seal(manifest), folder)
        remove_work_files(folder)

    def _write_arrays(self, result: DecodeResult) -> list[str]:
        """Write all facts of each image except its pixels. Return the names of the files."""
        arrays: dict[str, NDArray[Any]] = {
            "names.npy": self._write_names(result.rows),
            "treatment.npy": result.report.treatment,
            "sides.npy": result.sides,
            "grey.npy": result.grey,
            **column_arrays(result.columns),
        }
        for name, array in arrays.items():
            with replace_file(self.folder / name, self.folder) as file:
                np.save(file, array, allow_pickle=False)
        return list(arrays)

    def _write_names(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write names.bin. Return where each name begins in it, int64 [N + 1]."""
        offsets, names = np.zeros(len(rows) + 1, np.int64), self.scan.source.names
        with replace_file(self.folder / "names.bin", self.folder) as file:
            for start in range(0, len(rows), _BLOCK):
                encoded = [names[i].encode("utf-8", "surrogateescape") for i in rows[start : start + _BLOCK].tolist()]
                offsets[start + 1 : start + 1 + len(encoded)] = [len(name) for name in encoded]
                file.write(b"".join(encoded))
        return np.cumsum(offsets)

    def _fingerprints(self, result: DecodeResult, progress: Progress | None) -> tuple[list[str], str]:
        """Return (`ImageSet.fingerprint` of the training and of the held-out images, sha256 of pixels.u8)."""
        whole, n, fingerprints = hashlib.sha256(), len(self.order), list[str]()
        with self._open("pixels.u8", "rb") as file:
            for begin, end in ((0, result.train), (result.train, self.journal.rows)):
                shape = (end - begin, *self.scan.image_format.shape)
                digest = hashlib.sha256(repr((shape, classes_of(result.columns))).encode())
                for start in range(begin, end, 4096):
                    block = file.read(min(end - start, 4096) * self._image_bytes)
                    digest.update(block)
                    whole.update(block)
                    if progress:
                        progress(n, n)  # it may raise to stop
                update_digest(digest, rows_of(result.columns, slice(begin, end)))
                fingerprints.append(digest.hexdigest())
        return fingerprints, whole.hexdigest()

    def _pixel_statistics(self) -> dict[str, list[float]]:
        """Return mean and standard deviation of each channel over all images, in stored units."""
        count = self.journal.rows * self.scan.image_format.pixels
        means = [total / count for total in self.sums[0]]
        squares = [total / count for total in self.sums[1]]
        deviations = [max(0.0, square - mean**2) ** 0.5 for mean, square in zip(means, squares)]
        return {"mean": [round(mean, 4) for mean in means], "std": [round(one, 4) for one in deviations]}


class BusyError(RequestError):
    """Another process is writing the same pack."""


@dataclass
class Journal:
    """The progress of an unfinished pack, as stored in journal.jsonl."""

    header: dict[str, Any] = field(default_factory=dict)
    """Source and settings of the pack; {} if nothing has begun."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    """One for each chunk that is safe on disk."""

    @classmethod
    def read(cls, folder: Path) -> Journal:
        """Read the journal in a folder, less a last line that was cut off. Empty if it is missing or damaged."""
        try:
            text = read_file(folder / JOURNAL, folder, _LARGEST_JOURNAL).decode()
            header, *lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        except (OSError, ValueError, RecursionError):
            return cls()
        before = [{"done": 0, "rows": 0}, *lines]
        valid = isinstance(header, dict) and all(_follows(line, last) for line, last in zip(lines, before))
        return cls(header, lines) if valid else cls()

    @property
    def done(self) -> int:
        """Number of images of the source that were decoded or skipped."""
        return int(self.lines[-1]["done"]) if self.lines else 0

    @property
    def rows(self) -> int:
        """Number of usable images, which are in pixels.u8."""
        return int(self.lines[-1]["rows"]) if self.lines else 0

    @staticmethod
    def header_of(scan: Scan, key: str) -> dict[str, Any]:
        """Return the header for a source and its settings, all of which an attempt to go on must share."""
        return {
            "format": FORMAT,
            "key": key,
            "stamp": scan.stamp,
            "settings": [*(getattr(scan.settings, name) for name in PACK_SETTINGS), key],
            "pillow": PIL.__version__,  # another version may decode or resize to other bytes
            "found": len(scan.source.names),
            "channels": scan.channels,
            "size": scan.size,
            "proved": scan.channels_certain,
            # Absent from journals that were begun before there were these.
            **({} if is_auto(scan.settings, "range") else {"range": list(scan.settings.range)}),
            **({"columns": columns} if (columns := columns_digest(scan.columns)) else {}),
        }

    def difference(self, scan: Scan, key: str) -> str:
        """Name the first difference of this journal from one of a source and its settings; "" for none."""
        header = self.header_of(scan, key)
        names = {
            "stamp": "the images",
            "columns": "the columns",
            "settings": "the settings",
            "range": "the range of values",
        }
        names["pillow"] = "the version of Pillow"
        return next((name for key, name in names.items() if self.header.get(key) != header.get(key)), "")


def _follows(line: Any, last: dict[str, Any]) -> bool:
    """Return True if this is a valid journal line of the chunk behind the last line's."""
    match line:
        case {
            "done": int(done),
            "rows": int(rows),
            "sha256": str(),
            "reasons": dict(reasons),
            "treatments": list(treatments),
            "modes": dict(modes),
            "sums": [list(sums), list(squares)],
        }:
            begin = last["done"]
            images = begin < done < 2**48 and rows - last["rows"] == done - begin - len(reasons)
            # Of few digits, as int() takes long for a text of thousands.
            images = images and all(row.isdecimal() and len(row) < 16 and begin <= int(row) < done for row in reasons)
            actions = all(isinstance(one, list) and all(isinstance(text, str) for text in one) for one in treatments)
            counts = (*modes.values(), line.get("unused_pages", 0))
            numbers = all(isinstance(number, int) for number in counts)
            numbers = numbers and all(isinstance(number, int | float) for number in (*sums, *squares))
            return images and actions and numbers and all(isinstance(text, str) for text in reasons.values())
    return False


def remove_work_files(folder: Path) -> None:
    """Remove the files that a finished pack no longer needs."""
    for name in (JOURNAL, FACTS_FILE, LOCK):
        remove(folder / name, folder)


@contextmanager
def pack_folder(folder: Path, remedy: str) -> Iterator[None]:
    """Make the folder of a new or unfinished pack, and turn errors of the disk into messages with a remedy."""
    name = sanitize(str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{name} cannot be written ({error.strerror}); {remedy}") from error
    check_replaceable(folder, remedy)
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{name} could not be written ({error.strerror}); what is done is kept; free some space, then "
            f"repeat the command, or {remedy}"
        ) from error


def check_replaceable(folder: Path, remedy: str) -> None:
    """RequestError unless a folder is missing, empty or an unfinished pack."""
    name = sanitize(str(folder))
    try:
        foreign = os.path.lexists(folder) and (Pack.is_at(folder) or _has_foreign_files(folder))
    except OSError as error:
        raise RequestError(f"{name} cannot be written ({error.strerror}); {remedy}") from error
    if foreign:
        raise RequestError(f"{name} exists and is not a pack; give another folder, or remove it")


def _has_foreign_files(folder: Path) -> bool:
    # A pack's own files are overwritten, so without a journal of ours only empty or partial ones pass as its own.
    # Hidden files do no harm: our lock, and what file systems and desktops leave.
    there = [path for path in folder.iterdir() if not path.name.startswith(".")]
    if Pack.is_unfinished_at(folder):
        return any(path.name not in FILES for path in there)
    own = _CREATED_FIRST | _PARTIAL
    return any(path.name not in own or (path.name in _CREATED_FIRST and path.lstat().st_size) for path in there)


def _remove_empty_files(folder: Path) -> None:
    """Remove the files of a pack that no image was written to."""
    with suppress(OSError):
        if not Pack.is_at(folder) and not Journal.read(folder).rows:
            for name in (FACTS_FILE, "pixels.u8", JOURNAL):  # the journal last, as it proves that the others are ours
                remove(folder / name, folder)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder against other processes, and remove it afterwards if nothing was written to it.

    BusyError if another process has the lock.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_of(folder))
        except (OwnedError, FileNotFoundError):  # not found: another process has just moved or removed it
            raise BusyError(f"another process is packing into {sanitize(str(folder))}; wait for it") from None
        try:
            yield
        finally:
            _remove_empty_files(folder)
            stack.close()  # removes the lock's own file, without which the folder may be empty
            with suppress(OSError):
                folder.rmdir()


def sync(file: BinaryIO) -> None:
    """Flush a file, and wait until it is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def append(file: BinaryIO, data: NDArray[Any] | bytes) -> None:
    """Append to a file, and wait until it is on the disk."""
    file.write(data if isinstance(data, bytes) else np.ascontiguousarray(data).data)
    sync(file)
