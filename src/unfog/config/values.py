"""Parse values from text, and describe types in messages; the same for command line, TOML and Python."""

from __future__ import annotations

import difflib
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unfog.custom import is_own_choice

_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
# ASCII only: Python's own reading takes digits of every script, and words such as "infinity".
_WHOLE = re.compile(r"[+-]?[0-9]+(?:_[0-9]+)*")
_NUMBER = re.compile(
    r"[+-]?(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?|[+-]?(?:inf|nan)", re.IGNORECASE
)
_LONGEST = 60  # characters of a value that a message repeats
MAX_INT = 2**63 - 1
"""What TOML, and so config.toml, can hold."""


class FormatError(ValueError):
    """A value of the wrong format. The message follows "which is": "no whole number; write 1000"."""


def sanitize(value: object) -> str:
    """Return the repr of a value for a message: in one line, and shortened."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of more digits than Python writes
        text = "a number of thousands of digits"
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]} ... {text[-14:]}"


def suggest(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" or, if nothing is similar, the list of all that is known."""
    known = sorted(known)
    close = difflib.get_close_matches(str(word)[:_LONGEST], known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there is {', '.join(known)}"


def strip_optional(annotation: Any) -> Any:
    """Return X of `X | None`, and other types as they are."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not types.NoneType]
        return members[0] if len(members) == 1 else annotation
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
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    return names[annotation]


def describe_mismatch(annotation: Any, value: object) -> str:
    """Describe a value that is not of this type: "no whole number", which follows "is" in a message."""
    text = describe_type(annotation)
    article, _, rest = text.partition(" ")
    close = ""
    if typing.get_origin(strip_optional(annotation)) is typing.Literal:
        choices = list(map(str, typing.get_args(strip_optional(annotation))))
        match = difflib.get_close_matches(str(value)[:_LONGEST], choices, n=1)
        close = f"; did you mean {match[0]}?" if match else ""
    return (f"no {rest}" if article == "a" else f"not {text}") + close


def parse_value(annotation: Any, words: Sequence[str]) -> Any:
    """Return the value of one word, or for a tuple of several. Raise FormatError if they have the wrong format."""
    annotation = strip_optional(annotation)
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple:
        return tuple(parse_value(args[0], [word]) for word in words)
    (word,) = words
    if typing.get_origin(annotation) is typing.Literal:
        choices = {str(choice): choice for choice in args}
        if word in choices:
            return choices[word]
        if is_own_choice(annotation, word):
            return word
        raise FormatError(describe_mismatch(annotation, word))
    if annotation is bool:
        if word.lower() in _BOOLEANS:
            return _BOOLEANS[word.lower()]
        raise FormatError(describe_mismatch(bool, word))
    if annotation is int:
        return _whole(word.strip())
    if annotation is float:
        if not _NUMBER.fullmatch(word.strip()):
            raise FormatError("no number; write it as 0.001 or 1e-3")
        return float(word)
    return Path(os.path.expanduser(word)) if annotation is Path else annotation(word)  # --out=~/x, as shells leave it


def _whole(word: str) -> int:
    if not _WHOLE.fullmatch(word):
        plain = word.replace(",", "")
        value = float(plain) if _NUMBER.fullmatch(plain) else math.nan
        remedy = f"{int(value)}" if value.is_integer() and abs(value) <= MAX_INT else "it in digits, such as 1000"
        raise FormatError(f"no whole number; write {remedy}")
    if len(word) > 25:
        raise FormatError("too large a number; give less")
    return int(word)
