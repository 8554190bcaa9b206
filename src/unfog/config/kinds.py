"""Parts that come in kinds (schedules, targets, networks, …), and how a word names one.

On the command line a part is `kind` or `kind:name=value,name=value` (lists with slashes: `channels=32/64/96`); in TOML
it is such a text or a table with a `kind`. Both change the fields given and leave the rest at the kind's defaults.
"""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from unfog.diffusion.noise import PATHS, SCHEDULES
from unfog.diffusion.target import TARGETS
from unfog.diffusion.weighting import WEIGHTINGS
from unfog.errors import RequestError
from unfog.models.settings import SIZES, UNet
from unfog.training.settings import EMAS


def _by_kind(classes: tuple[Any, ...]) -> dict[str, Any]:
    return {cls.kind: cls() for cls in classes}


# Each entry: the classes of a union, and the words that stand for one of them with its fields filled in.
FAMILIES: tuple[tuple[tuple[type, ...], dict[str, Any]], ...] = tuple(
    (tuple(classes), words)
    for classes, words in (
        (PATHS, _by_kind(PATHS)),
        (SCHEDULES, _by_kind(SCHEDULES)),
        (TARGETS, _by_kind(TARGETS)),
        (WEIGHTINGS, _by_kind(WEIGHTINGS)),
        (EMAS, _by_kind(EMAS)),
        ((UNet,), {"auto": None, "unet": UNet(), **SIZES}),
    )
)


def words_of(annotation: Any) -> dict[str, Any] | None:
    """The words that name a value of this union type, or None if it is no type that comes in kinds."""
    members = set(typing.get_args(annotation)) or {annotation}
    members -= {types.NoneType}
    return next((words for classes, words in FAMILIES if members and members <= set(classes)), None)


def suggest(word: str, known: typing.Iterable[str]) -> str:
    """`; did you mean 'x'?`, or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there is {', '.join(known)}"


def named(words: Mapping[str, Any], word: str) -> Any:
    """The part that a word stands for. RequestError with a suggestion if none does."""
    if word not in words:
        raise RequestError(f"{word!r} is not known here{suggest(word, words)}")
    return words[word]


def parse(words: Mapping[str, Any], text: str) -> Any:
    """The part that a text such as `min-snr:gamma=3` stands for. RequestError if it stands for none."""
    kind, _, assignments = text.partition(":")
    part = named(words, kind)
    changes = {}
    for assignment in filter(None, assignments.split(",")):
        name, equals, value = assignment.partition("=")
        known = [f.name for f in fields(part)] if part is not None else []
        if name not in known:
            raise RequestError(f"{kind} has no setting {name!r}{suggest(name, known) if known else ''}")
        if not equals:
            raise RequestError(f"{assignment!r} in {text!r} needs a value, as in {name}=1")
        changes[name] = _value(typing.get_type_hints(type(part))[name], value, f"{kind}:{name}")
    return replace(part, **changes) if changes else part


def _value(annotation: Any, text: str, where: str) -> Any:
    if typing.get_origin(annotation) is tuple:
        return tuple(_value(typing.get_args(annotation)[0], item, where) for item in text.split("/"))
    if annotation is bool:
        choices = {"1": True, "true": True, "0": False, "false": False}
    else:
        choices = {str(choice): choice for choice in typing.get_args(annotation)}  # of a Literal
    if text.lower() in choices:
        return choices[text.lower()]
    if choices:
        raise RequestError(f"{where} = {text!r} is not one of {', '.join(choices)}")
    try:
        return annotation(text)
    except ValueError:
        raise RequestError(f"{where} = {text!r} is not a valid {annotation.__name__}") from None


def spell(part: Any) -> str:
    """The shortest text that `parse` turns into this part."""
    if part is None:
        return "auto"
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
