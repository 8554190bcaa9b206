"""Weights of a run, of diffusers or of another program, described before they are read, and fitted to a run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unfog.config.schema import Config, Init
from unfog.config.spec_strings import quote
from unfog.config.validate import reason_of
from unfog.data.settings import Data
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.export.diffusers_unet import Network, unet2d_settings
from unfog.export.foreign_weights import SUFFIXES, DiffusersFolder, ForeignModel, from_dit, read_model
from unfog.models.condition_embedding import column_inputs
from unfog.models.layers import ConditionalNetwork
from unfog.pipeline.build import build_network, limited_parameters
from unfog.planning.intervals import Choice
from unfog.process.run_folder import RunFolder
from unfog.reporting.progress import warn
from unfog.runs.weights.foreign_objectives import ForeignObjective, objective_from_scheduler, with_latents_of
from unfog.training.checkpoints import format as checkpoint
from unfog.training.checkpoints.load import read_tensors
from unfog.values.condition_kinds import ColumnFacts
from unfog.values.image_format import CHANNELS, LEAST, Size, size_of
from unfog.values.kinds.image_kinds import IMAGE_KINDS, image_columns

_CLASS_SPREAD = 0.02  # scale of random differences between new class embeddings; whole ones would drown what is known
_ADDED = 16  # parameters that a network has beside those of the weights, at most
_CLASSES, _AUGMENT, _BIAS = "class_embedding.weight", "augment_embedding.", "time_embedding.2.bias"
_COLUMNS, _COLUMN_WEIGHT = "column_embedding.", "column_embedding.linear.weight"
_TEXT_PARTS = frozenset(ConditionalNetwork.text_parts)
# Layers that embed conditions other than the class. The weights and the run may differ in having them.
_EMBEDDINGS = tuple(f"{name}." for name in ConditionalNetwork.embeddings if not _CLASSES.startswith(f"{name}."))


def _is_of_text(name: str) -> bool:
    return not _TEXT_PARTS.isdisjoint(name.split("."))


def _is_optional(name: str) -> bool:
    """Return whether a parameter belongs to a condition that the weights or the run may be without."""
    return name.startswith(_EMBEDDINGS) or _is_of_text(name)


def _text(config: Config) -> tuple[object, ...] | None:
    """Return all that the layers of the texts depend on; None without texts."""
    text = config.conditions.text
    return None if text is None else (*text.identity, text.statistics, config.text_encoder)


def _embedded(config: Config) -> list[ColumnFacts]:
    """Return the columns that `ColumnEmbedding` embeds."""
    return [one for one in config.columns if one != config.conditions.text and one.kind not in IMAGE_KINDS]


class WeightsSource(NamedTuple):
    """Weights of a folder, described before they are read."""

    config: Config  # network, objective, size and channels that they were trained with; the rest is not used
    weights: Path  # the file of weights
    what: str  # description for messages
    unet2d: dict[str, Any] | None = None  # `UNet2DModel`'s configuration; None for a run
    scheduler: dict[str, Any] | None = None  # that of diffusers' scheduler, if there is one
    elsewhere: ForeignModel | None = None  # weights of another program; None for a run and for a `UNet2DModel`
    objective_reason: str = "as it was trained with"
    known_input: tuple[int, Size] | None = None  # channels and size of the network's input; None: as `config` has it

    @property
    def input(self) -> tuple[int, Size]:
        """Channels and size of the network's input: pixels or latents; the size is 0 if it is not stated."""
        channels, height, width = self.config.input_shape
        return self.known_input or (channels, size_of(height, width))

    @property
    def root(self) -> Path:
        """The folder below which no link is followed: that of the run, or of the file of weights."""
        return self.weights.parents[2] if self.is_run else self.weights.parent

    @property
    def names_autoencoder(self) -> bool:
        """False for weights that see pixels, and for those of latents that come without their autoencoder."""
        return bool(self.config.autoencoder_folder)

    @property
    def is_run(self) -> bool:
        return self.unet2d is None and self.elsewhere is None

    def read(self) -> dict[str, Tensor]:
        """Return the weights, by the names of the program that wrote them or, of another than diffusers, by ours."""
        return read_tensors(self.weights, self.root) if self.elsewhere is None else self.elsewhere.state

    def fit(self, state: dict[str, Tensor], config: Config) -> tuple[dict[str, Tensor], list[Choice]]:
        """Return the weights under our names, with the classes and inputs of the run."""
        wanted = len(config.classes)
        if self.unet2d is not None:
            rows = self.unet2d.get("num_class_embeds")
            # Our export has one more row than classes, for no class; a model trained in diffusers has not.
            state = Network.from_unet2d(self.unet2d, state, null_class=wanted > 0 and rows == wanted + 1).state
        # Weights are trained in fp32, whatever the file holds.
        state = {name: tensor.float() for name, tensor in state.items() if self._has_input(name, config)}
        columns = [name for name in state if name.startswith(_COLUMNS)]
        before = {name: state.pop(name) for name in columns if self._other_columns(config)}
        # A weight's shape may describe a far larger network than the weights are of, so shapes are compared first.
        with torch.device("meta"), limited_parameters(len(state) + _ADDED, self._misfit):
            network = build_network(config)
        shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
        images = []
        if isinstance(network, ConditionalNetwork):
            images = self._fit_images(state, shapes, f"{network.ends[0]}.weight", config)
        for name, shape in shapes.items():
            added = name == _CLASSES or (_is_optional(name) and name not in state)
            if not added and (name not in state or state[name].shape != shape):
                raise self._misfit(name)
        with torch.no_grad():
            fresh = build_network(config).state_dict()
        new = [name for name in fresh if _is_optional(name) and name not in state]
        state |= {name: fresh[name] for name in new}
        choices = images + _fit_classes(state, fresh, self.config.classes, config)
        if any(name.startswith(_COLUMNS) for name in new):
            theirs = _embedded(self.config)
            expected = len(fresh[_COLUMN_WEIGHT]), sum(one.inputs for one in theirs)
            if _COLUMN_WEIGHT in before and before[_COLUMN_WEIGHT].shape != expected:
                raise self._misfit(_COLUMN_WEIGHT)
            choices.append(_fit_columns(state, before, theirs, config))
        if (text := config.conditions.text) is not None and any(map(_is_of_text, new)):
            reason = "its layers are new and begin at zero: the weights were trained without these texts"
            choices.append(Choice("text", text.name, reason))
        wrong = [name for name in {*state, *fresh} if name not in state or name not in fresh]
        wrong += [name for name in state if name in fresh and state[name].shape != fresh[name].shape]
        if wrong:
            raise self._misfit(min(wrong))
        return state, choices

    def _fit_images(
        self, state: dict[str, Tensor], shapes: Mapping[str, torch.Size], layer: str, config: Config
    ) -> list[Choice]:
        """Add inputs of zero to the first layer in `state`, for images that the weights were trained without.

        `shapes` are those of the network of the run, which has the images of the weights too.
        """
        theirs, ours = (image_columns(each.columns) for each in (self.config, config))
        if not (new := [one for one in ours if one.identity not in {each.identity for each in theirs}]):
            return []
        before, shape = state.get(layer), shapes.get(layer)
        # The inputs of a channel are side by side, in a patch too. Channels behind those of the images stay the last.
        patch = getattr(config.network, "patch", 1) ** 2
        first = config.input_shape[0] * (1 + config.data.has_unknown) * patch
        unit = config.conditions.image_factor**2 * patch
        if before is None or shape is None or before.ndim != len(shape):
            raise self._misfit(layer)
        if before.shape[1] + unit * sum(one.inputs for one in new) != shape[1]:
            raise self._misfit(layer)
        wide = before.new_zeros(before.shape[0], shape[1], *before.shape[2:])
        wide[:, :first] = before[:, :first]
        places, old = _image_inputs(ours, first, unit), _image_inputs(theirs, first, unit)
        for name, inputs in old.items():
            wide[:, places[name]] = before[:, inputs]
        end = max((inputs.stop for inputs in old.values()), default=first)
        wide[:, shape[1] - (before.shape[1] - end) :] = before[:, end:]
        state[layer] = wide
        begin = "begins" if len(new) == 1 else "begin"
        names = ", ".join(one.name for one in new)
        reason = f"{names} {begin} at zero: the weights were trained without them, and the first outputs are as before"
        return [Choice("images", ", ".join(one.name for one in ours), reason)]

    def _has_input(self, name: str, config: Config) -> bool:
        """Return False for a weight that embeds conditions if the run has none of this kind."""
        if name.startswith(_AUGMENT):
            return config.data.augment > 0
        if _is_of_text(name):
            return _text(config) is not None and _text(config) == _text(self.config)
        return not name.startswith(_COLUMNS) or bool(_embedded(config))

    def _other_columns(self, config: Config) -> bool:
        ours, theirs = ([one.identity for one in _embedded(each)] for each in (config, self.config))
        return ours != theirs

    def _misfit(self, name: str) -> RequestError:
        return RequestError(
            f"{self.weights} does not fit its own settings ({name}); it may have been edited: write it again"
        )

    @classmethod
    def describe(cls, init: Init, diffusion: Diffusion, known: bool = True) -> WeightsSource:
        """Describe the weights at `init.folder`, without reading them.

        `diffusion` is the objective if the folder has none, or if it is `known`: then a scheduler does not matter.
        """
        folder = Path(os.path.expanduser(init.folder))
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


def _in_run(init: Init, folder: Path) -> WeightsSource:
    run = RunFolder(folder)
    config = run.read_config()
    folder_text = quote(init.folder)
    config.task.check_generates(f"init = {folder_text}", f"train on its latents: --autoencoder {folder_text}")
    which = {"newest": None, "best": "best"}[init.checkpoint] if init.checkpoint.isalpha() else int(init.checkpoint)
    saved = checkpoint.find_checkpoint(run.checkpoints, which, warn)  # type: ignore[arg-type]
    if saved.is_weights_only and init.weights == "raw":
        raise RequestError(
            f"init = {folder_text} is an export, which holds EMA weights alone; give init.weights = 'ema'"
        )
    file, words = ("ema", "averaged (EMA)") if init.weights == "ema" else ("model", "raw")
    return WeightsSource(config, saved.folder / f"{file}.safetensors", f"{words} weights of step {saved.step:,}")


def _in_diffusers(folder: Path, diffusion: Diffusion, known: bool) -> WeightsSource:
    found = DiffusersFolder.open(folder)
    if found.scheduler is not None and not known:
        if found.has_own_pipeline:
            raise RequestError(
                f"{folder} is an export of Unfog whose files do not state its objective; give the run that it was made "
                "from, or an export of it that Unfog reads: unfog export RUN OUT --format run"
            )
        diffusion = objective_from_scheduler(found.scheduler, diffusion)
    if found.kind == "DiTTransformer2DModel":
        model = from_dit(found.config, read_tensors(found.weights, found.weights.parent))
        if found.scheduler is None:
            reason = "as given, or as in the recipe: the folder does not state it"
        else:
            reason = "as given" if known else "as its scheduler_config.json says"
        config = with_latents_of(_settings_of(model, diffusion, None), found.pipeline, model.size)
        known_input, what = (model.channels, model.size), "weights of a DiT"
        return WeightsSource(config, found.weights, what, None, found.scheduler, model, reason, known_input)
    network, channels, _ = unet2d_settings(found.config)
    size = found.config.get("sample_size")
    # diffusers also writes [height, width].
    sides = size if isinstance(size, list) and len(size) == 2 else [size, size]
    size = size_of(*sides) if all(isinstance(side, int) and side >= LEAST for side in sides) else 0
    config = replace(Config(), network=network, diffusion=diffusion, data=_data_of(channels, size))
    config, what = with_latents_of(config, found.pipeline, size), "weights of a UNet2DModel"
    return WeightsSource(config, found.weights, what, found.config, found.scheduler, known_input=(channels, size))


def _in_file(path: Path, diffusion: Diffusion, known: bool) -> WeightsSource:
    model = read_model(path)
    objective = ForeignObjective.of(model, diffusion, known)
    config = _settings_of(model, objective.diffusion, objective.sampler)
    known_input = (model.channels, model.size)
    return WeightsSource(config, path, f"weights of {model.what}", None, None, model, objective.reason, known_input)


def _settings_of(model: ForeignModel, diffusion: Diffusion, sampler: Sampler | None) -> Config:
    base = Config()
    learned = model.learned_variance
    diffusion = replace(diffusion, learned_variance=learned) if learned != diffusion.learned_variance else diffusion
    data = _data_of(model.channels, model.size)
    return replace(base, network=model.network, diffusion=diffusion, data=data, sampler=sampler or base.sampler)


def _data_of(channels: int, size: Size) -> Data:
    """Return image settings that match the input of a network; with latents, size and channels stay open."""
    return replace(Data(), size=size, channels=channels) if channels in CHANNELS else Data()


def _image_inputs(columns: Sequence[ColumnFacts], first: int, unit: int) -> dict[str, slice]:
    """Return the inputs of the first layer by image: behind the `first` ones, `unit` of them a channel."""
    places, end = dict[str, slice](), first
    for one in columns:
        places[one.name] = slice(end, end + unit * one.inputs)
        end += unit * one.inputs
    return places


def _fit_columns(
    state: dict[str, Tensor], before: Mapping[str, Tensor], columns: Sequence[ColumnFacts], config: Config
) -> Choice:
    """Begin the new layer of columns in `state` at zero, and columns that the weights know as they are in `before`."""
    wanted = _embedded(config)
    names = ", ".join(one.name for one in wanted)
    if config.network is not None and config.network.fixed_norm_weights:
        reason = "their embedding is new and random, as this network has no weights of zero"
        return Choice("conditions", names, f"{reason}; what the weights had for columns is forgotten")
    for name in state:
        if name.startswith(_COLUMNS):
            state[name] = torch.zeros_like(state[name])
    known = {one.identity for one in columns} if _COLUMN_WEIGHT in before else set()
    theirs, ours = column_inputs(columns), column_inputs(wanted)
    new = [one.name for one in wanted if one.identity not in known]
    for one in wanted:
        if one.identity in known:
            state[_COLUMN_WEIGHT][:, ours[one.name]] = before[_COLUMN_WEIGHT][:, theirs[one.name]]
    if not new:
        return Choice("conditions", names, "as they were trained; the weights have others, which are forgotten")
    begin = "begins" if len(new) == 1 else "begin"
    return Choice("conditions", names, f"{', '.join(new)} {begin} at zero: the weights were trained without them")


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
    difference = fresh[_CLASSES] * _CLASS_SPREAD
    difference[-1] = 0
    state[_CLASSES] = none + difference
    reason = f"their embedding is new, as the weights have {before or 'no'} classes; it begins as that of no class"
    return [Choice("classes", wanted, reason)]
