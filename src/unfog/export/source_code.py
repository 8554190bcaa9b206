"""Source code in an export: the network as one file of plain torch, the sampling file, and what the model card shows.

Tests run all of it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from unfog.models.image_conditions import IMAGES
from unfog.text import valid_text
from unfog.values.condition_format import TEXT_HEAD
from unfog.values.condition_kinds import MOST_CATEGORIES
from unfog.values.image_format import ImageFormat
from unfog.values.tokenizer import MOST_TOKENS

_HEAD = '''"""{title}

Plain {language}, written by Unfog: this file needs no package{packages}.{about}
"""

from __future__ import annotations

{imports}
'''
# What modules that are copied take from others that are not.
_OTHERS = {
    "RequestError": "RequestError = ValueError\n",
    "TEXT_HEAD": f"TEXT_HEAD = {TEXT_HEAD}\n",
    "valid_text": f"\n{inspect.getsource(valid_text)}",
}
# torch's own norm gives the same numbers; that of `models.group_norm` is for the speed of training on CUDA.
_GROUP_NORM = '''

class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm`, and SiLU after it."""

    def silu(self, x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        h = self(x)
        return F.silu(h if scale is None or shift is None else h * (1 + scale) + shift)
'''
# Format -> name of a file in its exports -> the module that it is.
_TORCH_FILES = {"sample.py": "unfog.export.sample_torch", "values.py": "unfog.export.values_torch"}
_CODE_FILES = {
    "safetensors": _TORCH_FILES,
    "pt2": _TORCH_FILES,
    "onnx": {"sample.py": "unfog.export.sample_onnx", "values.py": "unfog.export.values_numpy"},
}
# Methods of `unfog.values.conditions` that no network calls.
_METHODS = ("droppable", "apply", "rows", "to", "copy_", "cat", "dropped", "dropped_each", "without", "with_text")
OF_TRAINING = (*(f"Conditions.{name}" for name in _METHODS), "DiffusersAutoencoder")
OF_TRAINING += ("learn_merges", "_Learner", "tokenizer_of")
EXPORTED = ("number", "category", "several", "vector", "text", *IMAGES)
"""Kinds of the columns that exports hold."""
_BUILD = '''

def build(model):
    """Return the network of a description, such as that in model.json: {call}.

    Labels are int64 [B], or None without classes.{columns}
    """
    from types import SimpleNamespace

    classes, mask = model["classes"], model["mask"]
    columns = [SimpleNamespace(**one) for one in model["conditions"]]{checked}
    conditions = SimpleNamespace(
        classes=classes, augment_inputs=0, columns=columns, mask_channels=mask * model["input"][0],
        image_factor=model.get("image_factor", 1){text}
    )
    settings = SimpleNamespace(**model["network"]["settings"])
    network = {name}(settings, model["input"][0], conditions, model["out_channels"])
    network.wrap_edges(model["wrap"]){wrapped}
    return network
'''
_CHECKED = """
    sizes = [max(one.statistics) if one.kind == "text" else one.inputs for one in columns]
    kinds = {kinds}
    fits = [one.kind in kinds and 0 < size <= {most} for one, size in zip(columns, sizes)]
    if not all(fits):  # it may be a stranger's
        raise ValueError("a condition of the description has no kind and size that Unfog writes; was it edited?")"""
_TEXT = """,
        text_layers=model["text"]["layers"], text_width=model["text"]["width"]"""
_WRAPPED = """
    known = torch.ones(model["input"], dtype=torch.bool) if mask else None  # their values are among the weights
    network = NamedInputs(network, bool(classes), [one.kind for one in columns], known)"""
_DIFFUSERS = """\
{imports}from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained({place}{trust})
images = pipe({arguments}).images  # PIL images
images[0].save("sample.png")
"""
_TORCH = """\
import runpy

{imports}

{folder}
code = runpy.run_path(f"{{folder}}/sample.py")  # plain torch
model, network = code["load"](folder)
noise = torch.randn(4, *model["input"], generator=torch.Generator().manual_seed(0))
{read}x = code["sample"](model, network, noise{label})
{decode}{save}"""
_DENOISER = """\
import runpy

{imports}

{folder}
code = runpy.run_path(f"{{folder}}/denoiser.py")  # plain torch
denoiser = code["load"](f"{{folder}}/denoiser.safetensors")  # denoiser(x, sigma{argument}) is E[x0 | x]
first, last = min(denoiser.sigma_max, 80.0), max(denoiser.sigma_min, 0.01)
levels = first * (last / first) ** torch.linspace(0, 1, 30)
x = levels[0] * torch.randn(4, *denoiser.shape, generator=torch.Generator().manual_seed(0))
for sigma, then in zip(levels, [*levels[1:], 0.0]):  # DDIM
    x0 = denoiser(x, sigma{label})
    x = x0 + then / sigma * (x - x0)
{save}"""
_ONNX = """\
import runpy

{imports}

{folder}
code = runpy.run_path(f"{{folder}}/sample.py")  # plain numpy
model, sessions = code["load"](folder)
noise = np.random.default_rng(0).standard_normal((4, *model["input"])).astype(np.float32)
{read}x = code["sample"](model, sessions, noise{label})
{save}"""
_READ = """\
read = runpy.run_path(f"{{folder}}/given.py")["read"]
columns = read(model["conditions"], {given}, 4)
"""
_VALUES = 'values = runpy.run_path(f"{folder}/values.py")\n'
# Of pictures, and of other values, which are written in the units of their source.
_PIXELS = """\
pixels = ({stored}).round().byte().permute(0, 2, 3, 1).numpy()
Image.fromarray(pixels[0].squeeze()).save("sample.png")
"""
_ARRAY = """\
stored = {maps}["rounded"]({described}["values"], {maps}["to_stored"]({described}["values"], x))
np.save("samples.npy", stored.permute(0, 2, 3, 1).numpy())
"""
_NUMPY_BYTES = ".round().clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)"
# From latents to images.
_DECODE = {
    "safetensors": 'x = runpy.run_path(f"{folder}/network.py")["decode"](model, folder, x)\n',
    "pt2": 'x = torch.export.load(f"{folder}/decoder.pt2").module()(x)\n',
}


def network_source(
    what: str, model: str, named_inputs: bool, modules: Iterable[str] = (), has_text: bool = False
) -> str:
    """Return the code of a network, of further modules, and `build`, as one file of plain torch.

    Args:
        what: the file has, for its title.
        model: MODULE:CLASS of the network.
        named_inputs: the network has columns or a mask, and becomes a `NamedInputs`.
        modules: full names.
        has_text: the network has an encoder of captions.
    """
    module, _, name = model.partition(":")
    conditions = ["unfog.models.condition_embedding", "unfog.models.image_conditions"] if named_inputs else []
    inputs = ["unfog.export.network_inputs"] if named_inputs else []
    text = ["unfog.models.text_encoder"] if has_text else []
    names = dict.fromkeys(
        ["unfog.values.conditions", *text, *conditions, "unfog.models.layers", module, *inputs, *modules]
    )
    title, about = f"The {what} of an Unfog run: {name}.", " `build` makes the network."
    source = plain_source(title, names, OF_TRAINING, about)
    call, columns = "(x [B, C, H, W], c_noise [B], label) -> y", ""
    if named_inputs:
        call = "(x [B, C, H, W], c_noise [B], label, *columns) -> y"
        columns = " Without classes there is no label at all. See `NamedInputs`."
    most, kinds = MOST_TOKENS if has_text else MOST_CATEGORIES + 1, ", ".join(f'"{kind}"' for kind in EXPORTED)
    checked = _CHECKED.format(most=most, kinds=kinds) if named_inputs else ""
    parts = {"checked": checked, "wrapped": _WRAPPED if named_inputs else "", "text": _TEXT if has_text else ""}
    return source + _BUILD.format(name=name, call=call, columns=columns, **parts)


def plain_source(title: str, names: Iterable[str], left_out: Iterable[str] = (), about: str = "") -> str:
    """Return the source of modules of this package as one file that imports no module of it.

    Args:
        title: the first line of the file's docstring.
        names: full names of the modules, each after those that it uses.
        left_out: classes and functions that the file does without, and methods as CLASS.METHOD.
        about: the end of the docstring.
    """
    imports: dict[str, None] = {}
    bodies = [_body(import_module(name), imports, frozenset(left_out)) for name in names]
    code = "".join(bodies)
    used = filter(None, (_used_names(line, code) for line in imports))
    others = {"safe_open": "safetensors", "DiffusionPipeline": "diffusers", "np.": "numpy"}
    torch = ["torch"] if re.search(r"\btorch\b", code) else []
    packages = " and ".join([*torch, *(package for word, package in others.items() if word in code)])
    imported = "\n".join(sorted(used, key=lambda line: (line.startswith("f"), line)))
    of = {"language": "torch" if torch else "Python", "packages": f" but {packages}" if packages else ""}
    head = _HEAD.format(title=title, about=about, imports=imported, **of)
    given = [text for name, text in _OTHERS.items() if re.search(rf"\b{name}\b", code)]
    head += "".join(["\n\n", *given]) if given else ""
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


def usage(kind: str, name: str, model: Mapping[str, Any], custom: bool, format: ImageFormat, given: str) -> str:
    """Return Markdown that shows how to sample from an export of this format, described by its model.json.

    Args:
        kind: of the export.
        name: of the repository on the Hub, or "".
        model: the description.
        custom: a pipeline of diffusers has code of its own.
        format: of the images.
        given: Python for values of the conditions: arguments of a pipeline, else a dict; "" without conditions.
    """
    place = repr(name or "FOLDER").replace("'", '"')
    classes = len(model["classes"])
    if kind == "run":
        got = f"hf download {name} --local-dir FOLDER\n" if name else ""
        return f"```sh\n{got}unfog sample FOLDER -n 16\nunfog train SOURCE --init FOLDER\n```"
    if kind == "diffusers":
        # Diffusers runs code from a repository only if the caller says so, and a card must not hide that.
        trust = ", trust_remote_code=True" if custom else ""
        labels = f", class_labels={[i % classes for i in range(4)]}" if classes else ""
        told = f", {given}" if given else ""
        arguments = f"batch_size=4{labels}{told}, num_inference_steps={len(model['levels']) - 1}"
        note = "\nThe code that is not part of diffusers is in the files `*.py` here, in plain torch." if custom else ""
        first = "".join(f"{line}\n" for line in _imports_of(given))
        return _block(_DIFFUSERS.format(imports=first, place=place, trust=trust, arguments=arguments)) + note
    if name:
        folder = f"from huggingface_hub import snapshot_download\n\nfolder = snapshot_download({place})"
    else:
        folder = f"folder = {place}"
    library, short = ("import numpy as np", "np") if kind == "onnx" else ("import torch", "torch")
    writer = "from PIL import Image" if format.is_picture else "import numpy as np"
    imports = sorted({library, writer, *_imports_of(given)}, key=lambda line: (line.startswith("f"), line))
    label = f", {short}.arange(4) % {classes}" if classes else ""
    told = f", given={given}" if kind == "denoiser" else ", columns=columns"
    shared = {"folder": folder, "imports": "\n".join(imports), "save": _save(kind, format)}
    shared |= {"label": label + told * bool(given), "read": _READ.format(given=given) if given else ""}
    if kind == "denoiser":
        argument = ", label" * bool(classes) + ", given=…" * bool(given)
        return _block(_DENOISER.format(argument=argument, **shared))
    if kind == "onnx":
        return _block(_ONNX.format(**shared))
    return _block(_TORCH.format(decode=_DECODE[kind] if model["latents"] else "", **shared))


def _imports_of(given: str) -> list[str]:
    """Return the imports that the values of conditions need on a card."""
    words = {"np.load": "import numpy as np", "Image.open": "from PIL import Image"}
    return [line for word, line in words.items() if word in given]


def _save(kind: str, format: ImageFormat) -> str:
    """Return the lines that write samples x: a PNG of the first picture, or an array in the units of its source."""
    if format.is_picture:
        x = "x" if kind == "onnx" else "x.clamp(-1, 1)"
        lines = _PIXELS.format(stored=format.values.formula(x))
    elif kind == "denoiser":
        lines = _ARRAY.format(maps="code", described="denoiser.model")
    else:
        lines = _VALUES + _ARRAY.format(maps="values", described="model")
    if kind != "onnx":
        return lines
    lines = lines.replace(".round().byte().permute(0, 2, 3, 1).numpy()", _NUMPY_BYTES)
    return lines.replace(".permute(0, 2, 3, 1).numpy()", ".transpose(0, 2, 3, 1)")


def _block(code: str) -> str:
    return f"```python\n{code}```"


def code_files(kind: str, given: Sequence[str]) -> dict[str, bytes]:
    """Return the code of an export that is the same for all runs with such conditions, by file name.

    `given` has the names of the modules that read conditions; see `plain_source`.
    """
    files = _CODE_FILES.get(kind, {})
    written = {name: package_file(module) for name, module in files.items()}
    if files and len(given) == 1:
        written["given.py"] = package_file(given[0])
    elif files and given:
        title = "Conditions of an Unfog run: from what people ask for to inputs of the network."
        written["given.py"] = plain_source(title, given, OF_TRAINING).encode()
    return written
