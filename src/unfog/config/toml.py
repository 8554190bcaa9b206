"""Strict TOML for frozen dataclasses. Errors name an unknown key or a wrong value by its full dotted name."""

from __future__ import annotations

import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from unfog._version import __version__
from unfog.config.aliases import current_name
from unfog.config.spec_strings import (
    MAX_INT,
    FormatError,
    SampleGrid,
    StepOrRun,
    describe_mismatch,
    field_types,
    lookup,
    parse_spec,
    parse_value,
    quote,
    registry_of,
    strip_optional,
)
from unfog.custom import consent, is_own_choice
from unfog.diffusion.noise import Grid
from unfog.errors import RequestError
from unfog.settings import AUTO, NO_AUTO, rules_of
from unfog.text import not_utf8, sanitize, suggest
from unfog.values.condition_requests import ConditionGrid, GuidanceScale, parse_grid, parse_weights
from unfog.values.image_format import Size, parse_size

T = TypeVar("T")

# Python's reader takes the square of its length over a key of many parts; ours have three.
_DEEP_KEY = re.compile(r"(?:\.[^.,=\[\]{}\n]{1,99}){50}")
_LARGEST_FLOAT = 1e30  # float32, which networks compute in, has little beyond it
_UNKNOWN = "unknown setting"
_WRITTEN_BY = re.compile(r"# Written by unfog (\S{1,20})\s")
_LARGEST_FILE = 4_000_000  # bytes; the names of 20,000 classes, and far more than a person writes


def to_toml(settings: Any) -> str:
    """Return all fields of a dataclass tree as TOML. A field that is None is left out, as None is its default.

    RequestError if it is longer than what `read_toml` reads.
    """
    text = "\n".join(_tables(settings, "")).strip() + "\n"
    if (size := len(text.encode())) > _LARGEST_FILE:
        raise RequestError(
            f"the settings with the names of all classes take {size / 1e6:.1f} MB, and a file of settings has at most "
            f"{_LARGEST_FILE / 1e6:.0f} MB; give the classes shorter names, or train without them: --data.labels none"
        )
    return text


def _tables(settings: Any, name: str) -> list[str]:
    lines = [f"\n[{name}]"] if name else []
    # The sampler has its kind as a setting, which the loop below writes.
    if hasattr(type(settings), "kind") and "kind" not in [f.name for f in fields(settings)]:
        lines.append(f'kind = "{settings.kind}"')
    values, hints = {f.name: getattr(settings, f.name) for f in fields(settings)}, field_types(type(settings))
    lists = [key for key in values if is_dataclass(_each(hints[key]))]  # one without entries writes nothing
    # Before the sub-tables: a key below the header of one would belong to it.
    plain = [key for key, value in values.items() if not (value is None or is_dataclass(value) or key in lists)]
    lines += [f"{key} = {literal(values[key])}" for key in plain]
    for key, value in values.items():
        full = f"{name}.{key}" if name else key
        if key in lists:
            lines += [line for entry in value for line in (f"\n[[{full}]]", *_tables(entry, ""))]
        elif is_dataclass(value):
            lines += _tables(value, full)
    return lines


def _each(annotation: Any) -> Any:
    """Return the type X of tuple[X, ...]; None for another type."""
    args = typing.get_args(annotation)
    return args[0] if typing.get_origin(annotation) is tuple and args[1:] == (...,) else None


def literal(value: Any) -> str:
    """Return a value as TOML that reads back as the same value, floats to the last digit."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON strings are TOML strings
    # `repr` would write True, which TOML does not know.
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(literal, value)) + "]"
    return repr(value)


def from_toml(text: str, base: T) -> T:
    """Return `base` with the changes of a TOML text. RequestError names a wrong key or value.

    The text may be somebody else's, so the code that it names is imported only with consent.
    """
    try:
        if _DEEP_KEY.search(text):
            raise RecursionError
        table = tomllib.loads(text)
    except RecursionError:
        raise RequestError("not valid settings: it is nested far too deep") from None
    except ValueError as error:  # a TOMLDecodeError, or what Python says of a number of thousands of digits
        raise RequestError(f"not valid TOML: {' '.join(str(error).split())[:200]}") from None
    settings = update(base, table, "")
    consent.require(settings)
    return settings


def read_toml(path: Path, base: T) -> T:
    """Return `from_toml` of a file. Messages of RequestError begin with its name."""
    text = ""
    try:
        # A shell's <(command) is a pipe below /dev. To another one, as in the run of a stranger, nobody may ever write.
        if path.is_fifo() and not path.is_relative_to("/dev"):
            raise RequestError("it is a pipe; give a file of settings, or a shell's <(command)")
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)  # one byte more detects a longer file, without reading all of it
        if len(content) > _LARGEST_FILE:
            raise RequestError(f"it is over {_LARGEST_FILE / 1e6:.0f} MB, too large for a file of settings")
        text = content.decode("utf-8-sig").replace("\r\n", "\n")  # editors may begin with a BOM
        return from_toml(text, base)
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} {not_utf8(error)}") from None
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {error.strerror or error}; give a file of settings, as unfog init writes one"
        ) from None
    except ValueError as error:  # a name that cannot be one, as it holds a NUL
        raise RequestError(f"{quote(str(path))}: {error}") from None
    except RequestError as error:
        remedy = f" ({_version_remedy(text)})" if str(error).startswith(_UNKNOWN) else ""
        raise RequestError(f"{path}: {error}{remedy}") from None


def with_version(text: str) -> str:
    """Return a file of settings with a first line that names the version of Unfog which writes it."""
    return f"# Written by unfog {__version__}\n{text}"


def _version_remedy(text: str) -> str:
    """Return the remedy for an unknown setting, from the version that wrote the file."""
    if (found := _WRITTEN_BY.match(text)) is None:
        return f"this is unfog {__version__}; a newer version may know it: update unfog, or remove the line"
    if found[1] == __version__:
        return f"this is unfog {__version__}, which wrote the file, so the line was added later; remove or correct it"
    written = f"unfog {sanitize(found[1])} wrote the file, and this is {__version__}"
    return f"{written}; install that version, or remove the line"


def update(base: T, table: Mapping[str, Any], where: str) -> T:
    """Return `base` with the changes of a nested dict; `where` is the dotted name of `base`."""
    hints = field_types(type(base))
    known = {f.name: f for f in fields(base)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for key, value in table.items():
        given = f"{where}.{key}" if where else str(key)
        name = current_name(given)
        # Messages and the rest of this function know the present name alone.
        if name != given:
            key = name.rpartition(".")[2]
        if key in changes:
            raise RequestError(f"{name} is given twice, once by its old name; give one of them")
        if key not in known:
            raise RequestError(f"{_UNKNOWN} {quote(name)[1:-1]}{suggest(key, known)}")
        if isinstance(value, str) and value == AUTO and (automatic := rules_of(known[key]).auto) is not NO_AUTO:
            changes[key] = automatic
        else:
            changes[key] = _convert(hints[key], getattr(base, key), value, name)
    try:
        return replace(base, **changes)  # type: ignore[type-var]
    except RequestError as error:
        raise RequestError(_in_full(str(error), where, known)) from None


def _in_full(message: str, where: str, known: Collection[str]) -> str:
    """Return a message of a section with the section's full name in front."""
    if not where or message.startswith(where):
        return message
    begins_with_a_name = message.partition(" = ")[0] in known
    return f"{where}.{message}" if begins_with_a_name else f"{where}: {message}"


def _convert(annotation: Any, old: Any, value: Any, name: str) -> Any:
    words = registry_of(annotation)
    if words is not None:
        return _part(words, value, name)
    if is_dataclass(old):
        if type(value) is type(old):
            return _checked(value, name)
        if not isinstance(value, Mapping):
            raise RequestError(f"{name} = {quote(value)} must be a table of settings")
        return update(old, value, name)
    return of_type(annotation, value, name)


def _part(words: Mapping[str, Any], value: Any, name: str) -> Any:
    """Return a part such as a schedule, from a spec string, a table with a `kind`, or an instance."""
    # An instance, as Python gives it. None is one too, where the part is to be chosen.
    if type(value) in {type(part) for part in words.values()}:
        return value if value is None else _checked(value, name)
    if isinstance(value, str):
        try:
            part = parse_spec(words, value)
        except RequestError as error:
            raise RequestError(f"{name}: {error}") from None
        return part if part is None else _checked(part, name)
    if not isinstance(value, Mapping) or "kind" not in value:
        known, own = ", ".join(sorted(words)), getattr(value, "__qualname__", f"<{type(value).__name__}>")
        if callable(value) and "custom" in words:
            if "<" in own:  # a lambda, a function within another, a partial
                raise RequestError(
                    f"{name} is {own}, which no other process can import; define it with a name in a module, and give "
                    f"{name.rpartition('.')[2]}='custom:path=MODULE.NAME'"
                )
            module = getattr(value, "__module__", "__main__").replace("__main__", "MODULE")
            raise RequestError(
                f"{name} is the function or class {own}, which a run cannot store; give it by its path, in a "
                f"module that can be imported: {name.rpartition('.')[2]}='custom:path={module}.{own}'"
                " (more arguments follow with commas: ,c=0.1)"
            )
        raise RequestError(f"{name} = {quote(value)} must be one of {known}, or a table with such a kind")
    try:
        part = lookup(words, value["kind"])
    except RequestError as error:
        raise RequestError(f"{name}.kind: {error}") from None
    rest = {k: v for k, v in value.items() if k != "kind"}
    if part is None and rest:
        raise RequestError(f"{name} is {value['kind']}, which has no settings; remove {', '.join(map(str, rest))}")
    return update(part, rest, name) if part is not None else None


def _checked(instance: Any, name: str) -> Any:
    """Return an instance made in Python, with the types of its fields checked."""
    return update(instance, {f.name: getattr(instance, f.name) for f in fields(instance)}, name)


def of_type(annotation: Any, value: Any, name: str) -> Any:
    """Return a value as the type of a setting: lists become tuples, NumPy numbers plain ones. Else RequestError."""
    optional, annotation = types.NoneType in typing.get_args(annotation), strip_optional(annotation)
    if optional and value is None:
        return None
    if annotation == SampleGrid:
        if isinstance(value, ConditionGrid | Mapping):
            return value if isinstance(value, ConditionGrid) else parse_grid(value)
        annotation = Grid
    if annotation == GuidanceScale:
        if isinstance(value, Mapping | list | tuple) or (isinstance(value, str) and "=" in value):
            return parse_weights(value, name)
        annotation = float
    if annotation == StepOrRun:
        if isinstance(value, str):
            return parse_value(annotation, [value])
        annotation = Path if isinstance(value, Path) else int
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple and isinstance(value, list | tuple):
        if args[-1] is not Ellipsis and len(value) != len(args):
            raise RequestError(f"{name} = {quote(value)} must have {len(args)} values")
        return tuple(of_type(args[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if is_dataclass(annotation) and isinstance(annotation, type):
        return _convert(annotation, annotation(), value, name)
    if typing.get_origin(annotation) is typing.Literal:
        for choice in args:
            if type(value) is type(choice) and value == choice:  # True equals 1, and 1.0 does
                return choice
        if is_own_choice(annotation, value):
            return value
    elif annotation == Size and type(value) is not bool and isinstance(value, Integral | str):
        return parse_size(value, name)
    # NumPy's numbers become plain ones, as config.toml can hold no others. Python counts True among the whole numbers.
    elif annotation is int and type(value) is not bool and isinstance(value, Integral):
        if abs(int(value)) > MAX_INT:
            raise RequestError(f"{name} = {quote(value)} is too large a number; give less")
        return int(value)
    elif annotation is float and type(value) is not bool and isinstance(value, Real):
        return _finite(value, name)
    elif type(value) is annotation or (annotation is Path and isinstance(value, Path)):
        return value
    remedy = "; remove the quotes" if annotation in (int, float) and _spells(annotation, value) else ""
    raise RequestError(f"{name} = {quote(value)} is {describe_mismatch(annotation, value)}{remedy}")


def _finite(value: Real, name: str) -> float:
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond all floating-point ones
        number = math.inf
    if not math.isfinite(number):
        raise RequestError(f"{name} = {quote(value)} must be a finite number")
    if abs(number) > _LARGEST_FLOAT:
        raise RequestError(f"{name} = {quote(value)} is too large a number; give less")
    return number


def _spells(annotation: Any, value: object) -> bool:
    """Return True if a text would be a value of this type without its quotes."""
    try:
        return isinstance(value, str) and parse_value(annotation, [value]) is not None
    except FormatError:
        return False
