"""From words to a frozen dataclass: flags named after the tree of settings, short names, parts named by kind.

Reading is done here, so that whatever is wrong is said in a line; the help text is tyro's.
"""

from __future__ import annotations

import difflib
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from unfog.config import spec_strings as kinds
from unfog.config.aliases import current_name
from unfog.config.schema import SHORT
from unfog.config.values import FormatError, describe_type, parse_value, sanitize, strip_optional
from unfog.errors import RequestError

T = TypeVar("T")

# What people call things elsewhere, and what they are called here.
_ELSEWHERE = {
    "batch-size": "batch",
    "checkpoint-every": "checkpoint.every",
    "epochs": "images",
    "gpus": "gpus-per-node",
    "image-size": "size",
    "iterations": "steps",
    "learning-rate": "lr",
    "max-steps": "steps",
    "model": "network",
    "num-steps": "steps",
    "output": "out",
    "output-dir": "out",
    "random-seed": "seed",
    "resolution": "size",
    "save-every": "checkpoint.every",
}

_registry = ConstructorRegistry()


@_registry.primitive_rule
def _part_by_kind(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Show a schedule, target, network, … as one word such as `min-snr:gamma=3` in the help text."""
    words = kinds.registry_of(info.type)
    if words is None:
        return None
    classes = tuple({type(part) for part in words.values()})
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + "|".join(words) + "}[:…]",
        instance_from_str=lambda arguments: kinds.parse_spec(words, arguments[0]),
        is_instance=lambda value: isinstance(value, classes),
        str_from_instance=lambda value: [kinds.format_spec(value)],
    )


def show_help(kind: type[T], prog: str, default: T) -> typing.NoReturn:
    """Print what a command takes, with these defaults, and leave with 0."""
    with _registry:
        tyro.cli(kind, prog=prog, args=["--help"], default=default, config=(tyro.conf.AvoidSubcommands,))
    raise AssertionError("--help always leaves")


@dataclass(frozen=True)
class Flag:
    """A setting that can be given by a flag."""

    path: tuple[str, ...]
    """Its place in the tree of the command's dataclass."""
    annotation: Any
    value: bool | None = None
    """What a flag that takes no word says: --data.flip or --data.no-flip."""

    def takes(self) -> tuple[int, int | None]:
        """The least and the largest number of words that follow it; None is any."""
        if self.value is not None:
            return 0, 0
        members = get_args(self.annotation)
        if get_origin(self.annotation) is tuple and not kinds.registry_of(self.annotation):
            return (1, None) if members[-1] is Ellipsis else (len(members), len(members))
        return 1, 1

    def wants(self) -> str:
        """What those words are, in words."""
        if (words := kinds.registry_of(self.annotation)) is not None:
            return f"one of {', '.join(words)}"
        return describe_type(self.annotation)

    def read(self, words: Sequence[str], spelled: str) -> Any:
        """The value that these words give. RequestError says which flag they follow."""
        if self.value is not None:
            return self.value
        try:
            if (parts := kinds.registry_of(self.annotation)) is not None:
                return kinds.parse_spec(parts, words[0])
            return parse_value(self.annotation, words)
        except FormatError as error:
            raise RequestError(f"{spelled} got {sanitize(' '.join(words))}, which is {error}") from None
        except RequestError as error:
            raise RequestError(f"{spelled}: {error}") from None


@dataclass
class ParsedArgs:
    """What the words of a command give."""

    positionals: list[str] = field(default_factory=list)
    """What is not named by a flag, in order: SOURCE, or RUN, or SOURCE and OUT."""
    table: dict[str, Any] = field(default_factory=dict)
    """The settings as a nested table, for `unfog.config.toml.update`."""
    spelled: dict[tuple[str, ...], tuple[str, list[str]]] = field(default_factory=dict)
    """Place in the tree -> the flag as it was written, and its words."""

    def put(self, flag: Flag, spelled: str, words: list[str]) -> None:
        """Note a setting. RequestError if it has another value already."""
        before = self.spelled.setdefault(flag.path, (spelled, words))
        if before != (spelled, words):
            first, second = (" ".join([name, *said]) for name, said in (before, (spelled, words)))
            raise RequestError(f"{spelled} is given twice: {sanitize(first)} and {sanitize(second)}; give one of them")
        table = self.table
        for name in flag.path[:-1]:
            table = table.setdefault(name, {})
        table[flag.path[-1]] = flag.read(words, spelled)


def flags_of(kind: type) -> dict[str, Flag]:
    """Every flag of a command, by how it is written, short names included."""
    flags: dict[str, Flag] = {}
    named = {f.name: mark.name for f, mark in _marks(kind) if getattr(mark, "name", None)}
    for path, annotation in _leaves(kind, ()):
        *above, name = (named.get(part, part).replace("_", "-") for part in path if part != "settings")
        long = ".".join([*above, name])
        short = [short for short, place in SHORT.items() if place == ".".join(path).removeprefix("settings.")]
        for spelling in [long, *short]:
            section, dot, last = spelling.rpartition(".")
            if annotation is bool:
                flags[f"--{spelling}"] = Flag(path, annotation, True)
                flags[f"--{section}{dot}no-{last}"] = Flag(path, annotation, False)
            else:
                dashes = "-" if len(spelling) == 1 else "--"
                flags |= dict.fromkeys({f"{dashes}{spelling}", f"--{spelling}"}, Flag(path, annotation))
    return flags


def _marks(kind: type) -> Iterator[tuple[Any, Any]]:
    """(field, mark) of what the command's own fields are annotated with."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return ((f, mark) for f in fields(kind) for mark in getattr(hints[f.name], "__metadata__", ()))


def _leaves(kind: type, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(place, type) of each setting that a flag can give."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for f in fields(kind):
        marks = getattr(hints[f.name], "__metadata__", ())
        if tyro.conf.Suppress in marks or tyro.conf.Positional in marks:
            continue
        annotation = hints[f.name]
        annotation = annotation.__origin__ if marks else annotation
        if is_dataclass(annotation) and kinds.registry_of(annotation) is None:
            yield from _leaves(typing.cast(type, annotation), (*above, f.name))
        else:
            plain = annotation if kinds.registry_of(annotation) else strip_optional(annotation)
            yield (*above, f.name), plain


def metavars_of(kind: type) -> list[str]:
    """What the words are called that a command takes without a flag, in order."""
    names = []
    for hint in typing.get_type_hints(kind, include_extras=True).values():
        marks = getattr(hint, "__metadata__", ())
        if tyro.conf.Positional in marks:
            names += [mark.metavar for mark in marks if getattr(mark, "metavar", None)]
    return names


def parse_args(words: Sequence[str], kind: type, prog: str, others: Mapping[str, type]) -> ParsedArgs:
    """What the words of a command give; values of the right type, whose range is checked where they are put together.

    Args:
        words: after the command's name.
        kind: the command's dataclass.
        prog: the command as messages name it: "unfog train".
        others: the other commands and their dataclasses, whose flags may have been meant.

    Raises:
        RequestError: in one line what is wrong and what would be right.
    """
    flags, given, metavars = flags_of(kind), ParsedArgs(), metavars_of(kind)
    left, free, only_free = list(words), [], False
    while left:
        word = left.pop(0)
        if only_free or not word.startswith("-") or word == "-":
            free.append(word)
        elif word == "--":
            only_free = True
        else:
            spelled, equals, attached = word.partition("=")
            flag = flags.get(spelled.replace("_", "-")) or flags.get(_current_flag(spelled))
            if flag is None:
                raise RequestError(_unknown(spelled, flags, prog, others))
            if flag.value is not None and (equals or left[:1] in (["true"], ["false"])):
                raise RequestError(f"{spelled} takes no value; write {_switch(flag, flags)}")
            value = [attached] if equals else []
            keep = max(0, len(metavars) - len(free))
            given.put(flag, spelled, _following(flag, spelled, value, left, flags, keep))
    if len(free) != len(metavars):
        raise RequestError(_wrong_count(free, given, prog, metavars))
    given.positionals = [os.path.expanduser(word) for word in free]
    return given


def _current_flag(spelled: str) -> str:
    """The flag of today for one of an earlier version: --autoencoder is --autoencoder-folder."""
    return "--" + current_name(spelled.lstrip("-").replace("-", "_")).replace("_", "-")


def _following(
    flag: Flag, spelled: str, words: list[str], left: list[str], flags: Mapping[str, Flag], keep: int
) -> list[str]:
    """The words that belong to a flag, taken from those left; a list leaves the last `keep` to SOURCE or RUN."""
    least, most = flag.takes()
    while left and (most is None or len(words) < most):
        # A negative number and a lone dash are values.
        if left[0].startswith("--") or left[0].partition("=")[0] in (*flags, "-h"):
            break
        if most is None and len(words) >= least and len(left) <= keep:
            break
        words.append(left.pop(0))
    if len(words) < least:
        many = f"{least} values, each {describe_type(get_args(flag.annotation)[0])}" if least > 1 else "a value"
        what = "" if least > 1 else f": {flag.wants()}"
        raise RequestError(f"{spelled} needs {many}{what}{f', and got {len(words)}' if words else ''}")
    return words


def _switch(flag: Flag, flags: Mapping[str, Flag]) -> str:
    return " or ".join(name for name, other in flags.items() if other.path == flag.path)


def _wrong_count(free: Sequence[str], given: ParsedArgs, prog: str, metavars: Sequence[str]) -> str:
    if len(free) < len(metavars):
        lists = [
            f"; {flag} took {sanitize(' '.join(words))}" for flag, words in given.spelled.values() if len(words) > 1
        ]
        missing, usage = metavars[len(free)], " ".join([prog, *metavars])
        return f"{missing} is missing{''.join(lists)}; write {usage} before all else (see {prog} --help)"
    extra, taken = " ".join(free[len(metavars) :]), " ".join(free[: len(metavars)])
    if not metavars:
        return f"{prog} takes flags alone, so what is {sanitize(extra)}? (see {prog} --help)"
    count = "one" if len(metavars) == 1 else f"{len(metavars)} names,"
    return (
        f"{prog} takes {count} {' '.join(metavars)}, which is {sanitize(taken)}, so what is {sanitize(extra)}? "
        "Quote names with blanks"
    )


def _unknown(spelled: str, flags: Mapping[str, Flag], prog: str, others: Mapping[str, type]) -> str:
    """What to say about a flag that is none."""
    named = spelled.lower().replace("_", "-")
    meant = [f"--{_ELSEWHERE.get(named.lstrip('-'), '')}"]
    if meant[0] not in flags:
        meant = [flag for flag in flags if flag.startswith(f"{named}.") and ".no-" not in flag]
    if not meant:
        meant = [flag for flag in flags if named.lstrip("-") and flag.rpartition(".")[2] == named.lstrip("-")]
    elsewhere = [command for command, kind in others.items() if named in flags_of(kind)]
    theirs = f", but of {' and '.join(filter(None, [', '.join(elsewhere[:-1]), *elsewhere[-1:]]))}" if elsewhere else ""
    if theirs and not meant:
        return f"{sanitize(spelled)[1:-1]} is no flag of {prog}{theirs}"
    if not meant:
        meant = difflib.get_close_matches(named[:40], flags, n=1, cutoff=0.7)
    hint = f"did you mean {' or '.join(meant[:4])}?" if meant else f"see {prog} --help"
    return f"{sanitize(spelled)[1:-1]} is no flag of {prog}{theirs}; {hint}"
