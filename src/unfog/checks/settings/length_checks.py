"""Checks of the training length, and a guide to it from published runs.

Training length is measured in images seen, repeats counted, because that carries over between runs; steps, hours and
epochs follow from it. The figures come from a few runs on other datasets, so each is a wide range.
"""

from __future__ import annotations

from typing import NamedTuple

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.reporting.findings import Figure, Finding
from unfog.reporting.progress import format_duration, format_number
from unfog.text import plural

# Epochs after which a small set is memorized; DDPM's CIFAR-10, 50,000 images with dropout, had 2,048.
_MANY_EPOCHS = 2000
_SMALL_SET = 10_000
_COMMON_BATCH = 64  # of the table of common lengths, which lists steps only


class _Published(NamedTuple):
    what: str
    side: int
    pictures: int
    images: float
    """Training images seen."""
    level: str
    source: str


PUBLISHED_RUNS = (
    _Published("Fashion-MNIST, 1M parameters", 28, 9_500, 5e4, "recognisable", "docs/evidence/quality"),
    _Published("the same", 28, 9_500, 1e5, "FD 7.2, where real images have 1.7", "docs/decisions/0007"),
    _Published(
        "emoji, 1M parameters", 32, 7_572, 1.4e5, "faces and flags only, the rest blots", "docs/evidence/quality"
    ),
    _Published("CIFAR-10, 36M parameters", 32, 50_000, 800e3 * 128, "FID 3.2", "Ho et al. 2020, appendix B"),
    _Published("CIFAR-10, 56M parameters", 32, 50_000, 200e6, "FID 1.8", "Karras et al. 2022, table 7"),
    _Published("butterflies, 114M parameters", 128, 1_000, 5e4, "recognisable", "diffusers' training tutorial"),
    _Published("FFHQ, 62M parameters", 64, 70_000, 200e6, "FID 2.4", "Karras et al. 2022, table 7"),
    _Published("ImageNet, 296M parameters", 64, 1_281_167, 2500e6, "FID 1.4", "Karras et al. 2022, table 7"),
    _Published("CelebA-HQ, 114M parameters", 256, 30_000, 500e3 * 64, "published", "Ho et al. 2020, appendix B"),
    _Published("LSUN bedrooms, 114M parameters", 256, 3_033_042, 2.4e6 * 64, "FID 6.4", "Ho et al. 2020, appendix B"),
    _Published("ImageNet, 675M parameters, latent", 256, 1_281_167, 7e6 * 256, "FID 2.3", "Peebles and Xie 2023"),
)
# A table common in tutorials: dataset, resolution, images, steps of 64 images, time.
COMMON_LENGTHS = (
    ("10,000 images", 64, 10_000, 200_000, "1 day on a V100"),
    ("50,000 images", 64, 50_000, 500_000, "3 to 5 days"),
    ("1,000,000 images", 64, 1_000_000, 1_000_000, "2 to 3 weeks"),
    ("50,000 images", 256, 50_000, 500_000, "1 to 2 weeks"),
    ("CIFAR-10", 32, 50_000, 500_000, ""),
    ("ImageNet", 256, 1_281_167, 1_000_000, ""),
)

Range = tuple[float, float]
# Images seen, from one kind of thing before one kind of background to everything there is, at sides up to 40, up to 96
# and beyond: from PUBLISHED_RUNS, the upper ends of "recognisable" by proportion to the side, and for lack of better.
MILESTONES: dict[str, tuple[Range, Range, Range]] = {
    "recognisable": ((5e4, 1e6), (5e4, 2e6), (5e4, 8e6)),
    "good": ((1e6, 3e7), (1e7, 6.4e7), (3e7, 1.5e8)),
    "saturated": ((1e8, 2e8), (2e8, 2.5e9), (5e8, 1.8e9)),
}


def _milestones(side: int) -> dict[str, Range]:
    """Return the lowest and highest number of images for each milestone at this resolution."""
    band = 0 if side <= 40 else 1 if side <= 96 else 2
    return {name: bands[band] for name, bands in MILESTONES.items()}


def recognisable_from(config: Config) -> float:
    """Return the number of images that a run sees, at this resolution, before its samples are recognisable."""
    return _milestones(config.image_format.square_side)["recognisable"][0]


def format_count(value: float) -> str:
    """Return "50,000", "1.5 million" or "2.5 billion"."""
    for unit, name in ((1e9, " billion"), (1e6, " million")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def check_length(config: Config, prepared: Dataset, steps: int = 0) -> Finding:
    """Check that the run is long enough for recognisable samples, and not so long that it memorizes a small set.

    `steps` is its length as planned by a time budget; 0: that of the settings.
    """
    batch, pictures = config.training.batch, len(prepared.train)
    images = steps * batch or config.training.images
    low, high = _milestones(config.image_format.square_side)["recognisable"]
    steps, epochs, memorized_at = images // batch, images / pictures, _MANY_EPOCHS * pictures
    # Weights of another run have seen images before, so neither limit is known for them.
    fresh, many = not config.init.folder, epochs > _MANY_EPOCHS
    repeats = f"; so few are memorized after about {format_count(memorized_at)} images, before samples are recognisable"
    need = f"; samples become recognisable after about {format_count(low)} to {format_count(high)} images"
    copies = "; a small set is memorized long before that, so that samples become copies"
    more = "add images, at least hundreds; the model will only repeat these"
    longer = f"train on --images {round(low)} or more; the default length is an hour"
    flip = "--flip where left and right do not matter, " * (not config.data.flip)
    shorter = f"--images {memorized_at}, more images, {flip}or dropout"
    return Finding.graded(
        "settings.length",
        f"{plural(steps, 'step')} train{'s' * (steps == 1)} on {plural(images)}, each of the {pictures:,} about "
        f"{format_number(epochs)} times",
        (fresh and memorized_at < low, "warning", repeats, more),
        (fresh and images < low / 2, "warning", need, longer),
        (many and pictures < _SMALL_SET, "warning", copies, shorter),
        (many, "hint", "; watch the held-out loss for a rise", shorter),
        (epochs < 1, "hint", "; some images are never seen", "a longer run"),
        facts={"images": images, "steps": steps, "epochs": epochs, "recognisable_from": low},
    )


def training_length_guide(
    config: Config, prepared: Dataset, seconds_per_step: float | None = None, doubt: str = ""
) -> Finding:
    """Return how long to train on these images, in images, steps, hours and epochs, with sources.

    Hours are left out where `seconds_per_step` is None. `doubt` says why these seconds are not to be trusted.
    """
    images, batch, pictures = config.training.images, config.training.batch, len(prepared.train)
    side, size = config.image_format.square_side, config.data.size
    pace = seconds_per_step / batch if seconds_per_step else None
    guide = _milestones(side)
    facts = {
        "images": images,
        "epochs": images / pictures,
        "seconds_per_image": pace,
        "milestones": {name: list(span) for name, span in guide.items()},
        "memorised_from": _MANY_EPOCHS * pictures,
    }
    figures = (
        Figure(
            f"Training images at {size} pixels",
            table=_guide_rows({**guide, "this run": (images, images)}, batch, pictures, pace),
            caption="The lower figure is for images of one kind, the higher for images of everything. These are "
            "orders of magnitude from other datasets and networks; trust the previews more.",
        ),
        Figure("Sources", table=[_Published._fields, *([*map(_cell, known)] for known in PUBLISHED_RUNS)]),
        Figure(
            "Common training lengths, at your speed",
            table=_common_rows(side, pace),
            caption="Steps of 64 images. Time is assumed to grow with the number of pixels for this network; "
            "larger images usually need a larger network, which takes longer.",
        ),
    )
    low, high = guide["recognisable"]
    time = f" in {format_duration(images * pace)}" if pace else ""
    place = "in addition to what its initial weights have seen" if config.init.folder else _place(images, guide)
    said = (
        f"at {size} pixels, samples are recognisable after about {format_count(low)} to {format_count(high)} images "
        f"and good after {format_count(guide['good'][0])} to {format_count(guide['good'][1])}; "
        f"this run sees {format_count(images)}{time}, {place}" + f"; {doubt}" * bool(doubt)
    )
    return Finding("length.guide", "fine", said, facts=facts, figures=figures)


def _place(images: float, guide: dict[str, Range]) -> str:
    if images < guide["recognisable"][0]:
        return "too few for recognisable samples"
    within = [name for name, span in guide.items() if span[0] <= images < span[1]]
    if within:
        return f"where samples become {within[-1]}"
    return f"beyond where they become {[name for name, span in guide.items() if images >= span[1]][-1]}"


def _guide_rows(spans: dict[str, Range], batch: int, pictures: int, pace: float | None) -> list[list[str]]:
    """Return the guide as a table that marks the milestones which a small set cannot reach."""
    rows = [["", "images", "steps", "epochs", "time"]]
    for name, span in spans.items():
        images, steps, epochs = (
            _format_range([format_count(value / unit) for value in span]) for unit in (1, batch, pictures)
        )
        beyond = ": memorized before" if span[0] / pictures > _MANY_EPOCHS else ""
        time = _format_range([format_duration(value * pace) for value in span]) if pace else "not measured"
        rows.append([name, images, steps, epochs + beyond, time])
    return rows


def _common_rows(side: int, pace: float | None) -> list[list[str]]:
    rows = [["set", "side", "steps", "images", "epochs", "published time", "time at your speed"]]
    for name, its_side, pictures, steps, told in COMMON_LENGTHS:
        images = steps * _COMMON_BATCH
        # The measured pace is of this side; a network's work grows with the number of pixels.
        time = format_duration(images * pace * (its_side / side) ** 2) if pace else "not measured"
        counts = [format_count(value) for value in (steps, images, images / pictures)]
        rows.append([name, str(its_side), *counts, told, time])
    return rows


def _format_range(ends: list[str]) -> str:
    return ends[0] if ends[0] == ends[-1] else f"{ends[0]} to {ends[-1]}"


def _cell(value: object) -> str:
    return value if isinstance(value, str) else format_count(float(value)) if isinstance(value, float) else f"{value:,}"
