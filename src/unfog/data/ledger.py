"""What became of every file: nothing is dropped or altered without being counted here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

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
    "rgb_to_grey": "made grey",
    "grey_to_rgb": "made RGB from grey",
}
"""What can be done to an image, as `Ledger.line` puts it; an image may have had several."""


class Skipped(NamedTuple):
    """A file that could not be used."""

    name: str
    reason: str
    """A few words, the same for the same trouble: "truncated", "not an image"."""


@dataclass(frozen=True)
class Ledger:
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

    actions: Mapping[str, int]
    """How many images each of ACTIONS was done to; those that were done to none are left out."""

    skipped: tuple[Skipped, ...]
    other_files: int
    """Files passed over because their suffix is not an image's."""

    def line(self) -> str:
        """The account in one line."""
        classes = f" in {len(self.class_counts):,} classes" if self.class_counts else ""
        done = ", ".join(
            f"{self.actions[key]:,} {phrase.format(size=self.size, background=self.background)}"
            for key, phrase in ACTIONS.items()
            if key in self.actions
        )
        unchanged = f"as they are ({self.size}x{self.size})"
        parts = [
            f"{self.found:,} image{'s' * (self.found != 1)}{classes}",
            f"{self.used:,} used: {done or unchanged}",
        ]
        if self.held_out:
            parts.append(f"{self.held_out:,} held out")
        if self.skipped:
            parts.append(f"{len(self.skipped):,} skipped ({self._skipped()})")
        if self.other_files:
            parts.append(f"{self.other_files:,} other file{'s' * (self.other_files != 1)} ignored")
        # A file name need not be valid text; what a terminal is given must be.
        return "; ".join(parts).encode("utf-8", "replace").decode()

    def _skipped(self, named: int = 3) -> str:
        groups = []
        for reason, count in Counter(skipped.reason for skipped in self.skipped).most_common():
            names = [skipped.name for skipped in self.skipped if skipped.reason == reason]
            groups.append(f"{count:,} {reason}: {', '.join(names[:named])}{', ...' * (count > named)}")
        return "; ".join(groups)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ledger:
        """The ledger that `to_dict` gave these, also after a journey through JSON."""
        return cls(**{**values, "skipped": tuple(Skipped(*skipped) for skipped in values["skipped"])})
