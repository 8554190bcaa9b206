"""Export of a run: its network and all that sampling needs, in a folder for programs that do not know Unfog."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from unfog.config.requests.export import ExportSettings
from unfog.config.validate import check_out
from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.sampler import Sampler
from unfog.errors import RequestError, RunError
from unfog.export import values_numpy, values_torch
from unfog.export.graphs import Decoder, check_packages, write_graph
from unfog.export.network_inputs import NamedInputs
from unfog.export.source_code import code_files, usage
from unfog.files.safe_files import copy_into, tensor_file, write_atomic
from unfog.files.work_folder import whole_folder
from unfog.inference.exports.conditions import (
    check_conditions_map,
    condition_rows,
    example_code,
    example_given,
    example_values,
    has_named_inputs,
    reading_modules,
    source_of_network,
    with_named_inputs,
)
from unfog.inference.exports.description import describe_denoiser, describe_model
from unfog.inference.exports.diffusers import draw_samples, plain_weights, save_weights, write_pipeline
from unfog.inference.exports.hub import Repository
from unfog.inference.exports.model_card import GRID, CardSettings, model_card
from unfog.inference.exports.small_run import write_small_run
from unfog.inference.guide import is_guided_by_itself
from unfog.inference.loaded_run import LoadedRun
from unfog.models.autoencoder_settings import CONFIG, OURS
from unfog.models.network_settings import CustomNetwork
from unfog.pipeline.generate import GenerationSettings, sample_grid
from unfog.pipeline.latents import open_run_autoencoder
from unfog.reporting.image_grids import Pixels, save_png
from unfog.reporting.progress import say
from unfog.text import plural, sanitize

_DESCRIPTION, _WEIGHTS, SOURCE = "model.json", "model.safetensors", "network.py"
# Largest difference between the outputs of the run and of its export, over the largest output.
# Weights of 16 bits, as in a run, have errors of up to 2^-11 each, and blocks add theirs: 1.1e-3 for a DiT of depth 28.
_TOLERANCE = {"denoiser": 1e-5, "run": 1e-2}
_USUAL_TOLERANCE = 1e-3
_VALUE_TOLERANCE = 1e-5  # of the largest value of a channel
_LEVELS = 9  # at which a denoiser is compared
_SAMPLES = 16  # on the model card
_DECODE = '''

def decode(model, folder, x0):
    """Return images [B, C, H, W], about [-1, 1], of what the network generates; `model` is that of model.json."""
    import json
    from types import SimpleNamespace

    from safetensors.torch import load_file

    with open(f"{folder}/autoencoder/config.json") as file:
        settings = json.load(file)
    autoencoder = AutoencoderModel(SimpleNamespace(**settings), settings["image_channels"])
    autoencoder.load_state_dict(load_file(f"{folder}/autoencoder/codec.safetensors"))
    scale, mean = (torch.tensor(model["latents"][name])[:, None, None] for name in ("scale", "mean"))
    return autoencoder.eval().decode(x0 * scale + mean).detach()
'''
_DECODE_BY_DIFFUSERS = '''

def decode(model, folder, x0):
    """Return images [B, C, H, W], about [-1, 1], of what the network generates; `model` is that of model.json."""
    from diffusers import {name}

    autoencoder = {name}.from_pretrained(f"{{folder}}/autoencoder")
    scale, mean = (torch.tensor(model["latents"][name])[:, None, None] for name in ("scale", "mean"))
    return autoencoder.decode(x0 * scale + mean).sample.detach()
'''


@dataclass(frozen=True)
class _Export:
    """A run, what describes it, and the folder to write."""

    run: LoadedRun
    network: nn.Module
    """On the CPU."""
    called: NamedInputs
    """The network as exports call it."""
    sampler: Sampler
    description: dict[str, Any]
    folder: Path

    @property
    def weights(self) -> dict[str, Tensor]:
        return plain_weights(self.called if has_named_inputs(self.run.config) else self.network)


def export(run: LoadedRun, out: Path, settings: ExportSettings) -> float:
    """Write an export of a run into a new folder, and return its largest difference from the run, which is small.

    Raises:
        RequestError: the folder is not empty, the format cannot hold this run, or the Hub does not let us push.
        RunError: what was written gives another output, and nothing stays of it; or the upload failed, and all stays.
    """
    check_out(out, what="the folder of an export", argument="OUT")
    sampler = run.sampler(settings.sampler, settings.steps)
    _check(run, sampler, settings.format)
    if is_guided_by_itself(run):
        say(
            "  samples of the run are guided by its earlier EMA, and those of an export are not; to keep the guide, "
            "copy the folder of the run, and draw with `unfog sample`"
        )
    repository = None
    if settings.push_to_hub:  # what the Hub would refuse is found before the work
        repository = Repository.open(settings.push_to_hub, settings.public)
        settings = replace(settings, push_to_hub=repository.name)
    network = deepcopy(run.network).cpu().eval().requires_grad_(False)
    with whole_folder(out) as folder, torch.no_grad():
        called = with_named_inputs(run.config, network)
        job = _Export(run, network, called, sampler, describe_model(run, sampler), folder)
        difference = _WRITERS[settings.format](job)
        _write_code(job, settings.format)
        _check_loop(job, settings.format)
        if not difference <= _TOLERANCE.get(settings.format, _USUAL_TOLERANCE):
            raise RunError(
                f"the export differs from the run by {difference:.2g} of the largest output; this is a bug in unfog"
            )
        _write_card(job, settings)
    if repository is not None:
        repository.upload(out, f"step {run.step:,} of a run of Unfog, as {settings.format}")
    return difference


def _write_code(job: _Export, kind: str) -> None:
    """Write the code that loads an export and maps its values. RunError if its map is not that of the run."""
    modules = reading_modules(job.run.config) if job.run.config.columns else ()
    for name, content in code_files(kind, modules).items():
        write_atomic(job.folder / name, content, job.folder)
    if kind in ("diffusers", "run"):
        return
    # Written a moment ago, by this process, from this package.
    code = run_path(str(job.folder / ("denoiser.py" if kind == "denoiser" else "values.py")))
    described, values = job.description["values"], job.run.config.image_format.values
    shape = job.run.config.image_format.shape
    x0 = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2))
    if values.filler is not None:
        x0[..., 0, 0] = math.nan
    stored, whole = values.to_units(x0), values.to_stored(x0)
    expected = {"to_stored": (x0, stored), "rounded": (stored, whole), "to_model": (whole, values.to_model(whole))}
    for name, (given, wanted) in expected.items():
        found, result = torch.as_tensor(code[name](described, given.numpy())).float(), wanted.float()
        largest = result.nan_to_num(0).abs().amax((0, 2, 3), keepdim=True)  # of each channel, as each has its units
        same = (found - result).abs() <= _VALUE_TOLERANCE * largest
        if not bool((same | (found.isnan() & result.isnan())).all()):
            raise RunError(f"{name} of the export differs from that of the run; this is a bug in unfog")


def _check_loop(job: _Export, kind: str) -> None:
    """Draw in two steps by the code of an export of a run with unknown pixels. RunError if others become unknown.

    One call of the network, which is compared with the run, cannot show that: the loop hands NaN on.
    """
    model = job.description
    of_onnx = kind == "onnx" and model["sampler"]["kind"] in ("ddim", "dpmpp", "heun")  # else it has no loop
    if not model["mask"] or not (of_onnx or kind in ("safetensors", "pt2")):
        return
    # Written a moment ago, by this process, from this package.
    code, inputs = run_path(str(job.folder / "sample.py")), _example_inputs(model)
    _, network = code["load"](job.folder)
    short = model | {"levels": model["levels"][:1] + model["levels"][1:][-2:]}
    given: list[Any] = [inputs["x"], inputs.get("label")]
    noise, label = [one if one is None or kind != "onnx" else one.numpy() for one in given]
    columns = [example_values(one, 3) for one in model["conditions"]]
    drawn = torch.as_tensor(code["sample"](short, network, noise, label, columns))
    known = job.called.known
    assert known is not None
    if not torch.equal(drawn.isnan(), ~known.expand_as(drawn)):
        raise RunError(
            f"{drawn.isnan().float().mean():.0%} of the values that the export draws are NaN, and "
            f"{(~known).float().mean():.0%} are unknown in samples of the run; does its network give NaN by itself?"
        )


def _write_card(job: _Export, settings: ExportSettings) -> None:
    """Write the model card, the grid that it shows, and the code that it calls."""
    run, model = job.run, job.description
    pixels, caption = _card_grid(job)
    save_png(job.folder / GRID, job.folder, pixels)
    custom = (job.folder / "pipeline.py").exists()
    given = example_code(run.config, as_arguments=settings.format == "diffusers")
    use = usage(settings.format, settings.push_to_hub, model, custom, run.config.image_format, given)
    texts = (settings.format, settings.push_to_hub, settings.license, caption, use)
    card = model_card(run, CardSettings(*texts, condition_rows(model, settings.format)))
    write_atomic(job.folder / "README.md", card.encode(), job.folder)


def _card_grid(job: _Export) -> tuple[Pixels, str]:
    """Return a grid of samples, uint8 [H, W, C], and its caption: some for each class, as those of a run's previews."""
    classes = job.run.classes
    count = _SAMPLES if not classes else len(classes) * max(1, _SAMPLES // len(classes))
    # Of many classes one sample each would be a page of samples.
    count = count if count <= 2 * _SAMPLES else _SAMPLES
    say(f"  drawing {plural(count, 'sample')} for the model card")
    config = job.run.config
    samples = config.view(config.image_format.to_pictures(draw_samples(config, job.network, job.sampler, count)))
    caption = (
        f"{plural(count, 'sample')} of seed 0, {job.sampler.kind} in {plural(job.sampler.steps, 'step')}, not selected"
    )
    caption += "; conditions besides the class are open" * bool(config.columns)
    named = f"; {sanitize(', '.join(classes))}" if 1 < len(classes) <= _SAMPLES else ""
    return sample_grid(samples, classes), f"{caption}{named}"


def _check(run: LoadedRun, sampler: Sampler, kind: str) -> None:
    """Raise RequestError if a format cannot hold a run and its sampler."""
    check_packages(kind)
    check_conditions_map(run.config)
    if kind == "diffusers" and not run.config.image_format.is_picture:
        raise RequestError(
            f"pipelines of diffusers make pictures of 8 bits, and this run has {run.config.image_format} with a map of "
            "its own; give --format denoiser, safetensors, onnx or pt2, which store the map"
        )
    if kind == "denoiser" and run.config.representation.scaling():
        raise RequestError(
            "--format denoiser is of pixels, and this run generates latents, in which a measurement of pixels is not "
            "linear; give --format safetensors"
        )
    if isinstance(run.config.network, CustomNetwork) and kind in ("safetensors", "diffusers", "denoiser", "run"):
        raise RequestError(
            f"the network of this run is {run.config.network.path}, whose code is not ours to copy; "
            "--format onnx or pt2 exports its graph"
            + "; the denoiser is c_skip x + c_out y(c_in x, c_noise), with numbers from model.json"
            * (kind == "denoiser")
        )
    maps = {one.kind for one in run.config.image_format.values.maps}
    if kind != "run" and (others := maps - ({*values_torch.MAPS} & {*values_numpy.MAPS})):
        raise RequestError(
            f"the map {', '.join(sorted(others))} is not part of exports: add its curve to export/values_torch.py and "
            "export/values_numpy.py, as docs/extending/value-map.md shows; or give --format run"
        )
    if sampler.kind == "adaptive":
        raise RequestError(
            "sampler = adaptive chooses its own noise levels as it samples, and an export stores levels; give "
            "--sampler dpmpp"
        )


def _write_safetensors(job: _Export) -> float:
    _write_description(job)
    save_weights(job.weights, job.folder / _WEIGHTS)
    write_atomic(job.folder / SOURCE, _network_source(job.run).encode(), job.folder)
    if (described := job.run.config.representation.autoencoder()) is not None:
        copy_into([described.folder / CONFIG, described.weights], job.folder / "autoencoder", job.folder)
    # The code was written a moment ago, by this process, from this package.
    rebuilt = run_path(str(job.folder / SOURCE))["build"](job.description)
    rebuilt.load_state_dict(load_file(tensor_file(job.folder / _WEIGHTS, job.folder)))
    return _relative_difference(job.called, rebuilt.eval(), _example_inputs(job.description))


def _write_run(job: _Export) -> float:
    loaded = write_small_run(job.run, job.network, job.sampler, job.folder)
    others = with_named_inputs(job.run.config, loaded)
    return _relative_difference(job.called, others, _example_inputs(job.description))


def _write_denoiser(job: _Export) -> float:
    model, levels = describe_denoiser(job.run, job.sampler)
    weights, code = job.folder / "denoiser.safetensors", job.folder / "denoiser.py"
    save_weights(job.weights | {"levels": levels}, weights, json.dumps(model))
    write_atomic(code, _denoiser_source(job.run).encode(), job.folder)
    # The code was written a moment ago, by this process, from this package.
    written = run_path(str(code))["load"](tensor_file(weights, job.folder))
    ours, generator, differences = Denoiser(job.network, job.run.config.diffusion), torch.Generator().manual_seed(1), []
    low, high = written.sigma_min, min(written.sigma_max, 1e3)
    label = torch.tensor([0, len(job.run.classes)]) if job.run.classes else None
    told, given = example_given(job.run.config)
    settings = replace(GenerationSettings.default(job.run.config, 2, 2), given=told)
    conditions = settings.conditions(job.run.config, range(2), torch.device("cpu"))._replace(label=label)
    for sigma in torch.logspace(math.log10(low), math.log10(high), _LEVELS).clamp(low, high):
        x = torch.randn(2, *model["input"], generator=generator) * (0.25 + sigma.square()).sqrt()
        logsnr = (-2 * sigma.log()).expand(2)
        alpha, _ = job.run.config.diffusion.path(logsnr[0])
        expected = ours(alpha * x, logsnr, conditions)
        differences.append(float((written(x, sigma, label, given) - expected).abs().max() / expected.abs().max()))
    return max(differences)


def _write_description(job: _Export) -> None:
    text = f"{json.dumps(job.description, indent=1)}\n"
    write_atomic(job.folder / _DESCRIPTION, text.encode(), job.folder)


def _denoiser_source(run: LoadedRun) -> str:
    """Return the network's code and that of its denoiser as one file of plain torch and safetensors."""
    values = "unfog.export.values_torch"
    modules = [values, *reading_modules(run.config, values), "unfog.export.denoiser_torch"]
    return source_of_network(run.config, "denoiser", modules)


def _network_source(run: LoadedRun) -> str:
    """Return the network's code, and the autoencoder's if it is ours, as one file of plain torch."""
    described = run.config.representation.autoencoder()
    kind = "" if described is None else described.kind
    decode = _DECODE if kind == OURS else _DECODE_BY_DIFFUSERS.format(name=kind) if kind else ""
    return source_of_network(run.config, "network", ["unfog.models.autoencoder"] * (kind == OURS)) + decode


def _write_graphs(job: _Export, suffix: str) -> float:
    _write_description(job)
    network, inputs = job.called, _example_inputs(job.description)
    graph = write_graph(network, inputs, "y", job.folder / f"model{suffix}")
    # Fewer images than the graph was traced with, as the batch may be any.
    fewer = {name: value[:1] for name, value in inputs.items()}
    differences = [_relative_difference(network, graph, given) for given in (inputs, fewer)]
    if latents := job.description["latents"]:
        # A copy, as it is shared with the sampling of the run, and tracing may change a module.
        autoencoder = deepcopy(open_run_autoencoder(job.run.config, torch.device("cpu")))
        decoder = Decoder(autoencoder, latents["mean"], latents["scale"])
        x0 = {"x0": inputs["x"].clamp(-1, 1)}
        graph = write_graph(decoder, x0, "image", job.folder / f"decoder{suffix}")
        differences.append(_relative_difference(decoder, graph, x0))
    return max(differences)


def _example_inputs(description: dict[str, Any]) -> dict[str, Tensor]:
    """Return inputs of a network for three noise levels of its sampler: x, c_noise, and label and columns."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, *description["input"], generator=generator)
    levels = description["levels"][:-1]
    c_noise = torch.tensor([level["c_noise"] for level in (levels[0], levels[len(levels) // 2], levels[-1])])
    null = description["null_label"]
    # With the null class among them, as guidance calls the network with it.
    labels = {} if null is None else {"label": torch.tensor([0, null, null - 1])}
    columns = {one["input"]: torch.tensor(example_values(one, 3)) for one in description["conditions"]}
    return {"x": x, "c_noise": c_noise, **labels, **columns}


def _relative_difference(network: nn.Module, other: Callable[..., Tensor], inputs: dict[str, Tensor]) -> float:
    """Return the largest difference of two networks on these inputs, over the largest output; NaN equals NaN."""
    expected, found = network(*inputs.values()), other(*inputs.values())
    unknown = expected.isnan()
    if not torch.equal(unknown, found.isnan()):
        return math.inf
    expected, found = expected.masked_fill(unknown, 0.0), found.masked_fill(unknown, 0.0)
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


_WRITERS: dict[str, Callable[[_Export], float]] = {
    "diffusers": lambda job: write_pipeline(job.run, job.network, job.sampler, job.folder),
    "safetensors": _write_safetensors,
    "onnx": lambda job: _write_graphs(job, ".onnx"),
    "pt2": lambda job: _write_graphs(job, ".pt2"),
    "denoiser": _write_denoiser,
    "run": _write_run,
}
