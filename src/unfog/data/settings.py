"""Settings of decoding, labels, augmentation and the held-out split. Without torch, so that `--help` is quick."""

from __future__ import annotations

import csv
import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from unfog.data.columns.image_setting import check_conditions_of_images, split_images
from unfog.errors import RequestError
from unfog.settings import AUTO, check_bounds, is_auto, setting
from unfog.text import suggest
from unfog.values.arrays.slices import AXIAL, Slices
from unfog.values.columns import CLASS, name_problem
from unfog.values.condition_kinds import KINDS
from unfog.values.image_format import (
    BYTES,
    CHANNELS,
    MOST_CHANNELS,
    STORED,
    ImageFormat,
    Size,
    StoredValues,
    parse_size,
)
from unfog.values.unknown import NONE, UnknownValues, filler_of, mask_from_text
from unfog.values.value_maps import maps_of, parse_maps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Types of the stored values: see `image_format.STORED`.
KeptType = Literal["uint16", "float32", "float16"]

LABELS = (AUTO, "folders", "none")
# Values of `Data.labels`, and suffixes of the tables that it may name instead.
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
TEXT_NAMES = ("text", "caption", "captions", "prompt")
"""Names of columns whose cells are captions."""
_TABLE = re.compile(r"(.*\.(?:csv|tsv|jsonl|ndjson|parquet))(?::(.+))?", re.IGNORECASE | re.DOTALL)


def _floats(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(map(float, values))


# Settings of decoding that came after the first packs, and their types as read from JSON. Caches are named by them, and
# packs hold them, only where they are set, so that those from before are found again.
_LATER: dict[str, Callable[[Any], object]] = {
    "range": _floats,
    "clip": bool,
    "dtype": str,
    "axes": str,
    "unknown": str,
    "slices": str,
}
# Settings that act in training, so that a pack does not depend on them.
TRAINING_ONLY = (
    *(
        "map",
        "map_values",
        "map_range",
        "unknown_share",
        "unknown_mask",
        "flip",
        "jitter",
        "crop",
        "augment",
        "upright",
        "wrap",
        "roll",
        "aspect",
    ),
    *("cache", "cache_limit", "failed_shards"),
)
# Prefix of the fingerprint of images that are decoded while training: a digest of their source's state.
UNREAD = "unread:"


@dataclass(frozen=True)
class Data:
    """Settings of decoding, labels, augmentation and the held-out split. 0 or "auto" is chosen to suit the images."""

    size: Size = setting(0, short="size", auto=0, common=True)
    """Pixels that the network sees: 64, or width x height: 96x64; 0 = to suit the images, short side up to 64."""
    aspect: Literal["crop", "keep"] = setting(
        "crop",
        short="aspect",
        added_later=True,
        why="one size is the simplest; cutting photographs of 3:2 to squares loses a third of each",
        see="docs/guide.md",
    )
    """crop: cut all images to `size`. keep: batches of one aspect each, of about as many pixels as `size`."""
    channels: int = setting(0, auto=0)
    """1 = grey, 3 = RGB; 0 = grey if every image is grey, else RGB. Arrays may have 1 to 64, which are kept."""
    background: str = setting("white", affects="objective", resume="force")
    """Colour put behind transparent pixels: a name such as "white", or "#rrggbb"."""
    range: tuple[float, ...] = setting((), auto=(), affects="objective", resume="force", added_later=True)
    """Values of 16-bit, 32-bit and floating-point images that become black and white; auto = that of the set."""
    clip: bool = setting(False, affects="objective", resume="force", added_later=True)
    """Cut values beyond `range` at its ends; without it, images with such values are left out."""
    dtype: Literal["auto", "uint8", "uint16", "float32", "float16"] = setting(
        AUTO, auto=AUTO, affects="objective", resume="fixed", added_later=True, see="docs/arrays.md"
    )
    """Type of the stored values. auto = 8 bits for pictures; float32 for arrays whose values have no usual range."""
    axes: Literal["auto", "NCHW", "NHWC"] = setting(
        AUTO, auto=AUTO, affects="objective", resume="fixed", added_later=True, see="docs/arrays.md"
    )
    """Order of the axes of an array of images: channels first, or channels last; auto = by their sizes."""
    slices: str = setting(
        AXIAL, affects="objective", resume="fixed", added_later=True, see="docs/microscopy-and-medical.md"
    )
    """Slices of NIfTI volumes: axial, coronal, sagittal, or axis 0, 1 or 2; axial+1: with a neighbour on each side."""
    map: str = setting(AUTO, auto=AUTO, affects="objective", resume="fixed", added_later=True, see="docs/arrays.md")
    """Map from stored values to the network's, for all channels or each: linear, minmax, percentile, standard, …"""
    map_values: tuple[float, ...] = setting((), affects="objective", resume="fixed", added_later=True, hidden=True)
    """Knee, middle and half of the fitted map of each channel, as found in the training images."""
    map_range: tuple[float, ...] = setting((), affects="nothing", resume="fixed", added_later=True, hidden=True)
    """Least and largest value of each channel in the images that the map was fitted to."""
    unknown: str = setting(NONE, affects="objective", resume="fixed", added_later=True, see="docs/arrays.md")
    """What stands for pixels that are not known: nan, or a number such as -9999. They are left out of the loss."""
    unknown_share: float = setting(0.0, affects="nothing", resume="fixed", added_later=True, hidden=True)
    """Share of the values of the training images that are unknown."""
    unknown_mask: str = setting("", affects="objective", resume="fixed", added_later=True, hidden=True)
    """Values that are unknown in all training images, and so in samples: bits, compressed."""
    labels: str = setting(AUTO, auto=AUTO, affects="nothing", resume="free")
    """Classes: folders = the top sub-folders, or what shards say; none; auto = whichever fit; or TABLE[:FILE,LABEL]."""
    condition: str = setting(
        "",
        short="condition",
        resume="fixed",
        affects="objective",
        added_later=True,
        metavar="COLUMN,COLUMN",
        see="docs/conditions.md",
    )
    """What to learn beside the images: text = captions, from x.txt beside x.png or a column; or other columns of a
    table: [TABLE:]COLUMN[:KIND],…; or images: degrade:factor=4, grey, hole, NAME=SOURCE."""
    flip: bool = setting(False, short="flip", resume="free", common=True)
    """Mirror half of the images left to right; off, as text and digits do not survive it."""
    jitter: float = setting(0.0, at_least=0, at_most=1, usual="0.05 to 0.2", resume="free")
    """Random brightness, contrast and saturation, as a fraction: 0.1 is up to 10% each way."""
    crop: float = setting(0.0, at_least=0, at_most=0.5, usual="0.1", resume="free")
    """Enlarge a random square of at least 1 - crop of the side to the whole; 0.1 is usual. Samples show it."""
    augment: float = setting(
        0.0,
        short="augment",
        at_least=0,
        at_most=1,
        usual="0.12 to 0.15",
        common=True,
        measured="3% of a step of `tiny`; 1% of the samples show it, 30% if it is not an input of the network",
        paper="Karras et al. 2022, appendix F",
        see="docs/guide.md",
    )
    """Augment each image with this probability. Samples are not affected. Try 0.15 for a small set."""
    upright: float = setting(
        0.0,
        at_least=0,
        at_most=1,
        usual="0.5",
        added_later=True,
        why="EDM and the preset edm have 0.5; 0 is the value of runs that are older than this setting",
        paper="Karras et al. 2022, appendix F.2 (aniso_rotate_prob)",
    )
    """With `augment`: share of the stretches that are along the sides of the image; others are in any direction."""
    wrap: Literal["none", "x", "y", "xy"] = setting(
        "none",
        short="wrap",
        added_later=True,
        why="photographs end at their edges; textures and periodic fields continue at the other side",
        see="docs/guide.md",
    )
    """Axes along which images are seamless, x = left to right: samples continue at their other side."""
    roll: bool = setting(True, resume="free", added_later=True)
    """With `wrap`: move each training image around its edges by a random number of pixels."""
    held_out: float = setting(0.05, at_least=0, at_most=0.5, usual="0.05", affects="objective", resume="force")
    """Fraction kept from training to measure it; at most 1,000 images. Sets of fewer than 100 keep none back. Each
    image is drawn by its name with this chance, so a small set keeps only about this fraction: 37 of 240 for 0.2."""
    cache: Literal["auto", "memory", "disk", "none"] = setting(AUTO, auto=AUTO, affects="nothing", resume="free")
    """Place of decoded images: "disk" = a pack that later runs reuse; "none" = each is decoded when drawn."""
    cache_limit: str = setting("10gb", affects="nothing", resume="free")
    """Disk space for what is read of remote shards while training (500mb, 50gb; 0 = none)."""
    failed_shards: float = setting(0.05, at_least=0, at_most=0.5, usual="0.05", affects="nothing", resume="free")
    """Share of the remote shards read while training that may fail; other images replace theirs. 0 = none."""

    def __post_init__(self) -> None:
        if self.labels not in LABELS:
            table_and_columns(self.labels)
        parse_condition(self.condition)
        Slices.of(self.slices)
        of = {name: getattr(self, name) for name in ("aspect", "unknown", "channels")}
        check_conditions_of_images(self.condition, of)
        object.__setattr__(self, "size", parse_size(self.size))  # "64x64" is 64
        if not 0 <= self.channels <= MOST_CHANNELS:
            raise RequestError(
                f"channels = {self.channels} is not 1 (grey), 3 (RGB), 0 (choose), or up to {MOST_CHANNELS} of arrays"
            )
        if len(self.map_values) % 3:
            raise RequestError(f"map_values has {len(self.map_values)} numbers, and each channel has three; omit it")
        ends = zip(self.map_range[::2], self.map_range[1::2])
        if len(self.map_range) % 2 or not all(low <= high < math.inf for low, high in ends):
            raise RequestError("map_range is not a least and a largest value of each channel; omit it")
        if not is_auto(self, "map"):
            parse_maps(self.map)
            if self.dtype == "uint8":
                raise RequestError(f"data.map = {self.map} keeps values as float32; omit data.dtype = uint8")
        low, high = self.range[::2], self.range[1::2]
        if not is_auto(self, "range") and (len(self.range) not in (2, 4) or not all(a < b for a, b in zip(low, high))):
            given = " ".join(f"{value:g}" for value in self.range)
            raise RequestError(
                f"range = {given} is not LOW HIGH with LOW below HIGH; give both, such as 0 4095, or auto"
            )
        check_bounds(self)
        self._check_wrap()
        self._check_unknown()
        bytes_of(self.cache_limit)

    def _check_wrap(self) -> None:
        """Raise RequestError if images that are joined at their edges would be cut or turned."""
        whole = {"aspect": "crop", "crop": 0, "augment": 0}
        if self.wrapped and (name := next((each for each in whole if getattr(self, each) != whole[each]), "")):
            raise RequestError(
                f"wrap = {self.wrap} needs whole images, and {name} = {getattr(self, name)} cuts or turns them, so "
                f"that their edges no longer meet; omit {name} or wrap (data.flip, data.jitter and data.roll are "
                "possible)"
            )

    def _check_unknown(self) -> None:
        """Raise RequestError if unknown pixels do not suit the stored type, or the augmentation."""
        if (filler := filler_of(self.unknown)) is None:
            return
        said = f"data.unknown = {self.unknown}"
        if self.dtype == "uint8":
            raise RequestError(f"{said} keeps values as float32; omit data.dtype = uint8")
        if self.dtype == "uint16" and filler not in range(2**16):
            raise RequestError(f"{said} is not a value of uint16; give one from 0 to 65535, or --data.dtype float32")
        if name := next((each for each in ("crop", "augment") if getattr(self, each)), ""):
            raise RequestError(
                f"{said}, and data.{name} = {getattr(self, name)} computes pixels from their neighbours, which may be "
                f"unknown; omit data.{name} (data.flip and, with wrap, data.roll are possible)"
            )

    @property
    def filler(self) -> float | None:
        """NaN or the number that stands for unknown pixels; None if all are known."""
        return filler_of(self.unknown)

    @property
    def can_be_augmented(self) -> bool:
        """True if `augment` is 0, and no other setting refuses it."""
        return not self.augment and not self.wrapped and not self.has_unknown

    @property
    def has_unknown(self) -> bool:
        """True if pixels may be unknown."""
        return self.unknown != NONE

    @property
    def masks_vary(self) -> bool:
        """True if values are unknown in some training images, and known in others, so that samples have them."""
        known = self.known_in_samples()
        return self.unknown_share > (0.0 if known is None else float((~known).mean()))

    def known_in_samples(self) -> NDArray[np.bool_] | None:
        """Return which values [C, H, W] of samples are known; None if all are. RequestError for another size."""
        return None if not self.unknown_mask else ~mask_from_text(self.unknown_mask, self.image_format.shape)

    @property
    def unknown_values(self) -> UnknownValues | None:
        """Unknown values of images and of samples; None if all are known."""
        return None if self.filler is None else UnknownValues(self.filler, self.known_in_samples())

    @property
    def image_format(self) -> ImageFormat:
        """The format of the images; 0 in it is not chosen yet."""
        return ImageFormat.of(self.channels, self.size, self.stored_values)

    @property
    def requested_dtype(self) -> KeptType | Literal[""]:
        """The stored type that the settings ask for in place of 8 bits; "" if they do not."""
        if self.dtype != AUTO and self.dtype != "uint8":
            return self.dtype
        return "" if is_auto(self, "map") and not self.has_unknown else "float32"

    @property
    def asks_to_keep(self) -> bool:
        """True if the type, the map or the number of channels says that images keep their values."""
        return bool(self.requested_dtype) or self.channels not in (0, *CHANNELS)

    @property
    def may_keep(self) -> bool:
        """True if arrays without a usual range may keep their values: no setting makes 8 bits of them."""
        return self.dtype == AUTO and is_auto(self, "range") and not self.clip

    @property
    def stored_values(self) -> StoredValues:
        """The type of the stored values and their map, linear until it is fitted."""
        if self.dtype in (AUTO, "uint8"):
            return BYTES
        usual = STORED[self.dtype]
        low, high = self.range[:2] or (usual.low, usual.high)
        return StoredValues(self.dtype, low, high, maps_of(self.fitted_map, self.map_values), self.unknown)

    @property
    def fitted_map(self) -> str:
        """The map to fit to training images; "" if the linear one of `range` or of the type needs no fit."""
        if self.dtype in (AUTO, "uint8"):
            return ""
        if self.map in (AUTO, "linear") and (self.range or not STORED[self.dtype].floating):
            return ""
        return "standard" if self.map == AUTO else self.map

    @property
    def range_in_training(self) -> tuple[tuple[float, float], ...]:
        """Least and largest value of each channel of the training images; () if they are not known.

        Without a fitted map, `range` bounds values of floating point, as other images are left out or cut.
        """
        found = tuple(zip(self.map_range[::2], self.map_range[1::2]))
        if not found and self.range and not self.fitted_map and self.dtype.startswith("float"):
            found = ((self.range[0], self.range[1]),) * self.channels
        return found if len(found) == self.channels else ()

    @property
    def wrapped(self) -> str:
        """Axes along which images continue at their other side: "", "x", "y" or "xy"."""
        return "" if self.wrap == "none" else self.wrap

    @property
    def later(self) -> dict[str, Any]:
        """The settings of `_LATER` that are set, by name."""
        return {name: value for name in _LATER if (value := getattr(self, name)) != getattr(Data, name)}

    @property
    def later_key(self) -> tuple[object, ...]:
        """`later` as part of a key or digest; empty if nothing is set."""
        return tuple(name if value is True else value for name, value in self.later.items())

    @staticmethod
    def later_of(stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings of `_LATER`, read from those of a pack. ValueError or TypeError for another type."""
        return {name: kind(stored.get(name, getattr(Data, name))) for name, kind in _LATER.items()}


def table_and_columns(labels: str) -> tuple[str, tuple[str, str]]:
    """Split "t.csv:id,breed" into the path of the table and its columns of files and of labels, "" to find one.

    A name with a comma is quoted as in a .csv file. RequestError if the text names no table.
    """
    if match := _TABLE.fullmatch(labels):
        names = [name.strip() for name in next(csv.reader([match[2] or ""], skipinitialspace=True), [])]
        if len(names) <= 2 and all(names):
            return match[1], (names[0] if len(names) > 1 else "", names[-1] if names else "")
    close = difflib.get_close_matches(labels, LABELS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise RequestError(
        f"labels = {labels!r} is not auto, folders, none, or a .csv, .jsonl or .parquet file, with columns as in "
        f't.csv:file,label (a name with a comma in quotes: t.csv:"file, name",label){hint}'
    )


def parse_condition(condition: str) -> tuple[str, dict[str, str]]:
    """Split "t.csv:age,stain:category" into the path of the table, "" to find one, and column -> kind, "" to find it.

    Words on images are left out: see `split_images`. RequestError if it is not such a text.
    """
    images, condition = split_images(condition)
    if not condition:
        return "", {}
    match = _TABLE.fullmatch(condition)
    found = dict[str, str]()
    for word in ((match[2] or "") if match else condition).split(","):
        name, colon, kind = word.strip().rpartition(":")
        name, kind = (name, kind) if colon else (kind, "")
        kinds = [each for each in KINDS if each != CLASS]
        if colon and kind not in kinds:
            raise RequestError(f"condition = {word.strip()!r}: {kind!r} is not a kind{suggest(kind, kinds)}")
        if problem := name_problem(name, kind or "number"):
            raise RequestError(
                f"condition = {condition!r} is not COLUMN,COLUMN, TABLE:COLUMN or COLUMN:KIND, of a column"
                f"{f' {name[:60]!r}' * bool(name)}: {problem}"
            )
        if name in found or name in images.names:
            raise RequestError(f"condition = {condition!r} names the column {name!r} twice; name it once")
        found[name] = kind
    return (match[1] if match else ""), found


def bytes_of(text: str) -> int:
    """Parse a size such as 500mb, 50gb, 2tb or 0 to bytes. Raises RequestError if it is not a size."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(mb|gb|tb)", str(text).strip().lower())
    if match:
        return int(float(match[1]) * {"mb": 10**6, "gb": 10**9, "tb": 10**12}[match[2]])
    if str(text).strip() != "0":
        raise RequestError(f"cache_limit = {text!r} is not a size; write 500mb, 50gb or 2tb, or 0 for none")
    return 0
