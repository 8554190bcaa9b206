"""The configuration of a run: one frozen tree of the settings that each layer declares."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from unfog.config.advice import advice_on
from unfog.config.aliases import EPOCHS, USUAL, current_name
from unfog.config.representation import LatentSpace, PixelSpace, Representation
from unfog.config.task import AutoencoderTask, DiffusionTask, RunTask
from unfog.data.settings import Data
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.models.autoencoder_settings import Autoencoder, Latents
from unfog.models.settings import Architecture, TextEncoderSettings
from unfog.reporting.log_settings import Log
from unfog.settings import check_bounds, is_auto, rules_of, setting
from unfog.text import suggest, without_secrets
from unfog.training.settings import (
    Checkpoint,
    EmaSchedule,
    EmaSnapshots,
    Evaluate,
    Optimizer,
    PowerEma,
    Preview,
    Training,
)
from unfog.values.buckets import Bucket, parse_buckets
from unfog.values.condition_format import AUGMENT_INPUTS, ConditionFormat
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.image_format import ImageFormat, Size, area, check_view, parse_view, sides_of
from unfog.values.kinds.image_kinds import at_sides

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Network = Architecture | None  # None: chosen for the device and the image size


LENGTH = ("steps", "images", "budget")
# Step of the guide "auto", as a share of the step of what it guides (docs/decisions/0020-guide-of-the-same-run.md).
GUIDE_SHARE = 0.3


@dataclass(frozen=True)
class Init:
    """Weights to start from. Network, size and objective are theirs unless given."""

    folder: str = setting("", short="init", common=True)
    """A run; a UNet2DModel or DiT of diffusers, alone or in its pipeline; or weights of other programs as a file."""
    weights: Literal["ema", "raw"] = "ema"
    """Of a run: its EMA weights, or the raw weights of the last step."""
    checkpoint: str = "newest"
    """Of a run: newest, best (by its evaluate.best), or a step."""
    sha256: str = setting("", hidden=True)
    """Digest of the file of weights, as found."""

    def __post_init__(self) -> None:
        if self.checkpoint not in ("newest", "best") and not self.checkpoint.isdecimal():
            raise RequestError(f"checkpoint = {self.checkpoint!r} is not newest, best or a step such as 1000")


@dataclass(frozen=True)
class Config:
    """All settings of a run. `config.toml` in the run folder holds them, with automatic ones resolved."""

    source: str = setting("", affects="nothing", resume="free", hidden=True)
    """Folder of the images, or the name of a built-in set."""
    data: Data = Data()
    network: Network = setting(
        None,
        auto=None,
        common=True,
        measured="CIFAR-10, twenty minutes of one core: KID 0.044 with `tiny`, 0.053 with `small`",
        paper="Ho et al. 2020 (unet); Karras et al. 2024 (mpunet); Peebles and Xie 2023 (dit)",
        see="docs/decisions/0007-default-recipe.md",
    )
    """The network: auto, a size or a kind, with changes after a colon, such as small:dropout=0.1 or dit:patch=4."""
    text_encoder: TextEncoderSettings = setting(TextEncoderSettings(), added_later=True, see="docs/networks.md")
    autoencoder_folder: str = setting(
        "",
        short="autoencoder",
        affects="nothing",
        common=True,
        why="latents have a tenth to a fiftieth of the values of large images",
        paper="Rombach et al. 2022",
        see="docs/latent.md",
    )
    """Train on latents of this autoencoder: a run of `unfog train-autoencoder`, an AutoencoderKL or AutoencoderTiny."""
    label_dropout: float = setting(0.1, at_least=0, at_most=1, usual="0.1", resume="free", paper="Ho and Salimans 2022")
    """Share of training images that are shown without their class, so that sampling can use --guidance."""
    condition_dropout: float = setting(
        0.1, at_least=0, at_most=1, usual="0.1", resume="free", added_later=True, see="docs/conditions.md"
    )
    """With data.condition: share of training images that each condition is hidden from by itself."""
    diffusion: Diffusion = setting(Diffusion(), affects="objective")
    training: Training = Training()
    optimizer: Optimizer = setting(Optimizer(), resume="free")
    ema: EmaSchedule = setting(
        PowerEma(),
        resume="force",
        why="a share of the run suits runs of any length; `unfog ema-sweep` finds the best one afterwards",
        paper="Karras et al. 2024, section 3",
    )
    """Average of the weights, which sampling uses: power:width=0.1 or fixed:decay_max=0.9999."""
    ema_snapshots: EmaSnapshots = setting(EmaSnapshots(), affects="steps", resume="free", added_later=True)
    sampler: Sampler = setting(Sampler(), affects="samples", resume="free")
    guidance: float = setting(
        1.0,
        affects="samples",
        resume="free",
        measured="Fréchet distance on Fashion-MNIST: 3.6 with 1, 5.5 with 1.5, 2.7 with 1.5 within 0.2 to 0.8",
        paper="Ho and Salimans 2022",
        see="docs/decisions/0007-default-recipe.md",
    )
    """Classifier-free guidance in previews and samples: above 1, samples keep closer to their class and vary less."""
    guidance_interval: tuple[float, float] = setting(
        (0.0, 1.0),
        affects="samples",
        resume="free",
        why="guidance in the noisiest fifth costs variety; outside of the interval the network is called once",
        measured="Fréchet distance on Fashion-MNIST: 5.5 without an interval, 2.7 with 0.2 to 0.8",
        paper="Kynkäänniemi et al. 2024",
        see="docs/decisions/0007-default-recipe.md",
    )
    """Guide only where the share of noise, sigma / (alpha + sigma), is within this: 0 is the image, 1 noise alone."""
    guide: Literal["none", "auto"] = setting(
        "none",
        affects="samples",
        resume="free",
        added_later=True,
        why="a run without classes cannot use classifier-free guidance; an earlier EMA needs no more training",
        measured="KID in twenty minutes of one core, with and without it: CIFAR-10 0.030, 0.043; emoji 0.047, 0.070",
        paper="Karras et al. 2024a",
        see="docs/decisions/0020-guide-of-the-same-run.md",
    )
    """Weaker network that samples without classes are guided away from: auto is the run's EMA at 30% of its steps."""
    log: Log = setting(Log(), affects="nothing", resume="free")
    preview: Preview = setting(Preview(), affects="nothing", resume="free")
    evaluate: Evaluate = setting(Evaluate(), affects="nothing", resume="free")
    checkpoint: Checkpoint = setting(Checkpoint(), affects="nothing", resume="free")
    init: Init = setting(Init(), affects="nothing")
    classes: tuple[str, ...] = setting((), hidden=True)
    """Class names, as found in the data."""
    columns: tuple[ColumnFacts, ...] = setting((), added_later=True, hidden=True)
    """Facts on the columns of the data besides the class."""
    latents: Latents = setting(Latents(), affects="objective", added_later=True, hidden=True)
    """Format and statistics of the latents, as measured."""
    autoencoder: Autoencoder = setting(Autoencoder(), affects="objective", added_later=True, hidden=True)
    """The autoencoder that this run trains, if it does; see `unfog train-autoencoder`."""
    fingerprint: str = setting("", affects="objective", resume="force", hidden=True)
    """Digest of the images and their order, so that a resume notices other data."""
    buckets: tuple[str, ...] = setting((), affects="objective", resume="force", added_later=True, hidden=True)
    """Sizes of the buckets from narrow to wide, each with its training images, as found with data.aspect = keep."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_guidance_interval(self.guidance_interval)
        self._check_averages()
        parse_buckets(self.buckets)

    def without_secrets(self) -> Config:
        """Return the settings without passwords and signatures of URLs, to show to others."""
        labels = without_secrets(self.data.labels)
        return replace(self, source=without_secrets(self.source), data=replace(self.data, labels=labels))

    def adopt(self, facts: ImageFacts) -> Config:
        """Return the settings with what the images determine.

        A run keeps the statistics of its columns, as its network was trained with them.
        """
        same = [one.identity for one in self.columns] == [one.identity for one in facts.columns]
        return replace(self, **vars(facts) | ({"columns": self.columns} if same else {}))

    def without_length(self) -> Config:
        """Return the settings with no length, so that one of steps, images and budget can be given."""
        return replace(self, training=replace(self.training, steps=0, images=0, budget=""))

    def with_length_of(self, base: Config) -> Config:
        """Return the settings, with the length of `base` if they give none."""
        if any(getattr(self.training, name) for name in LENGTH):
            return self
        length = {name: getattr(base.training, name) for name in LENGTH}
        return replace(self, training=replace(self.training, **length))

    def _check_averages(self) -> None:
        # Two nearly equal profiles make the equations of a rebuilt EMA nearly singular, and its errors large.
        if is_auto(self.ema_snapshots, "second") or not isinstance(self.ema, PowerEma):
            return
        second = self.ema_snapshots.second
        if abs(math.log(second / self.ema.width)) < 0.2:
            raise RequestError(
                f"ema_snapshots.second = {second} is too close to the width {self.ema.width} of --ema; half "
                "or twice that is usual"
            )

    @property
    def task(self) -> RunTask:
        """Task of the run: to train a diffusion model, or with `unfog train-autoencoder` an autoencoder."""
        return AutoencoderTask(self.autoencoder) if self.autoencoder.factor else DiffusionTask()

    @property
    def representation(self) -> Representation:
        """Form in which the network sees images: latents of the autoencoder in `autoencoder_folder`, or pixels."""
        if self.autoencoder_folder:
            return LatentSpace(self.data, self.autoencoder_folder, self.latents, self.diffusion.sigma_data)
        return PixelSpace(self.data)

    @property
    def image_format(self) -> ImageFormat:
        """The format of the images, which latents are decoded to."""
        return self.data.image_format

    def view(self, images: NDArray[Any]) -> NDArray[np.uint8]:
        """Return pictures uint8 [N, H, W, 3] of stored images [N, H, W, C], by `preview.view`."""
        return self.image_format.view(images, *parse_view(self.preview.view))

    def with_view(self, view: str) -> Config:
        """Return the settings with another `preview.view`. RequestError if the images do not have such channels."""
        check_view(parse_view(view).channels, self.data.channels)
        return replace(self, preview=replace(self.preview, view=view))

    @property
    def size_buckets(self) -> tuple[Bucket, ...]:
        """The buckets of a run that keeps aspects, from narrow to wide; () of any other run."""
        return parse_buckets(self.buckets)

    @property
    def with_most_pixels(self) -> Config:
        """The settings at the largest of `data.size` and the sizes of the buckets, by which memory is planned."""
        return self.at_size(max((*(bucket.size for bucket in self.size_buckets), self.data.size), key=area))

    def at_size(self, size: Size) -> Config:
        """Return the settings of the same run for images of another size.

        Conditions that are images get that size too if it is the size of a bucket: others were not trained.
        """
        columns = self.columns
        if any(bucket.size == size for bucket in self.size_buckets):
            columns = at_sides(columns, *sides_of(size))
        return replace(self, data=replace(self.data, size=size), columns=columns)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the network's input: pixels, or latents."""
        return self.representation.shape

    @property
    def input_shapes(self) -> list[tuple[int, int, int]]:
        """(C, H, W) of all inputs of the network: that of the run, and those of its buckets."""
        return [self.input_shape, *(self.at_size(bucket.size).input_shape for bucket in self.size_buckets)]

    @property
    def conditions(self) -> ConditionFormat:
        """Format of the conditions that the network receives with an image."""
        mask = self.data.channels if self.data.has_unknown else 0
        augment, text = AUGMENT_INPUTS if self.data.augment else 0, self.text_encoder
        factor = self.representation.factor or 1  # that of an autoencoder is 0 until it is read
        return ConditionFormat(self.classes, augment, self.columns, mask, text.layers, text.width, text.model, factor)

    @property
    def usual_guidance(self) -> float:
        """Default guidance scale: 1, which does not guide, without conditions, or if none is ever hidden."""
        return self.guidance if self._guided_by_conditions else 1.0

    @property
    def usual_guide(self) -> Literal["none", "auto"]:
        """Default guide of samples: none if guidance by conditions is possible."""
        return "none" if self._guided_by_conditions else self.guide

    def is_guided_at(self, step: int) -> bool:
        """Return True if samples of a step are guided by default: a snapshot of the EMA is early enough for it."""
        return self.usual_guide == "auto" and 0 < self.ema_snapshots.every <= GUIDE_SHARE * step

    @property
    def _guided_by_conditions(self) -> bool:
        return self.conditions.can_be_dropped and self.label_dropout > 0


@dataclass(frozen=True)
class ImageFacts:
    """Settings that the images determine: `load_images` returns them, and `Config.adopt` takes them over."""

    source: str
    """Absolute, so that a resume finds it from anywhere."""
    data: Data
    classes: tuple[str, ...]
    columns: tuple[ColumnFacts, ...]
    fingerprint: str
    latents: Latents
    buckets: tuple[str, ...] = ()


def _short_flags(kind: type, above: str = "") -> dict[str, str]:
    """Return short flag -> dotted name of each setting that has one."""
    flags: dict[str, str] = {}
    for f in fields(kind):
        if short := rules_of(f).short:
            flags[short] = above + f.name
        # A part of several kinds, such as a schedule, is given as one word, and its settings behind a colon.
        by_kind = is_dataclass(f.default) and hasattr(f.default, "kind") and not isinstance(f.default, Sampler)
        if not above and is_dataclass(f.default) and not by_kind:
            flags |= _short_flags(type(f.default), f"{f.name}.")
    return flags


# Short names of settings. Others are named by their place in the tree, such as --optimizer.warmup.
SHORT = _short_flags(Config)


def check_given_length(changes: Mapping[str, Any]) -> None:
    """Raise RequestError if a person asks for a run of no steps; in a file, 0 leaves a length open."""
    training = changes.get("training", {})
    for name in ("steps", "images"):
        if isinstance(training, Mapping) and training.get(name) in (0, "0"):
            raise RequestError(f"{name} = 0 would train nothing; give at least 1, or omit it to train for an hour")


def check_guidance_interval(interval: tuple[float, float]) -> None:
    """Raise RequestError unless this is an interval of shares of noise."""
    low, high = interval
    if not 0 <= low < high <= 1:
        raise RequestError(
            f"guidance_interval = {low} {high} must be two shares of noise from 0 to 1, the lower first; 0.2 "
            "0.75 omits the cleanest fifth and the noisiest quarter"
        )


def nest_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by short name, or whole sections, as a nested table like that of a TOML file."""
    table: dict[str, Any] = {}
    known = {f.name for f in fields(Config)}
    for given, value in settings.items():
        name = current_name(given)
        name = name if name in known or name in SHORT else USUAL.get(name, name)
        # Epochs are not a measure here, as schedules count images; said before a close name is guessed.
        if name in EPOCHS:
            raise RequestError(f"{name} is not a setting; give steps, images (all images, times {name}) or budget")
        if name not in known and name not in SHORT and (advice := advice_on(name)) is not None:
            raise RequestError(f"{name} is not a setting; {advice.text} (here without the dashes)")
        if name.partition(".")[0] not in known and name not in SHORT:
            close = difflib.get_close_matches(name, USUAL, n=1)  # not all of them, in a list of what there is
            raise RequestError(f"unknown setting {name}{suggest(name, [*known, *SHORT, *close])}")
        # "optimizer" and "init" are sections, and short for what is given most of each.
        whole = name in known and (isinstance(value, Mapping) or is_dataclass(value))
        section, _, field = (name if whole else SHORT.get(name, name)).partition(".")
        if field:
            if not isinstance(table.setdefault(section, {}), dict):
                raise RequestError(f"{section} and {name} cannot both be given, unless {section} is a dict")
            if field in table[section]:
                raise RequestError(f"{section}.{field} is given twice, once as {given}; give one of them")
            table[section][field] = value
        else:
            if section in table and not isinstance(value, Mapping):
                if not isinstance(table[section], Mapping):
                    raise RequestError(f"{section} is given twice, once as {given}; give one of them")
                raise RequestError(f"{name} must be a dict where its settings are given by short name too")
            twice = set(table.get(section, {})) & set(value) if isinstance(value, Mapping) else set()
            if twice:
                raise RequestError(f"{name}.{min(twice)} is given twice, once by its short name; give one of them")
            table[section] = {**table.get(section, {}), **value} if isinstance(value, Mapping) else value
    return table
