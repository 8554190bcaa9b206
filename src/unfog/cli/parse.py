"""Parse the words of a command against its request dataclass. Flags are named after the tree of settings.

docs/decisions/0003-settings.md gives the reasons against a library for this.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cache
from typing import Any, get_args, get_origin

from unfog.config.advice import advice_on
from unfog.config.aliases import OUT, SAMPLING, USUAL, current_name
from unfog.config.describe import describe
from unfog.config.spec_strings import (
    FormatError,
    SampleGrid,
    describe_type,
    parse_spec,
    parse_value,
    quote,
    registry_of,
)
from unfog.errors import RequestError
from unfog.settings import AUTO, NO_AUTO
from unfog.text import quote_words

# Names of other trainers, for the message about an unknown flag; `aliases.USUAL` has those of settings.
_ELSEWHERE = {"gpus": "gpus-per-node", **dict.fromkeys(OUT, "out")}


@dataclass(frozen=True)
class _Flag:
    """A flag and the setting that it gives."""

    path: tuple[str, ...]
    """Place of the setting in the tree of the request."""
    annotation: Any
    auto: Any = NO_AUTO
    """Value that the word "auto" stands for."""
    switch: bool | None = None
    """Value of a flag that takes no word: True for --data.flip, False for --data.no-flip."""

    def counts(self) -> tuple[int, int | None]:
        """Return the least and the largest number of words that follow; None is any."""
        if self.switch is not None:
            return 0, 0
        if self.annotation == SampleGrid:
            return 1, None
        members = get_args(self.annotation)
        if get_origin(self.annotation) is tuple and not registry_of(self.annotation):
            return (1, None) if members[-1] is Ellipsis else (len(members), len(members))
        return 1, 1

    def joins(self, words: Sequence[str]) -> bool:
        """Return whether these words may follow one flag together: a grid of noise levels is one word."""
        return self.annotation != SampleGrid or len(words) < 2 or all("=" in word for word in words)

    def expected(self) -> str:
        """Describe the words that follow: "a whole number"."""
        if (registry := registry_of(self.annotation)) is not None:
            return f"one of {', '.join(registry)}"
        return describe_type(self.annotation)

    def parse(self, words: Sequence[str], spelled: str) -> Any:
        """Return the value of these words. Raise RequestError with the flag as it was written."""
        if self.switch is not None:
            return self.switch
        if self.auto is not NO_AUTO and [*words] == [AUTO]:
            return self.auto
        try:
            if (registry := registry_of(self.annotation)) is not None:
                return parse_spec(registry, words[0])
            return parse_value(self.annotation, words)
        except FormatError as error:
            raise RequestError(f"{spelled} got {quote(' '.join(words))}, which is {error}") from None
        except RequestError as error:
            raise RequestError(f"{spelled}: {error}") from None


@dataclass
class ParsedArgs:
    """The words of a command, parsed."""

    named: dict[str, Any] = field(default_factory=dict)
    """Words without a flag, by the names of their fields: source, or run, or source and out."""
    table: dict[str, Any] = field(default_factory=dict)
    """Values of the flags as a nested table, for `unfog.config.toml.update`."""
    spelled: dict[tuple[str, ...], tuple[str, list[str]]] = field(default_factory=dict)
    """Place in the tree -> the flag as it was written, and its words."""

    def put(self, flag: _Flag, spelled: str, words: list[str]) -> None:
        """Store the value of a flag. Raise RequestError if it has another value already."""
        before = self.spelled.setdefault(flag.path, (spelled, words))
        if before != (spelled, words):  # repeated alike, it contradicts nothing
            first, second = (" ".join([name, *said]) for name, said in (before, (spelled, words)))
            remedy = "give one of them"
            if flag.counts()[1] is None and flag.joins([*before[1], *words]):
                remedy = f"give all values after one flag: {quote_words([spelled, *before[1], *words])}"
            raise RequestError(f"{spelled} is given twice: {quote(first)} and {quote(second)}; {remedy}")
        table = self.table
        for name in flag.path[:-1]:
            table = table.setdefault(name, {})
        table[flag.path[-1]] = flag.parse(words, spelled)


@cache  # resolving the annotations of all settings takes longer than reading a command
def flags_of(kind: type) -> dict[str, _Flag]:
    """Return every flag of a command by its spelling, short names included."""
    flags: dict[str, _Flag] = {}
    for setting in describe(kind):
        path, annotation = setting.path, setting.annotation
        for number, spelling in enumerate([] if setting.positional else setting.flags):
            switch = number < len(setting.flags) / 2 if annotation is bool else None
            dashes = "-" if len(spelling) == 1 else "--"
            flags |= dict.fromkeys(
                (f"{dashes}{spelling}", f"--{spelling}"), _Flag(path, annotation, setting.rules.auto, switch)
            )
    return flags


def parse_args(words: Sequence[str], kind: type, prog: str, others: Mapping[str, type]) -> ParsedArgs:
    """Parse the words after a command's name. Bounds of values are checked when the request is made.

    Args:
        kind: the request dataclass of the command.
        prog: name of the command in messages: "unfog train".
        others: the other commands and their dataclasses, to recognise a flag of theirs.
    """
    flags, args = flags_of(kind), ParsedArgs()
    positionals = [setting for setting in describe(kind) if setting.positional]
    metavars = [setting.metavar for setting in positionals]
    needed = [setting.metavar for setting in positionals if setting.field.default is MISSING]
    left, free, only_free = list(words), list[str](), False
    while left:
        word = left.pop(0)
        # A lone dash is not a flag: programs take it for their input.
        if only_free or not word.startswith("-") or word == "-":
            free.append(word)
        elif word == "--":
            only_free = True
        else:
            spelled, equals, attached = word.partition("=")
            flag = _find_flag(spelled, flags)
            if flag is None:
                raise RequestError(_unknown_flags([spelled, *_later_unknown(left, flags)], flags, prog, others))
            if flag.switch is not None and (equals or left[:1] in (["true"], ["false"])):
                both = " or ".join(name for name, other in flags.items() if other.path == flag.path)
                raise RequestError(f"{spelled} takes no value; write {both}")
            # "--flag=value" takes one word whatever it looks like, so a value may begin with a dash.
            values = [attached] if equals else []
            values += _take_values(flag, values, left, flags, len(needed) - len(free))
            _check_count(flag, spelled, values)
            args.put(flag, spelled, values)
    if not len(needed) <= len(free) <= len(metavars):
        raise RequestError(_wrong_count(free, args, prog, metavars))
    for each, word in zip(positionals, free):
        try:
            args.named[each.path[0]] = parse_value(each.annotation, [os.path.expanduser(word)])
        except FormatError as error:
            raise RequestError(f"{quote(word)[1:-1]} is {error}") from None
    return args


def _find_flag(spelled: str, flags: Mapping[str, _Flag]) -> _Flag | None:
    """Return the flag of this spelling, None if it is unknown."""
    # --data.held_out counts as --data.held-out, and the old --codec as --autoencoder-folder.
    return flags.get(spelled.replace("_", "-")) or flags.get(_current_flag(spelled))


def _later_unknown(words: Sequence[str], flags: Mapping[str, _Flag]) -> list[str]:
    """Return the unknown flags among words that an unknown flag precedes. A word with one dash may be its value."""
    end = words.index("--") if "--" in words else len(words)
    named = (word.partition("=")[0] for word in words[:end] if word.startswith("--"))
    return [spelled for spelled in named if _find_flag(spelled, flags) is None]


def _current_flag(spelled: str) -> str:
    """Return the present flag for an old one: --codec is --autoencoder-folder."""
    if not spelled.startswith("--"):
        return spelled
    return "--" + current_name(spelled[2:].replace("-", "_")).replace("_", "-")


def _take_values(flag: _Flag, had: list[str], left: list[str], flags: Mapping[str, _Flag], keep: int) -> list[str]:
    """Take the words of a flag that has `had` of them from `left`. A list leaves the last `keep` to SOURCE or RUN."""
    least, most = flag.counts()
    values: list[str] = []
    while left and (most is None or len(had) + len(values) < most):
        # A negative number and a lone dash are values.
        if left[0].startswith("--") or left[0].partition("=")[0] in (*flags, "-h"):
            break
        if most is None and len(had) + len(values) >= least and len(left) <= keep:
            break
        if not flag.joins([*had, *values, left[0]]):
            break
        values.append(left.pop(0))
    return values


def _check_count(flag: _Flag, spelled: str, values: list[str]) -> None:
    least, _ = flag.counts()
    if len(values) < least:
        many = f"{least} values, each {describe_type(get_args(flag.annotation)[0])}" if least > 1 else "a value"
        what = "" if least > 1 else f": {flag.expected()}"
        raise RequestError(f"{spelled} needs {many}{what}{f', and got {len(values)}' if values else ''}")


def _wrong_count(free: Sequence[str], args: ParsedArgs, prog: str, metavars: Sequence[str]) -> str:
    if len(free) < len(metavars):
        lists = [f"; {flag} took {quote(' '.join(words))}" for flag, words in args.spelled.values() if words[1:]]
        usage = " ".join([prog, *metavars])
        write = "both" if free else "it first"  # before the flags, of which one may have taken it
        return f"{metavars[len(free)]} is missing{''.join(lists)}; write {write}: {usage} (see {prog} --help)"
    extra, taken = " ".join(free[len(metavars) :]), " ".join(free[: len(metavars)])
    if not metavars:
        return f"{prog} takes only flags; {quote(extra)} is not one (see {prog} --help)"
    count = "one" if len(metavars) == 1 else f"{len(metavars)} names,"
    return (
        f"{prog} takes {count} {' '.join(metavars)}: {quote(taken)}; {quote(extra)} is one too many. Put "
        "quotes around names with spaces"
    )


def _unknown_flags(spelled: Sequence[str], flags: Mapping[str, _Flag], prog: str, others: Mapping[str, type]) -> str:
    """Return the message about unknown flags. Those with the same remedy share it."""
    said = {quote(each)[1:-1]: _about_unknown(each, flags, prog, others) for each in spelled}
    if len(said) == 1:
        [(name, (owners, remedy))] = said.items()
        return (
            f"{name} is not a flag of {prog}{f', but of {owners}' if owners else ''}{f'; {remedy}' if remedy else ''}"
        )
    alike: dict[str, list[str]] = {}
    for name, (owners, remedy) in said.items():
        alike.setdefault("; ".join(filter(None, [owners and f"a flag of {owners}", remedy])), []).append(name)
    remedies = [f"{', '.join(names)}: {about}" for about, names in alike.items()]
    # All names come first, as a long message is cut.
    return f"{_joined([*said])} are not flags of {prog}. {'. '.join(remedies).replace('?. ', '? ')}"


def _joined(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _about_unknown(spelled: str, flags: Mapping[str, _Flag], prog: str, others: Mapping[str, type]) -> tuple[str, str]:
    """Return (the commands that have an unknown flag, what to give instead); each may be empty."""
    named = spelled.lower().replace("_", "-")
    last = named.lstrip("-")
    key = last.replace("-", "_")
    meant = [flag for flag in (f"--{_ELSEWHERE.get(key, '')}",) if flag in flags]
    for usual in (names[key] for names in (USUAL, SAMPLING) if key in names):
        path = usual.split(".")
        same = [name for name, flag in flags.items() if [*flag.path][-len(path) :] == path and name.startswith("--")]
        meant = meant or sorted(same, key=len)[:1]
    owners = [command for command, kind in others.items() if named in flags_of(kind)]
    # In another trainer the word may name something that no flag of any command has the name of.
    advice = None if meant or owners else advice_on(spelled)
    if advice is not None and _is_for(advice.text, prog, flags):
        return "", advice.text
    meant = meant or [flag for flag in flags if flag.startswith(f"{named}.") and ".no-" not in flag]
    own = last.rpartition(".")[2]
    meant = meant or [flag for flag in (f"--{own}",) if flag in flags]  # of --sampler.steps, --steps
    meant = meant or [flag for flag in flags if own and flag.rpartition(".")[2] == own]  # --optimizer.clip: --data.clip
    theirs = _joined(owners)
    # A flag of another command is meant as it is, unless one here is spelled nearly the same.
    meant = meant or difflib.get_close_matches(named[:40], flags, n=1, cutoff=0.9 if theirs else 0.7)
    if theirs and not meant:
        return theirs, "give each setting to change as a flag" if (prog, named) == ("unfog resume", "--config") else ""
    # Last of all, as a name that is spelled alike may be of another thing.
    meant = [name[1:] if len(name) == len("--n") else name for name in meant[:4]]  # as pages and --help write -n
    return theirs, f"did you mean {' or '.join(meant)}?" if meant else f"see {prog} --help"


def _is_for(advice: str, prog: str, flags: Mapping[str, _Flag]) -> bool:
    """Return whether an advice is for a command: it is named, has all flags that are named, or trains."""
    named = re.findall(r"--[a-z][\w.-]*\w", advice)
    return "--lr" in flags or f"{prog} " in advice or (bool(named) and all(name in flags for name in named))
