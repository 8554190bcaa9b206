"""Load the images of a run: open and decode its source, and fill in the settings that the images determine.

Images that cannot be reached are waited for, with one message, until a stop is requested.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from unfog.config.schema import Config, ImageFacts
from unfog.config.toml import to_toml
from unfog.data.buckets.prepare import BucketChoice, prepare_buckets
from unfog.data.columns.captions import has_caption_files
from unfog.data.columns.conditions import resolved_condition
from unfog.data.columns.image_setting import split_images
from unfog.data.columns.made import add_made, suits_factor
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.full_depth.choice import kept_line
from unfog.data.full_depth.fit import fit_values
from unfog.data.prepare import prepare
from unfog.data.scan import MIN_TO_HOLD_OUT
from unfog.data.settings import Data, bytes_of
from unfog.data.sources.base import RemotePolicy, Source
from unfog.data.sources.labels import SPLITS
from unfog.data.sources.registry import PYTHON, open_source
from unfog.errors import RequestError
from unfog.files.cache_folder import cache_folder
from unfog.pipeline.latents import add_latents, apply_autoencoder_settings
from unfog.process.run_folder import printable
from unfog.process.signals import StopSignals
from unfog.reporting.progress import Progress, format_duration, say, warn
from unfog.settings import AUTO, is_auto
from unfog.text import plural, sanitize
from unfog.training.distributed.watchdog import AWAITING_IMAGES
from unfog.values.buckets import bucket_texts
from unfog.values.condition_format import TEXT, facts_of
from unfog.values.condition_kinds import ColumnFacts, kind_of
from unfog.values.image_format import BYTES
from unfog.values.kinds.image_kinds import MADE, image_columns

_TOP = re.compile(r"/|(?:[-_.\d][-\w]*)?\.tar/", re.IGNORECASE)  # ends the top folder, or the word that names a shard
_FEW_NUMBERS = 20  # different numbers that may be names of categories
_NAMES_SAMPLED = 10_000  # file names, evenly spaced, that are searched for folders called train, test or similar


def _warn_of_no_effect(settings: Data, dataset: Dataset, from_python: bool) -> None:
    """Warn of settings that have no effect on these images."""
    if settings.held_out not in (0, Data().held_out) and not len(dataset.held_out):
        reason, n = f"sets of fewer than {MIN_TO_HOLD_OUT} images are used for training entirely", dataset.report.found
        if n >= MIN_TO_HOLD_OUT:
            reason = f"none of the {n:,} images fell below that share; give a larger one"
        warn(f"data.held_out = {settings.held_out} holds nothing out: {reason}")
    made = dataset.settings.background
    if settings.background not in (Data().background, made):
        warn(f"data.background = {settings.background} changes nothing: the pack was made with {made}")
    report, packed = dataset.report, dataset.settings.range
    deep = report.has_deep_images or report.dtype != BYTES.dtype
    if not is_auto(settings, "range") and settings.range != packed:
        warn(f"data.range changes nothing: the images of a pack have 8 bits{_made_with(packed)}")
    elif not is_auto(settings, "range") and (fitted := dataset.settings.fitted_map):
        warn(f"data.range changes nothing: data.map = {fitted} is fitted to the values")
    elif not is_auto(settings, "range") and report.read and not deep and not from_python:
        warn("data.range changes nothing: no image has values deeper than 8 bits")
    if settings.clip and not dataset.settings.clip:
        warn("data.clip changes nothing: the pack was made without it")


def _made_with(range: tuple[float, ...]) -> str:
    return f", and it was made with {' '.join(f'{value:g}' for value in range)}" if range else ""


def _report_splits(names: Sequence[str]) -> None:
    """Print that all of the folders called train, test or similar are used, if there are no others."""
    sampled = range(0, len(names), max(1, len(names) // _NAMES_SAMPLED))
    tops = {_TOP.split(names[i], 1)[0] for i in sampled}
    if len(tops) > 1 and all(top.lower() in SPLITS for top in tops):
        say(f"  all of {', '.join(sorted(tops))} is used; to train on one of them, give only that as SOURCE")


def load_images(
    config: Config, stop: StopSignals, few: bool = False, lost: Mapping[str, str] | None = None
) -> tuple[Dataset, ImageFacts]:
    """Scan and decode the source with progress, and report every file in one line.

    Returns the images, and the settings that they determine. Interrupted after a stop request.

    Args:
        few: only a few images are needed, so a large set that is not in the cache is decoded on demand.
        lost: name -> reason of the shards that the run continued without; None for a new run.
    """
    config = apply_autoencoder_settings(config)
    source, dataset = _read_source(config, stop, few, lost)
    _report(config, source, dataset, few)
    dataset = add_made(_keep_values(config, dataset))
    data = replace(dataset.settings, cache=config.data.cache) if few else dataset.settings
    data = replace(data, condition=resolved_condition(data.condition))
    classes = tuple(printable(name) for name in dataset.train.classes)
    columns = facts_of(dataset.train.columns.values())
    check_image_conditions(dataset.settings, columns)
    for one in columns:
        say(f"  condition {sanitize(one.name)}: {_evidence(one, dataset.train)}")
    buckets = bucket_texts(dataset.size_buckets)
    facts = ImageFacts(source.resolved, data, classes, columns, dataset.train.fingerprint, config.latents, buckets)
    to_toml(facts)  # what cannot be stored raises here, before anything is trained
    return add_latents(dataset, config.adopt(facts), facts, stop, few)


def _evidence(facts: ColumnFacts, train: ImageSet) -> str:
    """Describe a condition for people: its kind, its values, and how many training images are without one."""
    kind, column = kind_of(facts.kind), train.columns[facts.name]
    evidence = sanitize(kind.evidence(facts))
    if facts.kind in MADE:
        return evidence
    line = f"{facts.kind}, {evidence}"
    known = kind.known(column.values)
    if missing := len(known) - int(known.sum()):
        of = f"{missing:,} of the {len(known):,} training images"
        if facts.kind == TEXT:
            some = sanitize(train.names[int(known.argmin())])
            line += f"; {of} have no caption (such as {some}), and are trained on as images of any caption"
        else:
            line += f"; not known for {of}"
    if facts.kind == "number" and (different := len({*column.values[known].tolist()})) <= _FEW_NUMBERS:
        line += f"; {facts.name}:category takes its {different} values for names"
    return line


def _read_source(
    config: Config, stop: StopSignals, few: bool, lost: Mapping[str, str] | None
) -> tuple[Source, Dataset]:
    """Open and decode the source of a run, with progress; arguments are those of `load_images`."""
    if config.source.startswith(PYTHON):  # a run's settings may be somebody else's
        say(f"  source: imports and runs {config.source.removeprefix(PYTHON)}, as these settings ask for")
    # Only a run that continues may do without shards that it had at its beginning.
    begun = lost if lost is not None else {} if config.fingerprint else None
    policy = RemotePolicy(bytes_of(config.data.cache_limit), config.data.failed_shards, begun)
    with Progress("indexing (MB)", None) as progress:
        data = config.data
        source = open_source(
            config.source, stop.watching(progress), policy, data.axes, bool(config.fingerprint), data.slices
        )
    for column in source.columns.values():
        kind_of(column.kind, column.name)  # an unknown kind raises here, before anything is decoded
    source.outage.on_wait = OutageNotice(stop, source.outage.patience)
    with Progress("decoding", None) as progress:
        wanted = config.training.images or config.training.steps * config.training.likely_batch
        data = replace(config.data, cache=AUTO) if few else config.data
        to_draw, watched = 1 if few else wanted, stop.watching(progress)
        if data.aspect == "keep":
            choice = _bucket_choice(config)
            return source, prepare_buckets(source, data, choice, _say_of_buckets, watched, to_draw, config.fingerprint)
        return source, prepare(source, data, watched, to_draw, config.fingerprint)


def _keep_values(config: Config, dataset: Dataset) -> Dataset:
    """Return the dataset, with its map of values fitted and printed if its images keep their values.

    RequestError if settings of the run are for pictures alone.
    """
    if dataset.settings.image_format.is_picture:
        if dataset.report.has_deep_images and is_auto(config.data, "dtype"):
            say("  values deeper than 8 bits become 8 bits; --data.dtype float32 (or uint16) keeps them")
        return dataset
    _check_for_pictures(config, dataset.settings)
    if is_auto(config.data, "dtype") and not config.data.requested_dtype:
        say(f"  {kept_line(dataset.settings.image_format)}")
    dataset, lines = fit_values(dataset, lambda suspect: warn(str(suspect)))
    for line in lines:
        say(f"  {line}")
    return dataset


def _check_for_pictures(config: Config, data: Data) -> None:
    """Raise RequestError for settings of the run that are for pictures alone."""
    kind = f"{data.image_format}, and not pictures of 8 bits"
    if data.jitter:
        raise RequestError(f"data.jitter changes brightness and colours, and these images are {kind}; omit it")
    if data.aspect == "keep":
        raise RequestError(f"data.aspect = keep scales pictures, and these images are {kind}; omit it")
    if reason := config.task.pictures_only or config.representation.pictures_only:
        raise RequestError(f"{reason}, and these images are {kind}; train on their values instead")
    values = config.evaluate.VALUES
    if wrong := [name for name in config.evaluate.metrics if name not in values]:
        raise RequestError(
            f"evaluate.metrics = {', '.join(wrong)} compare pictures, and these images are {kind}; give "
            f"{','.join(values)}, or omit them: the held-out loss is measured"
        )


def check_image_conditions(data: Data, columns: Sequence[ColumnFacts]) -> None:
    """Raise RequestError if the run has conditions that are images of another size."""
    sides = data.image_format.shape[1:]
    if wrong := next((one for one in image_columns(columns) if one.statistics[1:3] != sides), None):
        _, height, width = map(int, wrong.statistics[:3])
        raise RequestError(
            f"the condition {sanitize(wrong.name)} is an image of {width}x{height}, and the images are "
            f"{data.image_format.sides}; pack the originals again, or omit --size and --aspect"
        )


def _bucket_choice(config: Config) -> BucketChoice:
    """Return the facts that decide the buckets: those of the run, or the sizes that the network takes and the batch."""
    network, known = config.network, tuple(bucket.size for bucket in config.size_buckets)
    factor = split_images(config.data.condition)[0].made.get("degrade", 1)

    def fits(height: int, width: int) -> bool:
        if factor > 1 and not suits_factor(height, width, factor):
            return False
        with suppress(RequestError):
            if network is not None:
                network.check((height, width))
            return True
        return False

    return BucketChoice(fits, config.training.likely_batch, known)


def _say_of_buckets(line: str) -> None:
    say(f"  {line}")


def _report(config: Config, source: Source, dataset: Dataset, few: bool) -> None:
    """Print the source, where its images are kept, and warnings of probable mistakes."""
    if source.found:
        say(f"  {source.found}")
    say(dataset.report.line())
    if not config.data.condition and has_caption_files(source):
        say("  text files lie beside the images, and are not used: --condition text learns them as captions")
    if dataset.placement and not few:
        say(f"  cache: {dataset.placement}")
    packed = type(source).decoded_dataset is not Source.decoded_dataset  # then the size was chosen long ago
    if dataset.buckets:
        one, all_sizes = "the only bucket", "the bucket with most images; previews and samples have all sizes"
        say(f"  data.size = {dataset.settings.size}: {one if len(dataset.buckets) == 1 else all_sizes}")
    elif is_auto(config.data, "size") and not packed and (chosen := dataset.report.chosen_size_line()):
        say(f"  {chosen}")
    if 0 < len(dataset.train) < (batch := config.training.likely_batch):
        warn(f"batch = {batch} is more than the {plural(len(dataset.train))}, so some images are used twice in a batch")
    for warning in dataset.warnings:
        warn(warning)
    # Floating point from Python was scaled when it was stored there.
    _warn_of_no_effect(config.data, dataset, Path(source.resolved).parent == cache_folder())
    _report_splits(source.names)


class _Activity(Protocol):
    """Holder of the activity that monitoring shows."""

    activity: str


class OutageNotice:
    """Called by `Outage.result` with the reason while images are waited for, and with "" afterwards.

    Args:
        stop: ends the wait with Interrupted once a stop is requested.
        patience: seconds that the wait may take, for the message.
        warn: prints the warning.
        heartbeat: shows `AWAITING_IMAGES` as activity meanwhile.
        set_phase: notes `AWAITING_IMAGES` for the watchdog of several ranks.
        stopped_elsewhere: says whether another rank is asked to stop, which then ends the wait as well.
    """

    def __init__(
        self,
        stop: StopSignals,
        patience: float,
        warn: Callable[[str], None] = warn,
        heartbeat: _Activity | None = None,
        set_phase: Callable[[str], None] = lambda phase: None,
        stopped_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        self._stop, self._patience, self._warn, self._heartbeat = stop, patience, warn, heartbeat
        self._set_phase, self._stopped_elsewhere = set_phase, stopped_elsewhere
        self._began: float | None = None
        self._activity = ""

    def __call__(self, reason: str) -> None:
        """Print the begin or the end of an outage. Raises Interrupted after a stop."""
        if not reason:
            self._over()
            return
        if self._began is None:
            self._began = time.monotonic()
            self._set_phase(AWAITING_IMAGES)
            if self._heartbeat is not None:
                self._activity, self._heartbeat.activity = self._heartbeat.activity, AWAITING_IMAGES
            patience = format_duration(self._patience)
            self._warn(f"the images cannot be reached: {reason}; they are waited for, {patience} at most")
        if self._stopped_elsewhere():
            self._stop.request("another rank is asked to stop")
        self._stop.leave_if_requested()

    def _over(self) -> None:
        if self._began is None:
            return
        if self._heartbeat is not None and self._heartbeat.activity == AWAITING_IMAGES:
            self._heartbeat.activity = self._activity
        say(f"  the images can be read again, after {format_duration(time.monotonic() - self._began)}")
        self._began = None
