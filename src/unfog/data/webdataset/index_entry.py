"""The index entry of one tar shard: position, name and label of each image in it. Built, stored and loaded."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.data_report import OWN, RUN, SkippedFile
from unfog.data.sources.folder import ignored_kind, normalize_path, own_pictures, run_folders
from unfog.data.sources.image_files import MAX_FILE_BYTES
from unfog.data.sources.label_tables import normalize_label
from unfog.data.sources.storage import BlockReader, FileState, Storage
from unfog.data.webdataset.tar import DamagedTarError, TarMember, detect_compression
from unfog.errors import RequestError
from unfog.files.safe_files import open_file, write_atomic
from unfog.text import sanitize

# An image: position and size of its file, number of its shard, where its name begins, and index of its label or -1.
ROW_DTYPE = np.dtype([("start", "<i8"), ("size", "<i8"), ("name", "<i8"), ("label", "<i4"), ("shard", "<i4")])

# Bytes read at once while looking for headers: few locally, where a read costs nothing; more where each read waits for
# a network, so that many small members are skipped in one.
_LOCAL_BLOCK, _REMOTE_BLOCK = 4096, 2**18

_LABEL_FILES = {"cls": 1024, "class": 1024, "json": 2**20, "txt": 1024}  # suffix -> bytes up to which it is read
_LABEL_KEYS = ("label", "class", "cls")
_MAX_TEXT = 100  # characters; if a text is longer, all are captions rather than classes
_MAX_TEXTS = 10_000
_REPORT_EVERY = 1000  # members
_MAX_MEMBERS = 10_000_000  # of a shard, as a server may send members without end


@dataclass
class IndexEntry:
    """Index of one shard: names, byte ranges and labels of its images."""

    rows: NDArray[Any]
    """[n] of ROW_DTYPE, in the order of the members; `shard` is 0, `name` is a position in `names`."""

    names: bytes
    """All names concatenated; each ends where the next one begins."""

    values: list[tuple[str, str]]
    """The distinct labels: ("class", "cat") from .cls or .json, ("text", "cat") from .txt, which may be a caption."""

    ignored: Counter[str] = field(default_factory=Counter)
    skipped: list[SkippedFile] = field(default_factory=list)

    def save(self, file: Path) -> None:
        info = {"values": self.values, "ignored": self.ignored, "quarantined": self.skipped}
        buffer = BytesIO()
        np.savez(
            buffer,
            rows=self.rows,
            names=np.frombuffer(self.names, np.uint8),
            info=np.frombuffer(json.dumps(info).encode(), np.uint8),
        )
        write_atomic(file, buffer.getbuffer(), file.parent, shared=True)

    @classmethod
    def load(cls, file: Path, size: int) -> IndexEntry | None:
        """Return the stored entry of a shard of `size` bytes, None if it is missing or damaged."""
        try:
            with open_file(file, "rb", file.parent) as stored, np.load(stored, allow_pickle=False) as arrays:
                rows, names, info = arrays["rows"], arrays["names"].tobytes(), json.loads(arrays["info"].tobytes())
            values = [(str(kind), str(value)) for kind, value in info["values"]]
            checks = (
                (rows["start"] >= 0, rows["size"] >= 0, rows["start"] + rows["size"] <= size),
                (rows["label"] >= -1, rows["label"] < len(values)),
                (rows["name"][:1] == 0, np.diff(rows["name"], append=len(names)) >= 0),
            )
            whole = rows.dtype == ROW_DTYPE and rows.ndim == 1 and all(check.all() for some in checks for check in some)
            ignored = Counter({str(kind): int(count) for kind, count in info["ignored"].items()})
            skipped = [SkippedFile(str(name), str(reason)) for name, reason in info["quarantined"]]
        except Exception:  # a damaged archive raises nearly anything: zlib.error, SyntaxError, MemoryError, …
            return None
        return cls(rows, names, values, ignored, skipped) if whole else None

    @classmethod
    def build(cls, storage: Storage, path: str, state: FileState, report: Callable[[int], None]) -> IndexEntry:
        """Build the entry of a shard. `report` is called with the bytes done, now and then; it may raise to stop.

        Raises:
            RequestError: the shard is compressed as a whole.
            ImageError: it cannot be read.
        """
        file = open_shard(storage, path, state.size)
        if packed := detect_compression(file.read_at(0, 16)):
            raise RequestError(
                f"{sanitize(path)} is compressed as a whole ({packed}), so no image in it can be reached; "
                "unpack it to a plain .tar first"
            )
        builder = _EntryBuilder(file, state.size, storage.remote)
        try:
            for count, member in enumerate(TarMember.iterate(file)):
                if count >= _MAX_MEMBERS:
                    raise DamagedTarError(f"a shard of over {_MAX_MEMBERS:,} members")
                builder.add(member)
                if count % _REPORT_EVERY == 0:
                    report(member.start)
        except DamagedTarError as error:  # what comes before the damage is used
            builder.skipped.append(SkippedFile("", str(error)))
        return builder.build()


@dataclass
class _EntryBuilder:
    """Collects the members of one shard. As in unpacking, the last member of a name counts."""

    file: BlockReader
    size: int
    remote: bool
    images: dict[str, TarMember] = field(default_factory=dict)  # by name
    labels: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)  # by (name less its suffix, rank)
    ignored: Counter[str] = field(default_factory=Counter)
    skipped: list[SkippedFile] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # of the members that may show where a run is

    def add(self, member: TarMember) -> None:
        name = normalize_path(member.name.decode("utf-8", "surrogateescape"))
        kind = ignored_kind(name)
        if "config.toml" in name or "checkpoints/" in name:
            self.names.append(name)
        if kind is None and not member.regular:
            self.skipped.append(SkippedFile(name, "a link or sparse file in a shard"))
        elif kind is None:
            self._add_image(name, member)
        elif kind == "hidden" or not member.regular or not self._add_label(name, member):
            self.ignored[kind] += 1

    def _add_image(self, name: str, member: TarMember) -> None:
        if member.start + member.size > self.size:
            self.skipped.append(SkippedFile(name, "in a shard that ends before it does"))
        elif member.size > MAX_FILE_BYTES:
            self.skipped.append(SkippedFile(name, f"over {MAX_FILE_BYTES // 2**20} MB"))
        else:
            if name in self.images:
                self.skipped.append(SkippedFile(name, "replaced by a later member of its name"))
            self.images[name] = member

    def _add_label(self, name: str, member: TarMember) -> bool:
        """Add the label that a member gives; return whether it gives one."""
        stem, kind = split_suffix(name)
        if kind not in _LABEL_FILES:
            return False
        data = member.read(self.file, _LABEL_FILES[kind])
        value = _json_label(data) if kind == "json" else _text_label(data)
        key = stem, list(_LABEL_FILES).index(kind)
        if not value:
            self.labels.pop(key, None)
            return False
        self.labels[key] = "text" if kind == "txt" else "class", value
        return True

    def _label(self, name: str) -> tuple[str, str] | None:
        """Return the label of an image; a .cls counts more than a .json, and that more than a .txt."""
        for stem in candidate_stems(split_suffix(name)[0]):
            for rank in range(len(_LABEL_FILES)):
                if (value := self.labels.get((stem, rank))) is not None:
                    return value
        return None

    def build(self) -> IndexEntry:
        self._remove_sidecar_images()
        self._remove_own()
        images = sorted(self.images.items(), key=lambda item: item[1].start)
        labels = [self._label(name) for name, _ in images] if self.labels else [None] * len(images)
        texts = {value for value in labels if value and value[0] == "text"}
        captions = len(texts) > _MAX_TEXTS or any(len(text) > _MAX_TEXT for _, text in texts)
        codes: dict[tuple[str, str], int] = {}
        rows = np.zeros(len(images), ROW_DTYPE)
        encoded, at = [], 0
        for i, ((name, member), value) in enumerate(zip(images, labels)):
            known = value is not None and not (captions and value[0] == "text")
            code = codes.setdefault(value, len(codes)) if known and value else -1
            rows[i] = member.start, member.size, at, code, 0
            encoded.append(name.encode("utf-8", "surrogateescape"))
            at += len(encoded[-1])
        return IndexEntry(rows, b"".join(encoded), list(codes), self.ignored, self.skipped)

    def _remove_own(self) -> None:
        """Leave out runs, and pictures that Unfog has written, unless there are no others. As in a folder."""
        if runs := run_folders(self.names) - {""}:
            self.images = {name: one for name, one in self.images.items() if not name.startswith(tuple(runs))}
            self.ignored[RUN] += len(runs)

        def head(name: str, size: int) -> bytes:
            return self.file.read_at(self.images[name].start, min(size, self.images[name].size))

        # Of a remote shard each of them would be a request.
        own = set() if self.remote else own_pictures(self.images, head)
        if 0 < len(own) < len(self.images):
            self.images = {name: one for name, one in self.images.items() if name not in own}
            self.ignored[OWN] += len(own)

    def _remove_sidecar_images(self) -> None:
        """Ignore 001.seg.png beside 001.jpg: it is a mask of that image, say, and no image of its own."""
        # Only an ending that begins with a letter marks a sidecar: 001.0.png beside 001.png is an image, as are
        # 001.left.png and 001.right.png without a 001.png.
        stems = {split_suffix(name)[0] for name in self.images}
        for name in list(self.images):
            stem, kind = split_suffix(name)
            for shorter in candidate_stems(stem)[1:]:
                if not stem[len(shorter) + 1 :][:1].isalpha():
                    break
                if shorter in stems:
                    del self.images[name]
                    self.ignored[f"{stem[len(shorter) :].lower()}.{kind}"] += 1
                    break


def open_shard(storage: Storage, path: str, size: int) -> BlockReader:
    """Return a reader of the headers and small members of a shard of so many bytes."""
    return BlockReader(storage, path, size, _REMOTE_BLOCK if storage.remote else _LOCAL_BLOCK)


def split_suffix(name: str) -> tuple[str, str]:
    """Split off the suffix, in lower case: "a/v1.001.PNG" -> ("a/v1.001", "png")."""
    folder, slash, base = name.rpartition("/")
    stem, dot, kind = base.rpartition(".")
    return (folder + slash + stem, kind.lower()) if dot else (name, "")


def candidate_stems(stem: str) -> list[str]:
    """Return the names under which the sidecar files of a member may be, the nearest first: "a/v1.001", then "a/v1"."""
    # The last one is webdataset's key, which ends at the first dot. That key alone would take v1.001.png and v1.002.png
    # for one sample with one label.
    found, begins = [stem], stem.rfind("/") + 1
    while (dot := stem.rfind(".", begins)) > begins:
        found.append(stem := stem[:dot])
    return found


def _text_label(data: bytes) -> str:
    text = data.decode("utf-8", "replace").strip()
    return normalize_label(text) if "\n" not in text else ""


def _json_label(data: bytes) -> str:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(values, dict):
        return ""
    return next((text for key in _LABEL_KEYS if (text := normalize_label(values.get(key)))), "")
