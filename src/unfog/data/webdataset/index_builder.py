"""The index of one tar shard: where each image in it is, what it is called, and its label."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unfog.data.report import SkippedFile
from unfog.data.sources.byte_storage import BlockReader, FileState, Storage
from unfog.data.sources.image_files import ignored_kind
from unfog.data.webdataset.tar import DamagedTarError, TarMember, detect_compression, iter_members, read_member
from unfog.errors import RequestError
from unfog.text import sanitize

MAX_FILE_BYTES = 512 * 2**20
"""Bytes of an image's file, over which it is not read."""

ROW_DTYPE = np.dtype([("start", "<i8"), ("size", "<i8"), ("name", "<i8"), ("label", "<i4"), ("shard", "<i4")])
"""An image: where its file is in which shard, where its name begins, and which of the values its label is, or -1."""

LOCAL_BLOCK, REMOTE_BLOCK = 4096, 2**18
"""Bytes read at once while looking for headers: little here, where it costs nothing; more where each reading takes its
time, so that of small images many are passed in one."""

_LABEL_FILES = {"cls": 1024, "class": 1024, "json": 2**20, "txt": 1024}  # and bytes up to which they are read
_LABEL_KEYS = ("label", "class", "cls")
_LONGEST_TEXT = 100
_MOST_TEXTS = 10_000
_REPORT_EVERY = 1000  # members


@dataclass
class IndexEntry:
    """What is in one shard."""

    rows: NDArray[Any]
    """[n] of ROW, in the order of the members; `shard` is 0, `name` counts in `names`."""

    names: bytes
    """The names one after the other, each from its row's `name` to the next one's."""

    values: list[tuple[str, str]]
    """The labels there are: ("class", "cat") of a .cls or .json, ("text", "cat") of a .txt, which may be a caption."""

    ignored: Counter[str] = field(default_factory=Counter)
    skipped: list[SkippedFile] = field(default_factory=list)


def index_shard(storage: Storage, path: str, state: FileState, report: Callable[[int], None]) -> IndexEntry:
    """Go through a shard. `report` is called with the bytes passed, now and then, and may raise to stop.

    Raises:
        RequestError: it is compressed as a whole.
        ImageError: it cannot be read.
    """
    file = BlockReader(storage, path, state.size, REMOTE_BLOCK if storage.remote else LOCAL_BLOCK)
    if packed := detect_compression(file.at(0, 16)):
        raise RequestError(
            f"{sanitize(path)} is compressed as a whole ({packed}), so no image in it can be reached; unpack it to a "
            "plain .tar first"
        )
    collected = _Collected(file, state.size)
    try:
        for count, member in enumerate(iter_members(file)):
            collected.add(member)
            if count % _REPORT_EVERY == 0:
                report(member.start)
    except DamagedTarError as error:
        collected.skipped.append(SkippedFile("", str(error)))
    return collected.piece()


@dataclass
class _Collected:
    """What was seen so far of one shard."""

    file: BlockReader
    size: int
    images: dict[str, TarMember] = field(default_factory=dict)  # by name: as in unpacking, the last of a name counts
    labels: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)  # by (name less its end, rank)
    ignored: Counter[str] = field(default_factory=Counter)
    skipped: list[SkippedFile] = field(default_factory=list)

    def add(self, member: TarMember) -> None:
        name = normalize_path(member.name.decode("utf-8", "surrogateescape"))
        why_not = ignored_kind(name)
        if why_not is None and not member.regular:
            self.skipped.append(SkippedFile(name, "a link or sparse file in a shard"))
        elif why_not is None:
            self._add_image(name, member)
        elif why_not == "hidden" or not member.regular or not self._add_label(name, member):
            self.ignored[why_not] += 1

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
        """Whether a member says the class of an image. As of images, the last of a name counts."""
        stem, kind = _split_suffix(name)
        if kind not in _LABEL_FILES:
            return False
        data = read_member(self.file, member, _LABEL_FILES[kind])
        value = _json_label(data) if kind == "json" else _text_label(data)
        place = stem, list(_LABEL_FILES).index(kind)
        if not value:
            self.labels.pop(place, None)
            return False
        self.labels[place] = "text" if kind == "txt" else "class", value
        return True

    def _label(self, name: str) -> tuple[str, str] | None:
        """What the members of an image's name say; a .cls counts more than a .json, that more than a .txt."""
        for stem in _candidate_keys(_split_suffix(name)[0]):
            for rank in range(len(_LABEL_FILES)):
                if (value := self.labels.get((stem, rank))) is not None:
                    return value
        return None

    def piece(self) -> IndexEntry:
        """All of it."""
        self._leave_companions_out()
        images = sorted(self.images.items(), key=lambda item: item[1].start)
        labels = [self._label(name) for name, _ in images] if self.labels else [None] * len(images)
        texts = {value for value in labels if value and value[0] == "text"}
        captions = len(texts) > _MOST_TEXTS or any(len(text) > _LONGEST_TEXT for _, text in texts)
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

    def _leave_companions_out(self) -> None:
        """Where there is a 001.jpg, 001.seg.png is not another picture but something about it.

        Only what begins with a letter says what it is: 001.0.png beside 001.png is a picture, as are 001.left.png and
        001.right.png without a 001.png.
        """
        there = {_split_suffix(name)[0] for name in self.images}
        for name in list(self.images):
            stem, kind = _split_suffix(name)
            for shorter in _candidate_keys(stem)[1:]:
                if not stem[len(shorter) + 1 :][:1].isalpha():
                    break
                if shorter in there:
                    del self.images[name]
                    self.ignored[f"{stem[len(shorter) :].lower()}.{kind}"] += 1
                    break


def _split_suffix(name: str) -> tuple[str, str]:
    """(name less its end, that end): "a/v1.001.png" is ("a/v1.001", "png")."""
    folder, slash, base = name.rpartition("/")
    stem, dot, kind = base.rpartition(".")
    return (folder + slash + stem, kind.lower()) if dot else (name, "")


def _candidate_keys(stem: str) -> list[str]:
    """Under which names what goes with a member may be found, the nearest first: "a/v1.001", then "a/v1".

    The last is the key by which webdataset groups members, which ends at the first dot. That alone would take
    v1.001.png and v1.002.png for one sample, with one label.
    """
    found, begins = [stem], stem.rfind("/") + 1
    while (dot := stem.rfind(".", begins)) > begins:
        found.append(stem := stem[:dot])
    return found


def normalize_path(name: str) -> str:
    """A member's name without what leads nowhere: "./a//b.png" and "/a/b.png" are "a/b.png"."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _text_label(data: bytes) -> str:
    """The label that a .cls or .txt gives, as text; "" if none."""
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


def normalize_label(value: Any) -> str:
    """A label as text, whole numbers in their usual form (3, "3", 3.0 and "03" are "3"); "" for what is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        return ""
    text = str(value).strip() if isinstance(value, str) or abs(value) < 2**63 else ""
    return str(int(text)) if re.fullmatch(r"-?[0-9]{1,18}", text) else text


def sort_labels(values: set[str]) -> list[str]:
    """Labels in the order of their numbers: as whole numbers where all of them are, else as text."""
    if all(re.fullmatch(r"-?[0-9]{1,18}", value) for value in values):
        return sorted(values, key=int)
    return sorted(values)
