"""Export to diffusers: a pipeline folder of a run, with diffusers' own parts where they are equal."""

from __future__ import annotations

import json
import math
import sys
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from unfog.config.schema import Config
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.noise import NoiseSource
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError
from unfog.export.diffusers_unet import Network, sample_size
from unfog.export.foreign_weights import OWN_PIPELINE
from unfog.export.source_code import OF_TRAINING, package_file, plain_source
from unfog.files.safe_files import copy_into, write_atomic
from unfog.inference.exports.conditions import (
    example_given,
    has_named_inputs,
    reading_modules,
    source_of_network,
    with_named_inputs,
)
from unfog.inference.exports.description import (
    check_sampler_maps,
    custom_scheduler,
    describe_network,
    describe_objective,
    equal_network,
    is_stock,
    stock_scheduler,
)
from unfog.inference.loaded_run import LoadedRun
from unfog.models.autoencoder_settings import OURS
from unfog.pipeline.generate import GenerationSettings, conditional_denoiser
from unfog.pipeline.latents import ImageMap, open_run_autoencoder
from unfog.values.condition_format import Given
from unfog.values.conditions import Conditions
from unfog.values.image_format import size_of

_DIFFUSERS = "0.35.0"  # the oldest version that reads these files
_WEIGHTS = "diffusion_pytorch_model.safetensors"
_IMAGES = 2
_MODEL = '''

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config


class UnfogNetwork(ModelMixin, ConfigMixin):
    """The network as a model of diffusers."""

    @register_to_config
    def __init__(self, model, in_channels, sample_size):
        super().__init__()
        self.network = build(model)

    def forward(self, sample, timestep, class_labels=None, columns=()):
        from types import SimpleNamespace

        label = [class_labels] if class_labels is not None else []
        return SimpleNamespace(sample=self.network(sample, timestep, *label, *columns))
'''
_PIPELINE = """A pipeline that draws the samples of an Unfog run.

    pipe = DiffusionPipeline.from_pretrained(FOLDER, trust_remote_code=True)
    images = pipe(batch_size=4, num_inference_steps=20).images"""
_VAE = '''

from types import SimpleNamespace

from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config


class UnfogAutoencoder(ModelMixin, ConfigMixin):
    """The autoencoder as a model of diffusers."""

    @register_to_config
    def __init__(self, settings, image_channels):
        super().__init__()
        self.network = AutoencoderModel(SimpleNamespace(**settings), image_channels)

    def encode(self, images):
        return SimpleNamespace(latents=self.network.encode(images))

    def decode(self, latents):
        return SimpleNamespace(sample=self.network.decode(latents))
'''


def write_pipeline(run: LoadedRun, network: nn.Module, sampler: Sampler, folder: Path) -> float:
    """Write a pipeline into an empty folder, load it, and return the largest difference of samples drawn with both.

    RequestError if the run cannot be sampled by a pipeline.
    """
    config = run.config
    sampler = config.representation.sampler(sampler)
    check_sampler_maps(config, sampler)
    stock = is_stock(config, sampler)
    scheduler = (stock_scheduler if stock else custom_scheduler)(config, sampler)
    index: dict[str, Any] = {"_diffusers_version": _DIFFUSERS, "scheduler": scheduler.component}
    index["unet"] = _write_network(run, network, folder / "unet")
    _write_json(folder / "scheduler", "scheduler_config.json", scheduler.kind, scheduler.settings)
    if scheduler.kind == "LevelsScheduler":
        code = package_file("unfog.export.levels_scheduler")
        write_atomic(folder / "scheduler/levels_scheduler.py", code, folder)
    if stock:
        index["_class_name"] = "DDPMPipeline"  # it takes any scheduler
    else:
        index |= {"_class_name": ["pipeline", OWN_PIPELINE], "objective": describe_objective(config, sampler)}
        index["vae"] = _write_autoencoder(config, folder / "vae")
        names = [*reading_modules(config), "unfog.export.diffusers_pipeline"]
        write_atomic(folder / "pipeline.py", plain_source(_PIPELINE, names, OF_TRAINING).encode(), folder)
    write_atomic(folder / "model_index.json", _json(index), folder)
    return _difference(run, network, sampler, folder, stock)


def _write_network(run: LoadedRun, network: nn.Module, folder: Path) -> list[str]:
    """Write the network, and return its module and class."""
    config, settings = run.config, run.config.network
    assert settings is not None  # a run's is settled
    (channels, *sides), classes = config.input_shape, len(config.classes)
    size = size_of(*sides)
    if (equal := equal_network(config)) is not None:
        out = channels * (1 + config.diffusion.learned_variance)
        # diffusers has no such factor; the scale is in the timesteps of the scheduler instead.
        plain = Network(replace(equal, time_scale=1.0), channels, classes, plain_weights(network), out)
        described, weights = plain.to_unet2d(size)
        _write_model(folder, "UNet2DModel", described, weights)
        return ["diffusers", "UNet2DModel"]
    stored = with_named_inputs(config, network) if has_named_inputs(config) else network
    described = {"model": describe_network(config), "in_channels": channels, "sample_size": sample_size(size)}
    _write_model(folder, "UnfogNetwork", described, _prefixed(plain_weights(stored)))
    file = f"unfog_{settings.kind.replace('-', '_')}"
    write_atomic(folder / f"{file}.py", (source_of_network(config, "network") + _MODEL).encode(), folder)
    return [file, "UnfogNetwork"]


def _write_autoencoder(config: Config, folder: Path) -> list[str | None]:
    """Write the autoencoder of a run, and return its module and class; None for both of pixels."""
    described = config.representation.autoencoder()
    if described is None:
        return [None, None]
    if described.kind != OURS:
        copy_into([described.folder / "config.json", described.weights], folder, folder.parent)
        return ["diffusers", described.kind]
    autoencoder: Any = open_run_autoencoder(config, torch.device("cpu"))
    settings = {"settings": asdict(autoencoder.settings), "image_channels": autoencoder.image_channels}
    _write_model(folder, "UnfogAutoencoder", settings, _prefixed(autoencoder.state_dict()))
    names = ["unfog.models.layers", "unfog.models.autoencoder"]
    source = plain_source("The autoencoder of an Unfog run.", names, ["DiffusersAutoencoder", "ConditionalNetwork"])
    write_atomic(folder / "unfog_autoencoder.py", (source + _VAE).encode(), folder)
    return ["unfog_autoencoder", "UnfogAutoencoder"]


def _prefixed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"network.{name}": tensor for name, tensor in weights.items()}


def _write_model(folder: Path, kind: str, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    _write_json(folder, "config.json", kind, config)
    save_weights(weights, folder / _WEIGHTS)


def plain_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the weights without the embedding of the augmentation, which adds exactly 0 to samples."""
    return {name: w for name, w in network.state_dict().items() if "augment_embedding" not in name.split(".")}


def save_weights(weights: dict[str, Tensor], path: Path, described: str = "") -> None:
    """Write a safetensors file, with a description in its metadata. OSError if it cannot be written."""
    # From memory, as the library reports a full disk by an error of its own and writes files for the owner alone.
    metadata = {"format": "pt"} | ({"unfog": described} if described else {})
    content = save({name: tensor.contiguous() for name, tensor in weights.items()}, metadata)
    write_atomic(path, content, path.parent)


def _write_json(folder: Path, name: str, kind: str, settings: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    described = {"_class_name": kind, "_diffusers_version": _DIFFUSERS, **settings}
    write_atomic(folder / name, _json(described), folder)


def _json(value: dict[str, Any]) -> bytes:
    return f"{json.dumps(value, indent=2)}\n".encode()


def _difference(run: LoadedRun, network: nn.Module, sampler: Sampler, folder: Path, stock: bool) -> float:
    """Return the largest difference, in [-1, 1], of samples from the same noise by the run and by its pipeline."""
    pipeline = _load(folder, stock)
    generators = NoiseSource(0, range(_IMAGES), run.config.input_shape).generators
    given, words = example_given(run.config)
    arguments = {"generator": generators, "num_inference_steps": sampler.steps, "output_type": "np"}
    arguments |= {"given": words} if words else {}
    # Samples and not outputs are compared: a wrong scheduler around a right network would go unnoticed.
    drawn = torch.from_numpy(pipeline(batch_size=_IMAGES, **arguments).images).permute(0, 3, 1, 2)
    ours = draw_samples(run.config, network, sampler, _IMAGES, given)
    return float((2 * drawn - 1 - ours.clamp(-1, 1)).abs().max())


def _load(folder: Path, stock: bool) -> Any:
    from diffusers import DiffusionPipeline
    from diffusers.utils import dynamic_modules_utils, logging

    shown, modules, path = logging.is_progress_bar_enabled(), dynamic_modules_utils.HF_MODULES_CACHE, [*sys.path]
    logging.disable_progress_bar()
    with TemporaryDirectory(prefix="unfog-") as own:
        # diffusers copies the code to a folder of all processes under its name alone, where two exports would collide.
        dynamic_modules_utils.HF_MODULES_CACHE = own
        try:
            # The code in it was written a moment ago, by this process, from this package.
            pipeline = DiffusionPipeline.from_pretrained(
                str(folder), trust_remote_code=not stock, low_cpu_mem_usage=False, local_files_only=True
            )
        finally:
            dynamic_modules_utils.HF_MODULES_CACHE, sys.path[:] = modules, path
            if shown:
                logging.enable_progress_bar()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw_samples(
    config: Config, network: nn.Module, sampler: Sampler, count: int, given: Given | None = None
) -> Tensor:
    """Return the first samples of seed 0 on the CPU, about [-1, 1], as a run draws them before they become uint8.

    Unknown values are NaN. The conditions are by default those of `unfog sample` without `--given`.
    """
    settings, cpu = replace(GenerationSettings.default(config, count, count), sampler=sampler), torch.device("cpu")
    settings = settings if given is None else replace(settings, given=given)
    noise = NoiseSource(settings.seed, range(count), config.input_shape)
    conditions = settings.conditions(config, range(count), cpu)
    denoise = conditional_denoiser(Denoiser(network, config.diffusion), config, settings, conditions)
    x0 = config.representation.sampler(sampler)(denoise, config.diffusion.path, config.diffusion.schedule, noise.draw)
    x0 = x0 if conditions.known is None else x0.masked_fill(conditions.known == 0, math.nan)
    return ImageMap.of(config, cpu).decode(x0)


@torch.inference_mode()
def export_difference(run: LoadedRun) -> float:
    """Return the largest output difference between a run's network and its export to diffusers, relative to ours.

    RequestError if diffusers has no equivalent network, or none for the conditions of the run.
    """
    from diffusers import UNet2DModel

    if equal_network(run.config) is None:
        raise RequestError(
            "diffusers has no network that is equal to that of this run, so that none is compared; `unfog export` "
            "writes its code, and compares that"
        )
    # Many branches of a network start at zero and are nearly zero after two steps, so that an exchanged weight would
    # go unnoticed: both get random weights.
    config, network = run.config, _randomized(run.network.cpu())
    assert config.network is not None  # a run's is settled
    channels, height, width = config.input_shape
    out = channels * (2 if config.diffusion.learned_variance else 1)
    plain = Network(config.network, channels, len(config.classes), network.state_dict(), out)
    settings, state = plain.to_unet2d(size_of(height, width))
    exported = UNet2DModel(**settings).eval()
    exported.load_state_dict(state)
    x = torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(1))
    level = torch.tensor([10.0, 500.0])
    told = Conditions(torch.tensor([0, -1]) if config.classes else None)  # a class, and no class
    expected = network(x, level, told)
    difference = (exported(x, level, class_labels=told.label_or(len(config.classes))).sample - expected).abs().max()
    # A network may output 0 everywhere, and 0 cannot be a divisor.
    return float(difference / expected.abs().max().clamp_min(1e-12))


def _randomized(network: nn.Module) -> nn.Module:
    """Return a copy of a network with random weights of ordinary size, so that all of them affect the output."""
    copy, generator = deepcopy(network), torch.Generator().manual_seed(0)
    for parameter in copy.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * (parameter.numel() / parameter.shape[0]) ** -0.5)
        else:  # biases about 0, the scales of normalisations about 1
            parameter.copy_(parameter.round().clamp(0, 1) + 0.1 * noise)
    return copy
