"""Initialise a run from trained weights: of another run, or of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfog.config.schema import Config, Init
from unfog.config.toml import update
from unfog.config.validate import reason_of
from unfog.config.values import format_spec, quote
from unfog.data.settings import Data
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.export.diffusers_dit import from_dit
from unfog.export.diffusers_folder import DiffusersFolder
from unfog.export.diffusers_unet import Network, unet2d_settings
from unfog.export.elsewhere import SUFFIXES, ElsewhereModel, read_model
from unfog.models.autoencoder_settings import AutoencoderFolder
from unfog.pipeline.build import build_network, input_shape
from unfog.planning.intervals import Choice
from unfog.process.run_folder import RunFolder, printable
from unfog.reporting.progress import warn
from unfog.runs.diffusers import objective_from_scheduler
from unfog.runs.elsewhere import objective_of, with_latents_of
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.load import read_tensors, sha256_of

_CLASS_SPREAD = 0.02  # scale of random differences between new class embeddings, as other networks draw their rows
_CLASSES, _AUGMENT, _BIAS = "class_embedding.weight", "augment_embedding.", "time_embedding.2.bias"


class WeightsSource(NamedTuple):
    """Weights of a folder, described before they are read."""

    config: Config  # network, objective, size and channels that they were trained with; the rest is not used
    weights: Path  # the file of weights
    what: str  # description for messages
    unet2d: dict[str, Any] | None = None  # `UNet2DModel`'s configuration; None for a run
    scheduler: dict[str, Any] | None = None  # that of diffusers' scheduler, if there is one
    elsewhere: ElsewhereModel | None = None  # weights of another program; None for a run and for a `UNet2DModel`
    objective_reason: str = "as it was trained with"
    known_input: tuple[int, int] | None = None  # channels and side of the network's input; None: as `config` has it

    @property
    def input(self) -> tuple[int, int]:
        """Channels and side of the network's input: pixels or latents; the side is 0 where it is not stated."""
        return self.known_input or input_shape(self.config)[:2]

    @property
    def is_run(self) -> bool:
        return self.unet2d is None and self.elsewhere is None

    def read(self) -> dict[str, Tensor]:
        """Return the weights, by the names of the program that wrote them or, of another than diffusers, by ours."""
        return read_tensors(self.weights) if self.elsewhere is None else self.elsewhere.state

    def fit(self, state: dict[str, Tensor], config: Config) -> tuple[dict[str, Tensor], list[Choice]]:
        """Return the weights under our names, with the classes and inputs of the run."""
        wanted = len(config.classes)
        if self.unet2d is not None:
            rows = self.unet2d.get("num_class_embeds")
            # Our export has one more row than classes, for no class; a model trained in diffusers has not.
            state = Network.from_unet2d(self.unet2d, state, null_class=wanted > 0 and rows == wanted + 1).state
        # Weights are trained in fp32, whatever the file holds.
        state = {
            name: tensor.float()
            for name, tensor in state.items()
            if not name.startswith(_AUGMENT) or config.data.augment
        }
        with torch.no_grad():
            fresh = build_network(config).state_dict()
        state |= {name: fresh[name] for name in fresh if name.startswith(_AUGMENT) and name not in state}
        choices = _fit_classes(state, fresh, self.config.classes, config)
        wrong = [name for name in {*state, *fresh} if name not in state or name not in fresh]
        wrong += [name for name in state if name in fresh and state[name].shape != fresh[name].shape]
        if wrong:
            raise RequestError(
                f"{self.weights} does not fit its own settings ({min(wrong)}); it may have been edited: write it again"
            )
        return state, choices

    @classmethod
    def describe(cls, init: Init, diffusion: Diffusion, known: bool = True) -> WeightsSource:
        """Describe the weights at `init.folder`, without reading them.

        `diffusion` is the objective if the folder has none, or if it is `known`: then a scheduler does not matter.
        """
        folder = Path(init.folder).expanduser()
        try:
            if not folder.is_dir():
                if folder.suffix in SUFFIXES and folder.is_file():
                    return _in_file(folder, diffusion, known)
                rule = "give a run, a folder that diffusers wrote, or weights as .safetensors or .pt"
                raise RequestError(f"init = {quote(init.folder)} is not a folder; {rule}")
            return (
                _in_run(init, folder) if (folder / "config.toml").is_file() else _in_diffusers(folder, diffusion, known)
            )
        except (OSError, ValueError) as error:
            raise RequestError(
                f"init = {quote(init.folder)} cannot be read: {reason_of(error)}; give another folder"
            ) from None


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
    data = replace(base.data, size=trained.data.size, channels=trained.data.channels)
    autoencoder = table.get("autoencoder_folder", base.autoencoder_folder)
    if autoencoder and not trained.uses_latents:  # diffusers' folder states the size and channels of the latents
        data = replace(data, size=source.input[1] * AutoencoderFolder.open(str(autoencoder)).factor, channels=0)
    return replace(
        base,
        init=init,
        network=trained.network,
        diffusion=trained.diffusion,
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
    if source is None or not (source.is_run or source.config.uses_latents):  # it does not name its autoencoder
        return config
    trained = source.config
    ours = AutoencoderFolder.open(config.autoencoder_folder).sha256() if config.uses_latents else ""
    theirs = trained.latents.sha256 if trained.uses_latents else ""
    if ours != theirs:
        trained_on = "latents of another autoencoder" if ours and theirs else "latents" if theirs else "pixels"
        raise RequestError(
            f"the weights in {config.init.folder} were trained on {trained_on}, which does not fit "
            f"autoencoder_folder = {quote(config.autoencoder_folder)}; omit --autoencoder, or start from "
            "other weights"
        )
    return replace(config, latents=trained.latents) if ours else config


def _in_run(init: Init, folder: Path) -> WeightsSource:
    run = RunFolder(folder)
    config = run.read_config()
    if config.trains_autoencoder:
        raise RequestError(
            f"init = {quote(init.folder)} is an autoencoder, and a diffusion network cannot start from its weights; "
            f"train on its latents: --autoencoder {quote(init.folder)}"
        )
    which = {"newest": None, "best": "best"}[init.checkpoint] if init.checkpoint.isalpha() else int(init.checkpoint)
    saved = checkpoint.find_checkpoint(run.checkpoints, which, warn)  # type: ignore[arg-type]
    file, words = ("ema", "averaged (EMA)") if init.weights == "ema" else ("model", "raw")
    return WeightsSource(config, saved.folder / f"{file}.safetensors", f"{words} weights of step {saved.step:,}")


def _in_diffusers(folder: Path, diffusion: Diffusion, known: bool) -> WeightsSource:
    found = DiffusersFolder.open(folder)
    if found.scheduler is not None and not known:
        diffusion = objective_from_scheduler(found.scheduler, diffusion)
    if found.kind == "DiTTransformer2DModel":
        model = from_dit(found.config, read_tensors(found.weights))
        if found.scheduler is None:
            reason = "as given, or as in the recipe: the folder does not state it"
        else:
            reason = "as given" if known else "as its scheduler_config.json says"
        config = with_latents_of(_settings_of(model, diffusion, None), found.pipeline, model.size)
        known_input, what = (model.channels, model.size), "weights of a DiT"
        return WeightsSource(config, found.weights, what, None, found.scheduler, model, reason, known_input)
    network, channels, _ = unet2d_settings(found.config)
    size = found.config.get("sample_size")
    # diffusers also writes [height, width]; the two have to be equal here.
    size = size[0] if isinstance(size, list) and size[:1] * len(size) == size != [] else size
    size = size if isinstance(size, int) and size >= 4 else 0
    config = replace(Config(), network=network, diffusion=diffusion, data=_data_of(channels, size))
    config, what = with_latents_of(config, found.pipeline, size), "weights of a UNet2DModel"
    return WeightsSource(config, found.weights, what, found.config, found.scheduler, known_input=(channels, size))


def _in_file(path: Path, diffusion: Diffusion, known: bool) -> WeightsSource:
    model = read_model(path)
    objective = objective_of(model, diffusion, known)
    config = _settings_of(model, objective.diffusion, objective.sampler)
    known_input = (model.channels, model.size)
    return WeightsSource(config, path, f"weights of {model.what}", None, None, model, objective.reason, known_input)


def _settings_of(model: ElsewhereModel, diffusion: Diffusion, sampler: Sampler | None) -> Config:
    base = Config()
    learned = model.learned_variance
    diffusion = replace(diffusion, learned_variance=learned) if learned != diffusion.learned_variance else diffusion
    data = _data_of(model.channels, model.size)
    return replace(base, network=model.network, diffusion=diffusion, data=data, sampler=sampler or base.sampler)


def _data_of(channels: int, size: int) -> Data:
    """Return settings of images that the input of a network has the form of; of latents, the form is left open."""
    return replace(Data(), size=size, channels=channels) if channels in (1, 3) else Data()


def load_initial_weights(config: Config) -> _InitialWeights:
    """Return the weights that a run with these settings starts from, once its images are known.

    RequestError if they are those of another network, or not those that the run began with.
    """
    source = WeightsSource.describe(config.init, config.diffusion)
    _check_network(source, config)
    sha256 = sha256_of(source.weights)
    if config.init.sha256 not in ("", sha256):
        raise RequestError(
            f"{source.weights} changed since this run began (sha256 differs), and the run has no checkpoint "
            "yet; restore the file, or start a new run with another --out"
        )
    choices = [Choice("init", config.init.folder, source.what), _objective_choice(source, config)]
    if source.input[1] not in (0, input_shape(config)[1]):
        choices.append(Choice("size", config.data.size, f"the weights were trained at {source.config.data.size}"))
    state, classes = source.fit(source.read(), config)
    folder = printable(str(Path(config.init.folder).expanduser().resolve()))
    config = replace(config, init=replace(config.init, folder=folder, sha256=sha256))
    return _InitialWeights(state, config, choices + classes)


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
    channels, known = input_shape(config)[0], source.input[0]
    if channels != known and not config.uses_latents and known not in (1, 3):
        raise RequestError(
            f"the network in {config.init.folder} generates latents of {known} channels; give its autoencoder: "
            "--autoencoder FOLDER"
        )
    if channels != known:
        what = "the autoencoder's latents have" if config.uses_latents else "data.channels ="
        raise RequestError(
            f"the network in {config.init.folder} has {known} channel(s), and {what} {channels}; omit that setting"
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
    before, now = ([format_spec(part) for part in (d.path, d.schedule, d.target)] for d in (trained, config.diffusion))
    if now != before:
        reason = f"as given; the weights were trained with {', '.join(before)}"
    return Choice("objective", ", ".join(now), reason)


def _fit_classes(
    state: dict[str, Tensor], fresh: dict[str, Tensor], names: tuple[str, ...], config: Config
) -> list[Choice]:
    """Fit the class embedding in `state`, trained with the classes `names`, to those of the images; return changes."""
    before = state[_CLASSES].shape[0] - 1 if _CLASSES in state else 0
    wanted = len(config.classes)
    if before == wanted:
        if wanted and names and names != config.classes:
            reason = f"{', '.join(config.classes)[:60]} take the places of {', '.join(names)[:60]}"
            return [Choice("classes", wanted, reason)]
        return []
    if not wanted:
        if _BIAS not in state:
            raise RequestError(f"the weights in {config.init.folder} have {before} classes, and the images have none")
        # Without classes the last row is added in every call, so it becomes part of the bias.
        state[_BIAS] = state[_BIAS] + state.pop(_CLASSES)[-1]
        return [Choice("classes", "none", f"the images have none; the {before} of the weights are forgotten")]
    # In EDM2 networks rows have unit magnitude, and class embeddings rescale the noise condition.
    scaled = config.network is not None and config.network.fixed_norm_weights
    if _CLASSES not in fresh or (scaled and not before):
        raise RequestError(
            f"the weights in {config.init.folder} have {before or 'no'} classes, and the images have {wanted}; this "
            "network can take no others: give --data.labels none, or start from other weights"
        )
    # Every class begins as "no class", so that the first samples are as good as before.
    none = state[_CLASSES][-1] if before else torch.zeros_like(fresh[_CLASSES][-1])
    difference = fresh[_CLASSES] * (_CLASS_SPREAD if scaled else 1.0)
    difference[-1] = 0
    state[_CLASSES] = none + difference
    reason = f"their embedding is new, as the weights have {before or 'no'} classes; it begins as that of no class"
    return [Choice("classes", wanted, reason)]
