"""Load the images of a run: scan, decode, and report the result in a line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from unfog.config.schema import Config
from unfog.data.dataset import Dataset
from unfog.data.prepare import prepare
from unfog.data.scan import MIN_TO_HOLD_OUT
from unfog.data.settings import Data
from unfog.data.sources.labels import SPLITS
from unfog.data.sources.registry import PYTHON, open_source
from unfog.pipeline.encode_latents import add_latents, apply_autoencoder_settings
from unfog.pipeline.failed_shards import retry_policy
from unfog.process.run_folder import printable
from unfog.process.signals import StopSignals
from unfog.reporting.progress import Progress, say, warn

_TOP = re.compile(
    r"/|(?:[-_.\d][-\w]*)?\.tar/", re.IGNORECASE
)  # behind the folder at the top, or the word a shard is named by
_NAMES_SAMPLED = 10_000
"""File names, evenly spaced, that are searched for folders called train, test or similar."""


def _warn_of_no_effect(asked: Data, prepared: Dataset) -> None:
    """Warn of settings that have no effect on these images."""
    if asked.held_out not in (0, Data().held_out) and not len(prepared.held_out):
        why, n = f"of fewer than {MIN_TO_HOLD_OUT} pictures each is trained on", prepared.report.found
        if n >= MIN_TO_HOLD_OUT:
            why = f"none of the {n:,} pictures fell below that share; give a larger one"
        warn(f"data.held_out = {asked.held_out} holds nothing out: {why}")
    made = prepared.settings.background
    if asked.background not in (Data().background, made):
        warn(f"data.background = {asked.background} changes nothing: the pack was made with {made}")


def load_images(
    config: Config, stop: StopSignals, few: bool = False, lost: Mapping[str, str] | None = None
) -> tuple[Dataset, Config]:
    """Scan and decode the source with progress, and report every file in one line.

    Args:
        config: names the source, and how its images are decoded.
        stop: a request raises Interrupted.
        few: only a few images are needed, so a large set that is not in the cache is decoded on demand.
        lost: name -> reason of the shards that the run continued without; None for a new run.

    Returns:
        The images, and the configuration with what they determine: size, channels, classes, fingerprint.
    """

    def counting(progress: Progress) -> Callable[[int, int], None]:
        def update(done: int, total: int) -> None:
            stop.leave_if_requested()
            progress.total = total
            progress.update(done)

        return update

    config = apply_autoencoder_settings(config)
    if config.source.startswith(PYTHON):  # a run's settings may be somebody else's
        say(f"  source: imports and runs {config.source.removeprefix(PYTHON)}, as these settings ask for")
    with Progress("indexing shards (MB)", None) as progress:
        source = open_source(config.source, counting(progress), retry_policy(config, lost))
    with Progress("decoding", None) as progress:
        wanted = config.training.images or config.training.steps * config.training.batch
        data = replace(config.data, cache="auto") if few else config.data
        prepared = prepare(source, data, counting(progress), 1 if few else wanted, config.fingerprint)
    say(prepared.report.line())
    if prepared.placement and not few:
        say(f"  cache: {prepared.placement}")
    for left_out in prepared.warnings:
        warn(left_out)
    _warn_of_no_effect(config.data, prepared)
    names = source.names
    looked_at = range(0, len(names), max(1, len(names) // _NAMES_SAMPLED))
    tops = {_TOP.split(names[i], 1)[0] for i in looked_at}
    if len(tops) > 1 and all(top.lower() in SPLITS for top in tops):
        say(f"  all of {', '.join(sorted(tops))} is used; to train on one of them, give only that as SOURCE")
    config = replace(
        config,
        source=source.resolved,  # so that a resume finds it from anywhere
        data=replace(prepared.settings, cache=config.data.cache) if few else prepared.settings,
        classes=tuple(printable(name) for name in prepared.train.classes),
        fingerprint=prepared.train.fingerprint,
    )
    return add_latents(prepared, config, stop.leave_if_requested, few)
