"""Description of settings, from their fields: name, flags, type, default, rules, and the text under the field.

`--help`, `unfog explain`, shell completion and `unfog init` are made from it, so that a new setting is in all of them.
"""

from __future__ import annotations

import ast
import inspect
import sys
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from unfog.config.schema import SHORT
from unfog.config.spec_strings import SampleGrid, field_types, format_spec, registry_of, strip_optional
from unfog.diffusion.noise import Grid
from unfog.settings import AUTO, Rules, rules_of
from unfog.values.image_format import Size


@dataclass(frozen=True)
class Description:
    """A setting that a flag can give, or a word without a flag."""

    path: tuple[str, ...]
    """Place in the tree of the request."""
    owner: type
    """Dataclass of the field."""
    field: Field[Any]
    annotation: Any
    rules: Rules

    @property
    def setting(self) -> str:
        """Dotted name in the tree of settings: "optimizer.lr"."""
        return ".".join(self.path).removeprefix("settings.")

    @property
    def flags(self) -> list[str]:
        """Flags of it without dashes, the short one first: "lr", "optimizer.lr"; of a switch, also its opposite."""
        *above, last = (part.replace("_", "-") for part in self.path if part != "settings")
        last = self.rules.flag or last
        # The short flag first, as it is the one that messages and `unfog explain` name.
        names = [*(short for short, place in SHORT.items() if place == self.setting), ".".join([*above, last])]
        return names + [_opposite(name) for name in names if self.annotation is bool]

    @property
    def positional(self) -> bool:
        """True for a word without a flag, such as SOURCE."""
        return self.rules.positional

    @property
    def text(self) -> str:
        """The string under the field, which `--help` prints; "" without one."""
        return field_texts(self.owner).get(self.field.name, "")

    @property
    def choices(self) -> tuple[str, ...]:
        """Words that it can be: of a list of choices, or kinds of a part."""
        if (registry := registry_of(self.annotation)) is not None:
            return tuple(registry)
        annotation = Grid if self.annotation == SampleGrid else self.annotation
        literal = typing.get_origin(annotation) is Literal
        return tuple(map(str, typing.get_args(annotation))) if literal else ()

    @property
    def metavar(self) -> str:
        """Placeholder of the value in the help text: "N", "PATH"; "" for a switch."""
        if self.rules.metavar:
            return self.rules.metavar
        if registry_of(self.annotation) is not None:
            return "NAME"
        if self.choices:
            return "|".join(self.choices)
        origin, args = typing.get_origin(self.annotation), typing.get_args(self.annotation)
        words = {int: "N", Size: "SIZE", float: "NUMBER", Path: "PATH", bool: ""}
        if origin is tuple:
            word = words.get(args[0], "TEXT")
            return f"{word} …" if args[-1] is Ellipsis else " ".join([word] * len(args))
        return words.get(self.annotation, "TEXT")

    @property
    def changes_on_resume(self) -> bool:
        """True if a resume can change it, or a part of it."""
        registry = registry_of(self.annotation) or {}
        parts = {type(part) for part in registry.values() if part is not None}
        inner = [rules_of(f).resume for part in parts for f in fields(part)]
        return any(rule in ("free", "force") for rule in (self.rules.resume, *inner))

    def default(self, tree: Any = None) -> str:
        """Return the default in words, or the value in a tree of settings; "" if it is empty."""
        value = self.field.default if tree is None else tree
        for name in self.path if tree is not None else ():
            value = getattr(value, name)
        if value is None and self.rules.auto is None:
            return AUTO
        return format_value(value, registry_of(self.annotation) is not None)


@cache  # resolving the annotations of all settings takes longer than reading a command
def describe(kind: type) -> tuple[Description, ...]:
    """Return the settings of a dataclass and of its sections, in order."""
    return tuple(_describe(kind, (), Rules()))


@cache
def field_texts(kind: type) -> dict[str, str]:
    """Return field -> the text under it, of a dataclass and its bases."""
    texts: dict[str, str] = {}
    # Python keeps no strings under fields, so they are read from the source; a field that a class declares again has
    # the text of that class.
    for base in reversed(kind.__mro__):
        name = ""
        for node in _classes_of(base.__module__).get(base.__name__, ast.Module([], [])).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
                texts[name], name = " ".join(str(node.value.value).split()), ""
            else:
                name = ""
    return texts


def _opposite(flag: str) -> str:
    """Return the flag that turns a switch off: "data.no-flip"."""
    section, dot, last = flag.rpartition(".")
    return f"{section}{dot}no-{last}"


def format_value(value: Any, is_part: bool = False) -> str:
    """Return a value as written on the command line; "" if it is empty or missing."""
    if value is MISSING or (value is None and not is_part):
        return ""
    if is_part:
        return format_spec(value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(format_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # a built-in module, or one without its source
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _describe(kind: type, above: tuple[str, ...], section: Rules) -> Iterator[Description]:
    hints = field_types(kind)
    for f in fields(kind):
        annotation, rules = hints[f.name], rules_of(f).inside(section)
        if rules.hidden:
            continue
        registry = registry_of(annotation)
        if is_dataclass(annotation) and registry is None:
            yield from _describe(typing.cast(type, annotation), (*above, f.name), rules)
        else:
            plain = annotation if registry is not None else strip_optional(annotation)
            yield Description((*above, f.name), kind, f, plain, rules)
