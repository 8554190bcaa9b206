"""The report on a source's images: every file that was found, and what decoding did to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.errors import RequestError
from unfog.text import plural, sanitize
from unfog.values.image_format import ImageFormat, Size, StoredValues, scaled, sides_of

_REASONS_LISTED, _NAMES_LISTED = 10, 3
# Each change that decoding can make to an image -> its description. Several may apply to one image.
ACTIONS = {
    "resized": "resized to {size}",
    "upscaled": "upscaled to {size}",
    "cropped": "centre-cropped",
    "flattened": "flattened on {background}",
    "rotated": "rotated by EXIF",
    "first_frame": "cut to the first frame",
    "sixteen_bit": "reduced from 16 bit",
    "float": "converted from floating point",
    "clipped": "cut at the ends of the range of values",
    "cmyk": "converted from CMYK",
    "palette": "converted from a palette",
    "colour_space": "converted from another colour space",
    "srgb": "converted to sRGB",
    "profile_ignored": "with an unusable colour profile ignored",
    "rgb_to_grey": "made grey",
    "grey_to_rgb": "made RGB from grey",
}

# Kinds of what is left out of a folder or archive, beside files that are not images -> one of it, and several.
OWN, RUN, SECOND_NAME = "made by Unfog", "a run's folder", "a second name of a folder"
LEFT_OUT = {
    OWN: ("picture made by Unfog", "pictures made by Unfog"),
    RUN: ("folder of a run", "folders of runs"),
    SECOND_NAME: ("second name of a folder", "second names of folders"),
}

# Key of `ignored` for files beside the images whose captions are read.
CAPTION_FILES = "caption files"

EDITORS_FILES = (".psd", ".psb", ".kra", ".xcf", ".clip")
"""Suffixes of pictures in the format of an editor. They are ignored, as a picture saved from them is often beside."""

# Those of ACTIONS that nearly every image needs; any other is worth a look.
COMMON_ACTIONS = frozenset(["resized", "upscaled", "cropped"])

# Values of packs that were written before these keys.
_ADDED_LATER = {"values": "", "unused_pages": 0, "dtype": "uint8"}
_KEYS_ON_DISK = {"skipped": "quarantined"}  # a field -> its key in data.json and pack.json, which must stay


class SkippedFile(NamedTuple):
    """A file that cannot be used. The name of a folder that cannot be read ends in "/"."""

    name: str
    reason: str
    """A few words, the same for the same cause, such as "truncated"."""


@dataclass(frozen=True, eq=False)
class DataReport:
    """Counts of the files found in a source, and what was done to each image used."""

    source: str
    found: int
    """Files taken for images: those used and those skipped."""
    used: int
    held_out: int
    """Number of the images used that are held out."""
    size: Size
    channels: int
    background: str
    class_counts: Mapping[str, int]
    """Images used of each class, in the order of the labels; {} without classes."""
    sides: Mapping[str, int] = field(default_factory=dict)
    """Minimum, median and maximum of the "shortest" and "longest" side of the upright originals, in pixels."""
    modes: Mapping[str, int] = field(default_factory=dict)
    """Images used of each Pillow mode."""
    treatments: tuple[tuple[str, ...], ...] = ()
    """The different lists of ACTIONS that were applied; one may be ()."""
    treatment: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """[used], index into `treatments` of each image, training images first. May be mapped from a file; [0] where no
    image was decoded yet."""
    skipped: tuple[SkippedFile, ...] = ()
    ignored: Mapping[str, int] = field(default_factory=dict)
    """Number of files that are not images, by suffix, "hidden" or "without suffix"; and of CAPTION_FILES and
    what else is in LEFT_OUT."""
    known_counts: tuple[int, ...] = ()
    """`counts`, where it is known already."""
    read: bool = True
    """False if images are decoded only while training, so that all are assumed to be usable."""
    values: str = ""
    """Ranges of the images deeper than 8 bits, as `Ranges.describe` says them; "" for those of the type."""
    unused_pages: int = 0
    """Pages or frames that are not used, as the first of each file is."""
    dtype: str = "uint8"
    """Type of the stored values."""

    def __post_init__(self) -> None:
        # A list when it comes from JSON; mapped from the file when it comes from a pack.
        object.__setattr__(self, "treatment", np.asarray(self.treatment, np.int32))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataReport) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Number of images of each of `treatments`. Raises ValueError if the file says something impossible."""
        counts = self.known_counts or np.bincount(self.treatment, minlength=len(self.treatments)).tolist()
        if len(counts) != len(self.treatments):
            raise ValueError(f"{len(counts)} counts of {len(self.treatments)} treatments")
        return tuple(counts)

    @property
    def actions(self) -> dict[str, int]:
        """Number of images that each of ACTIONS was applied to, without those of no image."""
        applied = Counter[str]()
        for actions, images in zip(self.treatments, self.counts):
            applied.update(dict.fromkeys(actions, images))
        # Plus leaves out the zeros.
        return dict(+applied)

    @property
    def captions(self) -> int:
        """Number of files with captions that are read."""
        return self.ignored.get(CAPTION_FILES, 0)

    @property
    def others(self) -> dict[str, int]:
        """`ignored` without files that are read: captions."""
        return {kind: count for kind, count in self.ignored.items() if kind != CAPTION_FILES}

    @property
    def has_deep_images(self) -> bool:
        """True if an image had values deeper than 8 bits."""
        return not {"sixteen_bit", "float"}.isdisjoint(self.actions)

    def treatment_of(self, index: NDArray[np.int64] | slice) -> NDArray[np.int32]:
        """Return the index into `treatments` of these images. Raises RequestError if the mapped file is damaged."""
        which = self.treatment[index]
        if len(which) and not 0 <= int(which.min()) <= int(which.max()) < len(self.treatments):
            raise RequestError(f"the pack of {self.source} is damaged (treatment.npy); pack it again")
        return which

    @property
    def image_format(self) -> ImageFormat:
        return ImageFormat.of(self.channels, self.size, StoredValues(self.dtype))

    @property
    def size_text(self) -> str:
        """Width x height of the decoded images, for people."""
        return self.image_format.sides

    def phrases(self, which: int) -> list[str]:
        """Describe each action of a treatment, in the order of ACTIONS."""
        return [self.phrase(key) for key in ACTIONS if key in self.treatments[which]]

    def phrase(self, action: str) -> str:
        """Describe one of ACTIONS, such as "resized to 64x64"."""
        return ACTIONS[action].format(size=self.size_text, background=self.background)

    def chosen_size_line(self) -> str:
        """Return the reason for a size that was left open, and how to change it; "" if squares keep their size."""
        if isinstance(self.size, str):
            side = min(sides_of(self.size))
            return f"data.size = {self.size}: most images have about this shape; --size {side} crops them to squares"
        if self.actions.get("resized"):
            return (
                f"data.size = {self.size}: larger images are made smaller, because twice the side takes four times "
                f"as long; --size {scaled(self.size, 2)} keeps more detail"
            )
        return ""

    def line(self) -> str:
        """Return the whole report as one line for people."""
        count = len(self.class_counts)
        classes = f" in {plural(count, 'class')}" if count else ""
        actions = self.actions
        pages = self.unused_pages + actions.get("first_frame", 0)
        more = {"first_frame": f" ({self.unused_pages:,} of {pages:,} pages are not used)" * (self.unused_pages > 0)}
        known = (key for key in ACTIONS if key in actions)
        done = ", ".join(f"{actions[key]:,} {self.phrase(key)}{more.get(key, '')}" for key in known)
        format = self.image_format
        unchanged = f"as they are ({format.sides if format.is_picture else format})"
        unread = f"decoded during training ({self.image_format}), so not checked yet"
        parts = [
            f"{plural(self.found)}{classes}",
            f"{self.used:,} used: {done or unchanged}" if self.read else unread,
        ]
        if self.values and (self.has_deep_images or not self.read):
            parts.append(self.values)
        if self.held_out:
            parts.append(f"{self.held_out:,} held out")
        if self.skipped:
            parts.append(f"{len(self.skipped):,} skipped ({self._skipped_by_reason()})")
        if captions := self.captions:
            parts.append(plural(captions, "caption"))
        left_out = {kind: count for kind in LEFT_OUT if (count := self.ignored.get(kind, 0))}
        if left_out:
            parts.append(f"left out: {', '.join(f'{n:,} {LEFT_OUT[kind][n != 1]}' for kind, n in left_out.items())}")
        if ignored := sum(self.others.values()) - sum(left_out.values()):
            parts.append(f"{plural(ignored, 'other file')} ignored")
        return "; ".join(parts)

    def _skipped_by_reason(self) -> str:
        names: dict[str, list[str]] = {}
        for file in self.skipped:
            names.setdefault(file.reason, []).append(file.name)
        groups = [
            f"{len(of):,} {reason}: {', '.join(map(sanitize, of[:_NAMES_LISTED]))}{', ...' * (len(of) > _NAMES_LISTED)}"
            for reason, of in sorted(names.items(), key=lambda item: -len(item[1]))
        ]
        return "; ".join([*groups[:_REASONS_LISTED], *["..."] * (len(groups) > _REASONS_LISTED)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, under the keys of data.json and pack.json."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"treatment": self.treatment.tolist(), "known_counts": self.counts}
        if self.dtype == _ADDED_LATER["dtype"]:
            del values["dtype"]  # so that packs of pictures stay as they were
        return {_KEYS_ON_DISK.get(name, name): value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataReport:
        """Rebuild a report from `to_dict`, also after a journey through JSON."""
        values = {**_ADDED_LATER, **values}
        rebuilt = {name: values[_KEYS_ON_DISK.get(name, name)] for name in (field.name for field in fields(cls))}
        # JSON has lists alone, and equal reports must compare equal.
        rebuilt["treatments"] = tuple(tuple(actions) for actions in rebuilt["treatments"])
        rebuilt["known_counts"] = tuple(rebuilt["known_counts"])
        rebuilt["skipped"] = tuple(SkippedFile(*file) for file in rebuilt["skipped"])
        return cls(**rebuilt)
