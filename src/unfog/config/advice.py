"""Advice, from advice.toml, on words without a setting: of other trainers, of tutorials, of people who begin."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

# Other words for those with advice, in the singular.
_SAME = {"picture": "image", "pic": "image", "photo": "image", "grad": "gradient", "gray": "grey"}
_SAME |= {"grayscale": "greyscale", "color": "colour", "colorful": "colourful", "model": "network"}
# Words that say least of what is meant, as in "NaN loss" or "data augmentation".
_VAGUE = ("loss", "data", "dataset", "gpu", "cpu", "where", "name", "words", "text", "class", "wrong", "bad", "start")
# Ranges of values, as in "images in [0, 1]".
_RANGE = re.compile(r"\[ *(-?1|0) *[,;] *\+?(1|255) *\]")


class Advice(NamedTuple):
    """Remedy for a word of other trainers or of a tutorial that is not a setting."""

    text: str
    settings: tuple[str, ...] = ()
    """Settings that are meant."""


@cache  # read where a word is unknown, not at every start
def all_advice() -> dict[str, Advice]:
    """Return the words, in lower case and with "_" between them, each with its advice."""
    return {
        word: Advice(" ".join(entry["text"].split()), tuple(entry.get("settings", ())))
        for entry in _table()["advice"]
        for word in entry["words"].split()
    }


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("unfog.config") / "advice.toml").read_text(encoding="utf-8"))


@cache
def _filling() -> frozenset[str]:
    return frozenset(_table()["filling"].split())


def advice_on(word: str) -> Advice | None:
    """Return the advice on a word as people write it, such as gradient-accumulation-steps; None without one."""
    return all_advice().get(word.lstrip("-").lower().replace("-", "_").replace(" ", "_"))


def advice_within(phrase: str) -> tuple[str, Advice] | None:
    """Return the longest known words in a phrase, such as "NaN loss" or "T=1000", and their advice; None without."""
    known, plain = all_advice(), _plain_words()
    for words in parts_of(phrase):
        found = known.get("_".join(words)) or plain.get(tuple(map(_plain, words)))
        if found is not None:
            return " ".join(words), found
    return None


def covers(taken: str, phrase: str) -> bool:
    """Return whether words of a phrase say all that it asks: "epochs" does for "how many epochs"."""
    most = max(parts_of(phrase), key=len, default=[])
    return is_vague([word for word in most if word not in taken.split()])


def is_vague(words: list[str]) -> bool:
    """Return whether none of these words says what is meant."""
    return {*words} <= _filling() | {*_VAGUE}


def parts_of(phrase: str) -> list[list[str]]:
    """Return the words of a phrase that follow each other, longest first; of as many words, the last ones first."""
    plain = _RANGE.sub(" value range ", phrase.lower().replace("_", " "))
    words = re.findall(r"[a-z0-9/+']+", plain)[:12]
    parts = [words[i:j] for i in reversed(range(len(words))) for j in range(i + 1, len(words) + 1)]
    return sorted(parts, key=lambda part: (-len(part), len(part) == 1 and part[0] in _VAGUE))


@cache
def _plain_words() -> dict[tuple[str, ...], Advice]:
    known: dict[tuple[str, ...], Advice] = {}
    for word, advice in all_advice().items():
        known.setdefault(tuple(map(_plain, word.split("_"))), advice)
    return known


def _plain(word: str) -> str:
    """Return a word in the singular, or the usual word for it: "image" for "pictures"."""
    one = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")) else word
    return _SAME.get(one, one)
