"""Pictures of conditions: masks in colours, second images and what is made of an image; samples beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unfog.config.schema import Config
from unfog.pipeline.generate import shows_unknown, with_legend
from unfog.reporting.image_grids import Pixels, captioned_groups
from unfog.text import sanitize
from unfog.values.colour_map import category_colours, with_checkers
from unfog.values.condition_format import Given
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.image_format import colour_channels, to_rgb
from unfog.values.kinds.image_kinds import IMAGE_KINDS, image_columns

SAMPLE, TRUTH = "drawn", "true"
"""Captions of a sample, and of the image whose conditions it has."""


def conditions_sheet(config: Config, given: Given, samples: NDArray[Any], truth: NDArray[Any]) -> Pixels:
    """Return one picture of samples [N, H, W, C], each beside its conditions that are images, and the true image.

    Below each are its other conditions. `truth` [n, H, W, C] has the images whose conditions the samples cycle through;
    [0, …] if none is to be shown.
    """
    numbers = range(len(samples))
    shown = condition_pictures(config, given, numbers) if samples.shape[1:3] == config.image_format.shape[1:] else {}
    parts = {**shown, SAMPLE: config.view(samples)}
    if len(truth):
        parts[TRUTH] = config.view(truth)[[i % len(truth) for i in numbers]]
    unknown = any(shows_unknown(config, images) for images in (samples, truth) if len(images))
    return with_legend(captioned_groups(parts, condition_captions(config, given, numbers)), config, unknown)


def condition_captions(config: Config, given: Given, numbers: Sequence[int]) -> list[str]:
    """Return the conditions of the samples of these numbers as text, but for those that are images."""
    pictures = {one.name for one in image_columns(config.columns)}
    told = tuple(one for one in given if one[0] not in pictures)
    names = config.conditions.captions(told, max(numbers, default=0) + 1)
    return [sanitize(names[i % len(names)]) if names else "" for i in numbers]


def condition_pictures(config: Config, given: Given, numbers: Sequence[int]) -> dict[str, Pixels]:
    """Return pictures uint8 [N, H, W, 3] of each condition that is an image, by name, of the samples of these numbers.

    Masks have a colour for each category. What is not known is checkered grey.
    """
    facts = {one.name: one for one in image_columns(config.columns)}
    told = config.conditions.columns_of(tuple(one for one in given if one[0] in facts), numbers)
    return {name: _picture(config, facts[name], column.values) for name, column in told.items()}


def _picture(config: Config, facts: ColumnFacts, values: NDArray[np.float32]) -> Pixels:
    """Return values of a condition [N, C, H, W], NaN where they are not known, as uint8 [N, H, W, 3]."""
    known: NDArray[np.bool_] = np.asarray(np.isfinite(values).all(1))
    values = np.where(known[:, None], values, 0).astype(np.float32)
    if IMAGE_KINDS[facts.kind].made:
        # Brightness has one channel, and is shown as an image of the run.
        x0 = torch.from_numpy(values).expand(-1, config.image_format.channels, -1, -1)
        shown = config.view(config.image_format.to_pictures(x0))
    else:
        shown = _PICTURES[facts.kind](facts, values)
    return with_checkers(shown, known)


def _of_mask(facts: ColumnFacts, values: NDArray[np.float32]) -> Pixels:
    colours: Pixels = np.array(category_colours(facts.categories), np.uint8)
    return colours[values[:, 0].astype(np.int64)]


def _of_second(facts: ColumnFacts, values: NDArray[np.float32]) -> Pixels:
    """Return the first three channels, or the first, between the least and the largest value of the set."""
    channels = int(facts.statistics[0])
    low, high = np.array(facts.statistics[3:]).reshape(2, -1, 1, 1)
    shown = ((values - low) / (high - low) * 255).round().clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return to_rgb(np.ascontiguousarray(shown[..., : colour_channels(channels > 2)]))


_PICTURES: Mapping[str, Callable[[ColumnFacts, NDArray[np.float32]], Pixels]] = {"mask": _of_mask, "image": _of_second}
