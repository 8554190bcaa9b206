"""Initialise a run from trained weights: its recipe, its latents, and the weights as its network takes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from unfog.config.schema import Config
from unfog.config.spec_strings import format_spec, quote
from unfog.config.toml import update
from unfog.errors import RequestError
from unfog.models.autoencoder_settings import AutoencoderFolder
from unfog.planning.auto_settings import with_text_encoder
from unfog.planning.intervals import Choice
from unfog.process.run_folder import printable
from unfog.runs.weights.foreign_objectives import objective_from_scheduler
from unfog.runs.weights.weights_source import WeightsSource
from unfog.settings import auto_value
from unfog.text import sanitize
from unfog.training.checkpoints.load import sha256_of
from unfog.values.image_format import CHANNELS, scaled, size_of
from unfog.values.kinds.image_kinds import image_columns


class _InitialWeights(NamedTuple):
    """Weights that fit the network of a run, and the automatic choices made for it."""

    state: dict[str, Tensor]
    config: Config
    choices: list[Choice]


def recipe_from_weights(base: Config, table: Mapping[str, Any]) -> Config:
    """Return the recipe `base` with the network, size and objective of the weights that `table` names as init, if any.

    `table` holds the settings given beside the recipe, nested; they are not applied.
    """
    init = replace(update(base.init, table.get("init", {}), "init"), sha256="")
    if not init.folder:
        return base
    given = table.get("diffusion", {})
    known = isinstance(given, Mapping) and {"path", "schedule", "target"} <= given.keys()
    source = WeightsSource.describe(init, base.diffusion, known)
    trained = source.config
    data = replace(base.data, size=trained.data.size, channels=trained.data.channels, wrap=trained.data.wrap)
    autoencoder = table.get("autoencoder_folder", base.autoencoder_folder)
    if autoencoder and not source.names_autoencoder:  # diffusers' folder states the size and channels of the latents
        factor = AutoencoderFolder.open(str(autoencoder)).factor
        data = replace(data, size=scaled(source.input[1], factor), channels=auto_value(data, "channels"))
    return replace(
        base,
        init=init,
        network=trained.network,
        diffusion=trained.diffusion,
        text_encoder=trained.text_encoder,
        data=data,
        sampler=base.sampler if source.elsewhere is None else trained.sampler,
        autoencoder_folder=base.autoencoder_folder or trained.autoencoder_folder,
    )


def adopt_latent_statistics(config: Config) -> Config:
    """Return the configuration with the mean and deviation of latents that the initial weights were trained with.

    RequestError if these weights were trained on pixels and the run uses latents, the other way round, or on latents
    of another autoencoder.
    """
    source = WeightsSource.describe(config.init, config.diffusion) if config.init.folder else None
    if source is None or not (source.is_run or source.names_autoencoder):
        return config
    trained = source.config
    autoencoder = config.representation.autoencoder()
    ours = "" if autoencoder is None else autoencoder.sha256()
    theirs = trained.latents.sha256
    if ours != theirs:
        trained_on = "latents of another autoencoder" if ours and theirs else "latents" if theirs else "pixels"
        raise RequestError(
            f"the weights in {config.init.folder} were trained on {trained_on}, which does not fit "
            f"autoencoder_folder = {quote(config.autoencoder_folder)}; omit --autoencoder, or start from "
            "other weights"
        )
    return replace(config, latents=trained.latents) if ours else config


def load_initial_weights(config: Config) -> _InitialWeights:
    """Return the weights that a run with these settings starts from, once its images are known.

    RequestError if they are those of another network, or not those that the run began with.
    """
    source = WeightsSource.describe(config.init, config.diffusion)
    _check_network(source, config)
    config, of_text = with_text_encoder(config)
    sha256 = sha256_of(source.weights, source.root)
    if config.init.sha256 not in ("", sha256):
        raise RequestError(
            f"{source.weights} changed since this run began (sha256 differs), and the run has no checkpoint "
            "yet; restore the file, or start a new run with another --out"
        )
    choices = [Choice("init", config.init.folder, source.what), _objective_choice(source, config)]
    if known := source.input[1]:
        reason = f"the weights were trained at {source.config.data.size}"
        if known == size_of(*config.input_shape[1:]):
            reason = "as it was trained with; --size WIDTHxHEIGHT takes another"
        choices.append(Choice("size", config.data.size, reason))
    state, classes = source.fit(source.read(), config)
    folder = printable(str(Path(os.path.expanduser(config.init.folder)).resolve()))
    config = replace(config, init=replace(config.init, folder=folder, sha256=sha256))
    return _InitialWeights(state, config, choices + classes + of_text)


def _check_network(source: WeightsSource, config: Config) -> None:
    """RequestError unless the weights are those of the run's network, apart from dropout."""
    ours, theirs = config.network, source.config.network
    assert theirs is not None  # a run's is settled
    # A network given by its import path may have no dropout.
    dropout = {f.name: getattr(theirs, f.name) for f in fields(theirs) if f.name == "dropout"}
    if ours is None or type(ours) is not type(theirs) or replace(ours, **dropout) != theirs:
        raise RequestError(
            f"network = {format_spec(ours)} differs from that of {config.init.folder}, "
            f"{format_spec(theirs)}; omit --network, or change only its dropout"
        )
    channels, known = config.input_shape[0], source.input[0]
    if channels != known:
        folder, given = config.init.folder, f"{config.representation.channels_from} {channels}"
        if known not in CHANNELS:
            remedy = "give its autoencoder: --autoencoder FOLDER"
            raise RequestError(f"the network in {folder} generates latents of {known} channels, and {given}; {remedy}")
        raise RequestError(f"the network in {folder} has {known} channel(s), and {given}; omit that setting")
    here, there = (image_columns(each.columns) for each in (config, source.config))
    if lost := [one.name for one in there if one.identity not in {each.identity for each in here}]:
        raise RequestError(
            f"the weights in {config.init.folder} were trained with {', '.join(map(sanitize, lost))}, an image as a "
            "condition, and this run has no equal one; give the same --condition, to which others may be added, or "
            "omit --init"
        )
    learned = config.diffusion.learned_variance
    if learned != (source.unet2d is None and source.config.diffusion.learned_variance):
        has = "no learned variance, and here it has" if learned else "a learned variance, and here it has none"
        raise RequestError(f"the network in {config.init.folder} has {has}; omit diffusion.learned_variance")


def _objective_choice(source: WeightsSource, config: Config) -> Choice:
    """Return the objective that training uses, and the reason."""
    trained, reason = source.config.diffusion, source.objective_reason
    if source.unet2d is not None:
        trained, reason = config.diffusion, "as given, or as in the recipe: the folder does not state it"
    if source.unet2d is not None and source.scheduler is not None:
        reason = "as given: that of the folder has no equivalent here"
        with suppress(RequestError):
            trained = objective_from_scheduler(source.scheduler, config.diffusion)
            reason = "as its scheduler_config.json says"
    stated = source.elsewhere is not None  # other sources leave the weighting to the recipe
    before, now = (
        [format_spec(part) for part in (d.path, d.schedule, d.target, *[d.weighting] * stated)]
        for d in (trained, config.diffusion)
    )
    if now != before:
        reason = f"as given; the weights were trained with {', '.join(before)}"
    return Choice("objective", ", ".join(now), reason)
