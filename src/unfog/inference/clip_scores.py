"""CLIP score of a run: how well samples agree with their captions, beside real images and captions of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from unfog.config.schema import Config
from unfog.data.dataset import Dataset, evenly_spaced
from unfog.errors import RequestError
from unfog.evaluation.clip_score import Captioned, clip_score
from unfog.evaluation.features import PixelSource
from unfog.evaluation.judged_kinds import FEWEST, ConditionScore
from unfog.inference.obeyed_conditions import MOST_REAL, in_parts
from unfog.models.pretrained.image_text import ImageTextModel
from unfog.reporting.progress import Progress
from unfog.text import plural, sanitize
from unfog.values.columns import Column
from unfog.values.condition_kinds import ColumnFacts, kind_of
from unfog.values.tokenizer import tokenizer_of


def open_clip(config: Config, folder: str, device: torch.device) -> ImageTextModel:
    """Load the model in `folder`, or else the text encoder of the run.

    RequestError if a run has no captions, its images are not pictures, or the folder lacks an encoder of images.
    """
    if config.conditions.text is None:
        raise RequestError("clip is of runs with captions, and this one has none; leave it out")
    if not config.image_format.is_picture:
        raise RequestError("clip is of pictures of 8 bits, grey or RGB, and this run has other images; leave it out")
    if not folder and not config.text_encoder.pretrained:
        raise RequestError("the metric clip needs --clip-folder: a local folder of Hugging Face of CLIP or SigLIP")
    return ImageTextModel(folder or config.text_encoder.pretrained, device, "clip_folder")


def measure_clip(
    config: Config, dataset: Dataset, samples: PixelSource, asked: Mapping[str, Column], model: ImageTextModel
) -> tuple[list[ConditionScore], str]:
    """Return the score of samples [N, C, H, W] drawn with the columns `asked`, and what it was measured with.

    [] if too few of them have a caption. Real images are held-out ones, or training images if those are too few.
    """
    facts = config.conditions.text
    assert facts is not None, "a run without captions is refused"
    real, what = dataset.held_out, "held-out image"
    if len(real) < FEWEST:
        real, what = dataset.train, "training image"
    taken = real.take(evenly_spaced(len(real), MOST_REAL))
    with Progress("comparing with captions", len(samples) + len(taken)) as progress:
        given = asked[facts.name].values if facts.name in asked else np.zeros((0, 1), np.int16)
        drawn = _captioned(model, facts, in_parts(samples), given, progress)
        true = _captioned(model, facts, in_parts(taken.pixels), taken.columns[facts.name].values, progress)
    score = clip_score(facts, drawn, true)
    said = f"CLIP score: cosine by {sanitize(model.name)} (sha256 {model.digest[:8]}); real images: "
    return [] if score is None else [score], said + plural(len(true.captions), what)


def _captioned(
    model: ImageTextModel,
    facts: ColumnFacts,
    parts: Iterable[NDArray[np.generic]],
    tokens: NDArray[np.generic],
    progress: Progress,
) -> Captioned:
    """Return the vectors of those images whose captions are known."""
    tokenizer = tokenizer_of(facts.categories)
    captions = [tokenizer.decode(row) for row in kind_of(facts.kind).pick(tokens, None).tolist()]
    images, done = list[torch.Tensor](), 0
    for part in parts if captions else ():
        if known := [i for i in range(len(part)) if captions[done + i]]:
            images.append(model.images(torch.from_numpy(np.ascontiguousarray(part[known]))))
        done += len(part)
        progress.advance(len(part))
    kept = [text for text in captions if text]
    if not kept:
        return Captioned(torch.zeros(0, 1), torch.zeros(0, 1), ())
    different = sorted({*kept})
    place = {text: i for i, text in enumerate(different)}
    return Captioned(torch.cat(images), model.texts(different)[[place[text] for text in kept]], kept)
