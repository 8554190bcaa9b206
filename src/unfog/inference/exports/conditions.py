"""Conditions in an export: which can be exported, their description, the code of a network with them, and examples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from keyword import iskeyword
from typing import Any

import torch
from torch import nn

from unfog.config.schema import Config
from unfog.errors import RequestError
from unfog.export.network_inputs import NamedInputs
from unfog.export.source_code import GIVEN_TEXT, network_source
from unfog.text import sanitize
from unfog.values.condition_format import TEXT, Given
from unfog.values.condition_kinds import ColumnFacts, kind_of
from unfog.values.tokenizer import BYTES, tokenizer_of

_KINDS = ("number", "category", "several", "vector", "text")
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
    if names := [sanitize(one.name) for one in config.columns if one.kind not in _KINDS]:
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


def reading_modules(config: Config) -> Sequence[str]:
    """Return the modules that read what people ask for, each after those that it uses."""
    return GIVEN_TEXT if config.conditions.text is not None else GIVEN_TEXT[1:2]


def describe_columns(config: Config) -> list[dict[str, Any]]:
    """Return a description of each column for JSON: its facts, `inputs` of its layer, and `input`, its ONNX name."""
    described = []
    for one in config.columns:
        name = one.name
        while name in _INPUTS or (name != one.name and name in {each.name for each in config.columns}):
            name += "_"
        described.append({**asdict(one), "inputs": one.inputs, "input": name})
    return described


def condition_rows(model: dict[str, Any], kind: str) -> list[tuple[str, ...]]:
    """Return the rows of a table of the conditions of a model.json, for its card: name, kind, values."""
    rows = []
    for one in model["conditions"]:
        facts = ColumnFacts(one["name"], one["kind"], tuple(one["categories"]), tuple(one["statistics"]))
        values = kind_of(facts.kind).evidence(facts)
        names = [] if facts.kind == TEXT else [sanitize(name) for name in facts.categories]
        if names:
            more = f", and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            values = ("any of " if facts.kind == "several" else "") + ", ".join(names[:_SHOWN]) + more
        shape = {"number": "float32 [B]", "category": "int64 [B]", "several": f"float32 [B, {len(names)}]"}
        shape["text"] = f"int64 [B, {facts.statistics[-1]:g}]" if facts.kind == TEXT else ""
        typed = shape.get(facts.kind, f"float32 [B, {len(facts.statistics) // 4}]")
        rows.append((one["name"], facts.kind, values, *([f"{one['input']}: {typed}"] if kind == "onnx" else [])))
    return rows


def example_values(column: dict[str, Any], count: int) -> list[Any]:
    """Return values of a described column for images, as the network takes them; the second is open."""
    names, numbers = column["categories"], column["statistics"]
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
    words = {one.name: _word(one) for one in config.columns}
    told = dict(config.conditions.usual)
    for one in config.columns:
        told[one.name] = (kind_of(one.kind).parse(one, words[one.name]), *kind_of(one.kind).usual(one))
    return tuple(told.items()), {name: [word, None] for name, word in words.items()}


def _word(one: ColumnFacts) -> Any:
    """Return a value of a column, as people give it."""
    if one.kind == TEXT:
        return _caption(one)
    if one.categories:
        return one.categories[-1]
    size = len(one.statistics) // 4
    usual = [float(f"{mean:.3g}") for mean in one.statistics[:size]]
    return usual[0] if one.kind == "number" else usual


def _caption(one: ColumnFacts) -> str:
    """Return two frequent words of the captions, long ones if there are any."""
    tokenizer = tokenizer_of(one.categories)
    spelled = [tokenizer.decode([token]) for token in range(BYTES, tokenizer.vocabulary)]
    words = [word for word, merge in zip(spelled, one.categories) if merge[0] == _SPACE and word.isalpha()]
    return " ".join([word for word in words if len(word) > 2][:2]) or "a"


def example_code(config: Config, as_arguments: bool = False) -> str:
    """Return Python for a card that gives each condition a value: a dict, or arguments of a pipeline; or ""."""
    words = {one.name: _word(one) for one in config.columns}
    if not words:
        return ""
    # A list is of several images, so a vector is a list in a list.
    lists = {name: [word] if isinstance(word, list) else word for name, word in words.items()}
    shown = {name: json.dumps(word, ensure_ascii=False) for name, word in lists.items()}
    text = config.conditions.text.name if config.conditions.text else ""
    others = [name for name in shown if name != text]
    if as_arguments and not any(name in _ARGUMENTS or iskeyword(name) or not name.isidentifier() for name in others):
        return ", ".join(f"{'prompt' if name == text else name}={word}" for name, word in shown.items())
    items = ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {word}" for name, word in shown.items())
    return f"given={{{items}}}" if as_arguments else f"{{{items}}}"
