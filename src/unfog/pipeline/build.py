"""Build network, training state, loss and held-out images from a configuration with no setting left open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from unfog.config.schema import Config
from unfog.config.task import AutoencoderTask, DiffusionTask, RunTask
from unfog.config.validate import check_network_size
from unfog.data.buckets.joined_set import Rows
from unfog.data.buckets.stream import BucketStream
from unfog.data.columns.made import without_made
from unfog.data.dataset import Dataset, ImageSet
from unfog.data.stream import DeviceStream, ImageStream
from unfog.device.compilation import compiled_with, keep_compiled_code
from unfog.diffusion.diffusion import Network
from unfog.diffusion.loss_by_level import LossByLevel
from unfog.diffusion.objective import Objective, noised, stratified, weighted_error
from unfog.errors import RequestError, RunError
from unfog.evaluation.held_out import HeldOut, HeldOutBuckets, LossAt, midpoints
from unfog.models.autoencoder import AutoencoderModel
from unfog.models.layers import ConditionalNetwork, Conv2d
from unfog.models.network_settings import CustomNetwork, build_model
from unfog.models.pretrained_text import known_texts
from unfog.pipeline.compile_network import compile_network
from unfog.process.device import total_memory
from unfog.process.torch_flags import set_repeatable
from unfog.training.autoencoder_loss import AutoencoderLoss
from unfog.training.checkpoints.load import TensorFile
from unfog.training.distributed.process_group import processes_per_gpu
from unfog.training.hooks import Augmentation, LossFunction, Stream
from unfog.training.loop import Intervals
from unfog.training.precision import Precision
from unfog.training.state import TrainState
from unfog.values.conditions import Conditions
from unfog.values.kinds.image_kinds import image_columns

# Device types on which convolutions keep their weights in the format that they compute in. Each weight would else be
# converted twice a step and its gradient once: 153 launches with `cifar10`. On a CPU it would change the bits of runs.
_WEIGHTS_CHANNELS_LAST_ON = ("cuda",)
_REGISTRATIONS = 4  # of one parameter, at the most: a module may set it anew
_weights: ContextVar[tuple[Path, Path] | None] = ContextVar("weights", default=None)


@contextmanager
def building_for(weights: Path | None, run: Path) -> Iterator[None]:
    """Inside, `build_network` raises RunError if a parameter has no shape in this file of `run`, before it is made.

    Settings that a stranger sent may describe a network that is far larger than the weights beside them.
    """
    token = _weights.set(None if weights is None else (weights, run))
    try:
        yield
    finally:
        _weights.reset(token)


@contextmanager
def limited_parameters(most: int, misfit: Callable[[str], Exception]) -> Iterator[None]:
    """Inside, a network of far more than `most` parameters raises what `misfit` returns for a parameter's name."""
    left = _REGISTRATIONS * most

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise misfit(name)

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _only_stored_shapes() -> Iterator[None]:
    if (weights := _weights.get()) is None:
        yield
        return
    path, run = weights
    stored = [tuple(shape) for shape in TensorFile(path, run).shapes.values()]
    shapes, left = frozenset(stored), _REGISTRATIONS * len(stored)

    def check(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal left
        left -= 1
        if parameter is not None and (tuple(parameter.shape) not in shapes or left < 0):
            raise RunError(
                f"the weights in {path.parent} do not fit the network that config.toml describes, which has a {name} "
                f"of shape {tuple(parameter.shape)}; was it edited?"
            )

    hook = register_module_parameter_registration_hook(check)
    try:
        yield
    finally:
        hook.remove()


def build_augmentation(config: Config) -> Augmentation:
    """Return the transform of training: augmentation of pixels, or normalisation of stored latents.

    With conditions that are images it is an `AugmentWithConditions`.
    """
    augment = config.representation.augmentation()
    if images := image_columns(config.columns):
        from unfog.data.augmentation import AugmentWithConditions

        return AugmentWithConditions(augment, tuple(images), makes=config.representation.scaling() is None)
    return augment


def without_augmentation(config: Config) -> Callable[[Tensor], Tensor]:
    """Return the map from the stream's data to the network's input, without random augmentation."""
    return config.representation.to_model


def build_loss(config: Config, state: TrainState | None = None) -> LossFunction:
    """Return the training loss: the diffusion objective, `fitted` to a training state, or that of an autoencoder."""
    return _PARTS[type(config.task)].loss(config, state)


def build_objective(config: Config) -> Objective:
    interleaved = config.training.noise == "batch"  # a batch drawn at once is split between micro-batches and ranks
    each, spans, data = config.condition_dropout, config.conditions.spans, config.data
    unknown = data.has_unknown, data.masks_vary
    return Objective(config.diffusion, config.label_dropout, each, spans, interleaved, *unknown)


def fitted(objective: Objective, state: TrainState) -> Objective:
    """Return the objective with the measured losses of a training state, and on a GPU compiled if its network is."""
    compiled = partial(compiled_with, state.model, state.precision.device)
    return replace(
        objective,
        levels=state.levels,
        stratified=compiled(stratified),
        noised=compiled(noised),
        weighted_error=compiled(weighted_error),
    )


def _build_diffusion_loss(config: Config, state: TrainState | None) -> Objective:
    objective = build_objective(config)
    return objective if state is None else fitted(objective, state)


def fixed_loss(network: Network, objective: Objective) -> LossAt:
    """Return the loss of a network as a function of images, conditions, noise quantiles and noise: nothing is drawn."""

    def loss_at(x0: Tensor, conditions: Conditions, u: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        return objective.at(network, x0, conditions, objective.diffusion.schedule(u), noise)

    return loss_at


def build_loss_at(network: nn.Module, config: Config) -> LossAt:
    """Return the `fixed_loss` of a run's network: of the held-out loss, of `evaluate`, doctor and EMA sweep."""
    return fixed_loss(network, build_objective(config))


def build_network(config: Config) -> ConditionalNetwork | AutoencoderModel:
    """Return the network with fresh weights, on the CPU: a function of the configuration and its seed alone.

    RequestError if the network does not fit the image size, or is not chosen yet.
    """
    return _PARTS[type(config.task)].network(config)


def _build_diffusion_network(config: Config) -> ConditionalNetwork:
    if config.network is None:
        raise RequestError("network = auto has to be resolved before a network can be built")
    for _, height, width in config.input_shapes:
        check_network_size(config.network, (height, width), config.representation.factor)
    channels = config.input_shape[0]
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random state as it is
        torch.manual_seed(config.training.seed)
        told = config.conditions
        out = 2 * channels if config.diffusion.learned_variance else None
        own = isinstance(config.network, CustomNetwork)  # somebody's code, which may build and drop other modules
        with nullcontext() if own else _only_stored_shapes():
            network = build_model(config.network, channels, told, out, config.data.wrapped)
        if isinstance(config.network, CustomNetwork) and not told.augment_inputs:
            for shape in config.input_shapes:
                config.network.try_out(network, shape, told, out or channels)
    network.channels_last = config.training.memory_format == "channels_last"
    return network


def learn_captions(config: Config, dataset: Dataset) -> None:
    """Encode all captions of the images, if a pretrained encoder reads them, or take them from the cache."""
    text, model = config.conditions.text, config.conditions.text_model
    if text is None or model is None:
        return
    columns = [images.columns[text.name].values for images in (dataset.train, dataset.held_out) if len(images)]
    rows = [values.reshape(-1, values.shape[-1]).astype(np.int64) for values in columns]
    tokens = torch.from_numpy(np.concatenate(rows)).to(config.training.device)
    known_texts(text.categories, model).learn_captions(tokens)


def _build_autoencoder(config: Config) -> AutoencoderModel:
    with torch.random.fork_rng(devices=[]), _only_stored_shapes():
        torch.manual_seed(config.training.seed)
        return AutoencoderModel(config.autoencoder, config.data.channels)


class _Parts(NamedTuple):
    """Functions that build the parts of a task."""

    network: Callable[[Config], ConditionalNetwork | AutoencoderModel]
    loss: Callable[[Config, TrainState | None], LossFunction]
    levels: Callable[[Config, torch.device], LossByLevel | None]
    """The noise levels that follow losses, if any do."""


_PARTS: dict[type[RunTask], _Parts] = {
    DiffusionTask: _Parts(
        _build_diffusion_network,
        _build_diffusion_loss,
        lambda config, device: LossByLevel(device) if config.diffusion.follows_losses else None,
    ),
    AutoencoderTask: _Parts(
        _build_autoencoder,
        lambda config, state: AutoencoderLoss(config.autoencoder.kl, config.autoencoder.pyramid),
        lambda config, device: None,
    ),
}


def build_state(
    config: Config, device: torch.device, weights: dict[str, Tensor] | None = None, home: torch.device | None = None
) -> TrainState:
    """Return network, optimizer, EMA and gradient scaler at the start of a run.

    The run computes on `device`; weights and EMA stay at `home` until they are sharded, None if they will not be.
    `weights` are those of the network, None for fresh ones. RequestError if torch can no longer compute alike each time
    in this process, or cannot compile.
    """
    repeats = config.training.deterministic != "off"
    set_repeatable(device, repeats)
    network = build_network(config)
    if weights is not None:
        network.load_state_dict(weights)
    network = network.to(home or device)
    if home is None and device.type in _WEIGHTS_CHANNELS_LAST_ON:
        _lay_out_weights(network)
    network.checkpointing = config.training.checkpointing
    if config.training.compile:
        keep_compiled_code()
        compile_network(network, device, repeats, sharded=home is not None)
    precision, second = Precision(config.training.precision, device), config.ema_snapshots.second_schedule(config.ema)
    levels = _PARTS[type(config.task)].levels(config, device)
    return TrainState(network, config.optimizer, config.ema, precision, second, levels)


def _lay_out_weights(network: nn.Module) -> None:
    """Keep the weights of convolutions in channels_last if they compute in it. Moments, EMAs and gradients follow."""
    # Only where nothing else looks at the weights, which may view them as matrices.
    if getattr(network, "channels_last", False) and getattr(network, "calls_layers_once", False):
        for layer in network.modules():
            if isinstance(layer, Conv2d) or type(layer) is nn.Conv2d:
                layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)


def build_intervals(config: Config, state: TrainState) -> Intervals:
    """Return the intervals of the hooks, in steps; EMA snapshots only if the EMA profiles are known."""
    every = (config.log.every, config.preview.every, config.evaluate.every, config.checkpoint.every)
    return Intervals(*every, ema_snapshot=config.ema_snapshots.every if state.ema_widths else 0)


def build_held_out_set(
    dataset: Dataset, config: Config, device: torch.device, wanted: int = 0
) -> HeldOut | HeldOutBuckets | None:
    """Return at most `wanted` held-out images (0: `evaluate.images`), evenly spaced, as network input on the device.

    None without any.
    """
    images, wanted = dataset.as_network_input.held_out, wanted or config.evaluate.images
    if not len(images):
        return None
    # Unlike `evenly_spaced`, which rounds: other images would change the held-out loss of existing runs.
    index = torch.linspace(0, len(images) - 1, min(wanted, len(images))).long().numpy()
    levels = midpoints(config.evaluate.levels).to(device)

    def take(images: ImageSet, rows: NDArray[np.int64]) -> HeldOut:
        taken = images.take(rows)
        x0 = without_augmentation(config)(torch.from_numpy(taken.pixels)).to(device)
        return HeldOut(x0, taken.conditions.to(device), levels)

    if not dataset.buckets:
        return take(images, index)
    sets = [bucket.held_out for bucket in dataset.buckets]
    rows = Rows(tuple(map(len, sets)))
    return HeldOutBuckets(tuple(take(sets[number], own) for number, _, own in rows.split(index)))


def open_stream(dataset: Dataset, config: Config) -> ImageStream | BucketStream:
    """Return the stream of the training images of a run, in the order that its seed gives."""
    seed = config.training.seed
    sets = [bucket.train for bucket in dataset.buckets] or [dataset.as_network_input.train]
    if dataset.latents is None:  # what is made of the images is made once they are augmented
        sets = [without_made(images) for images in sets]
    return BucketStream(sets, config.training.batch, seed) if dataset.buckets else ImageStream(sets[0], seed)


def open_task_stream(stream: ImageStream | BucketStream, device: torch.device) -> Stream:
    """Return the stream that the loop reads: on a GPU that it is small beside, one whose images are kept there."""
    memory = total_memory(device) // processes_per_gpu()
    if isinstance(stream, BucketStream):
        return stream.on_device(device, memory) if device.type == "cuda" else stream
    return DeviceStream.open(stream, device, memory)
