"""Write a pack, so that being killed costs at most the images of one chunk: the same again goes on from there.

While it is made, the folder holds `journal.jsonl`, a line for each chunk that is safe on disk, and `facts.bin`, a
record for each image looked at. pack.json comes last and makes it a pack. The result is the same to the byte however
often it was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.decode_pool import INFO_DTYPE, ColourFoundError, DecodeStatistics, Progress, decode_all
from unfog.data.packs.pack import PACK_SETTINGS, Pack
from unfog.data.packs.pack_files import FORMAT, JOURNAL, MANIFEST, is_pack, seal
from unfog.data.packs.pack_journal import (
    FACTS_FILE,
    Journal,
    append,
    clear,
    file_digest,
    header_of,
    locked,
    made,
    save,
    sync,
    write,
)
from unfog.data.scan import DecodeResult, Scan, split_held_out
from unfog.data.sources.image_files import ARCHIVE_GONE, CHANGED, GONE
from unfog.errors import RequestError
from unfog.text import sanitize

_ROOM_PER_IMAGE = 256  # bytes, for its name and all else but its pixels
_BLOCK = 1 << 16  # rows of names that are written at once


def write_pack(scan: Scan, folder: Path, key: str, remedy: str, progress: Progress | None = None) -> Pack:
    """Decode a source into a pack in this folder, going on where an earlier attempt was cut off.

    Args:
        scan: of the source.
        folder: what it will be; nothing else may be in it.
        key: names source and settings together; kept in the pack.
        remedy: what to do where there is no room, for messages.
        progress: called with (images done, images in all), from this thread; it may raise to stop.

    Raises:
        RequestError: no image can be used; the folder cannot be written, has no room or is something else.
        BusyError: another process is making it.
        RunError: the disk is full, or refuses; the images went away or were changed as they were read.
    """
    with made(folder, remedy), locked(folder):
        if is_pack(folder):  # another process has finished it since that was looked at
            return _finished(folder, key)
        try:
            packing = _Packing(scan, folder, key)
            packing.fill(remedy, progress)
        except ColourFoundError:
            packing = _Packing(scan.as_rgb(), folder, key)
            packing.fill(remedy, progress)
        packing.finish(progress)
        return Pack.open(folder)


def _finished(folder: Path, key: str) -> Pack:
    pack = Pack.open(folder)
    if pack.manifest["key"] != key:
        raise RequestError(f"{sanitize(str(folder))} is another pack by now; give another folder, or remove it")
    return pack


class _Packing:
    """A pack in the making."""

    def __init__(self, scan: Scan, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        header, found = header_of(scan, key), Journal.read(folder)
        if found.header and found.header == header | {"channels": 3, "proved": True}:
            scan = scan.as_rgb()  # an image in colour had turned up before
            header = header_of(scan, key)
        self.scan = scan
        self.order, self.in_train = split_held_out(scan.source, scan.settings.held_out)
        self.tally = DecodeStatistics.of(len(self.order))
        self.lines: list[dict[str, Any]] = []
        self.told = 0  # treatments that the journal knows
        self.sums = [[0] * scan.channels, [0] * scan.channels]  # of values and of their squares
        if found.header != header or not self._take_over(found.lines):
            self._begin(header)

    @property
    def _image_bytes(self) -> int:
        return self.scan.channels * self.scan.size**2

    @property
    def done(self) -> int:
        """Images looked at."""
        return int(self.lines[-1]["done"]) if self.lines else 0

    @property
    def rows(self) -> int:
        """Images used."""
        return int(self.lines[-1]["rows"]) if self.lines else 0

    def _begin(self, header: dict[str, Any]) -> None:
        for name in ("pixels.u8", FACTS_FILE):  # before the journal, which says that they are ours
            (self.folder / name).write_bytes(b"")
        write(self.folder / JOURNAL, json.dumps(header).encode() + b"\n")

    def _take_over(self, lines: list[dict[str, Any]]) -> bool:
        """Go on after these chunks; False if the files do not hold what the journal says."""
        channels = self.scan.channels
        # What was gone then may be there again; if not, it is found to be gone once more.
        lines = list(takewhile(lambda line: not {GONE, CHANGED, ARCHIVE_GONE} & set(line["reasons"].values()), lines))
        if not lines or lines[-1]["done"] > len(self.order) or any(len(sums) != channels for sums in lines[-1]["sums"]):
            return False
        done, rows = int(lines[-1]["done"]), int(lines[-1]["rows"])
        try:
            with open(self.folder / FACTS_FILE, "r+b") as facts, open(self.folder / "pixels.u8", "r+b") as pixels:
                facts.truncate(min(done * INFO_DTYPE.itemsize, os.fstat(facts.fileno()).st_size))
                pixels.truncate(min(rows * self._image_bytes, os.fstat(pixels.fileno()).st_size))
                known = np.fromfile(facts, INFO_DTYPE)
                if len(known) != done or os.fstat(pixels.fileno()).st_size != rows * self._image_bytes:
                    return False
        except OSError:
            return False
        self.tally.facts[:done] = known
        for line in lines:
            self.tally.reasons.update({int(row): reason for row, reason in line["reasons"].items()})
            for treatment in line["treatments"]:
                self.tally.treatments.setdefault(tuple(treatment), len(self.tally.treatments))
        self.tally.modes.update(lines[-1]["modes"])
        self.sums, self.lines, self.told = lines[-1]["sums"], lines, len(self.tally.treatments)
        # A last line that was cut off goes, so that the next one begins a line.
        whole = b"".join((self.folder / JOURNAL).read_bytes().splitlines(keepends=True)[: len(lines) + 1])
        os.truncate(self.folder / JOURNAL, len(whole))
        return True

    def _check_room(self, remedy: str) -> None:
        """RequestError if the disk cannot take what is still to come."""
        left = len(self.order) - self.done
        room = left * self._image_bytes + len(self.order) * _ROOM_PER_IMAGE + 2**20
        free = shutil.disk_usage(self.folder).free
        if free < room:
            raise RequestError(
                f"{sanitize(str(self.folder))} has no room for {room / 1e9:.1f} GB of decoded images "
                f"({free / 1e9:.1f} GB free); {remedy}"
            )

    def fill(self, remedy: str, progress: Progress | None) -> None:
        """Decode what is not decoded yet. Every chunk is on disk before the journal says so."""
        self._check_room(remedy)
        scan = self.scan
        chunks = decode_all(
            scan.source,
            self.order,
            scan.channels,
            scan.size,
            scan.background,
            self.tally,
            only_grey=not scan.channels_certain,
            progress=progress,
            start=self.done,
        )
        with (
            open(self.folder / "pixels.u8", "ab") as pixels,
            open(self.folder / FACTS_FILE, "ab") as facts,
            open(self.folder / JOURNAL, "ab") as journal,
            closing(chunks),
        ):
            for stop, images in chunks:
                scan.check_source_unchanged(self.tally, self.done, stop)
                append(pixels, images)
                append(facts, self.tally.facts[self.done : stop])
                line = self._line(stop, images)
                append(journal, json.dumps(line).encode() + b"\n")
                self.lines.append(line)

    def _line(self, stop: int, images: NDArray[np.uint8]) -> dict[str, Any]:
        treatments = [list(done) for done in self.tally.treatments]
        new, self.told = treatments[self.told :], len(treatments)
        unused = self.done + np.flatnonzero(~self.tally.used[self.done : stop])
        for channel in range(images.shape[1]):
            values = images[:, channel].astype(np.float64).ravel()  # whose sums are exact far beyond a chunk's
            self.sums[0][channel] += int(values.sum())
            self.sums[1][channel] += int(values @ values)
        return {
            "done": stop,
            "rows": self.rows + len(images),
            "sha256": hashlib.sha256(np.ascontiguousarray(images).data).hexdigest(),
            "reasons": {str(row): self.tally.reasons[row] for row in unused.tolist()},
            "treatments": new,
            "modes": dict(self.tally.modes),
            "sums": [list(sums) for sums in self.sums],
        }

    def finish(self, progress: Progress | None) -> None:
        """Write all else, and last the manifest."""
        account = DecodeResult.of(self.scan, self.order, self.in_train, self.tally)
        folder = self.folder
        if account.labels is not None:
            save(folder / "labels.npy", account.labels.astype(np.int64))
        save(folder / "treatment.npy", account.report.treatment)
        save(folder / "sides.npy", np.ascontiguousarray(account.facts["sides"]))
        save(folder / "grey.npy", np.ascontiguousarray(account.facts["grey"]))
        save(folder / "names.npy", self._write_names(account.rows))
        chunks = [[line["rows"], line["sha256"]] for line in self.lines]
        write(folder / "chunks.json", json.dumps(chunks, indent=0).encode())
        files = ["pixels.u8", "names.bin", "names.npy", "treatment.npy", "sides.npy", "grey.npy", "chunks.json"]
        files += [] if account.labels is None else ["labels.npy"]
        prints, sums = self._fingerprints(account, progress)
        labels = "none" if account.labels is None else "folders"  # a table they came from need not be there later
        manifest = {
            "format": FORMAT,
            "key": self.key,
            "stamp": self.scan.stamp,
            "shape": [self.rows, self.scan.channels, self.scan.size, self.scan.size],
            "train": account.train,
            "settings": {name: getattr(account.settings, name) for name in PACK_SETTINGS} | {"labels": labels},
            "classes": list(account.classes),
            "labelled": account.labels is not None,
            "ledger": {key: value for key, value in account.report.to_dict().items() if key != "treatment"},
            "fingerprints": prints,
            "statistics": self._statistics(),
            "files": {
                name: {
                    "bytes": (folder / name).stat().st_size,
                    "sha256": sums if name == "pixels.u8" else file_digest(folder / name),
                }
                for name in sorted(files)
            },
        }
        write(folder / MANIFEST, seal(manifest))
        clear(folder)

    def _write_names(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write names.bin. Returns where each name begins in it, int64 [N + 1]."""
        offsets, names = np.zeros(len(rows) + 1, np.int64), self.scan.source.names
        with open(self.folder / "names.bin", "wb") as file:
            for start in range(0, len(rows), _BLOCK):
                encoded = [names[i].encode("utf-8", "surrogateescape") for i in rows[start : start + _BLOCK].tolist()]
                offsets[start + 1 : start + 1 + len(encoded)] = [len(name) for name in encoded]
                file.write(b"".join(encoded))
            sync(file)
        return np.cumsum(offsets)

    def _fingerprints(self, account: DecodeResult, progress: Progress | None) -> tuple[list[str], str]:
        """(of the images to train on and of those held out, as `ImageSet.fingerprint`; sha256 of pixels.u8)."""
        whole, n = hashlib.sha256(), len(self.order)
        prints = []
        with open(self.folder / "pixels.u8", "rb") as file:
            for begin, end in ((0, account.train), (account.train, self.rows)):
                shape = (end - begin, self.scan.channels, self.scan.size, self.scan.size)
                digest, left = hashlib.sha256(repr((shape, account.classes)).encode()), (end - begin)
                while left:
                    block = file.read(min(left, 4096) * self._image_bytes)
                    digest.update(block)
                    whole.update(block)
                    left -= min(left, 4096)
                    if progress:
                        progress(n, n)  # it may raise to stop
                if account.labels is not None:
                    digest.update(account.labels[begin:end].astype(np.int64).tobytes())
                prints.append(digest.hexdigest())
        return prints, whole.hexdigest()

    def _statistics(self) -> dict[str, list[float]]:
        """Mean and standard deviation of each channel over all images, in 0 to 255."""
        count = self.rows * self.scan.size**2
        means = [total / count for total in self.sums[0]]
        squares = [total / count for total in self.sums[1]]
        deviations = [max(0.0, square - mean**2) ** 0.5 for mean, square in zip(means, squares)]
        return {"mean": [round(mean, 4) for mean in means], "std": [round(one, 4) for one in deviations]}
