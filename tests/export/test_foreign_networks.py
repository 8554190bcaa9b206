"""Networks of other programs compute what these programs compute, from their own files of weights."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from unfog.diffusion.denoiser import Denoiser
from unfog.diffusion.diffusion import Diffusion
from unfog.diffusion.noise import VE, LogNormal
from unfog.diffusion.target import EdmF
from unfog.export.foreign_weights import read_model
from unfog.models.network_settings import build_model
from unfog.values.condition_format import ConditionFormat

_spec = importlib.util.spec_from_file_location(
    "foreign_networks", Path(__file__).parents[1] / "references/make_foreign_networks.py"
)
references = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(references)
SHAPES, OUTPUTS = references.stored_shapes(), load_file(references.FILE)
EDM_OBJECTIVE = Diffusion(path=VE(), schedule=LogNormal(), target=EdmF(), conditioning="logsnr", scale_input=True)


def converted(folder, case, prefix=""):
    """A model read from a file with the weights of a reference, and its network."""
    weights = {prefix + name: tensor for name, tensor in references.weights(SHAPES[case]).items()}
    save_file(weights, folder / "weights.safetensors")
    model = read_model(folder / "weights.safetensors")
    network = build_model(model.network, model.channels, ConditionFormat.numbered(model.classes))
    network.load_state_dict(model.state)
    return model, network.eval()


@pytest.mark.parametrize("case", SHAPES)
@torch.no_grad()
def test_outputs_are_those_of_the_program(tmp_path, case):
    model, network = converted(tmp_path, case)
    x, level = references.inputs(model.channels, references.SIDE)
    if model.network.kind == "ddpm-pytorch":
        found = {"": network(x, level * 100)}
    else:
        assert model.size == references.SIDE
        denoise = Denoiser(network, EDM_OBJECTIVE)
        x, logsnr = x * level[:, None, None, None], -2 * level.log()
        found = {"": denoise(x, logsnr)}
        if model.classes:
            found[" class"] = denoise(x, logsnr, torch.tensor([2, 0]))
    for name, output in found.items():
        expected = OUTPUTS[f"{case}{name}"]
        assert expected.std() > 0.05
        assert (output - expected).abs().max() < 1e-5 * max(1, expected.abs().max())
