"""Spec strings and other values: parse them, and describe types; the same for command line, TOML and Python.

A spec string, `kind` or `kind:name=value,name=value`, names a schedule, target, network or other part. Lists have
slashes: `channels=32/64/96`. In TOML a part is a spec string or a table with a `kind`. Fields that are not given have
the kind's defaults.
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
import os
import re
import types
import typing
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from unfog.custom import REGISTERED, is_own_choice
from unfog.diffusion.losses.pixel_loss import PIXEL_LOSSES, CustomLoss
from unfog.diffusion.noise import PATHS, SCHEDULES, Grid
from unfog.diffusion.target import TARGETS
from unfog.diffusion.weighting import WEIGHTINGS, CustomWeighting
from unfog.errors import RequestError
from unfog.models.given_network import GivenNetwork
from unfog.models.network_settings import CustomNetwork
from unfog.models.settings import ARCHITECTURES, FOREIGN_NETWORKS, SIZES
from unfog.settings import AUTO
from unfog.text import is_address, suggest, without_secrets
from unfog.training.settings import EMA_SCHEDULES, OPTIMIZERS
from unfog.values.condition_requests import ConditionGrid, GuidanceScale, parse_grid, parse_weights
from unfog.values.image_format import Size, parse_size

SampleGrid = Grid | ConditionGrid
"""What `grid` of a sample is: a grid of noise levels, or conditions against each other."""
StepOrRun = int | Path
"""What an evaluation is compared with: a step of the same run, or the folder of another."""
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
# ASCII only: Python's own reading takes digits of every script, and words such as "infinity".
_WHOLE = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*")
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:inf|nan)", re.IGNORECASE
)
# 10k, 1.5k, 2M; m might be thousandths.
_THOUSANDS = re.compile(r"([+-]?[0-9]{1,15}(?:\.[0-9]{1,6})?)([kKM])")
_LONGEST = 60  # characters of a value that a message repeats
# What TOML, and so config.toml, can hold.
MAX_INT = 2**63 - 1


class FormatError(ValueError):
    """A value of the wrong format. The message follows "which is": "not a whole number; write 1000"."""


def quote(value: object) -> str:
    """Return the repr of a value for a message: in one line, without credentials of addresses, and shortened."""
    try:
        text = repr(value)
    except ValueError:  # a whole number with more digits than Python prints
        text = "a number of thousands of digits"
    # A line break in a value would break the message, which is one line.
    text = without_secrets(" ".join(text.split()))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]} ... {text[-14:]}"


def field_types(kind: type) -> Mapping[str, Any]:
    """Return the types of the fields of a class by name. Annotations are texts, which are evaluated once per class."""
    return _evaluate_annotations(kind)


@functools.cache  # on a function of its own, as mypy takes the class of a dataclass for an argument without a hash
def _evaluate_annotations(kind: type) -> Mapping[str, Any]:
    return types.MappingProxyType(typing.get_type_hints(kind))


def strip_optional(annotation: Any) -> Any:
    """Return X of `X | None`, X | Y of `X | Y | None`, and other types unchanged."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not types.NoneType]
        return functools.reduce(operator.or_, members)
    return annotation


def describe_type(annotation: Any) -> str:
    """Describe a type in words: "a whole number", "one of fp32, bf16"."""
    annotation = strip_optional(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        return (
            f"a list of {len(args)}"
            if args[-1] is not Ellipsis
            else f"a list, of which each is {describe_type(args[0])}"
        )
    if annotation == Size:
        return 'a size such as 64 or "96x64", width x height'
    if annotation == StepOrRun:
        return "the step of a checkpoint, or the folder of another run"
    if annotation == SampleGrid:
        return f"{describe_type(Grid)}, or NAME=VALUES of a condition"
    if annotation == GuidanceScale:
        return "a number, or a number for each condition: age=2,stain=1"
    if is_dataclass(annotation):
        return "a table of settings"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    return names[annotation]


def describe_mismatch(annotation: Any, value: object) -> str:
    """Describe a value that is not of this type: "not a whole number", which follows "is" in a message."""
    text = describe_type(annotation)
    close = ""
    if typing.get_origin(strip_optional(annotation)) is typing.Literal:
        choices = list(map(str, typing.get_args(strip_optional(annotation))))
        match = difflib.get_close_matches(str(value)[:_LONGEST], choices, n=1)
        close = f"; did you mean {match[0]}?" if match else ""
    return f"not {text}{close}"


def parse_value(annotation: Any, words: Sequence[str]) -> Any:
    """Return the value of one word, or for a tuple of several. Raise FormatError if they have the wrong format."""
    annotation = strip_optional(annotation)
    if annotation == SampleGrid:
        if "=" in words[0]:
            return parse_grid(words)
        annotation = Grid
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple:
        return tuple(parse_value(args[0], [word]) for word in words)
    (word,) = words
    if typing.get_origin(annotation) is typing.Literal:
        # A choice may be a number, and on the command line everything is a text.
        choices = {str(choice): choice for choice in args}
        if word in choices:
            return choices[word]
        if is_own_choice(annotation, word):
            return word
        raise FormatError(describe_mismatch(annotation, word))
    if annotation == Size:
        return _size(word)
    if annotation == StepOrRun:
        if not word.strip():  # which Path would take for the folder that we are in
            raise FormatError(describe_mismatch(annotation, word))
        annotation = int if _WHOLE.fullmatch(word) or _THOUSANDS.fullmatch(word) else Path
    if annotation == GuidanceScale:
        if "=" in word:
            return parse_weights(word)
        annotation = float
    if annotation is bool:
        if word.lower() in _BOOLEANS:
            return _BOOLEANS[word.lower()]
        raise FormatError(describe_mismatch(bool, word))
    if annotation is int:
        return _whole(word.strip())
    if annotation is float:
        if not _NUMBER.fullmatch(word.strip()):
            raise FormatError("not a number; write it as 0.001 or 1e-3")
        return float(word)
    return parse_path(word) if annotation is Path else annotation(word)


def parse_path(text: str) -> Path:
    """Return a path, with ~ expanded, as shells leave it in --out=~/x. Raise FormatError for an address."""
    if is_address(text):
        raise FormatError("an address and not a path on a disk; mount the bucket, and give the folder")
    return Path(os.path.expanduser(text))


def _size(word: str) -> Size:
    try:
        return parse_size(word)
    except RequestError as error:
        if _WHOLE.fullmatch(word) or _THOUSANDS.fullmatch(word):
            return _whole(word)  # such as 1k; the setting itself checks its bounds
        rule = "write 64, or width x height: 96x64, with 4 to 4096 pixels each and no spaces"
        raise FormatError(f"not a size; {rule}") from error


def _whole(word: str) -> int:
    if match := _THOUSANDS.fullmatch(word):
        exact = Decimal(match[1]) * (1000 if match[2] in "kK" else 1_000_000)
        if exact == int(exact):
            return int(exact)
    if not _WHOLE.fullmatch(word):
        plain = word.replace(",", "")
        value = float(plain) if _NUMBER.fullmatch(plain) else math.nan
        remedy = f"{int(value)}" if value.is_integer() and abs(value) <= MAX_INT else "it in digits, such as 1000"
        raise FormatError(f"not a whole number; write {remedy}")
    if len(word) > 25:  # beyond 64 bits; of thousands of digits, int() would raise a ValueError of its own
        raise FormatError("too large; give less")
    return int(word)


def _registry(section: str, classes: tuple[Any, ...], **named: Any) -> tuple[tuple[type, ...], Mapping[str, Any]]:
    words = {**named, **{cls.kind: cls() for cls in classes}}
    return classes, ChainMap(words, REGISTERED[section])  # a view, so that a later `register` shows


# Each entry: the classes of a union, and the words that stand for one of them with its fields filled in.
_REGISTRIES = (
    _registry("path", PATHS),
    _registry("schedule", SCHEDULES),
    _registry("target", TARGETS),
    _registry("weighting", (*WEIGHTINGS, CustomWeighting)),
    _registry("loss", (*PIXEL_LOSSES, CustomLoss)),
    _registry("ema", EMA_SCHEDULES),
    _registry("optimizer", OPTIMIZERS),
    _registry("network", (*ARCHITECTURES, *FOREIGN_NETWORKS, CustomNetwork, GivenNetwork), auto=None, **SIZES),
)


def registry_of(annotation: Any) -> Mapping[str, Any] | None:
    """Return word -> default part for a union of parts, or None for any other type."""
    members = set(typing.get_args(annotation)) or {annotation}
    members -= {types.NoneType}
    return next((words for classes, words in _REGISTRIES if members and members <= set(classes)), None)


def lookup(words: Mapping[str, Any], word: object) -> Any:
    """Return the part of a word. Raise RequestError with a suggestion if it is unknown."""
    if not isinstance(word, str) or word not in words:
        raise RequestError(f"{quote(word)} is unknown{suggest(word, words)}")
    return words[word]


def parse_spec(words: Mapping[str, Any], text: str) -> Any:
    """Return the part of a spec string such as `min-snr:gamma=3`. Raise RequestError if it names none."""
    kind, _, assignments = text.partition(":")
    part = lookup(words, kind)
    known = [f.name for f in fields(part)] if part is not None else []
    changes: dict[str, Any] = {}
    for assignment in filter(None, assignments.split(",")):
        name, equals, value = assignment.partition("=")
        if name not in known and "arguments" in known and equals:  # of a custom part, for the class that it names
            changes["arguments"] = (*changes.get("arguments", part.arguments), assignment)
            continue
        if name not in known:
            hint = suggest(name, known) if known else ", nor any other"
            raise RequestError(f"{kind} has no setting {quote(name)}{hint}")
        if not equals:
            raise RequestError(f"{quote(assignment)} in {quote(text)} needs a value, as in {name}=1")
        if name in changes:
            raise RequestError(f"{name} is given twice in {quote(text)}; give it once")
        annotation = field_types(type(part))[name]
        items = value.split("/") if typing.get_origin(annotation) is tuple else [value]
        try:
            changes[name] = parse_value(annotation, items)
        except FormatError as error:
            raise RequestError(f"{kind}:{name} = {quote(value)} is {error}") from None
    return replace(part, **changes) if changes else part


def format_spec(part: Any) -> str:
    """Return the shortest spec string of a part."""
    if part is None:
        return AUTO
    # Against the kind's defaults, not those of a named size: `small` and `unet` with the same fields are one part.
    default = type(part)()
    changed = [
        f"{f.name}={_spell_value(getattr(part, f.name))}"
        for f in fields(part)
        if getattr(part, f.name) != getattr(default, f.name)
    ]
    return ":".join(filter(None, [part.kind, ",".join(changed)]))


def _spell_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "/".join(map(_spell_value, value))
    return str(int(value)) if isinstance(value, bool) else str(value)
