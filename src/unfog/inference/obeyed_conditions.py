"""Obedience of samples to the conditions that were asked, by a judge from the cache; and the worth of conditions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from unfog.config.requests.evaluate import OBEYS, WORTH
from unfog.config.schema import Config
from unfog.data.dataset import Dataset, ImageSet, evenly_spaced
from unfog.errors import RequestError
from unfog.evaluation.condition_worth import ALL, ConditionWorth, condition_worth, passes
from unfog.evaluation.features import PixelSource
from unfog.evaluation.held_out import HeldOut, HeldOutBuckets, LossAt
from unfog.evaluation.judge import VERSION, Batch, Judge
from unfog.evaluation.judged_kinds import JUDGED, ConditionScore, JudgedKind, Retrieval, score_condition
from unfog.files.cache_folder import cache_folder, hold, make_room, release
from unfog.files.safe_files import tensor_file, write_atomic
from unfog.inference.true_images import compared_columns
from unfog.reporting.progress import Progress
from unfog.text import plural
from unfog.values.columns import Column
from unfog.values.condition_format import ConditionFormat
from unfog.values.condition_kinds import ColumnFacts

_AT_ONCE = 250  # images that are read and judged
MOST_REAL = 2000
"""Real images whose scores are compared with those of samples, at most."""
_FEW_HELD_OUT = 50  # held-out images below which training images are kept from the judge as well
_KEPT = 5  # one of so many training images then


def judged_columns(format: ConditionFormat) -> tuple[ColumnFacts, ...]:
    """Return the conditions that a judge can read from images; one class or category alone says nothing."""
    return tuple(one for one in format.facts if one.kind in JUDGED and (one.statistics or len(one.categories) > 1))


def can_be_obeyed(format: ConditionFormat) -> bool:
    """Return True if a condition has a judge, or is an image that samples can be compared with."""
    return bool(judged_columns(format) or compared_columns(format))


def check_condition_metrics(metrics: Sequence[str], conditions: ConditionFormat) -> None:
    """Raise RequestError if one of the metrics is of conditions that a run does not have, or that have no judge."""
    if wrong := [name for name in (OBEYS, WORTH) if name in metrics and not conditions.can_be_dropped]:
        raise RequestError(f"{wrong[0]} is of runs with conditions, and this one has none; leave it out")
    if OBEYS in metrics and not can_be_obeyed(conditions):
        raise RequestError(f"{OBEYS} has no judge for {', '.join(map(str, conditions.facts))}; leave it out")


@dataclass(frozen=True, eq=False)
class ConditionJudge:
    """A judge of the conditions of a run, with what it reads from real images that it was not trained on."""

    judge: Judge
    real: list[Tensor]
    """Outputs for each column, [N, K] each."""
    real_values: list[NDArray[np.generic]]
    """Values of each column of the same images, [N, …] each."""
    kinds: list[JudgedKind]
    """The scores of each column."""
    description: str

    @classmethod
    def open(cls, config: Config, dataset: Dataset) -> ConditionJudge:
        """Return the judge of a run from the cache, or train it. `judged_columns` of the run may not be empty."""
        judge, train = Judge.untrained(judged_columns(config.conditions), dataset.settings.image_format), dataset.train
        columns = judge.facts
        rows = evenly_spaced(len(train), judge.most_images)
        held_out = evenly_spaced(len(dataset.held_out), MOST_REAL)
        kept = rows[::_KEPT] if len(held_out) < _FEW_HELD_OUT else rows[:0]
        rows = np.setdiff1d(rows, kept)
        _train(judge, train, rows, config.data.flip)
        sets = [(dataset.held_out, held_out), (train, kept)]
        outputs, values = list[list[Tensor]](), list[Sequence[NDArray[np.generic]]]()
        for stored, own in chain(*(_batches(images, some, columns) for images, some in sets)):
            outputs.append(judge.read([stored]))
            values.append(own)
        parts = [plural(len(held_out), "held-out image")] * bool(len(held_out))
        parts += [f"{plural(len(kept), 'training image')} that it was not trained on"] * bool(len(kept))
        trained = f"{plural(len(rows), 'training image')} at {judge.grid[1]}x{judge.grid[0]}"
        said = f"a small network trained on {trained}; real images: {' and '.join(parts)}"
        kinds = [_kind(judge, i, dataset) for i in range(len(columns))]
        said += "".join(f"; {one.name}: {kind}" for one, kind in zip(columns, kinds) if isinstance(kind, Retrieval))
        compared = compared_columns(config.conditions)
        if others := [one.name for one in config.conditions.facts if one not in (*columns, *compared)]:
            said += f"; without a judge: {', '.join(others)}"
        read = [torch.cat(each) for each in zip(*outputs)]
        return cls(judge, read, [np.concatenate(each) for each in zip(*values)], kinds, said)

    def score(self, samples: Iterable[NDArray[np.generic]], given: Mapping[str, Column]) -> list[ConditionScore]:
        """Return the scores of samples, parts [n, C, H, W] of stored values, that were drawn with these columns."""
        scores = list[ConditionScore]()
        read = self.judge.read(samples)
        for one, output, real, values, kind in zip(self.judge.facts, read, self.real, self.real_values, self.kinds):
            if one.name in given:
                scores += score_condition(one, (output, given[one.name].values), (real, values), kind)
        return scores


def _kind(judge: Judge, column: int, dataset: Dataset) -> JudgedKind:
    """Return the scores of a column of a trained judge. The captions to look for are those of all images."""
    facts, reader = judge.facts[column], judge.reader(column)
    if reader is None:
        return JUDGED[facts.kind]
    sets = [images for images in (dataset.train, dataset.held_out) if len(images)]
    rows = [evenly_spaced(len(images), judge.most_images) for images in sets]
    return Retrieval(reader, facts, [one.columns[facts.name].values[some] for one, some in zip(sets, rows)])


def in_parts(samples: PixelSource) -> Iterator[NDArray[np.generic]]:
    """Yield samples [N, C, H, W], or a source of them by slices, in the parts that `ConditionJudge.score` takes."""
    for first in range(0, len(samples), _AT_ONCE):
        yield samples[first : min(first + _AT_ONCE, len(samples))]


def _train(judge: Judge, images: ImageSet, rows: NDArray[np.int64], flip: bool) -> None:
    """Load the weights of a judge from the cache, or train it on these rows and keep them there."""
    facts = (VERSION, images.fingerprint, judge.facts, judge.format, len(rows), len(images), flip)
    key = hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    path = cache_folder() / f"judge-{key}.safetensors"
    hold(path)
    with suppress(OSError, SafetensorError):
        if judge.load(load_file(tensor_file(path, cache_folder()))):
            release(path)
            return
    with Progress("training a judge of the conditions", None) as progress:
        judge.train(_batches(images, rows, judge.facts), flip, progress.set)
    with suppress(OSError):  # without room it is trained anew
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, save(judge.weights()), cache_folder(), shared=True)
        make_room()
    release(path)


def _batches(images: ImageSet, rows: NDArray[np.int64], columns: Iterable[ColumnFacts]) -> Iterator[Batch]:
    for first in range(0, len(rows), _AT_ONCE):
        taken = images.take(rows[first : first + _AT_ONCE])
        yield taken.pixels, [taken.columns[one.name].values for one in columns]


def measure_worth(
    config: Config, held_out: HeldOut | HeldOutBuckets, loss_at: LossAt, batch: int
) -> list[ConditionWorth]:
    """Return the worth of each condition of a run, in the loss of its held-out images."""
    places, trained = config.conditions.places, _hidden_in_training(config)
    count = passes(places, trained) * held_out.images * config.evaluate.levels
    with Progress("measuring what conditions are worth", count) as progress:
        return condition_worth(held_out, loss_at, places, trained, batch, progress.advance)


def _hidden_in_training(config: Config) -> Callable[[str], bool]:
    """Return whether the condition of a name was hidden from some training images, by itself or with all others."""
    alone = len(config.conditions.places) == 1
    by_itself = config.condition_dropout > 0 and bool(config.columns)

    def hidden(name: str) -> bool:
        return config.label_dropout > 0 if name == ALL else by_itself or (alone and config.label_dropout > 0)

    return hidden
