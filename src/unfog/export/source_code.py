"""Source code in an export: the network as one file of plain torch, the sampling file, and what the model card shows.

Tests run all of it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from unfog.values.image_format import BYTES, StoredValues

_HEAD = '''"""{title}

Plain torch, written by Unfog: this file needs no package but {packages}. `build` makes the network.
"""

from __future__ import annotations

{imports}

RequestError = ValueError
'''
# torch's own norm gives the same numbers; that of `models.group_norm` is for the speed of training on CUDA.
_GROUP_NORM = '''

class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm`, and SiLU after it."""

    def silu(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        h = self(x)
        return F.silu(h if scale is None or shift is None else h * (1 + scale) + shift)
'''
# Format -> the module that an export has as sample.py.
_SAMPLE_FILES = {
    "safetensors": "unfog.export.sample_torch",
    "pt2": "unfog.export.sample_torch",
    "onnx": "unfog.export.sample_onnx",
}
NETWORK_MODULES = ("unfog.values.conditions", "unfog.models.layers")
"""What the module of every network uses."""
OF_TRAINING = tuple(f"Conditions.{name}" for name in ("droppable", "apply", "rows", "to", "copy_", "cat", "dropped"))
"""Methods in `NETWORK_MODULES` that no network calls."""
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
{decode}pixels = ({stored}).round().byte().permute(0, 2, 3, 1).numpy()
Image.fromarray(pixels[0].squeeze()).save("sample.png")
"""
_DENOISER = """\
import runpy

import torch
from PIL import Image

{folder}
code = runpy.run_path(f"{{folder}}/denoiser.py")  # plain torch
denoiser = code["load"](f"{{folder}}/denoiser.safetensors")  # denoiser(x, sigma{argument}) is E[x0 | x]
first, last = min(denoiser.sigma_max, 80.0), max(denoiser.sigma_min, 0.01)
levels = first * (last / first) ** torch.linspace(0, 1, 30)
x = levels[0] * torch.randn(4, *denoiser.shape, generator=torch.Generator().manual_seed(0))
for sigma, then in zip(levels, [*levels[1:], 0.0]):  # DDIM
    x0 = denoiser(x, sigma{label})
    x = x0 + then / sigma * (x - x0)
pixels = ({stored}).round().byte().permute(0, 2, 3, 1).numpy()
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
pixels = ({stored}).round().clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
Image.fromarray(pixels[0].squeeze()).save("sample.png")
"""
# From latents to images.
_DECODE = {
    "safetensors": 'x = runpy.run_path(f"{folder}/network.py")["decode"](model, folder, x)\n',
    "pt2": 'x = torch.export.load(f"{folder}/decoder.pt2").module()(x)\n',
}


def plain_source(title: str, names: Iterable[str], left_out: Iterable[str] = ()) -> str:
    """Return the source of modules of this package as one file that imports no module of it.

    Args:
        title: the first line of the file's docstring.
        names: full names of the modules, each after those that it uses.
        left_out: classes and functions that the file does without, and methods as CLASS.METHOD.
    """
    imports: dict[str, None] = {}
    bodies = [_body(import_module(name), imports, frozenset(left_out)) for name in names]
    code = "".join(bodies)
    used = filter(None, (_used_names(line, code) for line in imports))
    packages = "torch and safetensors" if "safe_open" in code else "torch"
    head = _HEAD.format(
        title=title, packages=packages, imports="\n".join(sorted(used, key=lambda line: (line.startswith("f"), line)))
    )
    return head + (_GROUP_NORM if re.search(r"(?<![\w.])GroupNorm\(", code) else "") + code


def _used_names(line: str, code: str) -> str:
    """Return an import without the names that the code does not use; "" if it uses none."""
    node = ast.parse(line).body[0]
    assert isinstance(node, ast.Import | ast.ImportFrom)
    names = [one for one in node.names if re.search(rf"\b{re.escape(one.asname or one.name.split('.')[0])}\b", code)]
    node.names = names
    return ast.unparse(node) if names else ""


def _body(module: ModuleType, imports: dict[str, None], left_out: frozenset[str]) -> str:
    """Return a module without docstring and imports; those of other packages are added to `imports`."""
    source = inspect.getsource(module)
    lines = source.splitlines()
    for number, node in enumerate(ast.parse(source).body):
        imported = isinstance(node, ast.Import | ast.ImportFrom)
        if imported and not ast.unparse(node).startswith(("from unfog", "import unfog", "from __future__")):
            imports[ast.unparse(node)] = None
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        docstring, name = number == 0 and isinstance(node, ast.Expr), getattr(node, "name", "")
        methods = [part for part in getattr(node, "body", ()) if f"{name}.{getattr(part, 'name', '')}" in left_out]
        for part in [node] if imported or for_types or docstring or name in left_out else methods:
            first = min([part.lineno, *(each.lineno for each in getattr(part, "decorator_list", ()))])
            assert part.end_lineno is not None
            # Blank lines in their place, as the numbers of lines from the syntax tree must stay right.
            lines[first - 1 : part.end_lineno] = [""] * (part.end_lineno - first + 1)
    # The functions of `layers` are in the same file.
    text = re.sub(r"\blayers\.(?=(?:attention|repeat_pixels)\()", "", "\n".join(lines))
    return "\n\n" + re.sub(r"\n{4,}", "\n\n\n", text.strip() + "\n")


def package_file(name: str) -> bytes:
    """Return the file of a module of this package, which is not imported: it may need a package that is missing."""
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_bytes()


def usage(kind: str, name: str, model: Mapping[str, Any], custom: bool, values: StoredValues = BYTES) -> str:
    """Return Markdown that shows how to sample from an export of this format, described by its model.json.

    `name` is that of the repository on the Hub, or "". `custom`: a pipeline of diffusers has code of its own.
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
    if kind == "denoiser":
        label, argument = (f", torch.arange(4) % {classes}", ", label") if classes else ("", "")
        stored = values.formula("x.clamp(-1, 1)")
        return _block(_DENOISER.format(folder=folder, label=label, argument=argument, stored=stored))
    if kind == "onnx":
        label = f", np.arange(4) % {classes}" if classes else ""
        return _block(_ONNX.format(folder=folder, label=label, stored=values.formula("x")))
    label = f", torch.arange(4) % {classes}" if classes else ""
    decode, stored = _DECODE[kind] if model["latents"] else "", values.formula("x.clamp(-1, 1)")
    return _block(_TORCH.format(folder=folder, label=label, decode=decode, stored=stored))


def _block(code: str) -> str:
    return f"```python\n{code}```"


def sample_file(kind: str) -> bytes | None:
    """Return sample.py of an export; None for diffusers, whose pipeline samples."""
    return package_file(_SAMPLE_FILES[kind]) if kind in _SAMPLE_FILES else None
