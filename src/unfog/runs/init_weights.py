"""Initialise a run from trained weights: of another run, or of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfog.config.paths import reason_of
from unfog.config.schema import Config, Init
from unfog.config.spec_strings import format_spec
from unfog.config.toml import update
from unfog.config.values import sanitize
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VP, Cosine, Flow, FlowUniform, Linear
from unfog.diffusion.target import X0, Eps, FlowVelocity, Target, V
from unfog.errors import RequestError
from unfog.export.diffusers_folder import UNetFolder
from unfog.export.diffusers_unet import from_unet2d, unet2d_settings
from unfog.models.autoencoder_settings import AutoencoderFolder
from unfog.pipeline.build import build_network, input_shape
from unfog.planning.intervals import Choice
from unfog.process.run_folder import RunFolder, printable
from unfog.reporting.progress import warn
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.shard_files import sha256_of

_CLASS_SPREAD = 0.02
"""Scale of the random differences between new class embeddings; other networks draw their rows at this scale."""
_CLASSES, _AUGMENT, _BIAS = "class_embedding.weight", "augment_embedding.", "time_embedding.2.bias"


class _WeightsSource(NamedTuple):
    """Weights of a folder, described before they are read."""

    config: Config
    """Network, objective, size and channels that they were trained with; the rest is not used."""
    weights: Path
    """The file of weights."""
    what: str
    """Description for messages."""
    theirs: dict[str, Any] | None
    """`UNet2DModel`'s configuration; None for a run."""
    scheduler: dict[str, Any] | None = None
    """That of diffusers' scheduler, if there is one."""


class InitialWeights(NamedTuple):
    """Weights that fit the network of a run, and the automatic choices made for it."""

    state: dict[str, Tensor]
    config: Config
    choices: list[Choice]


def recipe_from_weights(base: Config, table: Mapping[str, Any]) -> Config:
    """Return `base` with the network, size and objective of the weights that `table` names as init.

    Args:
        base: the recipe; returned unchanged if no weights are named.
        table: settings given beside it, as a nested table; they are not applied.

    Raises:
        RequestError: there is nothing to start from, or it has no equivalent here.
    """
    init = replace(update(base.init, table.get("init", {}), "init"), sha256="")
    if not init.folder:
        return base
    given = table.get("diffusion", {})
    known = isinstance(given, Mapping) and {"path", "schedule", "target"} <= given.keys()
    theirs = _describe_source(init, base.diffusion, known).config
    codec = base.autoencoder_folder or theirs.autoencoder_folder
    data = replace(base.data, size=theirs.data.size, channels=theirs.data.channels)
    if (
        asked := table.get("autoencoder_folder", base.autoencoder_folder)
    ) and not theirs.uses_latents:  # the folder speaks of latents, then
        data = replace(data, size=theirs.data.size * AutoencoderFolder.open(str(asked)).factor, channels=0)
    return replace(
        base, init=init, network=theirs.network, diffusion=theirs.diffusion, data=data, autoencoder_folder=codec
    )


def adopt_latent_statistics(config: Config) -> Config:
    """Return the configuration with the mean and deviation of latents that the initial weights were trained with.

    Raises:
        RequestError: the weights were trained on pixels and the run uses latents, or the other way round, or latents of
            another autoencoder.
    """
    found = _describe_source(config.init, config.diffusion) if config.init.folder else None
    if found is None or found.theirs is not None:  # a folder of diffusers does not say what its network saw
        return config
    theirs, codec = (
        found.config,
        AutoencoderFolder.open(config.autoencoder_folder).sha256() if config.uses_latents else "",
    )
    known = theirs.latents.sha256 if theirs.uses_latents else ""
    if codec != known:
        saw = "latents of another codec" if codec and known else "latents" if known else "pixels"
        raise RequestError(
            f"the weights in {config.init.folder} know {saw}, and with "
            f"autoencoder_folder = {sanitize(config.autoencoder_folder)} they would see "
            "something else; leave --autoencoder away, or start from other weights"
        )
    return replace(config, latents=theirs.latents) if codec else config


def _describe_source(init: Init, diffusion: Diffusion, known: bool = True) -> _WeightsSource:
    """Describe the weights at `init.folder`, without reading them.

    Args:
        init: names the folder and the checkpoint.
        diffusion: the objective if the folder has none, or if it is `known`.
        known: the objective is given, so that a scheduler without an equivalent does not matter.
    """
    folder = Path(init.folder).expanduser()
    try:
        if not folder.is_dir():
            raise RequestError(f"init = {sanitize(init.folder)} is no folder; give a run, or a folder of diffusers")
        return _in_run(init, folder) if (folder / "config.toml").is_file() else _in_diffusers(folder, diffusion, known)
    except (OSError, ValueError) as error:
        raise RequestError(
            f"init = {sanitize(init.folder)} cannot be read: {reason_of(error)}; give another folder"
        ) from None


def _in_run(init: Init, folder: Path) -> _WeightsSource:
    run = RunFolder(folder)
    config = run.read_config()
    if config.trains_autoencoder:
        raise RequestError(
            f"init = {sanitize(init.folder)} is a codec, and a network that draws cannot start from its weights; train "
            f"on its latents: --autoencoder {sanitize(init.folder)}"
        )
    which = {"newest": None, "best": "best"}[init.checkpoint] if init.checkpoint.isalpha() else int(init.checkpoint)
    saved = checkpoint.find_checkpoint(run.checkpoints, which, warn)  # type: ignore[arg-type]
    file = saved.folder / f"{'ema' if init.weights == 'ema' else 'model'}.safetensors"
    words = "averaged (EMA)" if init.weights == "ema" else "raw"
    return _WeightsSource(config, file, f"{words} weights of step {saved.step:,}", None)


def _in_diffusers(folder: Path, diffusion: Diffusion, known: bool) -> _WeightsSource:
    found = UNetFolder.open(folder)
    network, channels, _ = unet2d_settings(found.config)
    size = found.config.get("sample_size")
    size = size[0] if isinstance(size, list) and size[:1] * len(size) == size != [] else size
    if found.scheduler is not None and not known:
        diffusion = objective_from_scheduler(found.scheduler, diffusion)
    base = Config()
    data = replace(base.data, size=size if isinstance(size, int) and size >= 4 else 0, channels=channels)
    config = replace(base, network=network, diffusion=diffusion, data=data)
    return _WeightsSource(config, found.weights, "weights of a UNet2DModel", found.config, found.scheduler)


def load_initial_weights(config: Config) -> InitialWeights:
    """Return the weights that a run with these settings starts from, once its images are known.

    Raises:
        RequestError: they are those of another network, or not those that the run began with.
    """
    found = _describe_source(config.init, config.diffusion)
    mine, theirs = config.network, found.config.network
    assert theirs is not None  # a run's is settled
    dropout = {f.name: getattr(theirs, f.name) for f in fields(theirs) if f.name == "dropout"}
    if mine is None or type(mine) is not type(theirs) or replace(mine, **dropout) != theirs:
        raise RequestError(
            f"network = {format_spec(mine)} is not that of {config.init.folder}, {format_spec(theirs)}; leave "
            "--network away, or change no more of it than dropout"
        )
    (channels, side, _), (known, known_side, _) = input_shape(config), input_shape(found.config)
    if channels != known:
        what = "the codec's latents have" if config.uses_latents else "data.channels ="
        raise RequestError(
            f"the network in {config.init.folder} has {known} channel(s), and {what} {channels}; leave that away"
        )
    learned = config.diffusion.learned_variance
    if learned != (found.theirs is None and found.config.diffusion.learned_variance):
        has = "no learned variance, and here it has" if learned else "a learned variance, and here it has none"
        raise RequestError(f"the network in {config.init.folder} has {has}; leave diffusion.learned_variance as it was")
    sha256 = sha256_of(found.weights)
    if config.init.sha256 not in ("", sha256):
        raise RequestError(
            f"{found.weights} is not what this run was to start from (sha256 differs), and it has saved no checkpoint "
            "yet; bring it back, or train anew with another --out"
        )
    choices = [Choice("init", config.init.folder, found.what), _objective_choice(found, config)]
    if side != known_side and known_side:
        choices.append(Choice("size", config.data.size, f"the weights were trained at {found.config.data.size}"))
    state, classes = _fitted(found, checkpoint.read_tensors(found.weights), config)
    choices += classes
    folder = printable(str(Path(config.init.folder).expanduser().resolve()))
    return InitialWeights(state, replace(config, init=replace(config.init, folder=folder, sha256=sha256)), choices)


def _objective_choice(found: _WeightsSource, config: Config) -> Choice:
    """Return the objective that training uses, and the reason."""
    told, reason = found.config.diffusion, "as it was trained with"
    if found.theirs is not None:
        told, reason = config.diffusion, "as given, or as the recipe has it: the folder says nothing of it"
    if found.scheduler is not None:
        reason = "as given: that of the folder has no equivalent here"
        with suppress(RequestError):
            told, reason = (
                objective_from_scheduler(found.scheduler, config.diffusion),
                "as its scheduler_config.json says",
            )
    before, now = ([format_spec(part) for part in (d.path, d.schedule, d.target)] for d in (told, config.diffusion))
    if now != before:
        reason = f"as given; the weights were trained with {', '.join(before)}"
    return Choice("objective", ", ".join(now), reason)


def _fitted(found: _WeightsSource, state: dict[str, Tensor], config: Config) -> tuple[dict[str, Tensor], list[Choice]]:
    """Return the weights under our names, with the classes and inputs of the run."""
    wanted = len(config.classes)
    if found.theirs is not None:
        rows = found.theirs.get("num_class_embeds")
        # Our export has one more row than classes, for no class; a model trained in diffusers has not.
        state = from_unet2d(found.theirs, state, null_class=wanted > 0 and rows == wanted + 1).state
    state = {
        name: tensor.float() for name, tensor in state.items() if not name.startswith(_AUGMENT) or config.data.augment
    }
    with torch.no_grad():
        fresh = build_network(config).state_dict()
    state |= {name: fresh[name] for name in fresh if name.startswith(_AUGMENT) and name not in state}
    choices = _classes(state, fresh, found, config)
    wrong = [name for name in {*state, *fresh} if name not in state or name not in fresh]
    wrong += [name for name in state if name in fresh and state[name].shape != fresh[name].shape]
    if wrong:
        raise RequestError(
            f"{found.weights} does not fit its own settings ({min(wrong)}); was it edited? Write it anew"
        )
    return state, choices


def _classes(state: dict[str, Tensor], fresh: dict[str, Tensor], found: _WeightsSource, config: Config) -> list[Choice]:
    """Fit the class embedding in `state` to the classes of the images; return what was changed."""
    before = state[_CLASSES].shape[0] - 1 if _CLASSES in state else 0
    names, wanted = found.config.classes, len(config.classes)
    if before == wanted:
        if wanted and names and names != config.classes:
            return [
                Choice(
                    "classes", wanted, f"{', '.join(config.classes)[:60]} take the places of {', '.join(names)[:60]}"
                )
            ]
        return []
    if not wanted:
        if _BIAS not in state:
            raise RequestError(f"the weights in {config.init.folder} know {before} classes, and the images have none")
        # Without classes the last row is added in every call, so it becomes part of the bias.
        state[_BIAS] = state[_BIAS] + state.pop(_CLASSES)[-1]
        return [Choice("classes", "none", f"the images have none; the {before} of the weights are forgotten")]
    # In EDM2 networks rows have unit magnitude, and class embeddings rescale the noise condition.
    scaled = config.network is not None and config.network.fixed_norm_weights
    if _CLASSES not in fresh or (scaled and not before):
        raise RequestError(
            f"the weights in {config.init.folder} know {before or 'no'} classes, and the images have {wanted}; this "
            "network can take no others: give --data.labels none, or start from other weights"
        )
    # Every class begins as "no class", so that the first samples are as good as before.
    none = state[_CLASSES][-1] if before else torch.zeros_like(fresh[_CLASSES][-1])
    apart = fresh[_CLASSES] * (_CLASS_SPREAD if scaled else 1.0)
    apart[-1] = 0
    state[_CLASSES] = none + apart
    reason = f"their embedding is new, as the weights know {before or 'no'} classes; it begins as that of no class"
    return [Choice("classes", wanted, reason)]


_TARGETS: dict[str, Target] = {"epsilon": Eps(), "sample": X0(), "v_prediction": V()}
_REMEDY = "give --path, --schedule and --target"


def objective_from_scheduler(scheduler: Mapping[str, Any], base: Diffusion) -> Diffusion:
    """Return the objective that a model was trained with, from its scheduler_config.json.

    Args:
        scheduler: missing keys have the defaults of diffusers' DDPMScheduler.
        base: everything else, such as the weighting.

    Raises:
        RequestError: it has no equivalent here.
    """
    kind = str(scheduler.get("_class_name", "DDPMScheduler"))
    plain = replace(base, conditioning="timestep", scale_input=False)
    if kind.startswith("FlowMatch"):
        return replace(plain, path=Flow(), schedule=FlowUniform(), target=FlowVelocity())
    if kind.startswith(("EDM", "KarrasVe", "ScoreSdeVe", "VQ", "Cosine", "CM")) or scheduler.get("trained_betas"):
        raise RequestError(f"the scheduler {kind} has no equivalent that could be read off it; {_REMEDY}")
    steps, betas = scheduler.get("num_train_timesteps", 1000), scheduler.get("beta_schedule", "linear")
    zero = bool(scheduler.get("rescale_betas_zero_snr", False))
    if not isinstance(steps, int) or steps < 2:
        raise RequestError(f"the scheduler's num_train_timesteps = {sanitize(steps)} is no number of steps; {_REMEDY}")
    if betas == "linear":
        ends = (float(scheduler.get(name, usual)) for name, usual in (("beta_start", 1e-4), ("beta_end", 0.02)))
        # Ours are stated for 1,000 steps.
        first, last = (round(beta * steps / 1000, 12) for beta in ends)
        schedule: Linear | Cosine = Linear(steps=steps, beta_start=first, beta_end=last, zero_terminal=zero)
    elif betas == "squaredcos_cap_v2":
        schedule = Cosine(steps=steps, zero_terminal=zero)
    else:
        raise RequestError(
            f"the scheduler's beta_schedule = {sanitize(betas)} has no equivalent; there is linear and "
            f"squaredcos_cap_v2; {_REMEDY}"
        )
    predicted = scheduler.get("prediction_type", "epsilon")
    if predicted not in _TARGETS:
        raise RequestError(
            f"the scheduler's prediction_type = {sanitize(predicted)} has no equivalent; there is "
            f"{', '.join(_TARGETS)}; {_REMEDY}"
        )
    return replace(plain, path=VP(), schedule=schedule, target=_TARGETS[predicted])
