"""Weights of other programs: files, recognised by names and shapes, and folders of diffusers, read and converted."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from unfog.errors import RequestError
from unfog.files.safe_files import read_file, regular_file, tensor_file
from unfog.models.settings import DdpmPytorch, DiffusersDiT, Edm, Edm2, ForeignNetwork
from unfog.text import sanitize

_PICKLES = (".pt", ".pth")
SUFFIXES = (".safetensors", *_PICKLES)
_LARGEST_PICKLE = 2**26  # bytes of names and shapes; the values are in other members
_MOST_SHARED = 2  # times that a file's tensors may claim its bytes, as some networks use a tensor twice
Weights = Mapping[str, Tensor]
_KINDS = ("weight", "bias")
# Settings that our network has no choice of, and diffusers' defaults, which DiT's own weights have.
_FIXED = {
    "norm_type": "ada_norm_zero",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "norm_elementwise_affine": False,
}
_IN_BLOCK = {
    "norm1.linear": "modulation",
    "attn1.to_out.0": "out",
    "ff.net.0.proj": "mlp_in",
    "ff.net.2": "mlp_out",
}
_OUTSIDE = {"pos_embed.proj": "patch_in", "proj_out_1": "modulation_out", "proj_out_2": "patch_out"}
_EMBEDDINGS = ("timestep_embedder.linear_1", "timestep_embedder.linear_2", "class_embedder.embedding_table")
_DIFFUSERS = ("UNet2DModel", "DiTTransformer2DModel")  # networks that can be converted
_CONFIG, _WEIGHTS = "config.json", "diffusion_pytorch_model.safetensors"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".json")
_LARGEST_JSON = 2**20
OWN_PIPELINE = "UnfogPipeline"  # of exports whose objective no pipeline of diffusers has


class ForeignModel(NamedTuple):
    """Weights of another program as those of one of our networks."""

    what: str
    """The program and its network, for messages."""
    network: ForeignNetwork
    channels: int
    """Of the images or latents."""
    size: int
    """Side of the images; 0 if the weights do not show it."""
    classes: int
    learned_variance: bool
    state: dict[str, Tensor]
    """By our names; may be of half precision."""
    buffers: dict[str, Tensor]
    """Of the program's diffusion process, where they are stored beside the weights."""


def read_model(path: Path) -> ForeignModel:
    """Read a file of weights. RequestError with the reason if it is of no network that we know, or cannot be read."""
    weights = _read(path)
    for what, marks, convert in _KNOWN:
        ends = {mark: [name for name in weights if name.endswith(mark)] for mark in marks}
        if all(ends.values()):
            prefix = _prefix(ends[marks[0]], marks[0])
            own = {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
            # Beside the network such files hold the noise levels, from which its objective is told.
            others = {name: weights[name] for name in weights if not name.startswith(prefix)}
            try:
                return convert(own, others)
            except (KeyError, ValueError, TypeError, IndexError, RuntimeError, ArithmeticError) as error:
                raise RequestError(f"{path} looks like {what}, but is not: {error}") from None
    raise RequestError(
        f"{path} holds weights of no network that is known here; there is denoising-diffusion-pytorch, EDM and EDM2, "
        "and of diffusers give the folder"
    )


def _read(path: Path) -> Weights:
    """Return the tensors of a file. Of a checkpoint of denoising-diffusion-pytorch, those of its EMA."""
    try:
        if path.suffix == ".safetensors":
            loaded: dict[str, Tensor] = load_file(tensor_file(path, path.parent, follow=True))
            return loaded
        _check_archive(path)
        # Only tensors and plain containers are made; anything else in the file is an error, and no code in it runs.
        stored = torch.load(
            regular_file(path, path.parent, follow=True), map_location="cpu", weights_only=True, mmap=True
        )
    except RequestError:
        raise
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a damaged file raises any kind, and a forbidden one an error of the pickle module
        # Only the first sentence: the following ones explain how to load a pickle unsafely, in terminal colours.
        reason = sanitize(" ".join(str(error).split()).partition(". ")[0])[:160]
        raise RequestError(
            f"{path} cannot be read as plain tensors: {reason}. Whatever else a pickle holds could run code; save the "
            "state_dict of the network as safetensors where you trust it"
        ) from None
    for part in ("ema", "model", "state_dict"):  # those of the EMA give the better images
        if isinstance(stored, dict) and isinstance(stored.get(part), dict):
            stored = stored[part]
    found = stored.items() if isinstance(stored, dict) else ()
    weights = {name: tensor for name, tensor in found if isinstance(name, str) and isinstance(tensor, Tensor)}
    # A tensor of a few bytes may claim any shape, by a stride of 0, and a network would be made of that shape.
    claimed, there = sum(one.numel() * one.element_size() for one in weights.values()), path.stat().st_size
    if claimed > _MOST_SHARED * there or any(one.layout != torch.strided for one in weights.values()):
        raise RequestError(
            f"{path} has tensors of {claimed:,} bytes in a file of {there:,}; save the state_dict of the network with "
            "torch.save again, each tensor as contiguous()"
        )
    return weights


def _check_archive(path: Path) -> None:
    """Raise RequestError unless a file is what torch.save writes, before anything in it is unpacked."""
    file = regular_file(path, path.parent, follow=True)
    if not zipfile.is_zipfile(file):
        raise RequestError(f"{path} is a pickle of torch before 1.6; load it there and save it again")
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    # torch.save compresses nothing. What unpacks to more than it takes could take all memory.
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise RequestError(f"{path} has compressed members, which torch.save does not write; save it there again")
    pickles = [member for member in members if member.filename.endswith(".pkl")]
    if sum(one.file_size for one in members) > path.stat().st_size or any(
        one.file_size > _LARGEST_PICKLE for one in pickles
    ):
        raise RequestError(
            f"{path} has a pickle of over {_LARGEST_PICKLE >> 20} MB, or members that overlap; save the state_dict of "
            "the network alone, as safetensors"
        )


def _prefix(names: Iterable[str], mark: str) -> str:
    """Return the prefix of the network's names; in an EMA object, the prefix of the average."""
    prefixes = sorted(name.removesuffix(mark) for name in names)
    return next((prefix for prefix in prefixes if "ema" in prefix), prefixes[0])


def _channels(weights: Weights, name: str) -> int:
    return int(weights[name].shape[0])


def _count(names: Iterable[str], pattern: str) -> int:
    """Return one more than the largest number that the pattern finds."""
    numbers = [int(found[1]) for name in names if (found := re.match(pattern, name))]
    return max(numbers) + 1


def _ddpm_pytorch(weights: Weights, others: Weights) -> ForeignModel:
    """Convert the U-Net of denoising-diffusion-pytorch 2; its EMA object has the noise levels beside it."""
    if not any(name.endswith("block1.norm.g") for name in weights) or "mid_attn.mem_kv" not in weights:
        raise ValueError("it is of a version before 2, whose blocks differ; train it on there, or start anew")
    if "time_mlp.0.weights" in weights:
        raise ValueError("it has learned or random Fourier features, which that program's trainer refuses too")
    levels = _count(weights, r"downs\.(\d+)\.")
    _, heads, memory, head_channels = weights["mid_attn.mem_kv"].shape
    width, out = weights["time_mlp.1.weight"].shape[1], _channels(weights, "final_conv.weight")
    first, channels = weights["init_conv.weight"].shape[:2]
    own = [_channels(weights, f"ups.{levels - 1 - i}.0.block1.proj.weight") for i in range(levels)]
    # Its shapes are those of a network of twice the channels, which would load and sample noise.
    if channels == 2 * out:
        raise ValueError("it is self-conditioned: its input has its last estimate beside the noisy image")
    network = DdpmPytorch(
        width,
        0 if first == width else int(first),
        tuple(c // width for c in own),
        tuple(f"downs.{i}.2.to_out.weight" in weights for i in range(levels)),
        int(heads),
        int(head_channels),
        int(memory),
    )
    state = dict(weights)
    buffers = {name.rpartition(".")[2]: tensor for name, tensor in others.items()}
    learned = out == 2 * channels
    return ForeignModel("denoising-diffusion-pytorch", network, int(channels), 0, 0, learned, state, buffers)


def _by_levels(weights: Weights) -> tuple[dict[str, Tensor], int, int]:
    """Return weights with levels in place of resolutions, the highest resolution, and the number of levels."""
    sides = {int(found[1]) for name in weights if (found := re.match(r"enc\.(\d+)x\d+_", name))}
    side = max(sides)
    named = {
        re.sub(r"^(enc|dec)\.(\d+)x\d+_", lambda m: f"{m[1]}.{(side // int(m[2])).bit_length() - 1}_", name): tensor
        for name, tensor in weights.items()
    }
    return named, side, len(sides)


def _level_settings(weights: Weights, levels: int, width: int, last_conv: str) -> dict[str, tuple[int, ...]]:
    """Return the mults, the attention and the blocks of a U-Net with numbered levels."""
    outs = [_channels(weights, f"enc.{i}_block0.{last_conv}.weight") for i in range(levels)]
    attends = tuple(
        any(re.match(rf"enc\.{i}_block0\.(qkv|attn_qkv)\.", name) for name in weights) for i in range(levels)
    )
    if any(out % width for out in outs):
        raise ValueError(f"its channels {outs} are not multiples of {width}")
    return {"mults": tuple(out // width for out in outs), "attention": attends}


def _edm(weights: Weights, others: Weights) -> ForeignModel:
    """Convert EDM's SongUNet or DhariwalUNet, whose levels are named by their resolutions."""
    if any("aux_down" in name or "aux_skip" in name or "aux_up" in name for name in weights):
        raise ValueError("its encoder or decoder is of the kind `skip`, which none of EDM's training settings has")
    if any(name.rpartition(".")[2] == "u" for name in others):
        raise ValueError("it is preconditioned as iDDPM, and only EDMPrecond is known")
    named, side, levels = _by_levels(weights)
    adm = "out_conv.weight" in named
    architecture = "adm" if adm else "ncsnpp" if "map_noise.freqs" in named else "ddpmpp"
    for name, buffer in named.items():
        if name.endswith("resample_filter") and buffer.shape[-1] != (4 if architecture == "ncsnpp" else 2):
            raise ValueError(f"its resampling filter has {buffer.shape[-1]} values, other than those of {architecture}")
    waves = named["map_layer0.weight"].shape[1]
    width = waves // (2 if architecture == "ncsnpp" else 1)
    blocks = _count(named, r"enc\.0_block(\d+)\.")
    network = Edm(architecture, width, blocks=blocks, **_level_settings(named, levels, width, "conv1"))  # type: ignore[arg-type]
    state, classes = {}, 0
    for name, tensor in named.items():
        if name.startswith("map_label."):
            classes = named["map_label.weight"].shape[1]
        elif not name.startswith("map_augment.") and not name.endswith("resample_filter"):
            name = re.sub(r"^dec\.0_aux_(norm|conv)\.", r"out_\1.", name)
            state[re.sub(r"(aux_residual)\.", r"\1.conv.", name)] = tensor
    if classes:
        # A class is a vector with a single 1, scaled by EDM in Song's networks; a hidden class is the zero vector.
        rows = named["map_label.weight"].float().T * (1.0 if adm else classes**0.5)
        rows = torch.cat([rows, torch.zeros(1, rows.shape[1])])
        state["class_embedding.weight"] = rows + named.get("map_label.bias", torch.zeros(())).float()
    channels = int(named["enc.0_conv.weight"].shape[1])
    return ForeignModel(f"EDM's {architecture}", network, channels, side, int(classes), False, state, {})


def _edm2(weights: Weights, others: Weights) -> ForeignModel:
    """Convert EDM2's U-Net, without the network that learned its loss weights."""
    named, side, levels = _by_levels(weights)
    width = int(named["emb_fourier.freqs"].shape[0])
    if width != _channels(named, "enc.0_conv.weight"):
        raise ValueError("its channel_mult_noise is not that of its first level")
    blocks = _count(named, r"enc\.0_block(\d+)\.")
    network = Edm2(width, blocks=blocks, **_level_settings(named, levels, width, "conv_res1"))  # type: ignore[arg-type]
    state = {name: tensor for name, tensor in named.items() if not name.startswith(("emb_label.", "logvar_"))}
    classes = 0
    if "emb_label.weight" in named:
        table = named["emb_label.weight"].float()
        classes = table.shape[1]
        # The rows are normalised over the classes, and a class is a vector of length sqrt(classes).
        rms = table.square().mean(dim=1, keepdim=True).sqrt()
        rows = (table / (rms + 1e-4)).T
        state["class_embedding.weight"] = torch.cat([rows, torch.zeros(1, rows.shape[1])])
    channels = int(named["enc.0_conv.weight"].shape[1]) - 1
    return ForeignModel("EDM2", network, channels, side, int(classes), False, state, {})


# A network in messages, ends of names that it alone has, and its conversion.
_KNOWN: tuple[tuple[str, tuple[str, ...], Callable[[Weights, Weights], ForeignModel]], ...] = (
    ("EDM2's U-Net", ("emb_fourier.freqs", "emb_noise.weight"), _edm2),
    ("EDM's SongUNet or DhariwalUNet", ("map_layer0.weight", "map_layer1.weight"), _edm),
    (
        "denoising-diffusion-pytorch",
        ("init_conv.weight", "time_mlp.1.weight", "final_conv.weight"),
        _ddpm_pytorch,
    ),
)


def from_dit(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ForeignModel:
    """Return a DiT of diffusers as one of ours. RequestError if its settings or weights have no equal here."""
    for name, usual in _FIXED.items():
        if config.get(name, usual) != usual:
            raise RequestError(f"this DiT has {name} = {config[name]!r}, and only {usual!r} is known")
    try:
        return _converted(config, weights)
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError, ZeroDivisionError) as error:
        raise RequestError(f"this DiT's weights do not fit its config.json: {error}") from None


def _converted(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ForeignModel:
    depth, patch = int(config.get("num_layers", 28)), int(config.get("patch_size", 2))
    width, channels = weights["pos_embed.proj.weight"].shape[:2]
    embedded = [_embedding(weights, i) for i in range(depth)]
    # Diffusers stores the embedding once for each block, though DiT trained a single one: by its values it is one.
    shared = all(torch.equal(tensor, embedded[0][name]) for one in embedded[1:] for name, tensor in one.items())
    network = DiffusersDiT(
        int(width),
        depth,
        int(config.get("attention_head_dim", 72)),
        patch,
        "shared" if shared else "block",
        float(config.get("norm_eps", 1e-5)),
    )
    state = {f"{ours}.{kind}": weights[f"{name}.{kind}"] for name, ours in _OUTSIDE.items() for kind in _KINDS}
    for i in range(depth):
        state |= _block(weights, i)
    kept = embedded[:1] if shared else embedded
    first, second, table = _EMBEDDINGS
    for kind in _KINDS:
        state[f"time_in.{kind}"] = torch.cat([one[f"{first}.{kind}"] for one in kept])
        state |= {f"time_out.{i}.{kind}": one[f"{second}.{kind}"] for i, one in enumerate(kept)}
    state["class_embedding.weight"] = torch.cat([one[f"{table}.weight"] for one in kept], dim=1)
    classes = state["class_embedding.weight"].shape[0] - 1
    if classes != int(config.get("num_embeds_ada_norm", 1000)):
        raise ValueError(f"it has {classes} classes and one for no class; num_embeds_ada_norm says otherwise")
    out = weights["proj_out_2.weight"].shape[0] // patch**2
    # Twice as many are a learned variance.
    if out not in (channels, 2 * channels):
        raise ValueError(f"{out} channels of its output are neither {channels} nor twice that")
    size = int(config.get("sample_size", 32))
    return ForeignModel("DiT", network, int(channels), size, int(classes), out == 2 * channels, state, {})


def _embedding(weights: Mapping[str, Tensor], block: int) -> dict[str, Tensor]:
    """Return the weights by which a block embeds noise level and class."""
    start = f"transformer_blocks.{block}.norm1.emb."
    found = {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
    if not found:
        raise KeyError(f"{start}*")
    return found


def _block(weights: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    start, state = f"transformer_blocks.{number}.", {}
    for kind in _KINDS:
        for name, ours in _IN_BLOCK.items():
            state[f"blocks.{number}.{ours}.{kind}"] = weights[f"{start}{name}.{kind}"]
        qkv = [weights[f"{start}attn1.to_{letter}.{kind}"] for letter in ("q", "k", "v")]
        state[f"blocks.{number}.qkv.{kind}"] = torch.cat(qkv)
    return state


class DiffusersFolder(NamedTuple):
    """A network of diffusers on disk, and its scheduler. Only JSON and safetensors are read; nothing is unpickled."""

    kind: str
    """One of _DIFFUSERS."""
    config: dict[str, Any]
    """Its config.json."""
    weights: Path
    """The file of its weights."""
    scheduler: dict[str, Any] | None
    """Settings of the scheduler beside it; None without any."""
    pipeline: Path
    """The folder of the whole pipeline, or that of the network."""

    @classmethod
    def open(cls, folder: Path) -> DiffusersFolder:
        """Read the settings of a network that `save_pretrained` wrote, alone or within a pipeline.

        RequestError if it is unknown, or its weights are in a pickle or in several files.
        """
        places = (folder / "unet", folder / "transformer", folder)
        model = next((place for place in places if (place / _CONFIG).is_file()), None)
        if model is None:
            raise RequestError(
                f"{folder} is neither a run nor a folder of diffusers: it has no config.toml, {_CONFIG} or "
                f"unet/{_CONFIG}; give a run or such a folder"
            )
        config = _read_json(model / _CONFIG)
        kind = str(config.get("_class_name", _DIFFUSERS[0]))
        if kind not in _DIFFUSERS:
            why = ": that one is conditioned on text" if kind == "UNet2DConditionModel" else ""
            raise RequestError(f"{model} holds a {kind!r}; only a {' or '.join(_DIFFUSERS)} can be started from{why}")
        weights = model / _WEIGHTS
        if not weights.is_file():
            there = sorted(path.name for path in model.iterdir() if path.suffix in _OTHER_WEIGHTS)
            raise RequestError(
                f"{model} has no {_WEIGHTS} ({', '.join(there)}); load it with diffusers in an environment of its own, "
                "and write it by save_pretrained(FOLDER, safe_serialization=True, max_shard_size='100GB'): pickles can "
                "run code"
            )
        # A pipeline's scheduler is in a folder beside the network's; some models were saved with it in their own.
        places = (folder / "scheduler", folder.parent / "scheduler", folder)
        settings = next((path for place in places if (path := place / "scheduler_config.json").is_file()), None)
        return cls(kind, config, weights, _read_json(settings) if settings else None, folder)

    @property
    def has_own_pipeline(self) -> bool:
        """Return whether the pipeline is Unfog's own: its scheduler does not state what the network predicts."""
        index = self.pipeline / "model_index.json"
        return index.is_file() and OWN_PIPELINE in str(_read_json(index).get("_class_name"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_file(path, path.parent, _LARGEST_JSON, follow=True))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be read: {error}; write it again with diffusers") from None
    return value
