"""Memorization checks: the nearest training images of generated images, compared with those of unseen real images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from unfog.data.dataset import Dataset, ImageSet, PixelArray, evenly_spaced
from unfog.reporting.charts import Floats, line_chart
from unfog.reporting.findings import Figure, Finding
from unfog.reporting.image_grids import Pixels, labelled_strip

# Fewest training images for a comparison: among fewer, all are near.
FEWEST = 4
# Generated images that are checked, at most.
DRAWN = 500
# Ratio of distances below which a generated image is a copy: the nearest training image over the next ones.
COPY = 0.5
_SIDE = 16  # images are compared as averages at this side, so that a shift by a pixel hardly counts
# Next ones that the nearest is compared with (Carlini et al. 2023, section 4.2). Of few images only a sixth: all others
# would be those of other kinds as well, from which even an unseen image is far.
_NEIGHBOURS = 50
# Where more than the first share of unseen images have so near a relative, nearness proves nothing. A copy is then what
# comes nearer than all but the second share of them by the third factor. Drawings without the noise that photographs
# have come 0.7 times as near.
_RELATED, _LOWEST, _NEARER = 0.1, 0.05, 0.4
_SAME = 0.5  # levels of 255 below which two images count as the same
_MOST = 100_000  # training images that are searched; of a larger set, as many, evenly spread
_SHOWN = 8
CHUNK = 2048
_REAL = 256  # real images that show how near unseen images usually are
_ENOUGH = 20  # fewest held-out images for a comparison


class _NearestImages(NamedTuple):
    """The training images near to each of N images."""

    distance: Tensor
    """float32 [N, K], ascending: root mean square difference in levels of 0 to 255."""
    image: Tensor
    """int64 [N, K]: row of the training image."""

    @property
    def ratio(self) -> Floats:
        """[N] in [0, 1]: distance of the nearest over the mean of the next ones; near 0 for a copy, else about 1."""
        rest = self.distance[:, 1:].double().mean(1)
        return (self.distance[:, 0].double() / rest.clamp_min(1e-9)).clamp(0, 1).numpy()


def _pixel_features(pixels: Tensor) -> Tensor:
    """Average uint8 [N, C, H, W] down to float32 [N, D]."""
    side = (min(_SIDE, pixels.shape[2]), min(_SIDE, pixels.shape[3]))
    small: Tensor = adaptive_avg_pool2d(pixels.float(), side)
    return small.flatten(1)


def _find_nearest(
    queries: Tensor,
    images: PixelArray,
    rows: Sequence[int] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> _NearestImages:
    """Find the images nearest to each query, mirrored or not, reading them chunk by chunk.

    Args:
        queries: uint8 [Q, C, H, W].
        images: uint8 [N, C, H, W], in memory or read on the way.
        rows: row of each query among the images, so that it does not find itself; -1, or None for all, if it has none.
        progress: called with the number of images searched.
    """
    searched = evenly_spaced(len(images), _MOST)
    kept, own, wanted = _neighbours_of(len(searched)), _own_rows(queries, rows), _pixel_features(queries)
    best = torch.full((len(queries), 0), 0.0)
    index = torch.zeros(len(queries), 0, dtype=torch.int64)
    for first in range(0, len(searched), CHUNK):
        chosen = searched[first : first + CHUNK]
        chunk = torch.from_numpy(np.ascontiguousarray(images[chosen]))
        distance = torch.minimum(
            _distances(wanted, _pixel_features(chunk)), _distances(wanted, _pixel_features(chunk.flip(3)))
        )
        here = torch.from_numpy(chosen).expand(len(queries), -1)
        best, index = torch.cat([best, distance.masked_fill(here == own, torch.inf)], 1), torch.cat([index, here], 1)
        best, order = best.topk(min(kept, best.shape[1]), largest=False)
        index = index.gather(1, order)
        progress(first + len(chosen))
    return _NearestImages(best, index)


def find_nearest_features(queries: Tensor, reference: Tensor, rows: Sequence[int] | None = None) -> _NearestImages:
    """Find the nearest images by features [Q, D] of the queries and [N, D] of the images, in the extractor's scale."""
    # Mirrored copies are found only by an extractor that ignores mirroring: features of mirrored images would have to
    # be computed too.
    own, every, found = _own_rows(queries, rows), torch.arange(len(reference))[None], []
    for first in range(0, len(queries), CHUNK // 8):
        part = slice(first, first + CHUNK // 8)
        distance = _distances(queries[part], reference).masked_fill(every == own[part], torch.inf)
        found.append(distance.topk(_neighbours_of(len(reference)), largest=False))
    return _NearestImages(torch.cat([best for best, _ in found]), torch.cat([index for _, index in found]))


def _neighbours_of(count: int) -> int:
    """Return how many neighbours are kept of each query: the nearest, and the next ones that it is compared with."""
    return 1 + min(_NEIGHBOURS, max(2, count // 6))


def _own_rows(queries: Tensor, rows: Sequence[int] | None) -> Tensor:
    return torch.full((len(queries), 1), -1) if rows is None else torch.tensor(rows)[:, None]


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Root mean square differences [A, B] of features [A, D] and [B, D]."""
    a, b = a.double(), b.double()  # in float32, rounding would give an exact copy a distance
    squared = a.square().sum(1)[:, None] + b.square().sum(1)[None] - 2 * a @ b.T
    return (squared.clamp_min(0) / a.shape[1]).sqrt().float()


class Nearness(NamedTuple):
    """Training images nearest to generated images, and to real ones that are not searched or do not find themselves."""

    found: _NearestImages
    unseen: _NearestImages
    what: str
    """Name of the unseen images in messages: "held-out images"."""
    searched: int
    """Number of training images searched."""
    same: float = _SAME
    """Distance below which two images are the same."""
    rolled: bool = False
    """Whether samples may be copies that are moved around their edges, which the search does not find."""

    @property
    def limit(self) -> float:
        """Ratio of distances below which one generated image counts as a copy."""
        if (self.unseen.ratio < COPY).mean() <= _RELATED:
            return COPY
        return min(COPY, _NEARER * float(np.quantile(self.unseen.ratio, _LOWEST)))

    def copy_shares(self, limit: float) -> tuple[float, float, bool]:
        """Return the shares of copies among generated and unseen images, and True if the first is surely larger.

        A copy has a ratio below `limit`, or is the same image.
        """
        copied, usual = (
            (of.ratio < limit) | ((of.distance[:, 0] < self.same).numpy() & (of.ratio < COPY))
            for of in (self.found, self.unseen)
        )
        share, expected = float(copied.mean()), float(usual.mean())
        # Standard error of the difference of two shares, with one more copy in each, so that 0 copies are not certain.
        spread = max(expected, 1 / (len(usual) + 2))
        error = float(np.sqrt(spread * (1 - min(spread, 0.99)) * (1 / len(copied) + 1 / len(usual))))
        return share, expected, share - expected > 3 * error


def check_memorization(drawn: Pixels, matches: Pixels, search: Nearness) -> Finding:
    """Compare generated images [N, H, W, C] with the training image nearest to each: the finding run.memorised."""
    ratio, usual, what, searched = search.found.ratio, search.unseen.ratio, search.what, search.searched
    limit, (share, expected, certain) = COPY, search.copy_shares(COPY)
    related = expected
    if not certain:
        limit = search.limit
        share, expected, certain = search.copy_shares(limit)
    copies = round(share * len(ratio))
    facts = {
        "copies": copies,
        "drawn": len(ratio),
        "share": share,
        "share_of_unseen": expected,
        "unseen_with_relatives": related,
        "limit": limit,
        "median_ratio": float(np.median(ratio)),
        "median_ratio_of_unseen": float(np.median(usual)),
        "training_images": searched,
    }
    figures = (_pairs_figure(drawn, matches, ratio), _ratio_figure(ratio, usual, what, limit))
    clearly_more = share - expected >= 0.1
    if certain and (clearly_more or copies > 1):
        evidence = (
            f"{copies} of {len(ratio)} generated images copy a training image (nearest at less than {limit:.2g} of the "
            f"distance of the next ones; so is {expected:.0%} of {len(usual)} {what}), of {searched:,} searched"
        )
        remedy = "train on more images, for fewer steps, or with --flip and dropout (--network small:dropout=0.1)"
        return Finding("run.memorised", "warning" if clearly_more else "hint", evidence, remedy, facts, figures)
    lower = ": your images are alike among themselves" * (limit < COPY)
    evidence = (
        f"no sign of copies: the nearest training image is at {facts['median_ratio']:.2f} of the distance of the next "
        f"ones (1: no nearer to one image than to others); {len(usual)} {what} are "
        f"at {facts['median_ratio_of_unseen']:.2f}{lower}{', so' if lower else ';'} copies would lie below {limit:.2g}"
        f"{f' in place of {COPY}' if lower else ''} ({searched:,} searched)"
    )
    evidence += "; copies that are moved around their edges are not found" * search.rolled
    return Finding("run.memorised", "fine", evidence, "", facts, figures)


def _pairs_figure(drawn: Pixels, matches: Pixels, ratio: Floats) -> Figure:
    """Show the generated images with the lowest ratios over their nearest training images."""
    order = np.argsort(ratio)[:_SHOWN]
    captions = [f"{ratio[i]:.2f}" for i in order]
    picture = labelled_strip(
        {"generated": drawn[order], "training": matches[order]}, captions, scale=max(1, 64 // drawn.shape[1])
    )
    caption = "Over each pair: its distance over that of the generated image to the next training images."
    return Figure("Generated images and their nearest training images", picture, caption=caption)


def _ratio_figure(ratio: Floats, usual: Floats, what: str, limit: float) -> Figure:
    curves = {name: (np.sort(r), (np.arange(len(r)) + 1) / len(r)) for name, r in (("generated", ratio), (what, usual))}
    chart = line_chart(curves, "distance of the nearest over that of the next ones", "share below it", zero_y=True)
    caption = f"Copies lie left of {limit:.2g}. A curve left of that of the {what} means memorization."
    return Figure("How near to the training images", svg=chart, caption=caption)


class UnseenImages:
    """Real images to compare with: held-out images, or too few of those, training images among the others."""

    def __init__(self, prepared: Dataset):
        self.enough = len(prepared.held_out) >= _ENOUGH
        self.images: ImageSet = prepared.held_out if self.enough else prepared.train
        self.rows: NDArray[np.int64] = evenly_spaced(len(self.images), _REAL)
        self.what = "held-out images" if self.enough else "training images among the others"

    @property
    def pixels(self) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.images.pixels[self.rows])

    @property
    def own(self) -> list[int]:
        """Index of each among the training images; -1 if it is not one of them."""
        return [-1] * len(self.rows) if self.enough else self.rows.tolist()


def find_nearest_images(
    drawn: Pixels, prepared: Dataset, progress: Callable[[int], None] = lambda done: None
) -> Nearness:
    """Search the training images for those nearest to generated images [N, H, W, C], and to unseen ones, by pixels."""
    unseen = UnseenImages(prepared)
    queries = torch.cat([torch.from_numpy(drawn.copy()).permute(0, 3, 1, 2), torch.from_numpy(unseen.pixels)])
    both = _find_nearest(queries, prepared.train.pixels, [-1] * len(drawn) + unseen.own, progress)
    # Samples of a network without edges begin anywhere, whether or not its training images were moved.
    rolled = bool(prepared.settings.wrapped)
    return Nearness(*_split_queries(both, len(drawn)), unseen.what, len(prepared.train), rolled=rolled)


def check_memorization_by_pixels(drawn: Pixels, prepared: Dataset, progress: Callable[[int], None]) -> Finding:
    """Compare generated images [N, H, W, C] with all training images by pixels."""
    near, train = find_nearest_images(drawn, prepared, progress), prepared.train
    matches = train.pixels[near.found.image[:, 0].numpy()].transpose(0, 2, 3, 1)
    return check_memorization(drawn, matches, near)


def check_memorization_by_features(
    drawn: Pixels, features: Tensor, real: Tensor, rows: NDArray[np.int64], unseen: Tensor, prepared: Dataset
) -> Finding:
    """Compare features of generated images [N, D], of training images `rows` [R, D], and of `UnseenImages`."""
    usual = UnseenImages(prepared)
    place = {int(row): i for i, row in enumerate(rows)}
    own = [place.get(row, -1) for row in usual.own]
    both = find_nearest_features(torch.cat([features, unseen]), real, [-1] * len(features) + own)
    found, other = _split_queries(both, len(features))
    matches = prepared.train.pixels[rows[found.image[:, 0].numpy()]].transpose(0, 2, 3, 1)
    # Distance of equal images in this scale: a thousandth of the distance of real images to their neighbours.
    same = 1e-3 * float(other.distance[:, 1:].median())
    return check_memorization(drawn, matches, Nearness(found, other, usual.what, len(rows), same))


def _split_queries(both: _NearestImages, count: int) -> tuple[_NearestImages, _NearestImages]:
    return (
        _NearestImages(both.distance[:count], both.image[:count]),
        _NearestImages(both.distance[count:], both.image[count:]),
    )
