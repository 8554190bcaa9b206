"""Explanations of settings: what one does, its default and why, bounds, resume rule, measured effect and source."""

from __future__ import annotations

import difflib
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from unfog.config.advice import Advice, advice_on, advice_within, all_advice, covers, is_vague, parts_of
from unfog.config.aliases import USUAL, current_name
from unfog.config.describe import Description, describe, field_texts, format_value
from unfog.config.presets import PRESETS
from unfog.config.schema import Config
from unfog.config.spec_strings import format_spec, quote, registry_of
from unfog.errors import RequestError
from unfog.settings import AUTO, NO_AUTO, rules_of
from unfog.text import manual

_WIDTH = 100
_INDENT = 14
_LONGEST = 40  # characters that are compared with known words, as the time is their square
_SAME_WORD = 0.85  # likeness from which a word is a misspelled one: a letter of seven
_ON_RESUME = {
    "free": "can change",
    "force": "can change with --force, which makes it another run",
    None: "cannot change",
}
_COMPARES = {
    "objective": "losses of runs that differ in it do not compare",
    "held_out_loss": "held-out losses of runs that differ in it do not compare",
}


def explain(name: str) -> str:
    """Return the explanation of a setting, a section, or a kind of a part such as `min-snr`; for "", all sections.

    RequestError if nothing has this name.
    """
    if not name:
        return _list_sections()
    settings = describe(Config)
    # Settings and kinds are lower case, but for the names of a custom part.
    blocks = _blocks(name, settings) or _blocks(name.lower(), settings)
    blocks = blocks or _blocks_within(name, settings)
    if not blocks:
        close = _near_words(name, settings)
        if close and difflib.SequenceMatcher(None, close[0], _spelled(name)).ratio() >= _SAME_WORD:
            return f"{quote(name)} is read as {close[0]}\n\n{explain(close[0])}"
        hint = f"did you mean {' or '.join(close)}?" if close else "`unfog explain` lists the sections"
        raise RequestError(f"{quote(name)} is not a setting or a known word; {hint}")
    return "\n".join(blocks)


def words_for(setting: str) -> list[str]:
    """Return the words by which people look for a setting: its names in other trainers, and those of its advice."""
    words = [word for word, meant in USUAL.items() if meant == setting]
    words += [word for word, advice in all_advice().items() if setting in advice.settings]
    return [word.replace("_", " ") for word in words]


def _near_words(name: str, settings: Sequence[Description]) -> list[str]:
    """Return at most three words that are spelled like this one and can be explained, nearest first."""
    known = {word for each in settings for word in (*each.flags, each.path[0], *each.choices)} | {*all_advice(), *USUAL}
    words = {word.replace("_", "-") for word in known}
    return difflib.get_close_matches(_spelled(name), words, n=3, cutoff=0.7)


def _spelled(name: str) -> str:
    return re.sub(r"[_ ]", "-", name.lstrip("-").lower())[:_LONGEST]


def _blocks(name: str, settings: Sequence[Description]) -> list[str]:
    """Return the explanations of the settings, sections, kinds and words of this name; [] if it is unknown."""
    # As a flag, as in TOML or by an old name: people paste what they have before them.
    wanted = current_name(re.sub(r"[- ]", "_", name.lstrip("-")))
    wanted = USUAL.get(wanted, wanted)
    found = [each for each in settings if wanted in (flag.replace("-", "_") for flag in each.flags)]
    section = [each for each in settings if each.setting.startswith(f"{wanted}.")]
    blocks = [_explain_setting(each) for each in found] + [_list(wanted, section)] * bool(section)
    same = [each.setting for each in settings if each.path[-1] == wanted and each not in found]
    blocks += ["\n".join(_row("also", ", ".join(same))) + "\n"] * bool(found and same)
    if not blocks:
        # Advice comes before the part of a network of the same name, such as `memory`.
        parts = [*_explain_parts(name), *_explain_choices(name)]
        advice = advice_on(name)
        blocks = [*(_explain_advice(name, advice, [] if parts else settings) if advice is not None else []), *parts]
    # The last name alone, such as `warmup`, is tried after whole names and parts, as several sections may have it.
    return blocks or [_explain_setting(each) for each in settings if each.path[-1] == wanted]


def _blocks_within(phrase: str, settings: Sequence[Description]) -> list[str]:
    """Return the explanations for the longest part of a phrase that is known, as of "how big a batch"; else [].

    A line above them says what was taken if that leaves out what the phrase asks.
    """
    found = advice_within(phrase)
    by_name = found is None or is_vague([found[0]])
    taken, blocks = _names_within(phrase, settings) if by_name else ("", list[str]())
    if not blocks and found is not None:
        taken, advice = found
        blocks = [*_explain_advice(phrase if covers(taken, phrase) else taken, advice, settings)]
    if not blocks or covers(taken, phrase):
        return blocks
    return [f"no entry for {quote(phrase)}; nearest: {taken}\n", *blocks]


def _names_within(phrase: str, settings: Sequence[Description]) -> tuple[str, list[str]]:
    """Return the longest part of a phrase that is the name of a setting, section or kind, and its explanations."""
    # Of a misspelled name, similar ones are said.
    if not re.fullmatch(r"[A-Za-z']+|[A-Za-z' -]* [A-Za-z' -]*\??", phrase):
        return "", []
    for words in parts_of(phrase):
        part = "" if is_vague(words) else " ".join(words)
        for name in (part, part.removesuffix("s"), f"{part}s"):
            if len(name) > 2 and (blocks := _blocks(name, settings)):
                return part, blocks
    return "", []


def _explain_advice(name: str, advice: Advice, settings: Sequence[Description]) -> Iterator[str]:
    """Yield the sentence of an advice, and the explanations of the settings that are meant."""
    lines = [name, "", *_paragraph(advice.text)]
    yield "\n".join([*lines, ""])
    yield from (_explain_setting(each) for each in settings if each.setting in advice.settings)


def _list_sections() -> str:
    lines = ["Settings of a run. unfog explain NAME says more about a section or a setting.", ""]
    settings = describe(Config)
    for section in dict.fromkeys(each.path[0] for each in settings):
        names = [each.path[-1] for each in settings if each.path[0] == section and len(each.path) > 1]
        text = ", ".join(names) if names else next(each.text for each in settings if each.setting == section)
        lines += textwrap.wrap(f"  {section:20}{text}", _WIDTH, subsequent_indent=" " * 22)
    return "\n".join(lines) + "\n"


def _list(section: str, settings: Sequence[Description]) -> str:
    lines = [f"{section}: {len(settings)} settings", ""]
    for each in settings:
        lines += textwrap.wrap(f"  {each.setting:28}{each.text}", _WIDTH, subsequent_indent=" " * 30)
    return "\n".join(lines) + "\n"


def setting_rows(each: Description) -> dict[str, str]:
    """Return title -> text of the facts about a setting, such as its default; without those that it does not have."""
    rules, registry = each.rules, registry_of(each.annotation)
    section = ".".join(each.path[:-1])
    flags = ", ".join(f"--{flag}" for flag in each.flags)
    usual = f"; usual: {rules.usual.rstrip(',')}" if rules.usual else ""
    bounds = rules.bounds()
    rows = {
        "flag": f"{flags} {each.metavar}".rstrip(),
        "in TOML": f"{each.path[-1]}, {f'below [{section}]' if section else 'above all sections'}",
        "default": _defaults(each),
        "allowed": f"{bounds}{usual}" if bounds else "" if registry else ", ".join(each.choices),
        "auto": _automatic(each),
        "on resume": _resume_rule(each),
        "compare": _COMPARES.get(rules.affects or "", ""),
        "why": rules.why,
        "measured": rules.measured,
        "source": rules.paper,
        "see": rules.see,
    }
    return {title: text for title, text in rows.items() if text}


def _explain_setting(each: Description) -> str:
    rows = setting_rows(each)
    if "see" in rows:
        rows["see"] = manual(rows["see"])
    lines = [each.setting, "", *_paragraph(each.text), ""]
    lines += [line for title, text in rows.items() for line in _row(title, text)]
    for word, part in (registry_of(each.annotation) or {}).items():
        lines += [*([] if "choices:" in lines else ["", "choices:"]), *_row(word, describe_part(word, part))]
    if each.rules.choices:
        lines += ["", "choices:", *(line for word, text in each.rules.choices for line in _row(word, text))]
    return "\n".join(lines) + "\n"


def _paragraph(text: str) -> list[str]:
    """Return the lines of a text that a name stands above."""
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")


def _row(title: str, text: str) -> list[str]:
    return textwrap.wrap(
        f"  {title:{_INDENT - 2}}{'' if len(title) < _INDENT - 2 else ' '}{text}",
        _WIDTH,
        subsequent_indent=" " * _INDENT,
        # A flag that is broken at its dash, or a path, can no longer be copied.
        break_on_hyphens=False,
        break_long_words=False,
    )


def _defaults(each: Description) -> str:
    """Return the default, and those of other presets that differ."""
    stored = _stored_auto(each)
    values = {name: each.default(make()) or "nothing" for name, make in PRESETS.items()}
    values = {name: AUTO if value == stored else value for name, value in values.items()}
    usual = values.pop("default")
    written = f", written as {stored}" if stored and usual == AUTO else ""
    others = "".join(f"; {value} with --preset {name}" for name, value in values.items() if value != usual)
    return usual + written + others


def _automatic(each: Description) -> str:
    """Describe the word "auto" by the value that stands for it; "" if there is no such value, or it is empty."""
    value = _stored_auto(each)
    return f"the same as {value}, which lets Unfog choose" if value else ""


def _stored_auto(each: Description) -> str:
    """Return the value that the word "auto" is stored as; "" if there is no such value, or it is empty."""
    value = each.rules.auto
    return "" if value in (NO_AUTO, AUTO, None, ()) else format_value(value)


def _resume_rule(each: Description) -> str:
    rule = _ON_RESUME[each.rules.resume if each.rules.resume in _ON_RESUME else None]
    if each.rules.resume in ("free", "force") or not each.changes_on_resume:
        return rule
    parts = {type(part) for part in (registry_of(each.annotation) or {}).values() if part is not None}
    return f"{rule}, but for {', '.join(sorted({f.name for p in parts for f in fields(p) if rules_of(f).resume}))}"


def describe_part(word: str, part: Any) -> str:
    """Describe a choice of a part, such as `min-snr` of --weighting, in a sentence or as its settings."""
    if part is None:
        return "chosen for the device and the images"
    # A preset of sizes, such as `small`, has no text of its own: its settings say what it is.
    if word != type(part).kind:
        return format_spec(part)
    return " ".join((inspect.getdoc(type(part)) or "").partition("\n\n")[0].split())


def _explain_parts(name: str) -> Iterator[str]:
    """Yield explanations of the kinds of this name, such as `min-snr`, and of fields of that name in any kind."""
    for each in describe(Config):
        kinds = {word: part for word, part in (registry_of(each.annotation) or {}).items() if part is not None}
        for word, part in kinds.items():
            inside = [f for f in fields(part) if f.name == name and word == type(part).kind]
            if word == name or inside:
                text = inspect.getdoc(type(part)) or ""
                head = f"{word}, a choice of --{each.flags[0]}" + (f": {word}:{name}=…" if inside else "")
                lines = [head, "", *([] if inside else [*textwrap.indent(text, "  ").splitlines(), ""])]
                kind: Any = type(part)
                for f in inside or fields(part):
                    usual = format_value(getattr(part, f.name)) or "nothing"
                    lines += _row(f.name, f"{field_texts(kind).get(f.name, '')} (default: {usual})")
                yield "\n".join(lines) + "\n"


def _explain_choices(name: str) -> Iterator[str]:
    """Yield explanations of a preset of this name, and of a choice without settings, such as a sampler."""
    if name in PRESETS:
        text = inspect.getdoc(PRESETS[name]) or ""
        yield "\n".join([f"{name}, a choice of --preset", "", *textwrap.indent(text, "  ").splitlines()]) + "\n"
    for each in describe(Config):
        if name in each.choices and registry_of(each.annotation) is None:
            text = dict(each.rules.choices).get(name, "")
            lines = [f"{name}, a choice of --{each.flags[0]}", ""]
            lines += [line for said in (text, each.text) if said for line in (*_paragraph(said), "")]
            lines += _row("measured", each.rules.measured) if each.rules.measured else []
            lines += _row("source", each.rules.paper) if each.rules.paper else []
            yield "\n".join(lines) + "\n"
