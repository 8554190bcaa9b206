"""Conditions in an export: which can be exported, their description, the code of a network with them, and examples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from keyword import iskeyword
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from unfog.config.schema import Config
from unfog.errors import RequestError
from unfog.export.network_inputs import NamedInputs
from unfog.export.source_code import EXPORTED, network_source
from unfog.pipeline.given_images import read_pictures
from unfog.text import sanitize
from unfog.values.condition_format import TEXT, Given
from unfog.values.condition_kinds import ColumnFacts, kind_of
from unfog.values.image_format import CHANNELS, luma_weights, pillow_mode
from unfog.values.kinds.image_kinds import IMAGE_KINDS, MADE, has_bytes, image_columns
from unfog.values.tokenizer import BYTES, tokenizer_of

_INPUTS = frozenset(("x", "c_noise", "label", "y"))
# Arguments of our pipeline that a column of the same name cannot be.
_ARGUMENTS = frozenset(
    (
        "self",
        "batch_size",
        "prompt",
        "negative_prompt",
        "class_labels",
        "generator",
        "latents",
        "num_inference_steps",
        "guidance_scale",
    )
) | {"output_type", "return_dict", "given"}
_SPACE = "\u0120"  # in merges, as in those of GPT-2
_SHOWN = 20  # categories of a column on the model card


def check_conditions_map(config: Config) -> None:
    """Raise RequestError if a run has conditions that no format of an export holds."""
    if config.conditions.text_model is not None:
        raise RequestError(
            "this run reads texts with a pretrained encoder, which no format of an export holds; "
            "unfog.load(run).network has it, and a run without text_encoder.pretrained can be exported"
        )
    if names := [sanitize(one.name) for one in config.columns if one.kind not in EXPORTED]:
        raise RequestError(
            f"this run has conditions that no format of an export holds ({', '.join(names)}); the weights in "
            "RUN/checkpoints are safetensors, and unfog.load(run).network takes all conditions"
        )


def has_named_inputs(config: Config) -> bool:
    """Return True if the network of an export is a `NamedInputs`: it has columns, or a mask of unknown pixels."""
    return bool(config.columns) or config.data.has_unknown


def with_named_inputs(config: Config, network: nn.Module) -> NamedInputs:
    """Return the network of a run as exports call it, with the mask of its samples."""
    known = None
    if config.data.has_unknown:
        mask = config.data.known_in_samples()
        known = torch.ones(config.input_shape, dtype=torch.bool) if mask is None else torch.from_numpy(mask)
    return NamedInputs(network, bool(config.classes), [one.kind for one in config.columns], known)


def source_of_network(config: Config, what: str, modules: Sequence[str] = ()) -> str:
    """Return the code of the network of a run and of further modules; see `network_source`."""
    assert config.network is not None  # a run's is settled
    has_text = config.conditions.text is not None
    return network_source(what, config.network.model, has_named_inputs(config), modules, has_text)


def reading_modules(config: Config, values: str = "unfog.export.values_numpy") -> Sequence[str]:
    """Return the modules that read what people ask for, each after those that it uses; `values` has value maps."""
    names = ["unfog.export.given_values"]
    if config.conditions.text is not None:
        names = ["unfog.values.tokenizer", *names, "unfog.export.given_text"]
    return [*names, values, "unfog.export.given_images"] if image_columns(config.columns) else names


def describe_columns(config: Config) -> list[dict[str, Any]]:
    """Return a description of each column for JSON: its facts, `inputs` of its layer, and `input`, its ONNX name.

    An image has the `mode` of Pillow for its pictures too; "" for values. What is made of an image has the
    map of its values, and `shares` of its channels in the brightness.
    """
    described, format = [], config.image_format
    of_image = {"values": asdict(format.values), "shares": list(luma_weights(format.channels))}
    for one in config.columns:
        name = one.name
        while name in _INPUTS or (name != one.name and name in {each.name for each in config.columns}):
            name += "_"
        more = of_image if one.kind in MADE else {}
        if one.kind in IMAGE_KINDS:
            more = {**more, "mode": _mode(config, one)}
        described.append({**asdict(one), "inputs": one.inputs, "input": name, **more})
    return described


def condition_rows(model: dict[str, Any], kind: str) -> list[tuple[str, ...]]:
    """Return the rows of a table of the conditions of a model.json, for its card: name, kind, values."""
    rows = []
    for one in model["conditions"]:
        facts = ColumnFacts(one["name"], one["kind"], tuple(one["categories"]), tuple(one["statistics"]))
        values = kind_of(facts.kind).evidence(facts)
        # The evidence of captions and masks has what it needs of their categories.
        names = [] if facts.kind in (TEXT, *IMAGE_KINDS) else [sanitize(name) for name in facts.categories]
        if names:
            more = f", and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            values = ("any of " if facts.kind == "several" else "") + ", ".join(names[:_SHOWN]) + more
        shape = {"number": "float32 [B]", "category": "int64 [B]", "several": f"float32 [B, {len(names)}]"}
        shape["text"] = f"int64 [B, {facts.statistics[-1]:g}]" if facts.kind == TEXT else ""
        if facts.kind in IMAGE_KINDS:
            shape[facts.kind] = f"float32 [B, {', '.join(map(str, IMAGE_KINDS[facts.kind].shape(facts)))}]"
        typed = shape.get(facts.kind, f"float32 [B, {len(facts.statistics) // 4}]")
        rows.append((one["name"], facts.kind, values, *([f"{one['input']}: {typed}"] if kind == "onnx" else [])))
    return rows


def example_values(column: dict[str, Any], count: int) -> Any:
    """Return values of a described column for images, as the network takes them; the second is open."""
    names, numbers = column["categories"], column["statistics"]
    if column["kind"] in IMAGE_KINDS:
        shape = (count, *map(int, numbers[:3]))
        drawn = np.random.default_rng(1).random(shape, np.float32)
        drawn = np.floor(drawn * len(names)) if names else 2 * drawn - 1
        drawn[1:2] = np.nan
        return drawn
    if column["kind"] == TEXT:
        vocabulary, length = map(int, numbers)
        return [[vocabulary - 1, *[-1] * (length - 1)], [-1] * length, [*range(97, 97 + length)]][:count]
    size = len(numbers) // 4
    low, high = numbers[2 * size : 3 * size], numbers[3 * size :]
    some, unknown = [a + 0.3 * (b - a) for a, b in zip(low, high)], [math.nan] * size
    values: dict[str, list[Any]] = {
        "number": [*some, math.nan, *high],
        "category": [0, -1, len(names) - 1],
        "several": [[1.0, *[0.0] * (len(names) - 1)], [math.nan] * len(names), [1.0] * len(names)],
        "vector": [some, unknown, high],
    }
    return values[column["kind"]][:count]


def example_given(config: Config) -> tuple[Given, dict[str, Any]]:
    """Return conditions of samples as Unfog has them, and columns in words for an export. Every second is open."""
    words = {one.name: _word(config, one) for one in config.columns}
    told, read = dict(config.conditions.usual), read_pictures(config, {name: [word] for name, word in words.items()}, 1)
    for one in config.columns:
        (word,) = cast(list[Any], read[one.name])
        told[one.name] = (kind_of(one.kind).parse(one, word), *kind_of(one.kind).usual(one))
    return tuple(told.items()), {name: [word, None] for name, word in words.items()}


def _word(config: Config, one: ColumnFacts) -> Any:
    """Return a value of a column, as people give it."""
    if one.kind in IMAGE_KINDS:
        return example_picture(config, one)
    if one.kind == TEXT:
        return _caption(one)
    if one.categories:
        return one.categories[-1]
    size = len(one.statistics) // 4
    usual = [float(f"{mean:.3g}") for mean in one.statistics[:size]]
    return usual[0] if one.kind == "number" else usual


def example_picture(config: Config, one: ColumnFacts) -> NDArray[Any]:
    """Return a picture for a condition that is an image, made of noise, as people give it: [H, W, C]."""
    (channels, height, width), format = IMAGE_KINDS[one.kind].shape(one), config.image_format
    rng = np.random.default_rng(0)
    if one.kind == "mask":
        names = rng.choice(one.categories, (height, width, 1))
        if not names[0, 0, 0].startswith("#"):
            return names.astype(np.uint16 if max(map(int, one.categories)) > 255 else np.uint8)
        return np.array([[list(bytes.fromhex(name[1:])) for name in row] for row in names[..., 0].tolist()], np.uint8)
    if one.kind == "image":
        low, high = np.array(one.statistics[3:], np.float32).reshape(2, channels)
        values = low + (high - low) * rng.random((height, width, channels), np.float32)
        return values.round().astype(np.uint8) if has_bytes(one) else values
    factor = int(one.statistics[3]) if one.kind == "degrade" else 1
    x0 = torch.from_numpy(rng.standard_normal((1, format.channels, height // factor, width // factor), np.float32) / 2)
    stored = format.values.to_stored(x0)[0].permute(1, 2, 0).numpy()
    if one.kind != "hole":
        return stored
    shown = np.full((height, width, 1), np.iinfo(stored.dtype).max if stored.dtype.kind in "ui" else 1, stored.dtype)
    shown[: (height + 1) // 2, : (width + 1) // 2] = 0
    return np.concatenate([stored, shown], 2)


def _mode(config: Config, one: ColumnFacts) -> str:
    """Return the mode of Pillow for the pictures that a condition is read from; "" if they are values, or a mask."""
    if one.kind in MADE:
        return pillow_mode(config.image_format.channels) if config.image_format.is_picture else ""
    channels = int(one.statistics[0])
    return pillow_mode(channels) if one.kind == "image" and has_bytes(one) and channels in CHANNELS else ""


def _word_in_code(config: Config, one: ColumnFacts) -> str:
    """Return Python for a value of a column on a card: of an image the code that reads it from a file."""
    if one.kind in IMAGE_KINDS:
        file = json.dumps(sanitize(one.name).replace("/", "_").replace("\\", "_"), ensure_ascii=False)[1:-1]
        as_file = one.kind == "mask" or _mode(config, one)
        return f'Image.open("{file}.png")' if as_file else f'np.load("{file}.npy")'
    word = _word(config, one)
    # A list is of several images, so a vector is a list in a list.
    return json.dumps([word] if isinstance(word, list) else word, ensure_ascii=False)


def _caption(one: ColumnFacts) -> str:
    """Return two frequent words of the captions, long ones if there are any."""
    tokenizer = tokenizer_of(one.categories)
    spelled = [tokenizer.decode([token]) for token in range(BYTES, tokenizer.vocabulary)]
    words = [word for word, merge in zip(spelled, one.categories) if merge[0] == _SPACE and word.isalpha()]
    return " ".join([word for word in words if len(word) > 2][:2]) or "a"


def example_code(config: Config, as_arguments: bool = False) -> str:
    """Return Python for a card that gives each condition a value: a dict, or arguments of a pipeline; or ""."""
    if not config.columns:
        return ""
    shown = {one.name: _word_in_code(config, one) for one in config.columns}
    text = config.conditions.text.name if config.conditions.text else ""
    others = [name for name in shown if name != text]
    if as_arguments and not any(name in _ARGUMENTS or iskeyword(name) or not name.isidentifier() for name in others):
        return ", ".join(f"{'prompt' if name == text else name}={word}" for name, word in shown.items())
    items = ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {word}" for name, word in shown.items())
    return f"given={{{items}}}" if as_arguments else f"{{{items}}}"
