"""Export of a run: its network and all that sampling needs, in a folder for programs that do not know Unfog."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unfog.config.export_request import ExportSettings
from unfog.config.validate import check_out, check_sampler
from unfog.errors import RequestError, RunError
from unfog.export.plain_source import plain_source
from unfog.inference.export_description import describe_model
from unfog.inference.loaded_run import LoadedRun
from unfog.models.autoencoder_settings import CONFIG, AutoencoderFolder
from unfog.models.network_settings import CustomNetwork
from unfog.safe_files import new_file, whole_folder, write_atomic

DESCRIPTION, WEIGHTS, SOURCE = "model.json", "model.safetensors", "network.py"
_TOLERANCE = 1e-3
"""Largest difference between the outputs of the run and of its export, over the largest output."""
_BUILD = '''

def build(settings, image_channels, num_classes=0, out_channels=None):
    """Return the network: (x [B, C, H, W], c_noise [B], label int64 [B] or None) -> y."""
    from types import SimpleNamespace

    return {name}(SimpleNamespace(**settings), image_channels, num_classes, 0, out_channels)
'''


def export(run: LoadedRun, out: Path, settings: ExportSettings) -> float:
    """Write an export of a run into a new folder, and return its largest difference from the run, which is small.

    Raises:
        RequestError: the folder is not empty, or the format cannot hold this run.
        RunError: what was written gives another output; nothing stays of it.
    """
    check_out(out, what="the folder of an export", argument="OUT")
    sampler = run.sampler(settings.sampler, settings.steps)
    check_sampler(sampler, run.config.diffusion.schedule)
    network = run.network.cpu().eval()
    with whole_folder(out) as folder, torch.inference_mode():
        description = describe_model(run, sampler)
        write_atomic(folder / DESCRIPTION, f"{json.dumps(description, indent=1)}\n".encode())
        difference = _write_safetensors(run, network, description, folder)
        if not difference <= _TOLERANCE:
            raise RunError(f"the export gives other outputs than the run, by {difference:.2g} of the largest; a defect")
    return difference


def _write_safetensors(run: LoadedRun, network: nn.Module, description: dict[str, Any], folder: Path) -> float:
    if isinstance(run.config.network, CustomNetwork):
        raise RequestError(
            f"the network of this run is {run.config.network.path}, whose code is not ours to copy; "
            "--format onnx or pt2 exports its graph"
        )
    weights = {name: tensor.contiguous() for name, tensor in plain_weights(network).items()}
    save_file(weights, new_file(folder / WEIGHTS))
    # safetensors writes files that only their owner may read.
    (folder / WEIGHTS).chmod((folder / DESCRIPTION).stat().st_mode)
    write_atomic(folder / SOURCE, network_source(run).encode())
    if run.config.uses_latents:
        _copy_autoencoder(AutoencoderFolder.open(run.config.autoencoder_folder), folder / "autoencoder")
    rebuilt = load_source(folder / SOURCE).build(
        description["network"]["settings"],
        description["input"][0],
        len(description["classes"]),
        description["out_channels"],
    )
    rebuilt.load_state_dict(load_file(folder / WEIGHTS))
    return relative_difference(network, rebuilt.eval(), description)


def plain_weights(network: nn.Module) -> dict[str, Tensor]:
    """Return the weights without the embedding of the augmentation, which adds exactly 0 to samples."""
    return {name: w for name, w in network.state_dict().items() if not name.startswith("augment_embedding.")}


def network_source(run: LoadedRun) -> str:
    """Return the network's code, and the autoencoder's if it is ours, as one file of plain torch."""
    settings = run.config.network
    assert settings is not None  # a run's is settled
    module, _, name = settings.model.partition(":")
    names = ["unfog.models.layers", module, *["unfog.models.autoencoder"] * run.config.uses_latents]
    title = f"The network of an Unfog run: {name}."
    return plain_source(title, names, ["DiffusersAutoencoder"]) + _BUILD.format(name=name)


def load_source(path: Path) -> ModuleType:
    """Import a file that `network_source` made, without leaving a compiled one beside it."""
    module = ModuleType(path.stem)
    exec(compile(path.read_text("utf-8"), str(path), "exec"), module.__dict__)
    return module


def _copy_autoencoder(described: AutoencoderFolder, folder: Path) -> None:
    folder.mkdir()
    for path in (described.folder / CONFIG, described.weights):
        shutil.copyfile(path, new_file(folder / path.name))


def example_inputs(description: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return inputs of a network for three noise levels of its sampler: x, c_noise, and with classes a label."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, *description["input"], generator=generator)
    levels = description["levels"][:-1]
    c_noise = torch.tensor([level["c_noise"] for level in (levels[0], levels[len(levels) // 2], levels[-1])])
    null = description["null_label"]
    return (x, c_noise) if null is None else (x, c_noise, torch.tensor([0, null, null - 1]))


def relative_difference(network: nn.Module, other: Any, description: dict[str, Any]) -> float:
    """Return the largest difference of two networks on the example inputs, over the largest output."""
    inputs = example_inputs(description)
    expected = network(*inputs)
    return float((other(*inputs) - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
