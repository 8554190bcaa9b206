"""What became of every file: nothing is dropped or altered without being counted here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unfog.errors import RequestError
from unfog.text import sanitize

REASONS = 10
"""Reasons that a line names."""
ACTIONS = {
    "resized": "resized to {size}x{size}",
    "upscaled": "upscaled to {size}x{size}",
    "cropped": "centre-cropped",
    "flattened": "flattened on {background}",
    "rotated": "rotated by EXIF",
    "first_frame": "cut to the first frame",
    "sixteen_bit": "reduced from 16 bit",
    "float": "converted from floating point",
    "cmyk": "converted from CMYK",
    "palette": "converted from a palette",
    "colour_space": "converted from another colour space",
    "srgb": "converted to sRGB",
    "profile_ignored": "with an unusable colour profile ignored",
    "rgb_to_grey": "made grey",
    "grey_to_rgb": "made RGB from grey",
}
"""What can be done to an image, as `DataReport.line` puts it; an image may have had several."""

COMMON_ACTIONS = frozenset(["resized", "upscaled", "cropped"])
"""Those of ACTIONS that nearly every image needs; any other is worth a look."""

_KEYS_ON_DISK = {"skipped": "quarantined"}  # a field -> its key in data.json and pack.json, where the two differ


class SkippedFile(NamedTuple):
    """A file that could not be used; a folder that could not be read ends in "/"."""

    name: str
    reason: str
    """A few words, the same for the same trouble: "truncated", "not an image"."""


@dataclass(frozen=True, eq=False)
class DataReport:
    """The account of one preparation."""

    source: str
    found: int
    """Files taken for images; `used` of them were, the others are in `skipped`."""

    used: int
    held_out: int
    """How many of those used are held out."""

    size: int
    channels: int
    background: str
    class_counts: Mapping[str, int]
    """Images used of each class, in the order of the labels; {} without classes."""

    sides: Mapping[str, int]
    """Original pixels, orientation put right: min, median and max of the "shortest" and "longest" side."""

    modes: Mapping[str, int]
    """Images used of each Pillow mode, as found."""

    treatments: tuple[tuple[str, ...], ...]
    """The different lists of ACTIONS that images had done to them; one may be ()."""

    treatment: NDArray[np.int32]
    """[used], which of `treatments` each image had: first those to train on, then those held out, as in the sets.
    Maybe mapped from a file; [0] where nothing has been read yet."""

    skipped: tuple[SkippedFile, ...]
    ignored: Mapping[str, int]
    """Files passed over as not images: how many of each suffix, or "hidden", or "without suffix"."""

    known_counts: tuple[int, ...] = ()
    """What `counts` is, where it was computed before."""

    read: bool = True
    """False where images are decoded only when training wants them, so that all of them are taken for usable."""

    def __post_init__(self) -> None:
        """`treatment` may be given as any sequence of numbers."""
        object.__setattr__(self, "treatment", np.asarray(self.treatment, np.int32))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataReport) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many images had each of `treatments`. Raises ValueError where they do not belong together."""
        counts = self.known_counts or np.bincount(self.treatment, minlength=len(self.treatments)).tolist()
        if len(counts) != len(self.treatments):
            raise ValueError(f"{len(counts)} counts of {len(self.treatments)} treatments")
        return tuple(counts)

    @property
    def actions(self) -> dict[str, int]:
        """How many images each of ACTIONS was done to; those that were done to none are left out."""
        counts: Counter[str] = Counter()
        for done, images in zip(self.treatments, self.counts):
            counts.update(dict.fromkeys(done, images) if images else {})
        return dict(counts)

    def treatment_of(self, index: NDArray[np.int64] | slice) -> NDArray[np.int32]:
        """Which of `treatments` these images had.

        Raises:
            RequestError: one that there is not, in a mapped file that is damaged.
        """
        which = self.treatment[index]
        if len(which) and not 0 <= int(which.min()) <= int(which.max()) < len(self.treatments):
            raise RequestError(f"the pack of {self.source} is damaged (treatment.npy); pack it again")
        return which

    def phrases(self, which: int) -> list[str]:
        """What was done to images of that treatment, in words, in the order of ACTIONS."""
        done = self.treatments[which]
        return [self.phrase(key) for key in ACTIONS if key in done]

    def phrase(self, action: str) -> str:
        """One of ACTIONS in words."""
        return ACTIONS[action].format(size=self.size, background=self.background)

    def line(self) -> str:
        """The account in one line."""
        classes = f" in {len(self.class_counts):,} classes" if self.class_counts else ""
        actions = self.actions
        done = ", ".join(f"{actions[key]:,} {self.phrase(key)}" for key in ACTIONS if key in actions)
        unchanged = f"as they are ({self.size}x{self.size})"
        kind = f"{self.size}x{self.size}, {'grey' if self.channels == 1 else 'RGB'}"
        unread = f"each decoded when its turn comes ({kind}), so none looked at yet"
        parts = [
            f"{self.found:,} image{'s' * (self.found != 1)}{classes}",
            f"{self.used:,} used: {done or unchanged}" if self.read else unread,
        ]
        if self.held_out:
            parts.append(f"{self.held_out:,} held out")
        if self.skipped:
            parts.append(f"{len(self.skipped):,} skipped ({self._quarantined()})")
        if ignored := sum(self.ignored.values()):
            parts.append(f"{ignored:,} other file{'s' * (ignored != 1)} ignored")
        return "; ".join(parts)

    def _quarantined(self, named: int = 3) -> str:
        names: dict[str, list[str]] = {}
        for one in self.skipped:
            names.setdefault(one.reason, []).append(one.name)
        groups = [
            f"{len(of):,} {reason}: {', '.join(map(sanitize, of[:named]))}{', ...' * (len(of) > named)}"
            for reason, of in sorted(names.items(), key=lambda item: -len(item[1]))
        ]
        return "; ".join([*groups[:REASONS], *["..."] * (len(groups) > REASONS)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, under the keys of data.json and pack.json."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"treatment": self.treatment.tolist(), "known_counts": self.counts}
        return {_KEYS_ON_DISK.get(name, name): value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataReport:
        """Rebuild a report from `to_dict`, also after a journey through JSON."""
        rebuilt = {name: values[_KEYS_ON_DISK.get(name, name)] for name in (field.name for field in fields(cls))}
        rebuilt["treatments"] = tuple(tuple(done) for done in rebuilt["treatments"])
        rebuilt["known_counts"] = tuple(rebuilt["known_counts"])
        rebuilt["skipped"] = tuple(SkippedFile(*one) for one in rebuilt["skipped"])
        return cls(**rebuilt)
