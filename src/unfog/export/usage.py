"""Usage of an export: the code that its model card shows, by format. Tests run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unfog.export.plain_source import package_file

# Format -> the module that an export has as sample.py.
_SAMPLE_FILES = {
    "safetensors": "unfog.export.sample_torch",
    "pt2": "unfog.export.sample_torch",
    "onnx": "unfog.export.sample_onnx",
}
_DIFFUSERS = """\
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained({place}{trust})
images = pipe({arguments}).images  # PIL images
images[0].save("sample.png")
"""
_TORCH = """\
import runpy

import torch
from PIL import Image

{folder}
code = runpy.run_path(f"{{folder}}/sample.py")  # plain torch
model, network = code["load"](folder)
noise = torch.randn(4, *model["input"], generator=torch.Generator().manual_seed(0))
x = code["sample"](model, network, noise{label})
{decode}pixels = ((x.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
Image.fromarray(pixels[0].squeeze()).save("sample.png")
"""
_ONNX = """\
import runpy

import numpy as np
from PIL import Image

{folder}
code = runpy.run_path(f"{{folder}}/sample.py")  # plain numpy
model, sessions = code["load"](folder)
noise = np.random.default_rng(0).standard_normal((4, *model["input"])).astype(np.float32)
x = code["sample"](model, sessions, noise{label})
pixels = ((x + 1) * 127.5).round().clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
Image.fromarray(pixels[0].squeeze()).save("sample.png")
"""
# From latents to images.
_DECODE = {
    "safetensors": 'x = runpy.run_path(f"{folder}/network.py")["decode"](model, folder, x)\n',
    "pt2": 'x = torch.export.load(f"{folder}/decoder.pt2").module()(x)\n',
}


def usage(kind: str, name: str, model: Mapping[str, Any], custom: bool) -> str:
    """Return Markdown that shows how to sample from an export.

    Args:
        kind: the format.
        name: of the repository on the Hub; "" without one.
        model: its description, as in model.json.
        custom: a pipeline of diffusers has code of its own.
    """
    place = repr(name or "FOLDER").replace("'", '"')
    classes = len(model["classes"])
    if kind == "diffusers":
        # Diffusers runs code from a repository only if the caller says so, and a card must not hide that.
        trust = ", trust_remote_code=True" if custom else ""
        labels = f", class_labels={[i % classes for i in range(4)]}" if classes else ""
        arguments = f"batch_size=4{labels}, num_inference_steps={len(model['levels']) - 1}"
        note = "\nThe code that is not part of diffusers is in the files `*.py` here, in plain torch." if custom else ""
        return _block(_DIFFUSERS.format(place=place, trust=trust, arguments=arguments)) + note
    if name:
        folder = f"from huggingface_hub import snapshot_download\n\nfolder = snapshot_download({place})"
    else:
        folder = f"folder = {place}"
    if kind == "onnx":
        label = f", np.arange(4) % {classes}" if classes else ""
        return _block(_ONNX.format(folder=folder, label=label))
    label = f", torch.arange(4) % {classes}" if classes else ""
    return _block(_TORCH.format(folder=folder, label=label, decode=_DECODE[kind] if model["latents"] else ""))


def _block(code: str) -> str:
    return f"```python\n{code}```"


def sample_file(kind: str) -> bytes | None:
    """Return sample.py of an export; None for diffusers, whose pipeline samples."""
    return package_file(_SAMPLE_FILES[kind]) if kind in _SAMPLE_FILES else None
